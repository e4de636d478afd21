"""Countdown: reach a target with `+ - * /` from three numbers, each used exactly once.

A prompt is "30,100,93>23:" (the numbers, the target); a completion is an expression such as "93-(100-30)". The published rules:
1 for a right expression, 0.1 for one that uses the numbers but misses the target, else 0.
"""

from __future__ import annotations

import functools
import operator
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any, NamedTuple

from unmask.errors import ConfigError, DataError
from unmask.rewards.arithmetic import ArithmeticSyntaxError, evaluate, numbers_used
from unmask.tasks.base import Row, Split, Task, Verdict, split_of
from unmask.tasks.files import read_records

COUNT = 3
LARGEST = 999
WELL_FORMED = 0.1
NUMBERS = re.compile(r"[1-9][0-9]{0,2}(,[1-9][0-9]{0,2}){2}")
TARGET = re.compile(r"[1-9][0-9]{0,8}")

ATOM = 3
OPERATORS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
}
"""Precedence and function of each operator."""


class Term(NamedTuple):
    """An expression while it is being built."""

    value: Fraction
    text: str
    precedence: int


@functools.lru_cache(maxsize=4096)
def expressions(numbers: tuple[int, ...]) -> dict[str, Fraction]:
    """Every expression that uses each number exactly once, written with the fewest parentheses, and its value."""
    terms = [Term(Fraction(number), str(number), ATOM) for number in sorted(numbers)]
    return {term.text: term.value for term in _merged(terms)}


def solve(numbers: Sequence[int], target: int) -> str | None:
    """The shortest expression that reaches the target (of those the first in alphabetical order), or None."""
    right = [text for text, value in expressions(tuple(sorted(numbers))).items() if value == target]
    return min(right, key=lambda text: (len(text), text), default=None)


def _merged(terms: list[Term]) -> Iterator[Term]:
    """All ways to merge terms, two at a time, into one."""
    if len(terms) == 1:
        yield terms[0]
        return
    for i, j in permutations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for merged in _applied(terms[i], terms[j]):
            yield from _merged([*rest, merged])


def _applied(left: Term, right: Term) -> Iterator[Term]:
    """Each operator between two terms; a division by zero is left out."""
    for symbol, (precedence, function) in OPERATORS.items():
        if symbol == "/" and not right.value:
            continue
        first = f"({left.text})" if left.precedence < precedence else left.text
        # a-(b+c) and a/(b*c) need theirs; a+(b-c) and a*(b/c) mean the same without.
        binds_weaker = right.precedence < precedence or (right.precedence == precedence and symbol in "-/")
        second = f"({right.text})" if binds_weaker else right.text
        yield Term(function(left.value, right.value), first + symbol + second, precedence)


class Countdown(Task):
    """Countdown with three numbers.

    Args:
        max_number: generated numbers are 1 to this. (The published test file goes to 100; a tiny model needs fewer.)
        max_target: generated targets are positive integers up to this, as in the published file.
    """

    name = "countdown"
    columns = ("numbers", "target")
    alphabet = "0123456789+-*/(),>:"
    max_completion = COUNT * len(str(LARGEST)) + (COUNT - 1) + len("()") + 1

    def __init__(self, *, max_number: int = 20, max_target: int = 100):
        if not 1 <= max_number <= LARGEST:
            raise ConfigError(f"max_number {max_number} is not within 1 to {LARGEST}", where=self.name, remedy="Use 20 or 100.")
        if max_target < 1:
            raise ConfigError(f"max_target {max_target} is not positive", where=self.name, remedy="Use 100.")
        self.max_number, self.max_target = max_number, max_target

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """Random numbers and a random target within their reach; None where no such target belongs to the split."""
        numbers = [rng.randint(1, self.max_number) for _ in range(COUNT)]
        reached = {value.numerator for value in expressions(tuple(sorted(numbers))).values() if value.denominator == 1}
        targets = [target for target in sorted(reached) if 1 <= target <= self.max_target and split_of(_group(numbers, target)) == split]
        return self._row(numbers, rng.choice(targets)) if targets else None

    def read(self, path: str | os.PathLike[str]) -> list[Row]:
        """The rows of a JSONL file such as `{"input": "30,100,93", "output": "23"}`; the right completion is found by search."""
        rows = []
        for where, record in read_records(path, ("input", "output")):
            if not NUMBERS.fullmatch(str(record["input"])):
                remedy = f"Write three integers from 1 to {LARGEST}, as '30,100,93'."
                raise DataError(f"{record['input']!r} are not three numbers", where=f"{where}, key 'input'", remedy=remedy)
            if not TARGET.fullmatch(str(record["output"])):
                what, remedy = f"{record['output']!r} is not a target", "Write a positive integer."
                raise DataError(what, where=f"{where}, key 'output'", remedy=remedy)
            numbers, target = [int(number) for number in record["input"].split(",")], int(record["output"])
            if solve(numbers, target) is None:
                raise DataError(f"{target} cannot be reached from {numbers}", where=where, remedy="Mend or remove the row.")
            rows.append(self._row(numbers, target))
        return rows

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """1 where the expression reaches the target, 0.1 where it uses each number once but misses it, 0 otherwise."""
        try:
            value, used = evaluate(completion), numbers_used(completion)
        except ArithmeticSyntaxError:
            return Verdict(0.0, "malformed")
        if used != sorted(row["numbers"]):
            return Verdict(0.0, "wrong")
        return Verdict(1.0, "ok") if value == row["target"] else Verdict(WELL_FORMED, "wrong")

    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """A random expression over the same numbers that misses the target."""
        candidates = expressions(tuple(sorted(row["numbers"])))
        return rng.choice([text for text, value in candidates.items() if value != row["target"]])

    def _row(self, numbers: list[int], target: int) -> Row:
        prompt = f"{','.join(map(str, numbers))}>{target}:"
        completion = solve(numbers, target)
        return {"prompt": prompt, "completion": completion, "group": _group(numbers, target), "numbers": numbers, "target": target}


def _group(numbers: Sequence[int], target: int) -> str:
    """The identity of a problem: its order of numbers does not matter."""
    return f"{','.join(map(str, sorted(numbers)))}>{target}"
