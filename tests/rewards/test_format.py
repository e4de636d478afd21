"""The published shaping rewards equal the published expressions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import cost
from unmask.rewards.format import (
    boxed_in_answer,
    code_format,
    integer,
    published_answer,
    soft_format,
    strict_format,
    xml_count,
)

GOOD = "<reasoning>\nsix times seven\n</reasoning>\n<answer>\n42\n</answer>\n"
marks = ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "\n", " ", "x", "7"]
texts = st.lists(st.sampled_from(marks), max_size=16).map("".join) | st.lists(
    st.sampled_from(["<reasoning>\n", "\n</reasoning>\n", "<answer>\n", "\n</answer>\n", "\n", "x"]),
    max_size=8,
).map("".join)


@given(texts)
def test_formats_are_the_published_patterns(text):
    soft = re.match(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text, flags=re.DOTALL)
    strict = re.match(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", text, flags=re.DOTALL)
    assert soft_format(text) == 0.5 * bool(soft)
    assert strict_format(text) == 0.5 * bool(strict)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (GOOD, 0.5),
        (GOOD + "and on", 0.5 - 0.006 * 2),
        (GOOD + GOOD, 0.0),
        ("<reasoning>\n", 0.125),
        ("", 0.0),
        ("42", 0.0),
    ],
)  # fmt: skip
def test_tags_are_counted_and_what_follows_them_costs(text, count):
    assert xml_count(text) == pytest.approx(count)


@pytest.mark.parametrize(
    ("text", "value"), [(GOOD, 0.5), ("42", 0.5), ("4.2", 0.0), ("-4", 0.0), ("<answer>x</answer>", 0.0)]
)
def test_an_integer(text, value):
    assert integer(text) == value


def test_the_published_answer_is_the_last():
    assert published_answer("<answer>1</answer> <answer> 2 </answer>") == "2"
    assert published_answer("<answer>1") == "1" and published_answer("1") == "1"


def test_a_box_within_the_tags():
    assert boxed_in_answer("<answer>\\boxed{1}</answer>") == 0.5
    assert boxed_in_answer("\\boxed{1} <answer>1</answer>") == 0.0


def test_code_that_parses_is_worth_more():
    assert code_format("```python\nx = 1\n```", "python") == 1.0
    assert code_format("```python\nx = = 1\n```", "python") == 0.5
    assert code_format("```python\n'\\d'\n```", "python") == 1.0
    assert code_format(f"```python\n{'(' * 9000}\n```", "python") == 0.5
    assert code_format("```ocaml\nlet x = \n```", "ocaml") == 1.0
    assert code_format("x = 1", "python") == 0.0


@pytest.mark.parametrize(
    "piece",
    [
        "<reasoning>",
        "</reasoning>",
        "<reasoning>\n",
        "\n</reasoning>\n",
        "<answer>",
        "\n</answer>",
        " ",
        "\n",
    ],
)
def test_no_text_takes_long(piece):
    text = "<reasoning>\n" + piece * (16_000 // len(piece))
    for function in (xml_count, soft_format, strict_format, integer, boxed_in_answer):
        assert cost(function, text) < 10
