"""Only plain data passes between candidate and judge."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.sandbox import worker

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
)
hashable = st.recursive(leaves, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
values = st.recursive(
    leaves | st.builds(range, st.integers(-5, 5), st.integers(-5, 5)) | st.sampled_from([int, str, list]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(hashable, inner, max_size=3) | st.sets(hashable, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_data_comes_through_with_its_types(value):
    def types(item):
        return (type(item), [types(part) for part in item]) if isinstance(item, list | tuple) else type(item)

    sent = json.loads(json.dumps(worker.encode(value, pytest.fail)))
    received = worker.decode(sent, pytest.fail)
    assert received == value and types(received) == types(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["int", "dict", "tuple", "set", "range", "type", "handle", "bytes", "x"]), inner, max_size=2)
        ),
        max_leaves=20,
    )
)
def test_whatever_a_candidate_answers_is_plain_data_or_an_error(answer):
    judge = worker.Judge(None, {})
    try:
        value = judge.value({"value": answer})
    except worker.CandidateError:
        return
    assert type(value) in {
        type(None),
        bool,
        int,
        float,
        str,
        list,
        dict,
        tuple,
        set,
        frozenset,
        bytes,
        bytearray,
        complex,
        range,
        worker.Handle,
        type,
        worker.collections.deque,
    }
