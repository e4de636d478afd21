"""Tasks that show what parallel decoding loses: copy, sort, shuffle and count lists of letters.

A prompt is "k d b e=". The answer of `copy`, `sort` and `count` follows from the prompt, so a perfect model
may reveal it in one step. That of `shuffle` does not: any new order is right, and the tokens of one step are
drawn independently, so that letters repeat.

Source: W. Kang et al., "ParallelBench: Understanding the Tradeoffs of Parallel Decoding in Diffusion LLMs"
(2025); its lists are of words.
"""

from __future__ import annotations

import abc
import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unmask.errors import ConfigError, DataError
from unmask.rewards.parsing import answer_of
from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict
from unmask.tasks.base import Puzzle, Row, Split, split_of


class ListTask(Puzzle):
    """Lists of lower-case letters, separated by single spaces.

    Args:
        min_letters, max_letters: range of the length of a generated list, from which it is drawn uniformly.
    """

    fields = ("letters",)
    columns = ("letters",)
    letters: ClassVar[str] = string.ascii_lowercase
    """From which lists are drawn, without replacement."""
    alphabet = string.ascii_lowercase + " ="
    entry: ClassVar[str] = "[a-z]"
    """The form of an entry of an answer."""

    def __init__(self, *, min_letters: int = 4, max_letters: int = 8):
        if not 2 <= min_letters <= max_letters <= len(string.ascii_lowercase):
            what = f"min_letters {min_letters} and max_letters {max_letters} are not a range within 2 to 26"
            raise ConfigError(what, where=self.name, remedy="Use 2 <= min_letters <= max_letters <= 26")
        self.min_letters, self.max_letters = min_letters, max_letters
        self.max_completion = 2 * max_letters
        self._form = re.compile(f"{self.entry}( {self.entry})*")

    @abc.abstractmethod
    def solution(self, letters: Sequence[str], rng: random.Random) -> list[str]:
        """The entries of a right answer; the only one, except for `shuffle`."""

    def pick(self, rng: random.Random, count: int) -> list[str]:
        """A random list."""
        return rng.sample(self.letters, count)

    def group(self, letters: Sequence[str], answer: str) -> str:
        """The identity of the solution."""
        return answer

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        row = self._row(self.pick(rng, rng.randint(self.min_letters, self.max_letters)), rng)
        return row if len(set(row["letters"].split())) > 1 and split_of(row["group"]) == split else None

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record such as `{"letters": "k d b e"}`."""
        text = record["letters"]
        if not isinstance(text, str) or not re.fullmatch("[a-z]( [a-z])*", text):
            what, remedy = f"{text!r} is not a list of letters", "Write lower-case letters, as 'k d b e'"
            raise DataError(what, where=f"{where}, key 'letters'", remedy=remedy)
        letters = text.split()
        if len(set(letters)) == 1 or len(letters) > self.max_letters:
            what, remedy = (
                f"{text!r} has {len(letters)} letters, {len(set(letters))} different",
                f"Write 2 to {self.max_letters}, not all equal",
            )
            raise DataError(what, where=f"{where}, key 'letters'", remedy=remedy)
        return self._row(letters, random.Random(text))

    def _row(self, letters: Sequence[str], rng: random.Random) -> Row:
        text, answer = " ".join(letters), " ".join(self.solution(letters, rng))
        return {
            "prompt": f"{text}=",
            "completion": answer,
            "group": self.group(letters, answer),
            "letters": text,
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Right if the answer is exactly a right one. The value of another: see `judge`."""
        answer = answer_of(completion) or ""
        if not self._form.fullmatch(answer):
            return MALFORMED
        return self.judge(answer.split(" "), row["letters"].split(" "))

    def judge(self, answer: Sequence[str], letters: Sequence[str]) -> Verdict:
        """The verdict on a well-formed answer. The value of a wrong one: the entries that are right at their
        place, as a fraction of the longer of the two lists."""
        right = self.solution(letters, random.Random(0))
        if answer == right:
            return OK
        return Verdict(
            sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right)), "wrong"
        )

    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """One letter of the answer is replaced by another one of the list, as in parallel decoding."""
        entries, letters = row["completion"].split(" "), row["letters"].split(" ")
        place = rng.randrange(len(entries))
        entries[place] = rng.choice([letter for letter in letters if letter != entries[place]])
        return " ".join(entries)

    def question(self, row: Mapping[str, Any]) -> str:
        return f"Letters: {row['letters']}"


class Copy(ListTask):
    """The same list."""

    name = "copy"
    instructions = (
        "Repeat the letters in the same order. Give them alone, separated by single spaces, between "
        "<answer> and </answer>."
    )

    def solution(self, letters: Sequence[str], rng: random.Random) -> list[str]:
        return list(letters)


class Sort(ListTask):
    """The list in alphabetical order."""

    name = "sort"
    instructions = (
        "Put the letters into alphabetical order. Give them alone, separated by single spaces, between "
        "<answer> and </answer>."
    )

    def solution(self, letters: Sequence[str], rng: random.Random) -> list[str]:
        return sorted(letters)


class Shuffle(ListTask):
    """Any other order of the list."""

    name = "shuffle"
    instructions = (
        "Put the letters into a random order, other than the given one, with each letter as often as "
        "given. Give them alone, separated by "
        "single spaces, between <answer> and </answer>."
    )

    def solution(self, letters: Sequence[str], rng: random.Random) -> list[str]:
        """Drawn uniformly from all other orders."""
        while (order := rng.sample(letters, len(letters))) == list(letters):
            pass
        return order

    def group(self, letters: Sequence[str], answer: str) -> str:
        return " ".join(sorted(letters))

    def judge(self, answer: Sequence[str], letters: Sequence[str]) -> Verdict:
        """Another order of the letters is right; the given order has value 0. The value of another answer:
        the letters of the list that it has, as a fraction of the longer of the two lists."""
        if answer == letters:
            return WRONG
        if sorted(answer) == sorted(letters):
            return OK
        return Verdict((Counter(answer) & Counter(letters)).total() / max(len(answer), len(letters)), "wrong")


class Count(ListTask):
    """How often each letter occurs, in alphabetical order: the answer to "b a b b=" is "a1 b3"."""

    name = "count"
    letters = "abcd"
    alphabet = string.ascii_lowercase + string.digits + " ="
    entry = "[a-z][1-9][0-9]?"
    instructions = (
        "Count each letter. Give letters with their counts, in alphabetical order, as a1 b3, between "
        "<answer> and </answer>."
    )

    def __init__(self, *, min_letters: int = 4, max_letters: int = 8):
        super().__init__(min_letters=min_letters, max_letters=max_letters)
        self.max_completion = 3 * max_letters + 1  # of a file's list of different letters

    def pick(self, rng: random.Random, count: int) -> list[str]:
        return rng.choices(self.letters, k=count)

    def solution(self, letters: Sequence[str], rng: random.Random) -> list[str]:
        return [f"{letter}{count}" for letter, count in sorted(Counter(letters).items())]

    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """One count is one too high."""
        entries = row["completion"].split(" ")
        place = rng.randrange(len(entries))
        entries[place] = f"{entries[place][0]}{int(entries[place][1:]) + 1}"
        return " ".join(entries)
