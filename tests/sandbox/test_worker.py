"""Only plain data passes between candidate and tester."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.sandbox import worker

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
hashable = st.recursive(
    leaves, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    leaves | st.builds(range, st.integers(-5, 5), st.integers(-5, 5)) | st.sampled_from([int, str, list]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.tuples(inner, inner)
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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@contextlib.contextmanager
def pipe():
    """From and to itself."""
    reading, writing = os.pipe()
    try:
        yield worker.Pipe(reading, writing)
    finally:
        os.close(reading)
        os.close(writing)


@given(json_values)
def test_frames_are_what_json_reads_and_writes(value):
    text = json.dumps(value)
    with pipe() as ours:
        ours.write(value)
        frame = os.read(ours.source, 1 << 20)
        assert frame == len(text).to_bytes(4, "big") + text.encode()
        os.write(ours.sink, frame)
        assert json.dumps(ours.read()) == text


@pytest.mark.parametrize(
    "data", [b"", b"1 2", b"[1,", b"nul", b"'x'", '"\u00e9"'.encode(), b"\xff", b'{"a" 1}', b" 1 ", b"Nan"]
)
def test_a_frame_that_is_no_json_is_the_candidates_error(data):
    with pipe() as ours:
        os.write(ours.sink, len(data).to_bytes(4, "big") + data)
        with pytest.raises(worker.CandidateError, match="not JSON"):
            ours.read()


@pytest.mark.parametrize("frame", ['{"a" 1}', "[1 2]", '"abc', "[" * 100_000, '{"value": "\\u12"}'])
def test_so_it_is_in_a_bare_interpreter_that_never_saw_json(frame):
    script = f"""
import sys
sys.path.insert(0, {str(Path(worker.__file__).parent)!r})
import posix, worker
reading, writing = posix.pipe()
if not posix.fork():
    data = sys.argv[1].encode()
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[posix.write(writing, data):]
    posix._exit(0)
try:
    worker.Pipe(reading, writing).read()
except worker.CandidateError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script, frame], capture_output=True, text=True)
    assert done.stdout.strip() == "a frame that is not JSON", done.stderr


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["int", "dict", "tuple", "set", "range", "type", "handle", "bytes", "x"]),
                inner,
                max_size=2,
            )
        ),
        max_leaves=20,
    )
)
def test_whatever_a_candidate_answers_is_plain_data_or_an_error(answer):
    tester = worker.Tester(None, {})
    try:
        value = tester.value({"value": answer})
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
        deque,
    }
