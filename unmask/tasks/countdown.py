"""Countdown: an expression with `+ - * /` that uses each of three or four numbers exactly once and equals the
target.

A prompt is "30,100,93>23:" (the numbers, the target); a completion is an expression such as "93-(100-30)".
"""

from __future__ import annotations

import functools
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from unmask.errors import ConfigError, DataError
from unmask.rewards.arithmetic import ArithmeticSyntaxError, evaluate, numbers_used
from unmask.rewards.format import tagged_answers
from unmask.rewards.parsing import BOX, answer_of
from unmask.rewards.spelling import inside, unwrapped
from unmask.rewards.symbolic import MAX_ANSWER
from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict
from unmask.tasks.base import Puzzle, Row, Split, split_of

MAX_NUMBER = 999
WELL_FORMED = 0.1
NUMBERS = re.compile(r"[1-9][0-9]{0,2}(,[1-9][0-9]{0,2})*")
TARGET = re.compile(r"[1-9][0-9]{0,8}")

ATOM = 3
OPERATORS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
}
"""Precedence and function of each operator."""
SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u00d7\u00b7\u22c5\u2022\u2219\u2217\u2715\u2716", "*"),
        **dict.fromkeys("\u00f7\u2215\u2044", "/"),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    }
)
"""Other signs of the operators."""
SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in [
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
        (r"(?<=[0-9)]) ?[xX] ?(?=[0-9(])", "*"),
    ]
]
"""LaTeX, and x for a product."""
STATED = re.compile(" *[1-9][0-9]{0,8} *")


class Term(NamedTuple):
    """An expression while it is being built."""

    value: Fraction
    text: str
    precedence: int


@functools.lru_cache(maxsize=256)
def expressions(numbers: tuple[int, ...]) -> dict[str, Fraction]:
    """Every expression that uses each number exactly once, with the fewest parentheses, and its value."""
    terms = [Term(Fraction(number), str(number), ATOM) for number in sorted(numbers)]
    return {term.text: term.value for term in _merged(terms)}


def solve(numbers: Sequence[int], target: int) -> str | None:
    """The shortest expression that reaches the target (the first alphabetically), or None."""
    right = [text for text, value in expressions(tuple(sorted(numbers))).items() if value == target]
    return min(right, key=lambda text: (len(text), text), default=None)


def _merged(terms: list[Term]) -> Iterator[Term]:
    """All ways to merge terms into one, two at a time."""
    if len(terms) == 1:
        yield terms[0]
        return
    for i, j in permutations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for merged in _applied(terms[i], terms[j]):
            yield from _merged([*rest, merged])


def _applied(left: Term, right: Term) -> Iterator[Term]:
    """Each operator between two terms, except a division by zero."""
    for symbol, (precedence, function) in OPERATORS.items():
        if symbol == "/" and not right.value:
            continue
        first = f"({left.text})" if left.precedence < precedence else left.text
        # a-(b+c) and a/(b*c) need their parentheses; a+(b-c) and a*(b/c) do not.
        binds_weaker = right.precedence < precedence or (right.precedence == precedence and symbol in "-/")
        second = f"({right.text})" if binds_weaker else right.text
        yield Term(function(left.value, right.value), first + symbol + second, precedence)


def published_value(completion: str, row: Mapping[str, Any]) -> float:
    """1 for a right expression in the last answer tags, 0.1 for anything else in them, 0 without tags."""
    answers = tagged_answers(completion)
    if not answers:
        return 0.0
    try:
        right = numbers_used(answers[-1]) == sorted(row["numbers"]) and evaluate(answers[-1]) == row["target"]
    except ArithmeticSyntaxError:
        right = False
    return 1.0 if right else WELL_FORMED


class Countdown(Puzzle):
    """Countdown with three numbers.

    Args:
        max_number: largest generated number. (The published test file goes to 100; a tiny model needs fewer.)
        max_target: largest generated target, as in the published file.
    """

    name = "countdown"
    fields = ("input", "output")
    columns = ("numbers", "target")
    alphabet = "0123456789+-*/(),>:"
    published = MappingProxyType({"countdown": published_value})
    count: ClassVar[int] = 3
    """Numbers in a problem."""
    instructions = (
        "Write an arithmetic expression with + - * / and parentheses that uses each of the numbers "
        "exactly once and has the target as its "
        "value. Give the expression alone, without an equals sign, between <answer> and </answer>."
    )

    def __init__(self, *, max_number: int = 20, max_target: int = 100):
        if not 1 <= max_number <= MAX_NUMBER:
            raise ConfigError(
                f"max_number {max_number} is not within 1 to {MAX_NUMBER}",
                where=self.name,
                remedy="Use 20 or 100",
            )
        if max_target < 1:
            raise ConfigError(f"max_target {max_target} is not positive", where=self.name, remedy="Use 100")
        self.max_number, self.max_target = max_number, max_target
        self.max_completion = (
            self.count * len(str(MAX_NUMBER)) + (self.count - 1) + (self.count - 2) * len("()") + 1
        )

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """Random numbers and a random target that they reach; None if no such target belongs to the split."""
        numbers = [rng.randint(1, self.max_number) for _ in range(self.count)]
        reached = {
            value.numerator
            for value in expressions(tuple(sorted(numbers))).values()
            if value.denominator == 1
        }
        targets = [
            target
            for target in sorted(reached)
            if 1 <= target <= self.max_target and split_of(_group(numbers, target)) == split
        ]
        return self._row(numbers, rng.choice(targets)) if targets else None

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record such as `{"input": "30,100,93", "output": "23"}`; the right completion is found
        by search."""
        if not NUMBERS.fullmatch(str(record["input"])) or record["input"].count(",") + 1 != self.count:
            remedy = f"Write {self.count} integers from 1 to {MAX_NUMBER}, as '30,100,93'"
            raise DataError(
                f"{record['input']!r} are not {self.count} numbers",
                where=f"{where}, key 'input'",
                remedy=remedy,
            )
        if not TARGET.fullmatch(str(record["output"])):
            what, remedy = f"{record['output']!r} is not a target", "Write a positive integer"
            raise DataError(what, where=f"{where}, key 'output'", remedy=remedy)
        row = self._row([int(number) for number in record["input"].split(",")], int(record["output"]))
        if row["completion"] is None:
            raise DataError(
                f"{row['target']} cannot be reached from {row['numbers']}",
                where=where,
                remedy="Fix or remove the row",
            )
        return row

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Right if the expression uses each number once and reaches the target; 0.1 if it only uses the
        numbers.

        It may be an equation that says what its value is, and be set as a formula, code or in bold type.
        """
        expression, *stated = _sides(answer_of(completion) or "")
        if STATED.fullmatch(expression) and stated:
            expression, stated = stated[0], [expression, *stated[1:]]
        try:
            value, used = evaluate(expression), numbers_used(expression)
        except ArithmeticSyntaxError:
            return MALFORMED
        if stated and not (len(stated) == 1 and STATED.fullmatch(stated[0]) and int(stated[0]) == value):
            return MALFORMED
        if used != sorted(row["numbers"]):
            return WRONG
        return OK if value == row["target"] else Verdict(WELL_FORMED, "wrong")

    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """A random expression over the same numbers that misses the target."""
        candidates = expressions(tuple(sorted(row["numbers"])))
        return rng.choice([text for text, value in candidates.items() if value != row["target"]])

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        """A mistake is the nearest that can be reached without the largest number; it is more likely the
        larger that number is."""
        *others, largest = sorted(row["numbers"])
        effort = min(1.0, (largest - 0.5) / self.max_number) ** len(row["numbers"])  # uniform from 0 to 1
        if rng.random() >= self.chance(effort, mistake_rate):
            return row["completion"]
        return min(
            expressions(tuple(others)).items(),
            key=lambda item: (abs(item[1] - row["target"]), len(item[0]), item[0]),
        )[0]

    def question(self, row: Mapping[str, Any]) -> str:
        return f"Numbers: {', '.join(map(str, row['numbers']))}\nTarget: {row['target']}"

    def _row(self, numbers: list[int], target: int) -> Row:
        prompt = f"{','.join(map(str, numbers))}>{target}:"
        completion = solve(numbers, target)
        return {
            "prompt": prompt,
            "completion": completion,
            "group": _group(numbers, target),
            "numbers": numbers,
            "target": target,
        }


class Countdown4(Countdown):
    """Countdown with four numbers."""

    name = "countdown4"
    count = 4


def _sides(text: str) -> list[str]:
    """The two sides of an equation, or the expression, that a text is."""
    if len(text) > MAX_ANSWER:
        return [""]
    text = text.translate(SIGNS)
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    return [_plain(side) for side in _plain(text).split("=")]


def _plain(text: str) -> str:
    """The text without what stands around all of it: signs of formulas, code and bold type, a box, a full
    stop."""
    text = unwrapped(text.strip())
    box = inside(text, BOX, "}")
    return text if box is None else _plain(box)


def _group(numbers: Sequence[int], target: int) -> str:
    """The identity of a problem, independent of the order of its numbers."""
    return f"{','.join(map(str, sorted(numbers)))}>{target}"
