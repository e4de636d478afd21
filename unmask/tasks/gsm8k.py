"""Grade-school mathematics (GSM8K, Cobbe et al. 2021): a word problem, and an integer or decimal as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from unmask.errors import DataError
from unmask.rewards.format import integer, published_answer, soft_format, strict_format, xml_count
from unmask.rewards.parsing import answer_of
from unmask.rewards.symbolic import number
from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict
from unmask.tasks.base import Component, Row, Task

MARK = "####"


def correctness(completion: str, row: Mapping[str, Any]) -> float:
    """2 where the text of the answer is that of the reference."""
    return 2.0 * (published_answer(completion) == row["answer"])


SHAPING: dict[str, Component] = {
    "xml_count": lambda text, row: xml_count(text),
    "soft_format": lambda text, row: soft_format(text),
    "strict_format": lambda text, row: strict_format(text),
    "integer": lambda text, row: integer(text),
    "correctness": correctness,
}


class GSM8K(Task):
    """Records have `question` and `answer` (steps, then the number after `####`)."""

    name = "gsm8k"
    fields = ("question", "answer")
    columns = ("answer",)
    published = MappingProxyType(SHAPING)
    instructions = (
        "Think step by step. Answer in this form:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
        "with the number alone, without a unit, in the answer."
    )

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record; its completion is the published steps, without their calculator marks, and `#### number`."""
        question, solution = record["question"], record["answer"]
        steps, mark, answer = str(solution).rpartition(MARK)
        value = number(answer.strip())
        if not (isinstance(question, str) and question.strip()) or not mark or value is None:
            remedy = f"Write a question, and an answer that ends with {MARK} and a number."
            raise DataError(f"not a problem with a number for an answer: {str(solution)[-40:]!r}", where=where, remedy=remedy)
        plain = answer.strip().replace(",", "")
        return {
            "prompt": f"Question: {question.strip()}\nAnswer:",
            "completion": f" {_without_marks(steps)}{MARK} {plain}",
            "group": question.strip(),
            "question": question.strip(),
            "answer": plain,
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The number in the answer tags, else after the one `####`, else the whole text; a dollar sign and commas do not matter."""
        text = answer_of(completion) or ""
        if text.count(MARK) == 1:
            text = text.partition(MARK)[2]
        value = number(text.strip().removeprefix("$").removesuffix("."))
        if value is None:
            return MALFORMED
        return OK if value == number(row["answer"]) else WRONG

    def answer(self, row: Mapping[str, Any]) -> str:
        steps = row["completion"].partition(MARK)[0].strip()
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{row['answer']}\n</answer>\n"


def _without_marks(steps: str) -> str:
    """Without the <<48/2=24>> for a calculator."""
    before, *rest = steps.split("<<")
    return before + "".join(piece.partition(">>")[2] for piece in rest)
