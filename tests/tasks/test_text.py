"""Which letters answer a multiple choice."""

from __future__ import annotations

import json

import pytest

from tests.errors import raises
from unmask.data.sources import read_problems
from unmask.errors import DataError
from unmask.tasks import get_task


def test_hub_layouts_of_multiple_choice():
    task = get_task("multiple_choice")
    record = {
        "question": "Which?",
        "choices": {"text": ["one", "two"], "label": ["1", "2"]},
        "answerKey": "2",
    }
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


PASSAGE, QUESTION, OPTIONS = (
    "Some birds fly.",
    "Which follows?",
    ["All fly.", "One flies.", "None flies.", "All are birds."],
)
LOGIQA = {"context": PASSAGE, "query": QUESTION, "options": OPTIONS, "correct_option": 1}
LOGIQA_2 = {
    "id": 7,
    "text": PASSAGE,
    "question": QUESTION,
    "options": OPTIONS,
    "answer": 1,
    "type": {"Categorical Reasoning": True},
}


@pytest.mark.parametrize(
    "record", [LOGIQA, LOGIQA | {"correct_option": "B"}, LOGIQA_2], ids=["logiqa", "letter", "logiqa 2"]
)
def test_logiqa_is_read_with_its_passage(record, tmp_path):
    path = tmp_path / "logiqa.jsonl"
    path.write_text(json.dumps(record) + "\n")
    [row] = read_problems(get_task("multiple_choice"), str(path), None, split="test")
    listed = "\nA. All fly.\nB. One flies.\nC. None flies.\nD. All are birds."
    assert (
        row["prompt"] == f"{PASSAGE}\n{QUESTION}{listed}\nAnswer:"
        and row["question"] == row["group"] == f"{PASSAGE}\n{QUESTION}{listed}"
    )
    assert (row["completion"], row["letter"], row["choices"]) == (" B", "B", OPTIONS)


def test_a_passage_may_be_absent_but_is_a_text():
    task = get_task("multiple_choice")
    for nothing in ({"context": None}, {"context": " "}, {}):
        [row] = task.rows(
            [("row 1", {key: value for key, value in LOGIQA.items() if key != "context"} | nothing)]
        )
        assert row["prompt"].startswith("Which follows?\nA. All fly.")
    with raises(DataError, where="row 1"):
        list(task.rows([("row 1", LOGIQA | {"context": ["a"]})]))
    with raises(DataError, where="row 1"):
        list(task.rows([("row 1", LOGIQA | {"correct_option": 4})]))


@pytest.mark.parametrize("name", ["system", "history", "tools", "chat_template_kwargs"])
def test_a_column_that_would_change_the_prompt_is_not_left_out(name):
    record = {"question": "a", "answer": "b", "choices": ["b", "c"]}
    for task, row in ((get_task("text"), record), (get_task("multiple_choice"), record | {"answer": 0})):
        assert list(task.rows([("line 1", row | {name: None})]))
        with raises(DataError, where="line 1"):
            list(task.rows([("line 1", row | {name: ["a"]})]))
