"""Grade-school mathematics (GSM8K, Cobbe et al. 2021): a word problem, and an integer or decimal as the
answer."""

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
LEAD = (
    r"(?:(?:so|thus|hence|therefore|then|and|the|my|our|final|correct|finally|overall|altogether"
    r"|consequently|as a result|"
    r"in (?:conclusion|summary|total)|(?:this|which) means(?: that)?|we (?:find|get|see|know|conclude) "
    r"that)[,:]? )*"
)
START = rf"(?:^|[.!?\n}}$])[*_# ]*{LEAD}"
CONCLUSION = re.compile(
    rf"{START}(?:answer[*_ ]*(?:is\b(?: (?:therefore|thus|then)\b)?|[:=]|(?=\n))|(?-i:A|Ans)[*_ ]*:)",
    re.IGNORECASE,
)
"""How a sentence begins that ends with the answer: "So the answer is 18", "**Answer:** 18"."""
TOTAL = re.compile(
    (
        rf"{START}(?:(?:her|his|their) )?total(?: (?:amount|cost|number|price|time|distance))?[*_ "
        r"]*(?:is\b|[:=])"
    ),
    re.IGNORECASE,
)
"""The same, of a sentence that may as well be a step."""
STATEMENT = re.compile(
    rf"{LEAD}(?:s?he|it|they|there|we|you|I) "
    r"(?:has|have|is|are|will (?:have|be)|costs?|makes?|earns?|needs?|gets?|spends?|pays?|sells?|takes?) "
    r"(?:a total of )?(\W*[0-9].*?)(?: (?:left|in total|altogether))?[.!]*",
    re.IGNORECASE,
)
"""A sentence of a pronoun, a verb and a number, in a text without another: "She has $18."."""
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
BEFORE_BOX = re.compile(r"[0-9][ $,]*(?:(?:[^.\n=]*\bor|and)\b[ $]*)?$")
AFTER_BOX = re.compile(r"(?:[ $,;/]*(?:(?:and|not)\b.*)?|[^.\n=]*\bor\b.*)[0-9]")
"""Another number beside the answer in a box: `17 or \boxed{18}`."""
HOPE = re.compile(r" ?I hope (?:it|this) is correct[.!]*$", re.IGNORECASE)
"""How answers to a common few-shot prompt end (Lewkowycz et al. 2022)."""
GOES_ON = re.compile(r"\n[*_# ]*(?:Q|Question|Problem)(?: ?[0-9]+)?[*_ ]*:")
"""How a base model continues after its answer."""


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
        """The row of a record. Its completion is the published steps, without calculator annotations, and
        `#### number`."""
        question, solution = record["question"], str(record["answer"])
        steps, mark, answer = solution.rpartition(MARK)
        if not (isinstance(question, str) and question.strip()) or not mark or number(answer.strip()) is None:
            remedy = f"Write a question, and an answer that ends with {MARK} and a number"
            raise DataError(
                f"not a problem whose answer is a number: {solution[-40:]!r}", where=where, remedy=remedy
            )
        question, answer = question.strip(), answer.strip().replace(",", "")
        prompt, completion = (
            f"Question: {question}\nAnswer:",
            f" {_without_annotations(steps)}{MARK} {answer}",
        )
        return {
            "prompt": prompt,
            "completion": completion,
            "group": question,
            "question": question,
            "answer": answer,
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The number in the answer tags, else on the line of the first `####`, else in the box, else after
        the only "answer is" (or, at the end, "total is"), else in a single statement, else the whole text.
        What else is offered has to be the same number.

        A base model continues after its answer, with another question.
        """
        text = HOPE.sub("", answer_of(completion) or "")
        first = GOES_ON.split(text, maxsplit=1)[0]
        verdict = self._verdict(first, row)
        return self._verdict(text, row) if verdict == MALFORMED and first != text else verdict

    def _verdict(self, text: str, row: Mapping[str, Any]) -> Verdict:
        final, *others = _offered(text)
        # an amount, as LaTeX writes it
        question = re.sub(r"\$(?=[0-9.])", r"\\$", str(row.get("question") or ""))

        def read(offered: str) -> tuple[str, str]:
            return bare(offered, row["answer"], question) if len(offered) <= MAX_ANSWER else ("", "")

        found, reference = read(final)
        value = number(found)
        if value is None or any(number(read(other)[0]) != value for other in dict.fromkeys(others)):
            return MALFORMED
        if value != number(reference):
            return WRONG
        return OK if lowest_terms(found) else UNCOMPUTED

    def answer(self, row: Mapping[str, Any]) -> str:
        steps = row["completion"].partition(MARK)[0].strip()
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{row['answer']}\n</answer>\n"


def _offered(text: str) -> list[str]:
    """What a text offers as its answer, beginning with what decides, which is empty if another number stands
    beside it."""
    steps, marked, rest = text.partition(MARK)
    line = next(iter(rest.strip().splitlines()), "") if marked else text
    box = boxed(line)
    if box is not None:
        before, _, after = line.rpartition(BOX)
        after = after.lstrip().removeprefix(box).lstrip()[1:]
        beside = (
            re.search("[0-9]", before + after)
            if marked
            else BEFORE_BOX.search(before[-80:]) or AFTER_BOX.match(after[:80])
        )
        return ["" if beside else box, *_claims(steps if marked else text)]
    if marked:
        start = CONCLUSION.match(line)
        return [_undressed(line[start.end() :]) if start else line.rstrip("! "), *_claims(steps)]
    sentences = CONCLUSION.split(text)
    sentences = TOTAL.split(text) if len(sentences) == 1 else sentences
    statement = STATEMENT.fullmatch(text) if len(sentences) == 1 else None
    return [
        _undressed(sentences[1]) if len(sentences) == 2 else statement[1] if statement else text.rstrip("! ")
    ]


def _claims(text: str) -> list[str]:
    """The content of each box in a text, and the result of each sentence with "the answer is", if that has a
    number and no box."""
    boxes = [boxed(BOX + part) or "" for part in text.split(BOX)[1:]]
    sentences = [SENTENCE_END.split(part.lstrip(), maxsplit=1)[0] for part in CONCLUSION.split(text)[1:]]
    return boxes + [
        _undressed(each.rpartition("=")[2])
        for each in sentences
        if BOX not in each and re.search("[0-9]", each)
    ]


def _undressed(text: str) -> str:
    """What follows "the answer is", without bold type and the end of the sentence."""
    return text.lstrip("*_: \n").rstrip("*_.! \n")


def _without_annotations(steps: str) -> str:
    """Without the <<48/2=24>> for a calculator."""
    before, *rest = steps.split("<<")
    return before + "".join(part.partition(">>")[2] for part in rest)
