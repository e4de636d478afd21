# ruff: noqa: E501 (tables)
"""Which texts answer a question of gsm8k."""

from __future__ import annotations

import pytest

from unmask.tasks import get_task


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("72", "ok"), (" so 48 + 24 = 72 #### 72", "ok"), ("<answer>72</answer>", "ok"), ("#### $72.00", "ok"), ("72.0", "ok"),
        ("<reasoning>\n7\n</reasoning>\n<answer>\n72\n</answer>\n", "ok"), ("#### 71", "wrong"), ("720", "wrong"), ("7272", "wrong"),
        ("the answer is 72", "malformed"), ("#### 72 #### 73", "malformed"), ("72 clips", "malformed"), ("<answer>72", "malformed"),
        ("144/2", "wrong"), ("#### 72/1", "wrong"), (r"\frac{144}{2}", "wrong"), ("144.0/2", "wrong"), ("48+24", "malformed"), ("72,0", "malformed"),
        ("<answer>72</answer><answer>71</answer>", "malformed"), ("72=71", "malformed"), ("", "malformed"),
    ],
)  # fmt: skip
def test_the_number_of_gsm8k(text, status):
    task = get_task("gsm8k")
    (row,) = task.rows([("row 1", {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 and 48+24 = <<48+24=72>>72.\n#### 72"})])
    assert row["completion"] == " 48/2 = 24 and 48+24 = 72.\n#### 72"
    assert task.verify(text, row).status == status


@pytest.mark.parametrize(
    ("answer", "text", "solved"), [("0.5", "1/2", True), ("0.5", "2/4", False), ("1,234", "1234", True), ("1234", "2,468/2", False)]
)
def test_fractions_are_in_lowest_terms(answer, text, solved):
    (row,) = get_task("gsm8k").rows([("row 1", {"question": "How many?", "answer": f"#### {answer}"})])
    assert get_task("gsm8k").verify(text, row).solved == solved
