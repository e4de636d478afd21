"""Grade-school mathematics (GSM8K, Cobbe et al. 2021): a word problem, and an integer or decimal as the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from unmask.errors import DataError
from unmask.rewards.final_form import lowest_terms
from unmask.rewards.format import integer, published_answer, soft_format, strict_format, xml_count
from unmask.rewards.parsing import BOX, answer_of, boxed
from unmask.rewards.spelling import bare
from unmask.rewards.symbolic import MAX_ANSWER, number
from unmask.rewards.verdict import MALFORMED, OK, UNCOMPUTED, WRONG, Verdict
from unmask.tasks.base import Row, Task

MARK = "####"
CONCLUSION = re.compile(
    r"(?:^|[.!?\n])[*_ ]*(?:(?:so|thus|hence|therefore|then|and|the|my|our|final|correct)[,:]? )*answer[*_ ]*(?:is\b|[:=])", re.IGNORECASE
)
"""How a sentence begins that ends with the answer: "So the answer is 18", "**Answer:** 18"."""


def correctness(completion: str, row: Mapping[str, Any]) -> float:
    """2 if the text of the answer is that of the reference."""
    return 2.0 * (published_answer(completion) == row["answer"])


class GSM8K(Task):
    """Records have `question` and `answer` (steps, then the number after `####`)."""

    name = "gsm8k"
    fields = ("question", "answer")
    columns = ("answer",)
    optional_columns = ("question",)
    published = MappingProxyType(
        {
            "xml_count": lambda text, row: xml_count(text),
            "soft_format": lambda text, row: soft_format(text),
            "strict_format": lambda text, row: strict_format(text),
            "integer": lambda text, row: integer(text),
            "correctness": correctness,
        }
    )
    instructions = (
        "Think step by step. Answer in this form:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
        "with the number alone, without a unit, in the answer."
    )

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record. Its completion is the published steps, without calculator annotations, and `#### number`."""
        question, solution = record["question"], str(record["answer"])
        steps, mark, answer = solution.rpartition(MARK)
        if not (isinstance(question, str) and question.strip()) or not mark or number(answer.strip()) is None:
            remedy = f"Write a question, and an answer that ends with {MARK} and a number"
            raise DataError(f"not a problem whose answer is a number: {solution[-40:]!r}", where=where, remedy=remedy)
        question, answer = question.strip(), answer.strip().replace(",", "")
        prompt, completion = f"Question: {question}\nAnswer:", f" {_without_annotations(steps)}{MARK} {answer}"
        return {"prompt": prompt, "completion": completion, "group": question, "question": question, "answer": answer}

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The number in the answer tags, else on the line of the first `####`, else the whole text; of these the box, or what follows the
        only "answer is", if there is one.

        A base model goes on after its answer, with another question.
        """
        text = answer_of(completion) or ""
        _, marked, rest = text.partition(MARK)
        text = next(iter(rest.strip().splitlines()), "") if marked else text
        box = boxed(text)
        if box is not None and any(part and not part.lstrip().startswith(box) for part in text.split(BOX)[1:]):
            return MALFORMED  # several answers
        sentences = CONCLUSION.split(text)
        text = box or (sentences[1].strip("*_:! ") if len(sentences) == 2 else text.rstrip("! "))
        if len(text) > MAX_ANSWER:
            return MALFORMED
        question = re.sub(r"\$(?=[0-9.])", r"\\$", str(row.get("question") or ""))  # an amount, as LaTeX writes it
        found, reference = bare(text, row["answer"], question)
        value = number(found)
        if value is None:
            return MALFORMED
        if value != number(reference):
            return WRONG
        return OK if lowest_terms(found) else UNCOMPUTED

    def answer(self, row: Mapping[str, Any]) -> str:
        steps = row["completion"].partition(MARK)[0].strip()
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{row['answer']}\n</answer>\n"


def _without_annotations(steps: str) -> str:
    """Without the <<48/2=24>> for a calculator."""
    before, *rest = steps.split("<<")
    return before + "".join(part.partition(">>")[2] for part in rest)
