"""Problems whose answer is a choice among several, or a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from unmask.errors import DataError, require_names
from unmask.rewards.parsing import answer_of
from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict
from unmask.tasks.base import Row, Task

QUESTIONS = ("query", "question", "ctx")
CHOICES = ("choices", "endings", "options")
GOLD = ("gold", "label", "answerKey", "answer", "correct_option")
PASSAGES = ("context", "text")
PROMPTS = ("prompt", "context", "question")
ANSWERS = ("completion", "continuation", "answer")
UNREAD = ("system", "history", "tools", "chat_template_kwargs")


class MultipleChoice(Task):
    """A question with lettered choices; the answer is a letter. For PIQA, ARC, HellaSwag, LogiQA and similar
    datasets.

    Records have a question (`query`, `question` or `ctx`), a list of choices (`choices`, `endings` or
    `options`), the number (from 0) or letter of the right one (`gold`, `label`, `answerKey`, `answer` or
    `correct_option`), and optionally a passage (`context` or `text`).
    """

    name = "multiple_choice"
    fields = ()
    columns = ("letter", "choices")
    instructions = "Choose the right answer. Give its letter alone between <answer> and </answer>."

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        question, choices, gold = (_first(record, names, where) for names in (QUESTIONS, CHOICES, GOLD))
        # ARC on the hub: {"text": [...], "label": [...]}
        if isinstance(choices, Mapping) and "text" in choices:
            labels = choices.get("label")
            gold = labels.index(gold) if isinstance(labels, list) and gold in labels else gold
            choices = choices["text"]
        texts = (
            isinstance(choices, Sequence)
            and not isinstance(choices, str)
            and all(isinstance(choice, str) for choice in choices)
        )
        if not (
            isinstance(question, str)
            and question.strip()
            and texts
            and 2 <= len(choices) <= len(ascii_uppercase)
        ):
            what = (
                f"not a question with 2 to {len(ascii_uppercase)} choices: {question!r:.40}, {choices!r:.40}"
            )
            raise DataError(
                what, where=where, remedy="Write the question as text and the choices as a list of texts"
            )
        passage = next((record[name] for name in PASSAGES if record.get(name) is not None), "")
        if not isinstance(passage, str):
            raise DataError(
                f"the passage is not text: {passage!r:.40}",
                where=where,
                remedy="Write it as a string, or omit it",
            )
        question = f"{passage.strip()}\n{question.strip()}".strip()
        letters = ascii_uppercase[: len(choices)]
        position = letters.index(gold) if gold in list(letters) else _index(gold)
        if not 0 <= position < len(choices):
            what = f"{gold!r:.40} is none of the {len(choices)} choices"
            raise DataError(
                what, where=where, remedy="Write the number of the right one, counted from 0, or its letter"
            )
        question += "".join(
            f"\n{letter}. {choice.strip()}" for letter, choice in zip(letters, choices, strict=True)
        )
        return {
            "prompt": f"{question}\nAnswer:",
            "completion": f" {letters[position]}",
            "group": question,
            "question": question,
            "letter": letters[position],
            "choices": list(choices),
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The letter alone, in answer tags or as the whole text. "(A)", "A." and "a" count as "A"."""
        answer = (answer_of(completion) or "").strip("().").upper()
        if len(answer) != 1 or answer not in ascii_uppercase[: len(row["choices"])]:
            return MALFORMED
        return OK if answer == row["letter"] else WRONG

    def answer(self, row: Mapping[str, Any]) -> str:
        return f"<answer>{row['letter']}</answer>"


class Text(Task):
    """A text and its one right continuation: LAMBADA's last word, short answers.

    Records have `prompt`, `context` or `question`, and `completion`, `continuation` or `answer`.
    """

    name = "text"
    fields = ()
    columns = ("answer",)
    reference = "answer"
    instructions = (
        "Go on with the text. Give what comes next, and nothing else, between <answer> and </answer>."
    )

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        prompt, answer = (_first(record, names, where) for names in (PROMPTS, ANSWERS))
        if not (isinstance(prompt, str) and prompt.strip() and isinstance(answer, str) and answer.strip()):
            raise DataError(
                f"not two texts: {prompt!r:.40}, {answer!r:.40}", where=where, remedy="Write both as strings"
            )
        completion = answer if prompt[-1].isspace() or answer[0].isspace() else f" {answer}"
        return {
            "prompt": prompt,
            "completion": completion,
            "group": prompt,
            "answer": " ".join(answer.split()),
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The same words in the same order; white space is ignored."""
        text = answer_of(completion)
        if text is None:
            return MALFORMED
        return OK if " ".join(text.split()) == row["answer"] else WRONG


def _first(record: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The value of the first name that the record has. DataError if it has none, or a column that would
    change the prompt."""
    if unread := next((other for other in UNREAD if record.get(other)), None):
        remedy = "Write it into the prompt, or remove the column"
        raise DataError(f"the column {unread} is not read", where=where, remedy=remedy)
    name = next((name for name in names if name in record), names[0])
    require_names(record, [name], where)
    return record[name]


def _index(gold: Any) -> int:
    """The value of a number, also of one written as text; -1 for anything else."""
    return int(gold) if str(gold).isdecimal() and len(str(gold)) < 3 and not isinstance(gold, bool) else -1
