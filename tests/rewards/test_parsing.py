"""Answers are found within text by scans that no text makes slow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.rewards.parsing import MAX_TEXT, answer_of, between, boxed, code_block

pieces = st.lists(
    st.sampled_from(
        ["<answer>", "</answer>", "<a>", "</a>", "x", " ", "\n", "\\boxed{", "{", "}", "\\", "```", "python"]
    )
)
texts = pieces.map("".join)


@given(texts)
def test_between_is_what_the_regular_expression_finds(text):
    assert between(text, "<a>", "</a>") == re.findall(r"<a>(.*?)</a>", text, re.DOTALL)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("  42 \n", "42"),
        ("so <answer> 42 </answer> it is", "42"),
        ("<answer>1</answer><answer>2</answer>", None),
        ("<answer>1", None),
        ("1</answer>", None),
        ("</answer>1<answer>", None),
        ("<answer><answer>1</answer>", None),
        ("<answer> </answer>", None),
        ("", None),
        ("x" * (MAX_TEXT + 1), None),
    ],
)
def test_the_answer_is_in_one_pair_of_tags_or_all_there_is(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1", None),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{}", None),
        ("boxed{1}", None),
        ("\\boxed{" * 2000, None),
    ],
)
def test_the_last_box_that_closes(text, content):
    assert boxed(text) == content


@given(texts)
def test_a_box_has_balanced_braces(text):
    content = boxed(text)
    if content is not None:
        bare = re.sub(r"\\.", "", content, flags=re.DOTALL)
        assert bare.count("{") == bare.count("}") and content in text and content == content.strip() != ""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Here:\n```\nx = 1\n```\nand ```python\ny\n```", "x = 1\n"),
        ("``` Python \nx\n\ny\n```", "x\n\ny\n"),
        ("```ocaml\nx\n```", None),
        ("```python\nx = 1\n", None),
        ("```python x = 1```", None),
        ("x = 1", None),
        ("```python\nx = '''```'''\n```", "x = '''```'''\n"),
    ],
)
def test_the_first_fenced_block(text, code):
    assert code_block(text, "python") == code
