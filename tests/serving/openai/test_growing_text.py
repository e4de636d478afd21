"""The text of tokens that come one by one: what all of them decode to, though few are decoded each time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.serving.openai.committed import DECODED_AGAIN, UNFINISHED, GrowingText


def of_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def cleaned(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace").replace(" .", ".").replace(" n't", "n't").lstrip(" ")


@pytest.mark.parametrize("decode", [of_bytes, cleaned])
@given(text=st.text(alphabet="ab .n't é猫🙂", max_size=60), data=st.data())
def test_it_is_that_of_all_tokens(decode, text, data):
    tokens, growing, read = [*text.encode()], GrowingText(decode), 0
    while read < len(tokens):
        read += data.draw(st.integers(1, 5))
        assert growing.read(tokens[:read]).rstrip(UNFINISHED) == decode(tokens[:read]).rstrip(UNFINISHED)


def test_few_tokens_are_decoded_each_time():
    decoded = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return of_bytes(tokens)

    growing = GrowingText(decode)
    for number in range(1, 2000):
        growing.read([97] * number)
    assert max(decoded) <= 2 * DECODED_AGAIN
