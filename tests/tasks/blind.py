# ruff: noqa: E501 (tables)
"""Programs that do not read the problem: each returns the same expression of its arguments, whatever is asked for."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from unmask.tasks import get_task
from unmask.tasks.base import Row

CONSTANTS = ["None", "True", "False", "0", "1", "-1", "2", "3", "10", "0.0", "''", "[]", "()", "{}", "set()", "'Yes'", "'No'", "'YES'", "'NO'", "'Valid'", "'Invalid'", "'Even'", "'Odd'", "'Found a match!'", "'Not matched!'"]  # fmt: skip
ARGUMENTS = ["a", "b", "c", "rest[0]", "[a, b, c, *rest][at]"]
OF_ONE = [
    "len({})", "sum({})", "max({})", "min({})", "sorted({})", "sorted({}, reverse=True)", "{}[::-1]", "list({})", "tuple({})", "set({})", "str({})", "int({})", "float({})", "bool({})", "not {}",
    "{}[0]", "{}[-1]", "{}[1]", "{}[:-1]", "{}[1:]", "{}[:len({}) // 2]", "abs({})", "-{}", "{} + 1", "{} - 1", "{} * 2", "{} // 2", "{} / 2", "({} + 1) // 2", "{} ** 2", "{} ** 3", "{} ** 0.5", "{} * ({} + 1) // 2",
    "{} % 2 == 0", "{} % 2 == 1", "{} % 3 == 0", "{} % 4 == 0", "{} % 10", "{} > 0", "{} < 0", "{} == 0", "{} > 1", "{} > 10", "{} < 100", "math.isqrt({})", "math.isqrt({}) ** 2 == {}", "{} > 0 and {} & ({} - 1) == 0",
    "{} > 1 and all({} % d for d in range(2, math.isqrt({}) + 1))", "bin({})[2:]", "bin({}).count('1')", "bin({}).count('1') % 2 == 1", "sum(map(int, str({})))", "sum(map(int, str({}))) % 2 == 0", "len(str({}))", "int(str({})[0])", "int(str({})[::-1])",
    "list({}) == sorted({})", "list({}) == sorted({}, reverse=True)", "len(set({})) == len({})", "len(set({})) == 1", "{} == {}[::-1]", "{}[0] == {}[-1]", "len({}) > 0", "len({}) > 3", "len({}) % 2 == 0", "sum({}) % 2 == 0", "any({})", "all({})", "0 in {}",
    "len(set({}))", "max({}) - min({})", "len({}) // 2", "len({}) - 1", "len({}) + 1", "sum({}) / len({})", "math.prod({})", "sorted({})[len({}) // 2]", "sorted({})[-2]", "sorted(set({}))", "list(dict.fromkeys({}))", "dict(collections.Counter({}))", "collections.Counter({}).most_common(1)[0][0]",
    "[x for x in {} if x % 2 == 0]", "[x for x in {} if x % 2]", "sum(x % 2 == 0 for x in {})", "[y for x in {} for y in x]", "[x[0] for x in {}]", "[x[-1] for x in {}]", "max(map(len, {}))", "min(map(len, {}))", "max({}, key=len)", "sorted({}, key=lambda x: x[-1])", "[list(x) for x in zip(*{})]", "sum(set({}))",
    "{}.upper()", "{}.lower()", "{}.strip()", "{}.split()", "{}.title()", "{}.capitalize()", "{}.swapcase()", "{}.replace(' ', '')", "''.join({})", "' '.join({})", "''.join(sorted({}))", "' '.join({}.split()[::-1])", "{}.isalpha()", "{}.isdigit()", "{}.isalnum()", "{}.islower()", "any(x.isdigit() for x in {})", "type({})()", "[{}]",
]  # fmt: skip
OF_TWO = [
    "a + b", "a - b", "b - a", "abs(a - b)", "a * b", "a / b", "a // b", "a % b", "a ** b", "max(a, b)", "min(a, b)", "a == b", "a != b", "a < b", "a > b", "a in b", "b in a", "a % b == 0", "b % a == 0", "(a + b) % 2 == 0", "a.count(b)", "a.index(b)", "a[b]", "a[b - 1]", "a[:b]", "a[b:]", "a[b:] + a[:b]", "math.gcd(a, b)", "math.gcd(a, b) == 1", "a & b", "a | b", "a ^ b",
    "[x for x in a if x in b]", "[x for x in a if x not in b]", "any(x in b for x in a)", "all(x in b for x in a)", "all(x in a for x in b)", "sorted(a + b)", "list(zip(a, b))", "(a, b)", "[a, b]", "sorted(a)[:b]", "sorted(a)[b - 1]", "sorted(a, reverse=True)[:b]", "sum(a[:b])", "max(a[:b])", "min(a[:b])", "a + [b]", "a.replace(b, '')", "len(a) == len(b)", "len(a) < len(b)", "len(a) == b", "len(a) - b", "sum(a) == b", "a[0] == b[0]", "a[0] == b", "a == b[::-1]", "sorted(a) == sorted(b)", "set(a) == set(b)",
    "max(a, b, c)", "min(a, b, c)", "a + b + c", "a * b * c", "a == b == c", "sorted((a, b, c))[1]", "a <= b <= c", "a[b:c]", "b + c", "c - b", "pow(a, b, c)", "a.replace(b, c)", "all(x in a for x in c)", "max(numbers)", "sum(numbers)", "len(numbers)", "numbers",
]  # fmt: skip

RIGHT = {
    'sorted(a, reverse=True)[:b]': {4, 232}, 'sorted(a)[:b]': {10, 54, 71, 141, 152, 372, 428, 496, 516, 635, 815, 839, 940}, '[x for x in a if x % 2 == 0]': {41, 412, 629}, 'len(set(a)) == len(a)': {46, 281, 352, 394}, 'a == b == c': {51}, 'a * b': {52, 127, 458, 789}, 'sorted(a)': {54, 71, 141, 152, 372, 428, 516, 635, 815, 839, 940}, 'min(a)': {62, 225, 443, 457, 713}, 'min(a[:b])': {62, 443, 457, 713}, 'sorted(a, key=lambda x: x[-1])': {64, 333, 487, 896}, 'dict(collections.Counter(a))': {88, 332}, 'a - 1': {89}, 'max(map(len, a))': {90, 562}, 'a ** b': {93}, 'pow(a, b, c)': {93}, 'min(map(len, a))': {95, 947}, 'bin(a)[2:]': {99}, 'sum(a)': {105, 514, 798}, 'sum(a[:b])': {105, 514, 798}, 'sum(map(int, str(a)))': {109, 566}, 'a.split()': {118, 708}, "''.join(a)": {132}, 'a % 2 == 0': {138, 600, 904}, 'max(a) - min(a)': {145, 588}, 'math.gcd(a, b) == 1': {151}, '[x for x in a if x not in b]': {161, 484, 507}, 'a.count(b)': {168, 204, 250, 492, 666, 744, 929}, 'a + b + c': {176}, 'sum(numbers)': {176}, 'len(set(a)) == 1': {201, 741}, 'a.isalnum()': {210}, 'all(x in a for x in b)': {216, 651, 872}, "bin(a).count('1')": {224}, 'min(a, b, c)': {227}, 'a ** 3': {234}, 'len(a)': {242, 792, 813}, 'len(str(a))': {242, 813}, '[x for x in a if x in b]': {249}, 'a | b': {263, 821}, '[x[-1] for x in a]': {272, 424, 565, 893}, 'a // b': {292}, 'max(a, b)': {309, 924}, 'max(numbers)': {309, 672, 924}, 'tuple(a)': {310, 538, 587}, 'collections.Counter(a).most_common(1)[0][0]': {362, 480, 658, 937}, 'a * b * c': {373}, "a.replace(b, '')": {377}, 'sorted((a, b, c))[1]': {397}, 'min(a, b)': {404, 970}, 'b in a': {405, 492, 703, 744, 808}, 'any(x in b for x in a)': {414, 942}, 'max(a)': {418, 517, 550}, 'max(a, key=len)': {418}, 'max(a[:b])': {418, 517}, '[x for x in a if x % 2]': {426, 554, 824}, 'a % 10': {435}, "a.replace(' ', '')": {451, 678, 800}, '[x[0] for x in a]': {460, 565}, 'a.replace(b, c)': {474}, 'a.lower()': {477}, 'int(str(a)[0])': {479}, 'math.gcd(a, b)': {498, 687}, 'a * 2': {499}, 'a % b': {502}, '(a + 1) // 2': {509}, 'a ** 0.5': {518}, 'math.isqrt(a)': {518}, 'sorted(a) == sorted(b)': {532, 650}, 'sorted(a)[b - 1]': {550}, 'a.swapcase()': {557}, 'list(a)': {565, 833}, '[y for x in a for y in x]': {565}, 'list(a) == sorted(a)': {567, 670, 680}, 'not a': {582}, "' '.join(a.split()[::-1])": {604}, 'a > 1 and all(a % d for d in range(2, math.isqrt(a) + 1))': {605}, '[list(x) for x in zip(*a)]': {612}, 'a.upper()': {624}, 'a == b': {637, 811}, 'max(a, b, c)': {672}, 'sum(x % 2 == 0 for x in a)': {697}, 'all(x in a for x in c)': {706}, 'all(a)': {713}, 'math.prod(a)': {713, 919, 925}, "bin(a).count('1') % 2 == 1": {768}, 'sum(set(a))': {777}, 'math.isqrt(a) ** 2 == a': {803}, 'list(dict.fromkeys(a))': {833, 932}, 'sorted(set(a))': {839}, "''.join(sorted(a))": {877}, 'all(x in b for x in a)': {878}, 'set(a) == set(b)': {878}, 'sum(a) / len(a)': {886, 959}, 'a % 2 == 1': {887}, 'sorted(a + b)': {943}, 'set(a)': {945}, 'a[b]': {948}, 'len(a) % 2 == 0': {964}, 'a + b': {972}, 'a[b:] + a[:b]': {973},
}  # fmt: skip
"""The problems of MBPP that an expression solves, because it is what they ask for, or what all their tests say."""


def strategies() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each expression and the function that returns it."""
    for text in [*CONSTANTS, *ARGUMENTS, *(rule.replace("{}", name) for rule in OF_ONE for name in "ab"), *OF_TWO]:
        yield text, _function(text)


def _function(text: str) -> Callable[..., Any]:
    code = compile(text, "<strategy>", "eval")
    known = {"math": math, "collections": collections}

    def answer(*values: Any, **_: Any) -> Any:
        a, b, c, *rest = [*values, *[None] * max(0, 3 - len(values))]
        if any(isinstance(value, int) and abs(value) > 10**6 for value in values):
            raise ValueError(values)
        return eval(code, {**known, "a": a, "b": b, "c": c, "rest": rest, "numbers": values, "at": len(values) - 1})

    return answer


def passing(row: Row) -> list[str]:
    """The expressions that pass the tests of a problem of MBPP. Run in a process of its own, which it leaves in any state."""
    tests, names, found = compile(row["tests"], "<tests>", "exec"), row["names"], []
    known: dict[str, Any] = {}
    exec("".join(f"import {name}\n" for name in row["imports"]), known)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for text, function in strategies():
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with contextlib.suppress(Exception, KeyboardInterrupt):
            exec(tests, known | dict.fromkeys(names, function))
            found.append(text)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def main(path: str, step: int) -> None:
    """Print the expressions that pass every `step`-th problem of a file, a line for each."""
    for record in map(json.loads, pathlib.Path(path).read_text().splitlines()[::step]):
        for row in get_task("mbpp").rows([("", record)]):
            reading, writing = os.pipe()
            if not os.fork():
                os.write(writing, json.dumps([record["task_id"], passing(row)]).encode())
                os._exit(0)
            os.close(writing)
            with open(reading) as answer:
                print(answer.read() or f"[{record['task_id']}, null]", flush=True)
            os.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
