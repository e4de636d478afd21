"""The arithmetic grader compared with Python's evaluation, and on hostile text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import cost
from unmask.rewards.arithmetic import MAX_DEPTH, MAX_LENGTH, ArithmeticSyntaxError, evaluate, numbers_used

LEAVES = st.integers(0, 200).map(lambda number: ([number], str(number)))


def _parent(children):
    def join(left, symbol, right, parentheses, space):
        text = f"{left[1]}{space}{symbol}{space}{right[1]}"
        return left[0] + right[0], f"({text})" if parentheses else text

    return st.builds(
        join, children, st.sampled_from("+-*/"), children, st.booleans(), st.sampled_from(["", " "])
    )


TREES = st.recursive(LEAVES, _parent, max_leaves=12)


@given(TREES)
def test_value_is_python_s_value_over_fractions(tree):
    numbers, text = tree
    assert len(text) <= MAX_LENGTH
    exact = "".join(f"Fraction({word})" if word.isdigit() else word for word in _words(text))
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with raises(ArithmeticSyntaxError, where=None):
            evaluate(text)
    else:
        assert evaluate(text) == expected
    assert numbers_used(text) == sorted(numbers)


def _words(text: str) -> list[str]:
    spaced = "".join(character if character.isdigit() else f" {character} " for character in text)
    return spaced.split()


@given(st.one_of(st.text(max_size=60), st.text(alphabet="0123456789+-*/() _.e\0\n", max_size=60)))
def test_any_text_has_a_value_or_the_one_error(text):
    for read in (evaluate, numbers_used):
        try:
            read(text)
        except ArithmeticSyntaxError as error:
            assert error.remedy


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "()", "1+", "1 2", "(1", "1)", "1(2)", "(1,2)", "012", "1,2"),
        *("2**3", "2//3", "7%3", "-1", "+1", "1--1", "1*-1", "~1", "1<2", "1=1"),
        *(
            "1.0",
            "1e3",
            "0x10",
            "1_0",
            "1j",
            "True",
            "x",
            "abs(1)",
            "__import__('os')",
            "'1'",
            "[1]",
            "1if 1else 2",
            "1#2",
            "1;2",
        ),
        *("\u0663", "1\x00", "1\n+1", "1\n", "\ud800", "\u00bd", "1\u00a0+1"),
        *("9**9**9", "1/0", "1/(2-2)", "(1/3-1/3)/0"),
        *(
            "(" * 10_000,
            "(" * 40 + "1" + ")" * 40,
            "1" * 5_000,
            "1+" * 5_000 + "1",
            ")" * 10_000,
            "1" * 10**7,
        ),
    ],
)
def test_refused(text):
    def refused() -> None:
        with pytest.raises(ArithmeticSyntaxError):
            evaluate(text)

    assert cost(refused) < 50


def test_bounds_are_inclusive():
    deepest = "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH
    assert evaluate(deepest) == 1
    longest = "1" + "+1" * ((MAX_LENGTH - 1) // 2)
    assert evaluate(longest) == len(numbers_used(longest)) == (MAX_LENGTH + 1) // 2
    assert evaluate("9" * MAX_LENGTH) == int("9" * MAX_LENGTH)


def test_exact_where_floats_are_not():
    assert evaluate("1/3*3") == 1
    assert evaluate("10/4") == Fraction(5, 2)
    assert evaluate(" ( 93 - (100 - 30) ) ") == 23
