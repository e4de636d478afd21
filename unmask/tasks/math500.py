"""Competition mathematics (MATH, Hendrycks et al. 2021; the 500 problems of Lightman et al. 2023): answers in
LaTeX, in a box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from unmask.errors import DataError
from unmask.rewards.format import boxed_in_answer
from unmask.rewards.parsing import BOX, OPEN, answer_of, boxed
from unmask.rewards.symbolic import equivalent, equivalent_all
from unmask.rewards.verdict import MALFORMED, Verdict
from unmask.tasks.base import Row, Task


def correctness(completion: str, row: Mapping[str, Any]) -> float | None:
    """2 if the last box, anywhere in the text, is equivalent to the reference."""
    found = boxed(completion)
    verdict = equivalent(found, row["answer"], question_of(row)) if found is not None else MALFORMED
    return None if verdict.value is None else 2.0 * verdict.solved


def question_of(row: Mapping[str, Any]) -> str:
    """The problem of a row; empty for rows of users' datasets without one."""
    return str(row.get("question") or "")


def final_answer(completion: str) -> str | None:
    """The last box in the answer tags, or in the whole text without tags; if the tags hold no box, their
    content."""
    text = answer_of(completion)
    if text is None or (OPEN in completion and BOX not in text):
        return text
    return boxed(text)


class Math500(Task):
    """Records have `problem`, `solution` and `answer`."""

    name = "math500"
    fields = ("problem", "solution", "answer")
    columns = ("answer",)
    optional_columns = ("question",)
    published = MappingProxyType(
        {"boxed_in_answer": lambda text, row: boxed_in_answer(text), "correctness": correctness}
    )
    instructions = (
        "Think step by step. Answer in this "
        "form:\n<reasoning>\n...\n</reasoning>\n<answer>\n\\boxed{...}\n</answer>\n"
        "with the final answer alone in the box."
    )

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        for name in self.fields:
            if not (isinstance(record[name], str) and record[name].strip()):
                raise DataError(
                    f"{record[name]!r:.40} is not text",
                    where=f"{where}, key {name!r}",
                    remedy="Write LaTeX, as a string",
                )
        problem, solution, answer = (record[name].strip() for name in self.fields)
        prompt = f"Problem: {problem}\nSolution:"
        return {
            "prompt": prompt,
            "completion": f" {solution}",
            "group": problem,
            "question": problem,
            "answer": answer,
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        return self.verify_all([completion], [row])[0]

    def verify_all(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        answers = [final_answer(completion) for completion in completions]
        given = [
            (answer, row["answer"], question_of(row))
            for answer, row in zip(answers, rows, strict=True)
            if answer is not None
        ]
        verdicts = iter(equivalent_all(given))
        return [MALFORMED if answer is None else next(verdicts) for answer in answers]

    def answer(self, row: Mapping[str, Any]) -> str:
        reasoning = f"<reasoning>\n{row['completion'].strip()}\n</reasoning>"
        return f"{reasoning}\n<answer>\n\\boxed{{{row['answer']}}}\n</answer>\n"
