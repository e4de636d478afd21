"""Committed text: what is released never has to be taken back, and a stop string cuts it at one place however
it arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unmask.serving.openai.choices import CommittedText, find_stop, held_back, tokens_until


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_does_not_depend_on_how_it_arrives(whole, stops, data):
    text, released = CommittedText(stops), ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    for cut in cuts:
        released += text.grow(whole[:cut], done=False)
        assert whole.startswith(released)
    released += text.grow(whole, done=True)
    ends = [(start + len(stop), start) for stop in stops for start in [whole.find(stop)] if start >= 0]
    expected = whole[: min(ends)[1]] if ends else whole
    assert released == text.text == expected
    assert text.stop == find_stop(whole, stops)


def test_of_two_stop_strings_the_first_complete_one_cuts_and_of_equal_ones_the_longer():
    assert find_stop("xabcd", ["abcd", "bc"]) == (2, 4)
    assert find_stop("xabc", ["bc", "abc"]) == (1, 4)


def test_what_may_become_a_stop_string_is_held_back():
    assert held_back("hello <", ["<end>", "zz"]) == 1
    assert held_back("hello <en", ["<end>"]) == 3
    assert held_back("hello", ["<end>"]) == 0
    text = CommittedText(["<end>"])
    assert [text.grow("a <e", done=False), text.grow("a <e b", done=False)] == ["a ", "<e b"]


def test_text_that_a_decoder_changes_later_is_not_lost():
    text = CommittedText([])
    assert [
        text.grow("ab ", done=False),
        text.grow("aB cd", done=False),
        text.grow("aB cdef", done=True),
    ] == ["ab ", "cd", "ef"]


def test_the_token_that_completes_a_stop_string():
    tokens = ["ab", "c", "d<", "e", ">f", "g"]
    assert tokens_until(lambda number: "".join(tokens[:number]), len(tokens), ["<e>"]) == 5
    assert tokens_until(lambda number: "".join(tokens[:number]), len(tokens), ["ab"]) == 1
