"""Which letters answer a multiple choice."""

from __future__ import annotations

from unmask.tasks import get_task


def test_hub_layouts_of_multiple_choice():
    task = get_task("multiple_choice")
    record = {"question": "Which?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"}
    (row,) = task.rows([("row 1", record)])
    assert row["prompt"] == "Which?\nA. one\nB. two\nAnswer:" and row["letter"] == "B"
    (row,) = task.rows([("row 1", {"ctx": "He", "endings": ["sat.", "ran."], "label": "1"})])
    assert row["letter"] == "B"
    for text, status in {
        "B": "ok",
        " b": "ok",
        "(B)": "ok",
        "A": "wrong",
        "C": "malformed",
        "A B": "malformed",
        "ran.": "malformed",
    }.items():
        assert task.verify(text, row).status == status
