"""The published files: every row is read, its answer is right, another row's is not, and errors name file and
line."""

from __future__ import annotations

import json

import pytest

from tests.errors import raises
from tests.helpers import each_once, read_task, shared_path
from unmask.errors import DataError
from unmask.tasks import get_rewards, get_task

FILES = [
    ("sudoku", "sudoku/4x4_test_sudoku.csv", 500),
    ("countdown", "countdown/countdown_cd3_test.jsonl", 256),
    ("gsm8k", "gsm8k/train.jsonl", 7473),
    ("gsm8k", "gsm8k/test.jsonl", 1319),
    ("math500", "math500/math500.jsonl", 500),
    ("multiple_choice", "commonsense/piqa.jsonl", 1838),
    ("multiple_choice", "commonsense/arc_easy.jsonl", 2376),
    ("multiple_choice", "commonsense/hellaswag_val1000.jsonl", 1000),
    ("text", "commonsense/lambada_openai.jsonl", 5153),
]
PROGRAMS = [
    ("humaneval", "humaneval/HumanEval.jsonl.gz", 164),
    ("mbpp", "mbpp/mbpp.jsonl", 962),  # and twelve that are left out
    ("mbpp_published", "mbpp/mbpp.jsonl", 974),
    ("exercism_ocaml", "ocaml/exercism_ocaml.jsonl", 62),
    ("multipl_t_ocaml", "ocaml/multiplT_filtered_typecheck.jsonl", 534),  # of 649
]


@pytest.mark.parametrize(("name", "file", "count"), [*FILES, *PROGRAMS])
def test_every_row_is_read(name, file, count):
    task = get_task(name)
    rows = read_task(task, shared_path("data", *file.split("/")))
    assert len(rows) == count
    for row in rows:
        assert {"prompt", "completion", "group", *task.columns} <= set(row)
        assert row["prompt"].strip() and (row["completion"].strip() or name == "multipl_t_ocaml")
        assert json.loads(json.dumps(row)) == row


@each_once("style, name, file, count", ["plain", "chat"], FILES)
def test_right_answers_are_right_and_those_of_the_next_row_are_not(name, file, count, style):
    task = get_task(name)
    rows = read_task(task, shared_path("data", *file.split("/")))[:400]
    answers = [row["completion"] if style == "plain" else task.answer(row) for row in rows]
    assert {verdict.status for verdict in task.verify_all(answers, rows)} == {"ok"}
    key = (
        "letter"
        if name == "multiple_choice"
        else "solution"
        if name == "sudoku"
        else "target"
        if name == "countdown"
        else "answer"
    )
    pairs = [
        (answer, row)
        for answer, row, other in zip(answers[1:], rows, rows[1:], strict=False)
        if row[key] != other[key]
    ]
    shifted = task.verify_all(*map(list, zip(*pairs, strict=True)))
    right = sum(verdict.solved for verdict in shifted)
    # A puzzle with several solutions may have its neighbour's among them; a problem of math500 with the
    # answer 5 is beside one with x=5.
    assert right <= {"sudoku": 2, "math500": 1}.get(name, 0)


@pytest.mark.parametrize(
    ("name", "record", "where"),
    [
        ("gsm8k", {"question": "How many?", "answer": "Four. 4"}, ", line 1"),
        ("gsm8k", {"question": "How many?", "answer": "#### four"}, ", line 1"),
        ("gsm8k", {"question": "", "answer": "#### 4"}, ", line 1"),
        ("gsm8k", {"question": "How many?"}, ", line 1"),
        ("math500", {"problem": "1+1", "solution": "2", "answer": ""}, ", line 1, key 'answer'"),
        ("math500", {"problem": "1+1", "solution": "2", "answer": 2}, ", line 1, key 'answer'"),
        ("multiple_choice", {"query": "Which?", "choices": ["a"], "gold": 0}, ", line 1"),
        ("multiple_choice", {"query": "Which?", "choices": ["a", "b"], "gold": 2}, ", line 1"),
        ("multiple_choice", {"query": "Which?", "choices": ["a", "b"], "gold": "AB"}, ", line 1"),
        ("multiple_choice", {"query": "Which?", "choices": ["a", "b"]}, ", line 1"),
        ("multiple_choice", {"query": "Which?", "choices": ["a", "b"], "gold": "1" * 5000}, ", line 1"),
        ("multiple_choice", {"query": "Which?", "choices": {"text": ["a", "b"], "label": None}, "answerKey": "x"}, ", line 1"),
        ("multiple_choice", {"query": "Which?", "choices": {"text": 5}, "answerKey": "x"}, ", line 1"),
        ("mbpp", {"text": "t", "code": "lambda:" * 3000, "test_list": ["assert f() == 1"]}, ", line 1"),
        ("mbpp", {"text": "t", "code": "\ud800", "test_list": ["assert f() == 1"]}, ", line 1"),
        ("text", {"prompt": "a"}, ", line 1"),
        ("text", {"prompt": "a", "completion": " "}, ", line 1"),
        ("humaneval", {"prompt": "def f():", "canonical_solution": "x", "test": "y", "entry_point": "f g"}, ", line 1"),
        ("mbpp", {"text": "t", "code": "def f(): pass", "test_list": []}, ", line 1"),
        ("mbpp", {"text": "t", "code": "def f(): pass", "test_list": ["assert g() == 1"]}, ", line 1"),
        ("mbpp", {"text": "t", "code": "def f(: pass", "test_list": ["assert f() == 1"]}, ", line 1"),
        ("exercism_ocaml", dict.fromkeys(("instructions", "interface", "stub", "tests", "reference"), "x") | {"file": "../x.ml"}, ", line 1"),
        ("multipl_t_ocaml", {"prompt": "let f x =", "tests": "(assert (true))"}, ", line 1"),
        ("sudoku9", {"Puzzle": "0" * 80, "Solution": "1" * 81}, ", line 1, column 'Puzzle'"),
        ("sudoku9", {"Puzzle": "0" * 81, "Solution": "1" * 81}, ", line 1, column 'Solution'"),
        ("countdown", {"input": "1,2,3,4,5", "output": "6"}, ", line 1, key 'input'"),
    ],
)  # fmt: skip
def test_malformed_rows_name_file_and_line(tmp_path, name, record, where):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with raises(DataError, where=f"{path}{where}") as caught:
        read_task(get_task(name), path)
    assert caught.value.remedy


def test_published_components_add_up():
    task = get_task("gsm8k")
    (row,) = task.rows([("row 1", {"question": "How many?", "answer": "#### 72"})])
    text = "<reasoning>\nx\n</reasoning>\n<answer>\n72\n</answer>\n"
    columns = {name: [row[name]] for name in task.columns}
    values = {reward.name: reward([""], [text], **columns) for reward in get_rewards("gsm8k/published")}
    assert values == {
        "xml_count": [0.5],
        "soft_format": [0.5],
        "strict_format": [0.5],
        "integer": [0.5],
        "correctness": [2.0],
    }

    (row,) = get_task("math500").rows([("row 1", {"problem": "?", "solution": "?", "answer": "2"})])
    values = [
        reward([""], [r"<answer>\boxed{2}</answer>"], answer=[row["answer"]])
        for reward in get_rewards("math500/published")
    ]
    assert values == [[0.5], [2.0]]

    (countdown,) = get_rewards("countdown/published")
    texts = ["<answer>30+93-100</answer>", "<answer>30+93</answer>", "<answer>9**9**9</answer>", "30+93-100"]
    assert countdown([""] * 4, texts, numbers=[[30, 100, 93]] * 4, target=[23] * 4) == [1.0, 0.1, 0.1, 0.0]

    (sudoku,) = get_rewards("sudoku/published")
    texts = ["<answer>1234341221434321</answer>", "<answer>1 2 3 4 3 4</answer>", "1234341221434321"]
    assert sudoku([""] * 3, texts, puzzle=["0034341221434321"] * 3, solution=["1234341221434321"] * 3) == [
        1.0,
        1.0,
        0.0,
    ]
