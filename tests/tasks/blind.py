"""Programs that do not read the problem: each returns the same expression of its arguments, whatever is asked
for.

`search` composes expressions from the tables below and finds those that pass the tests of a problem. An
expression that passes is right if it returns what the reference solution returns on inputs of the same kind
(`tests.tasks.inputs`); otherwise the problem pays it.

    python -m tests.tasks.blind MBPP.jsonl STEP

prints a JSON line for every STEP-th problem: its `task_id`, the number of expressions tried, those that pass
and are right, those that are paid for, and cases that tell these from the reference.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import io
import json
import math
import pathlib
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, combinations, islice, permutations, product
from typing import Any

from tests.tasks.inputs import similar_inputs
from unmask.tasks import get_task
from unmask.tasks.base import Row

# {} is an expression, {0} and {1} are two. `x` and `y` are names of the templates.
OF_ONE = [
    "len({})", "sum({})", "max({})", "min({})", "sorted({})", "sorted({}, reverse=True)", "{}[::-1]", "list({})", "tuple({})", "set({})", "str({})", "int({})", "float({})", "bool({})", "not {}",
    "{}[0]", "{}[-1]", "{}[1]", "{}[2]", "{}[-2]", "{}[:-1]", "{}[1:]", "{}[1:-1]", "{}[::2]", "{}[1::2]", "{}[len({}) // 2]", "{}[:len({}) // 2]", "abs({})", "-{}", "~{}", "round({})", "math.ceil({})", "math.floor({})", "math.isqrt({})", "math.sqrt({})", "math.log2({})", "factorial({})", "power(2, {})",
    "bin({})[2:]", "hex({})[2:]", "oct({})[2:]", "int({}, 2)", "int({}, 16)", "chr({})", "ord({})", "range({})", "range(1, {} + 1)", "[x for x in range(1, {} + 1) if {} % x == 0]", "[x for x in range(2, {} + 1) if {} % x == 0 and all(x % y for y in range(2, x))]", "[int(x) for x in str({})]", "int(str({})[::-1])", "{} > 1 and all({} % x for x in range(2, math.isqrt({}) + 1))", "{} > 0 and {} & ({} - 1) == 0",
    "list({}) == sorted({})", "list({}) == sorted({}, reverse=True)", "{} == {}[::-1]", "any({})", "all({})", "len({}) == len(set({}))", "all(x < y for x, y in zip({}, {}[1:]))", "all(x != y for x, y in zip({}, {}[1:]))", "all(x % 2 == y % 2 for x, y in enumerate({}))", "all(x % 2 != y % 2 for x, y in enumerate({}))", "[y - x for x, y in zip({}, {}[1:])]",
    "math.prod({})", "math.gcd(*{})", "math.lcm(*{})", "sorted(set({}))", "list(dict.fromkeys({}))", "collections.Counter({})", "collections.Counter({}).most_common(1)[0][0]", "list({}.values())", "list({}.keys())", "list({}.items())", "max({}, key={}.get)",
    "[x for x in {} if x % 2 == 0]", "[x for x in {} if x % 2]", "[x for x in {} if x > 0]", "[x for x in {} if x < 0]", "[x for x in {} if x]", "[x for x in {} if isinstance(x, int)]", "[x for x in {} if isinstance(x, str)]", "[x for x in {} if {}.count(x) == 1]", "[x for x in {} if {}.count(x) > 1]", "[x for x in {} if {}.count(x) % 2]",
    "[x for x in {} if x.isdigit()]", "[x for x in {} if x.isalpha()]", "[x for x in {} if x.isupper()]", "[x for x in {} if x.islower()]", "[x for x in {} if x in 'aeiou']", "[x for x in {} if x not in 'aeiou']", "[x for x in {} if not x.isdigit()]",
    "[y for x in {} for y in x]", "[x[0] for x in {}]", "[x[1] for x in {}]", "[x[-1] for x in {}]", "[x[::-1] for x in {}]", "[len(x) for x in {}]", "[sum(x) for x in {}]", "[max(x) for x in {}]", "[min(x) for x in {}]", "[sorted(x) for x in {}]", "[str(x) for x in {}]", "[int(x) for x in {}]", "[tuple(x) for x in {}]", "[x + 1 for x in {}]", "[x * 2 for x in {}]", "[x ** 2 for x in {}]", "[x ** 3 for x in {}]", "[abs(x) for x in {}]",
    "max({}, key=len)", "min({}, key=len)", "max({}, key=sum)", "sorted({}, key=len)", "sorted({}, key=sum)", "sorted({}, key=lambda x: x[-1])", "[list(x) for x in zip(*{})]", "list(zip({}, {}[1:]))",
    "{}.upper()", "{}.lower()", "{}.strip()", "{}.split()", "{}.title()", "{}.capitalize()", "{}.swapcase()", "''.join({})", "' '.join({})", "''.join(map(str, {}))", "{}.isalpha()", "{}.isdigit()", "{}.isalnum()", "{}.islower()", "{}.isupper()", "{}.istitle()", "{}.isidentifier()", "[{}]", "type({})()",
]  # fmt: skip
OF_TWO = [
    "{0} + {1}", "{0} - {1}", "times({0}, {1})", "{0} / {1}", "{0} // {1}", "{0} % {1}", "power({0}, {1})", "{0} == {1}", "{0} < {1}", "{0} <= {1}", "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "{0} >> {1}", "shift({0}, {1})", "{0} in {1}", "{0} % {1} == 0", "max({0}, {1})", "min({0}, {1})", "math.gcd({0}, {1})", "comb({0}, {1})", "{0} and {1}", "{0} or {1}", "abs({0} - {1})", "range({0}, {1})",
    "{0}.count({1})", "{0}.index({1})", "{0}[{1}]", "{0}[{1} - 1]", "{0}[:{1}]", "{0}[{1}:]", "{0}[-{1}:]", "{0}[:-{1}]", "{0}[::{1}]", "{0}[{1}:] + {0}[:{1}]", "{0}.startswith({1})", "{0}.endswith({1})", "{0}.split({1})", "{0}.find({1})", "{0}.rfind({1})", "{0}.replace({1}, '')", "{0}.replace(' ', {1})",
    "[x for x in {0} if x in {1}]", "[x for x in {0} if x not in {1}]", "[x for x in {0} if x > {1}]", "[x for x in {0} if x < {1}]", "[x for x in {0} if x == {1}]", "[x for x in {0} if x != {1}]", "[x for x in {0} if x % {1} == 0]", "[x for x in {0} if {1} in x]", "[x for x in {0} if len(x) == {1}]", "[x for x in {0} if len(x) > {1}]", "all(x == {1} for x in {0})", "all(x in {1} for x in {0})", "all(x > {1} for x in {0})", "all(x < {1} for x in {0})", "all(len(x) == {1} for x in {0})", "any(x > {1} for x in {0})", "any(x in {1} for x in {0})",
    "list(zip({0}, {1}))", "[x + y for x, y in zip({0}, {1})]", "[x - y for x, y in zip({0}, {1})]", "[x * y for x, y in zip({0}, {1})]", "[x ^ y for x, y in zip({0}, {1})]", "[x == y for x, y in zip({0}, {1})]", "[x < y for x, y in zip({0}, {1})]", "[times(x, {1}) for x in {0}]", "[x / {1} for x in {0}]", "[x[{1}] for x in {0}]", "[{0}[x:x + {1}] for x in range(0, len({0}), {1})]", "{0} + [{1}]", "({0}, {1})", "[{0}, {1}]", "dict(zip({0}, {1}))", "{{**{0}, **{1}}}", "{0}.get({1})", "len({0}) == len({1})", "sorted({0}) == sorted({1})", "set({0}) == set({1})", "set({0}) < set({1})",
]  # fmt: skip
ARITHMETIC = ["{0} + {1}", "{0} - {1}", "times({0}, {1})", "{0} / {1}", "{0} // {1}", "{0} % {1}", "{0} == {1}", "{0} < {1}", "{0} and {1}", "{0} or {1}", "{0} in {1}", "power({0}, {1})"]  # fmt: skip
"""Those that are applied to two expressions that are not arguments."""
OF_THREE = ["{0}[{1}:{2}]", "{0}[{1}:{2} + 1]", "{0}[{1} - 1:{2}]", "{0}[{1}][{2}]", "{0}.replace({1}, {2})", "{0} <= {1} <= {2}", "{0} == {1} == {2}", "sorted(({0}, {1}, {2}))[1]", "len({{{0}, {1}, {2}}})", "{0} + {1} > {2}", "pow({0}, {1}, {2})", "{0} + {1} + {2}", "times(times({0}, {1}), {2})", "times({0}, {1}) + {2}", "times({0}, {1}) % {2}", "{0} % {1} == {2}", "({0}, {1}, {2})", "[{0}, {1}, {2}]", "{0} + times({1} - 1, {2})", "times({0}, power({2}, {1} - 1))"]  # fmt: skip
NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "10",
    "None",
    "4",
    "5",
    "6",
    "7",
    "8",
    "9",
    "20",
    "50",
    "100",
    "1000",
    "math.pi",
]
TEXTS = ["''", "' '", "'_'", "'@'", "'.'", "','", "'-'", "'ab'", "'bb'", "'aeiou'", "'0'", "'1'", "'2'", "'3'", "'4'", "'7'", "'9'", *map(repr, "abcdefghijklmnopqrstuvwxyz"), "'A'", "'P'"]  # fmt: skip
ANSWERS = list(map(repr, [True, False, None, "True", "False", "Yes", "No", "YES", "NO", "Even", "Odd", "Valid", "Invalid", "Equal", "Not Equal", "Found a match!", "Not matched!"]))  # fmt: skip
"""What a program may return one of that has seen other problems."""
PLAIN = ["0", "1", "-1", "None", "True", "False", "''", "[]"]
"""What an expression returns for one of two branches, beside its arguments."""

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
ROTATED = "any(a[x:] + a[:x] == sorted(a) for x in range(len(a)))"
MOST_OFTEN = "[a.count(x) for x in set(a)].count(max(map(a.count, a))) == 1"
ODD_AND_EVEN = "len({x % 2 for x in a}) == 2 and out == int(out)"
ONE_ODD = "sum(a.count(x) % 2 for x in set(a)) == 1"
DECIDED = {
    2: "sorted(out) == list(out)", 3: "a > 1", 12: "len(set(map(sum, a))) == len(a)", 25: "all(x == 1 or a.count(x) == 1 for x in a)", 29: ONE_ODD, 34: "a == [x for x in range(1, len(a) + 2) if x != out] and len(a) == b",
    38: ODD_AND_EVEN, 39: "a == a[::-1]", 57: "max(a) < 10", 58: "a * b", 64: "len({x[1] for x in a}) == len(a)", 66: "0 not in a", 76: "out == sum((a - x) * (b - x) for x in range(min(a, b)))", 81: "len(a) >= len(b)",
    92: "len(a) > 2", 94: "[x[1] for x in a].count(min(x[1] for x in a)) == 1", 102: "all(a.split('_'))", 103: "b < a", 113: "out == a.removeprefix('-').isdigit()", 118: "a == ' '.join(a.split())",
    119: "sorted(collections.Counter(a).values()) == [1] + [2] * (len(a) // 2)", 121: "d == 0 and len(a) > 2", 125: "'0' in a", 126: "out == sum(x for x in range(1, min(a, b) + 1) if a % x == b % x == 0)",
    129: "all(len(x) == len(a) for x in a)", 143: "isinstance(a, tuple) and all(isinstance(x, list) for x in a)", 164: "min(a, b) > 1 and math.isqrt(a) ** 2 != a and math.isqrt(b) ** 2 != b", 183: "len(set(a)) == len(a)",
    184: "b not in a", 190: "c - a == d - b > 0", 191: "a in MONTHS", 193: "sorted(out) == list(out)", 204: "len(b) == 1", 208: "len(a.partition('.')[2]) > 1", 216: "all(isinstance(x, list) for x in b)", 219: "2 * b <= len(a)",
    225: ROTATED + " and b == 0 and c == len(a) - 1", 229: "sum(x > 0 for x in a) == sum(x < 0 for x in a) == 1", 230: "len(b) == 1", 231: "[len(x) for x in a] == [*range(1, b + 1)]", 236: "a - 2 * b >= -2",
    249: "a == sorted(set(a)) and b == sorted(set(b))", 262: "0 < b < len(a)", 263: "all(a[x] == b[x] for x in a if x in b)", 278: "any(isinstance(x, tuple) for x in a)", 288: "all(c % x for x in range(2, c))",
    303: "sorted(a) == [*range(b)]", 304: "0 < c <= len(b) and 0 <= d < len(a) and all(x <= y < len(a) for x, y in b)", 316: "a == sorted(a)",
    326: "list((words := collections.Counter(' '.join(a).split())).values()).count(max(words.values())) == 1", 327: "len({a, b, c}) > 1", 329: "0 not in a", 333: "len({x[1] for x in a}) == len(a)", 336: "a in MONTHS",
    340: "len({x for x in a if x > 0}) > 2", 347: "out == sum((a - x) * (b - x) for x in range(min(a, b)))", 348: "a % 2 == 0", 362: MOST_OFTEN, 371: "b == 0 and c == len(a) - 1", 377: "len(b) == 1",
    382: "len(set(a)) == len(a) and any(a[x:] + a[:x] == sorted(a) for x in range(len(a)))", 403: "a.startswith('https://')", 411: "all(a.split('_'))", 412: "out == [x for x in a if x % 2 == 0]",
    454: "('z' in a) == (out[0] == 'F')", 455: "0 < a < 13", 472: "a == sorted(a)", 480: MOST_OFTEN, 487: "len({x[-1] for x in a}) == len(a)", 509: "a % 2",
    511: "out == sum(x for x in range(2, a + 1) for y in range(1, 9) if a % x ** y == 0 and all(x % z for z in range(2, x)))", 516: "out == sorted(a)", 517: "max(a) > 0", 518: "math.isqrt(a) ** 2 == a",
    525: "len(a) == len(b) == 3 and all(a + b)", 528: "[len(x) for x in a].count(out[0]) == 1", 532: "out == (sorted(a) == sorted(b))", 540: "out == max(map(a.count, a)) - min(map(a.count, a))",
    550: ROTATED + " and b == 0 and c == len(a) - 1", 551: "len(set(map(len, a))) == 1", 558: "len(str(a)) == len(str(b)) and out == sum(abs(int(x) - int(y)) for x, y in zip(str(a), str(b)))", 560: "sorted(out) == list(out)",
    575: "out < d", 594: ODD_AND_EVEN, 609: "c >= b - 1", 612: "len(a[0]) > 1", 627: "b == 0 and c == len(a) - 1", 640: "a[0].count('(') == 1", 642: "all(len(set(x)) == len(x) for x in a)",
    650: "out == (sorted(a) == sorted(b)) and c == len(a) and d == len(b)", 658: MOST_OFTEN, 660: "a != c and b != d", 664: "a % 2 == 0", 666: "len(b) == 1", 668: "len(b) == 1", 671: "a & (a + 1)", 675: "a + b != d",
    680: "len(set(a)) == len(a)", 700: "b <= c", 702: "out == len(a) - max(sum(x <= y <= x + c for y in a) for x in a)", 708: "a == ' '.join(a.split())", 751: "b == 0",
    757: "len(set(a)) == len(a) and all(x != x[::-1] for x in a)", 759: "len(a.partition('.')[2]) > 1", 762: "0 < a < 13", 769: "out == [x for x in a if x not in b] + [x for x in b if x not in a]", 784: ODD_AND_EVEN,
    802: "len(set(a)) == len(a) and any(a[x:] + a[:x] == sorted(a) for x in range(len(a)))", 805: "[sum(x) for x in a].count(sum(out)) == 1", 815: "{*a} <= {0, 1, 2}", 820: "0 < a < 13",
    821: "all(a[x] == b[x] for x in a if x in b)", 824: "out == [x for x in a if x % 2]", 829: "len({a.count(x) for x in a}) == len(set(a))", 836: "0 not in a", 839: "len({x[0] for x in a}) == len(a)", 840: "b or c < 0",
    842: ONE_ODD, 846: "all(x < y for x, y in zip(a, b))", 852: "out == [x for x in a if x >= 0]", 866: "a in MONTHS", 884: "b <= c", 890: "a == sorted(a) and b == sorted(set(b)) and set(b) < set(a) and c == len(b) == len(a) - 1",
    891: "out == (len(str(a)) == len(str(b)))", 896: "len({x[-1] for x in a}) == len(a)", 897: "b.isalpha()", 908: "a == sorted(set(a)) and sum(x == y for x, y in enumerate(a)) < 2",
    917: "not (out[0] == 'N' and any(x.isupper() and y.islower() for x, y in zip(a, a[1:]))) and not any(x.isupper() and y.isupper() for x, y in zip(a, a[1:]))", 937: MOST_OFTEN, 939: "len({x['color'] for x in a}) == len(a)",
    941: "any(isinstance(x, tuple) for x in a)", 953: "out == max(map(a.count, a))", 974: "[len(x) for x in a] == [*range(1, len(a) + 1)]",
}  # fmt: skip
"""What holds of the inputs `a`, `b`, ... of a problem, and of its output `out`, where the text or the
reference is no answer for others: of equal counts no one is the most common, 0 is no positive number, and
some references are wrong for inputs that no test has."""
GIVEN = {
    44: "[('Python',), ('Data set',)]", 229: "[(each, 2) for x in range(1, 6) for each in ([x, -2 * x], [-x, x + 3])]", 56: "[(1,), (793,), (7993,), (794,)]", 188: "[(100,), (144,), (225,), (64,), (48,), (50,)]", 192: "[('ABC123',), ('A1',), ('ABC',)]", 252: "[(-x,) for x in range(1, 9)]",
    256: "[(x,) for x in range(2, 60)]", 269: "[(chr(x),) for x in range(65, 91)]", 518: "[(x * x,) for x in range(1, 26)]", 948: "[(tuple('python'), x) for x in range(-6, 6)]",
    533: "[((1, 'a', 2.5, 'b'), str), ((3, 1.5, 'x'), float), (('y', 2, 7, 'z'), int), ((4, 5, 'q', 0.5), int), (('w', 1.25, 8), str), ((0.25, 6, 'v', 9), float), (('u', 't'), int)]",
    **dict.fromkeys([191, 336, 866], "[(x,) for x in MONTHS]"), **dict.fromkeys([455, 762, 820], "[(x,) for x in range(1, 13)]"),
}  # fmt: skip
"""Inputs of problems whose tests have too few kinds to draw others like them."""

ORDERED = [
    "sorted",
    "rotat",
    "heap",
    "search",
    "consecutive",
    "order",
    "missing",
    "monoton",
    "triangle",
    "arrival",
    "platforms",
]
"""Words of texts that speak of sorted inputs, or may mean them."""
NOTHING = [-1, None, "", [], (), {}, set()]
"""What a reference returns for inputs that its problem does not speak of, if no test has it."""
MOST, MOST_LONG, MOST_TOO_LONG = 10**15, 3000, 40
RIGHT_ON = 8
"""Inputs, with those of the tests, on which an expression must agree with the reference to be right."""


def _bounded_range(*limits: int) -> range:
    found = range(*limits)
    if len(found) > 400:
        raise ValueError(limits)
    return found


def _times(a: Any, b: Any) -> Any:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a * b
    if max(a if isinstance(a, int) else len(a), b if isinstance(b, int) else len(b)) > 100:
        raise ValueError(a, b)
    return a * b


def _power(a: float, b: float) -> Any:
    if abs(a) > 10**6 or abs(b) > 40:
        raise ValueError(a, b)
    return a**b


def _shift(a: int, b: int) -> int:
    if b > 60:
        raise ValueError(b)
    return a << b


def _small(function: Callable[..., int]) -> Callable[..., int]:
    def bounded(*values: int) -> int:
        if max(values) > 100:
            raise ValueError(values)
        return function(*values)

    return bounded


KNOWN = {"math": math, "collections": collections, "range": _bounded_range, "times": _times, "power": _power, "shift": _shift, "factorial": _small(math.factorial), "comb": _small(math.comb)}  # fmt: skip
"""What expressions call. The functions named for operators are these with bounds."""

ERRORS = (Exception, RecursionError)
FAILED = object()


@dataclass(slots=True)
class Expression:
    """An expression of the arguments, and its values on the inputs."""

    text: str
    values: list[Any]
    """On the inputs of the tests, and then on a few others, where FAILED stands for an error."""
    atomic: bool = True
    kind: Any = None

    def __post_init__(self) -> None:
        first = self.values[0]
        inner = next(iter(first), None) if isinstance(first, list | tuple | set | dict) else None
        self.kind = (type(first), type(inner))


class Template:
    """An expression with gaps."""

    def __init__(self, text: str, gaps: int) -> None:
        names = ["p", "q", "r"][:gaps]
        self.text = text.replace("{}", "{0}")
        filled = self.text.format(*names)
        tree = ast.parse(filled, mode="eval").body
        self.atomic = isinstance(
            tree, ast.Call | ast.Subscript | ast.ListComp | ast.List | ast.Dict | ast.Tuple
        )
        self.function = eval(f"lambda {', '.join(names)}: {filled}", KNOWN)
        self._dead: dict[Any, int] = {}

    def applies(self, kinds: Any) -> bool:
        """False for operands of kinds that have always been of a wrong type."""
        return self._dead.get(kinds, 0) < 4

    def note(self, kinds: Any, error: Exception | None) -> None:
        if error is None:
            self._dead[kinds] = -(10**9)
        elif isinstance(error, TypeError | AttributeError):
            self._dead[kinds] = self._dead.get(kinds, 0) + 1

    def filled(self, *operands: Expression) -> str:
        return self.text.format(*(each.text if each.atomic else f"({each.text})" for each in operands))


@functools.cache
def _templates(gaps: int, arithmetic: bool = False) -> list[Template]:
    return [
        Template(text, gaps) for text in (ARITHMETIC if arithmetic else [OF_ONE, OF_TWO, OF_THREE][gaps - 1])
    ]


BOTH = [Template("{0} and {1}", 2), Template("{0} or {1}", 2)]


@dataclass
class Problem:
    """The tests of a problem, as inputs and outputs."""

    name: str
    tests: list[tuple[tuple[Any, ...], Any]]
    seen: Callable[[Any], Any]
    """What the tests compare of an output."""
    shape: str
    """The same as a text with a gap."""
    reference: Callable[..., Any]
    ordered: bool = False
    """Whether the text speaks of sorted inputs, or may mean them."""
    inputs: list[tuple[tuple[Any, ...], Any]] = field(repr=False, default_factory=list)
    """Other inputs, and the outputs of the reference."""
    too_long: int = 0
    """Calls of the reference that were stopped."""

    def call(self, arguments: tuple[Any, ...]) -> Any:
        """What the reference returns, with a bound on the processor time."""
        signal.signal(signal.SIGVTALRM, _stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.3)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return self.seen(self.reference(*deepcopy(arguments)))
        except TimeoutError:
            self.too_long += 1
            raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def case(self, arguments: tuple[Any, ...], output: Any) -> str:
        called = self.shape.format(
            f"{self.name}({', '.join(each.__name__ if isinstance(each, type) else repr(each) for each in arguments)})"
        )
        return f"{called} == {output!r}"


def _stop(*_: Any) -> None:
    raise TimeoutError


def read_problem(row: Row, code: str) -> Problem | None:
    """The problem of a row; None if its tests are not comparisons of one call with a value."""
    known: dict[str, Any] = {}
    tree = ast.parse(row["tests"])
    compared = [node.test for node in tree.body if isinstance(node, ast.Assert)]
    with contextlib.redirect_stdout(io.StringIO()):
        exec("".join(f"import {name}\n" for name in row["imports"]) + code, known)
    known_tests = dict(known)
    setup = ast.Module([node for node in tree.body if not isinstance(node, ast.Assert)], [])
    exec(compile(setup, "<setup>", "exec"), known_tests)
    names = [name for name in row["names"] if not isinstance(known[name], type)]
    tests, seen = [], "{}"
    for test in compared:
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)):
            return None
        calls = [
            node
            for node in ast.walk(test.left)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        ]
        if len(calls) != 1 or calls[0].keywords:
            return None
        name = calls[0].func.id
        seen = ast.unparse(test.left).replace(ast.unparse(calls[0]), "{}")
        arguments = tuple(eval(ast.unparse(each), known_tests) for each in calls[0].args)
        tests.append((arguments, eval(ast.unparse(test.comparators[0]), known_tests)))
    return Problem(
        name, tests, eval("lambda output: " + seen.format("output"), dict(known)), seen, known[name]
    )


def add_inputs(
    problem: Problem, count: int, number: int = 0, published: Sequence[tuple[tuple[Any, ...], Any]] = ()
) -> None:
    """Add inputs like those of the tests as published, which do not change with our cases. At most three in
    four have the same output."""
    found: dict[str, tuple[tuple[Any, ...], Any]] = {}
    counts: collections.Counter[str] = collections.Counter()
    given, outputs = zip(*(published or problem.tests), strict=True)
    kinds = list(dict.fromkeys(map(type, outputs)))
    most = 1000 + 50 * max(map(_size, outputs))
    nothing = {repr(each) for each in NOTHING} - set(map(repr, outputs))
    tested = {repr(arguments) for arguments, _ in [*published, *problem.tests]}
    drawn = similar_inputs(given, seed=0, ordered=problem.ordered)
    for arguments in chain(eval(GIVEN.get(number, "()")), islice(drawn, 8 * count)):
        if len(found) >= count or problem.too_long >= MOST_TOO_LONG:
            break
        if repr(arguments) in found:
            continue
        with contextlib.suppress(*ERRORS):
            output = _as_one_of(kinds, problem.call(arguments))
            if (
                repr(output) in nothing
                or _size(output) > most
                or counts[repr(output)] > 0.75 * count
                or len(repr(output)) > 300
            ):
                continue
            known = {
                **KNOWN,
                **dict(zip("abcdefgh", arguments, strict=False)),
                "out": output,
                "MONTHS": MONTHS,
            }
            if eval(DECIDED.get(number, "True"), known):
                counts[repr(output)] += 1
                found[repr(arguments)] = (arguments, output)
    problem.inputs = [each for text, each in found.items() if text not in tested]


def _size(output: Any) -> float:
    return abs(output) if isinstance(output, int | float) else 0


def _as_one_of(kinds: Sequence[type], output: Any) -> Any:
    """An output as one of the types of the tests: a dict for a Counter, 4 for 4.0. A number may be of another
    type."""
    equal = [output] * (type(output) in kinds) + [
        kind(output) for kind in kinds if kind is not type(None) and kind(output) == output
    ]
    if not equal and isinstance(output, bool) | (not isinstance(output, int | float)) | (
        not {int, float} & {*kinds}
    ):
        raise TypeError(output)
    return equal[0] if equal else output


class Search:
    """Composes expressions, simple ones first, and keeps one of those with equal values on all inputs."""

    def __init__(self, problem: Problem, others: int = 5) -> None:
        self.arguments = [arguments for arguments, _ in problem.tests]
        self.wanted = [output for _, output in problem.tests]
        self.seen = problem.seen
        self.others = [arguments for arguments, _ in problem.inputs[:others]]
        self.known: set[Any] = set()
        self.passing: list[str] = []
        self.tried = 0
        two = list({repr(output): output for output in self.wanted}.values())
        plain = all(isinstance(each, str | bool | type(None)) for each in two)
        branches = (
            len(two) == 2 and plain and (len(self.wanted) > 2 or all(repr(each) in ANSWERS for each in two))
        )
        self.pattern = [repr(output) == repr(two[0]) for output in self.wanted] if branches else None
        self.two = two

    def arguments_as_expressions(self) -> list[Expression]:
        count = min(map(len, self.arguments))
        texts = [*"abcdefgh"[:count], *(["numbers"] if count > 1 else [])]
        return [
            Expression(text, [self._argument(text, each) for each in [*self.arguments, *self.others]])
            for text in texts
        ]

    @staticmethod
    def _argument(text: str, arguments: tuple[Any, ...]) -> Any:
        return arguments if text == "numbers" else arguments["abcdefgh".index(text)]

    def constants(self, texts: Sequence[str]) -> list[Expression]:
        return [
            Expression(
                text, [eval(text, KNOWN)] * (len(self.arguments) + len(self.others)), not text.startswith("-")
            )
            for text in texts
        ]

    def apply(self, template: Template, *operands: Expression) -> Expression | None:
        """A new expression, whose values no other has; None if it fails on a test or is not new."""
        self.tried += 1
        kinds = tuple([each.kind for each in operands])
        if not template.applies(kinds):
            return None
        values, function = [], template.function
        try:
            for group in zip(*[each.values for each in operands], strict=True):
                if len(values) < len(self.wanted):
                    values.append(function(*group))
                else:
                    values.append(self._attempt(function, group))
        except ERRORS as error:
            template.note(kinds, error)
            return None
        template.note(kinds, None)
        if not all(map(_bounded, values)):
            return None
        text = template.filled(*operands)
        self.judge(text, template.atomic, values)
        key = tuple(map(_frozen, values))
        if key in self.known:
            return None
        self.known.add(key)
        return Expression(text, values, template.atomic)

    @staticmethod
    def _attempt(function: Callable[..., Any], group: Sequence[Any]) -> Any:
        if any(each is FAILED for each in group):
            return FAILED
        try:
            return function(*group)
        except ERRORS:
            return FAILED

    def attempt(self, template: Template, *operands: Expression) -> None:
        """Try an expression that no other will contain: only as many of its values are computed as pass."""
        self.tried += 1
        kinds = tuple([each.kind for each in operands])
        if not template.applies(kinds):
            return
        values: list[Any] = []
        try:
            for at, wanted in enumerate(self.wanted):
                value = template.function(*[each.values[at] for each in operands])
                values.append(value)
                if self.pattern is not None:
                    if bool(value) != bool(values[0]) and self.pattern[at] == self.pattern[0]:
                        break
                    if (
                        bool(value) == bool(values[0])
                        and self.pattern[at] != self.pattern[0]
                        and not self._equal(value, wanted)
                    ):
                        break
                elif not self._equal(value, wanted):
                    break
            else:
                self.judge(template.filled(*operands), template.atomic, values)
        except ERRORS as error:
            template.note(kinds, error)
            return
        template.note(kinds, None)

    def _equal(self, value: Any, wanted: Any) -> bool:
        return bool(self.seen(value) == wanted)

    def judge(self, text: str, atomic: bool, values: Sequence[Any]) -> None:
        """Note an expression if it passes, or if it tells the tests with one output from those with
        another."""
        with contextlib.suppress(*ERRORS):
            if all(self._equal(value, wanted) for value, wanted in zip(values, self.wanted, strict=False)):
                self.passing.append(text)
                return
            if self.pattern is not None:
                truths = [bool(value) for value in values[: len(self.wanted)]]
                if truths == self.pattern or truths == [not each for each in self.pattern]:
                    first, second = self.two if truths == self.pattern else self.two[::-1]
                    self.passing.append(f"{first!r} if {text} else {second!r}")

    def run(self, most: int) -> None:
        """Try all compositions. `most` bounds the expressions that others contain."""
        one, two, three, arithmetic = _templates(1), _templates(2), _templates(3), _templates(2, True)
        given = self.arguments_as_expressions()
        numbers, texts = self.constants(NUMBERS), self.constants(TEXTS)
        for each in [*numbers, *texts, *self.constants(PLAIN)]:
            self.judge(each.text, True, each.values)
        for each in given:
            self.judge(each.text, True, each.values)
            self.known.add(tuple(map(_frozen, each.values)))
        plain = self.all_of(one, product(given))
        pairs = self.all_of(two, permutations(given, 2))
        triples = self.all_of(three, permutations(given[:4], 3))
        literals = [(a, b) for a in given for b in (numbers[:7] + texts if str in a.kind else numbers[:7])]
        with_literal = (
            self.all_of(two, literals)
            + self.all_of(arithmetic, product(given, numbers[7:]))
            + self.all_of(arithmetic, product(numbers[1:5], given))
        )
        first = [*plain, *pairs, *triples, *with_literal]
        self._branches(first, given, plain)
        simple, most_simple = [*plain, *pairs], numbers[:4] + given
        second = [
            *(of_plain := self.all_of(one, product(plain))),
            *self.all_of(one, product([*pairs, *triples]), most),
            *self.all_of(one, product(with_literal), most),
            *self.all_of(
                two,
                [(a, b) for a in simple for b in most_simple] + [(a, b) for a in given for b in simple],
                most,
            ),
        ]
        for template, each in product(one, second):
            self.attempt(template, each)
        for template, a, b in product(arithmetic, [*given, *first][:70], [*given, *first][:70]):
            self.attempt(template, a, b)
        for a, b in product(filter(_is_number, plain), filter(_is_number, of_plain)):
            for template in arithmetic[:8]:
                self.attempt(template, a, b)
                self.attempt(template, b, a)
        for a, b in product([*of_plain[:most], *second[len(of_plain) :]], most_simple):
            for template in arithmetic:
                self.attempt(template, a, b)
            self.attempt(arithmetic[1], b, a)
        predicates = [each for each in [*pairs, *with_literal] if isinstance(each.values[0], bool)][:80]
        for (a, b), template in product(combinations(predicates, 2) if self.pattern else (), BOTH):
            self.attempt(template, a, b)

    def all_of(
        self,
        templates: Sequence[Template],
        operands: Iterable[tuple[Expression, ...]],
        most: int | None = None,
    ) -> list[Expression]:
        """The new expressions of templates and operands."""
        found = (new for each in operands for template in templates if (new := self.apply(template, *each)))
        return list(islice(found, most))

    def _branches(self, first: list[Expression], given: list[Expression], plain: list[Expression]) -> None:
        """`x if p else y`, where each of the two passes some of the tests."""
        results: dict[tuple[bool, ...], str] = {}
        for each in [*given, *self.constants(PLAIN), *plain]:
            with contextlib.suppress(*ERRORS):
                mask = tuple(
                    self._equal(value, wanted)
                    for value, wanted in zip(each.values, self.wanted, strict=False)
                )
                if any(mask) and not all(mask):
                    results.setdefault(mask, each.text)
        pairs = [(x, y) for x, y in product(results, repeat=2) if x != y and all(map(max, x, y))]
        predicates: dict[tuple[bool, ...], str] = {}
        for each in first:
            with contextlib.suppress(*ERRORS):
                predicates.setdefault(
                    tuple(bool(value) for value in each.values[: len(self.wanted)]), each.text
                )
        for (x, y), (truths, text) in product(pairs, predicates.items()):
            self.tried += 1
            if len(set(truths)) == 2 and all(x[at] if true else y[at] for at, true in enumerate(truths)):
                self.passing.append(f"{results[x]} if {text} else {results[y]}")


def _is_number(expression: Expression) -> bool:
    return isinstance(expression.values[0], int | float)


def _bounded(value: Any) -> bool:
    if isinstance(value, int):
        return -MOST < value < MOST
    if isinstance(value, str) and " object at 0x" in value:
        return False
    return not isinstance(value, str | list | tuple | set | dict) or len(value) < MOST_LONG


def _frozen(value: Any) -> Any:
    return (type(value), value) if isinstance(value, str | int | float | bool) else repr(value)


def compiled(text: str, count: int) -> Callable[..., Any]:
    """The function of so many arguments that returns an expression of them."""
    names = "abcdefgh"[:count]
    return eval(f"lambda {', '.join(names)}, numbers: {text}", KNOWN)


def differences(problem: Problem, text: str) -> set[int]:
    """The inputs on which an expression does not return what the reference does."""
    function, found = compiled(text, len(problem.tests[0][0])), set()
    for at, (arguments, output) in enumerate(problem.inputs):
        try:
            answer = problem.seen(function(*arguments, arguments))
            same = bool(answer == output) or (isinstance(output, float) and math.isclose(answer, output))
        except ERRORS:
            same = False
        if not same:
            found.add(at)
    return found


def separating(problem: Problem, paid: Sequence[set[int]]) -> list[str]:
    """Few cases of which each expression fails one, short ones first."""
    left, cases = [each for each in paid if each], []
    while left:
        counts = collections.Counter(at for each in left for at in each)
        at = max(counts, key=lambda at: (counts[at], -len(repr(problem.inputs[at]))))
        cases.append(problem.case(*problem.inputs[at]))
        left = [each for each in left if at not in each]
    return cases


def problem_of(record: Mapping[str, Any], inputs: int) -> Problem | None:
    """The problem of a record, with so many inputs; None if it is left out, or if its tests cannot be
    read."""
    code = record["code"].replace("\r\n", "\n")
    for row, published in zip(
        get_task("mbpp").rows([("", record)]), get_task("mbpp_published").rows([("", record)]), strict=False
    ):
        problem, given = read_problem(row, code), read_problem(published, code)
        if problem is not None and given is not None:
            problem.ordered = any(word in record["text"] for word in ORDERED)
            add_inputs(problem, inputs, record["task_id"], given.tests)
            return problem
    return None


def examine(problem: Problem, most: int) -> dict[str, Any]:
    """What passes the tests of a problem."""
    search = Search(problem)
    search.run(most)
    found = {text: differences(problem, text) for text in dict.fromkeys(search.passing)}
    enough = len(problem.inputs) + len(problem.tests) >= RIGHT_ON
    right = [text for text, wrong in found.items() if not wrong and enough]
    paid = [text for text in found if not any(each in text for each in right)]
    cases = separating(problem, [found[text] for text in paid])
    return {"tried": search.tried, "inputs": len(problem.inputs), "right": right[:3], "num_right": len(right), "paid": paid[:8], "num_paid": len(paid), "cases": cases}  # fmt: skip


def examined(
    path: str, step: int, most: int, inputs: int, only: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """What passes every `step`-th problem of a file, or those of some numbers."""
    for record in map(json.loads, pathlib.Path(path).read_text().splitlines()[::step]):
        if (not only or record["task_id"] in only) and (problem := problem_of(record, inputs)):
            yield {"task_id": record["task_id"], **examine(problem, most)}


def main(path: str, step: str, most: str = "300", inputs: str = "150", *only: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    for found in examined(path, int(step), int(most), int(inputs), [int(each) for each in only]):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
