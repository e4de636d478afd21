# ruff: noqa: E501 (tables)
"""Which texts answer a problem of MATH-500."""

from __future__ import annotations

import pytest

from unmask.tasks import get_task


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (r"so \boxed{\frac12}", "ok"), (r"<answer>\boxed{0.5}</answer>", "ok"), ("<answer>1/2</answer>", "ok"), (r"\boxed{1} \boxed{\frac{1}{2}}", "ok"),
        (r"\boxed{1/2} \boxed{1}", "wrong"), (r"\boxed{0.5=1}", "wrong"), (r"\boxed{50\%}", "wrong"), ("1/2", "malformed"), (r"\boxed{1/2", "malformed"),
        (r"\boxed{0.5} <answer>\boxed{3}</answer>", "wrong"), ("", "malformed"),
    ],
)  # fmt: skip
def test_the_box_of_math500(text, status):
    task = get_task("math500")
    (row,) = task.rows([("row 1", {"problem": "?", "solution": r"\boxed{\frac{1}{2}}", "answer": r"\frac{1}{2}"})])
    assert task.verify(text, row).status == status
