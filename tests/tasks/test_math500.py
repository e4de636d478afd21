"""Which texts answer a problem of MATH-500."""

from __future__ import annotations

import pytest

from tests.helpers import read_task, shared_path
from tests.tasks.formulas import formulas, is_reference, subformulas
from unmask.tasks import get_rewards, get_task


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
    (row,) = task.rows(
        [("row 1", {"problem": "?", "solution": r"\boxed{\frac{1}{2}}", "answer": r"\frac{1}{2}"})]
    )
    assert task.verify(text, row).status == status


def problems():
    return read_task(get_task("math500"), shared_path("data", "math500", "math500.jsonl"))


def paid(parts_of):
    """The parts of each problem's formulas that are paid without being its reference."""
    task, asked = get_task("math500"), []
    for row in problems():
        parts = {part for formula in formulas(row["question"]) for part in parts_of(formula)}
        asked += [
            (part, row)
            for part in sorted(parts)
            if len(part) <= 512 and not is_reference(part, row["answer"])
        ]
    verdicts = task.verify_all([rf"\boxed{{{part}}}" for part, _ in asked], [row for _, row in asked])
    return len(asked), [
        (part, row["answer"]) for (part, row), verdict in zip(asked, verdicts, strict=True) if verdict.value
    ]


@pytest.mark.slow
def test_no_formula_of_a_problem_answers_it():
    count, wrongly = paid(lambda formula: [formula.strip()])
    assert count > 1000 and wrongly == []


@pytest.mark.nightly
def test_no_part_of_a_formula_of_a_problem_answers_it():
    count, wrongly = paid(subformulas)
    assert count > 30_000 and wrongly == []


def test_every_reference_answers_its_problem():
    rows, task = problems(), get_task("math500")
    for texts in (
        [rf"\boxed{{{row['answer']}}}" for row in rows],
        [task.answer(row) for row in rows],
        [row["completion"] for row in rows],
    ):
        assert [
            row["answer"]
            for row, verdict in zip(rows, task.verify_all(texts, rows), strict=True)
            if not verdict.solved
        ] == []


@pytest.mark.parametrize("name", ["math500", "math500/published"])
def test_rewards_read_the_question_where_there_is_one(name):
    reward, answer = get_rewards(name)[-1], [r"\boxed{\frac{3}{20}}"]
    assert reward([""], answer, answer=["0.15"], question=[r"Write $\frac{3}{20}$ as a decimal."]) == [0.0]
    assert reward([""], answer, answer=["0.15"], question=["What is the probability?"])[0] > 0
    assert reward([""], answer, answer=["0.15"])[0] > 0
    assert reward([""], [r"\boxed{3 / 20 + 0}"], answer=["0.15"]) == [0.0]
