r"""Whether two mathematical answers are the same: exactly for plain numbers, by math-verify for the rest.

math-verify runs in a process of its own, which is killed where an answer keeps it busy (`44**35**19`). What it would wave through is
refused before it is asked: a relation for a value (`7=5` would count as 5), a percentage for a number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from queue import SimpleQueue

from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict
from unmask.rewards.workers import Worker, WorkerCallError, WorkerError, WorkerTimeoutError

MAX_ANSWER = 512
SECONDS = 5.0
WORKERS = 4
"""Processes at most; each starts when it is first needed."""
NUMBER = re.compile(r"([+-]?)(?:([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.([0-9]+))?|\.([0-9]+))(?:/([0-9]+))?")
FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
RELATION = re.compile(
    r"\\(?:leq?|geq?|neq?|lt|gt|in|notin|approx|equiv|sim|cong|to|mapsto|rightarrow|subset|subseteq)(?![a-zA-Z])|[=<>≤≥≠≈∈]"
)
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
PERCENT = re.compile(r"%|percent")


def equivalent(answer: str, reference: str) -> Verdict:
    """Whether an answer (LaTeX or plain) says what the reference says.

    `malformed`: empty, longer than `MAX_ANSWER` characters, or nothing that math-verify can read. `timeout`: it took longer than
    `SECONDS`. `infrastructure`: math-verify is not installed.
    """
    answer, reference = _bare(answer), _bare(reference)
    if WORDS.sub(r"\1", answer) == WORDS.sub(r"\1", reference):
        return OK
    if not answer or len(answer) > MAX_ANSWER:
        return MALFORMED
    numbers = (number(answer), number(reference))
    if None not in numbers:
        return OK if numbers[0] == numbers[1] else WRONG
    if any(pattern.findall(answer) != pattern.findall(reference) for pattern in (RELATION, PERCENT)):
        return WRONG
    try:
        return _verified(answer, reference)
    except WorkerError as error:
        return Verdict(None, "infrastructure", error.what)


def number(text: str) -> Fraction | None:
    r"""The value of an integer, a decimal (1,234.5) or a quotient of integers (-3/4, \frac{3}{4}); None for anything else, or longer."""
    if len(text) > MAX_ANSWER:
        return None
    if found := FRACTION.fullmatch(text):
        sign, above, below = found.groups()
        parts = (above, "", below)
    elif found := NUMBER.fullmatch(text):
        sign, whole, decimals, bare_decimals, below = found.groups()
        parts = ((whole or "0").replace(",", "") + (decimals or bare_decimals or ""), decimals or bare_decimals or "", below or "1")
    else:
        return None
    if not int(parts[2]):
        return None
    value = Fraction(int(parts[0]), int(parts[2]) * 10 ** len(parts[1]))
    return -value if sign == "-" else value


def _bare(text: str) -> str:
    """Without the dollar signs and spaces around it, a final full stop, and the space that LaTeX ignores."""
    return re.sub(r"\\[,!;: ]|\s+", " ", text).strip(" $").removesuffix(".").strip()


def equivalent_all(pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
    """The verdict on each answer and its reference, several at a time."""
    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(lambda pair: equivalent(*pair), pairs))


_idle: SimpleQueue[Worker] = SimpleQueue()
for _ in range(WORKERS):
    _idle.put(Worker("unmask.rewards.judging:judge"))


@functools.lru_cache(maxsize=65_536)
def _verified(answer: str, reference: str) -> Verdict:
    worker = _idle.get()
    try:
        verdict: Verdict = worker.call(answer, reference, timeout=SECONDS)
    except WorkerTimeoutError as error:
        verdict = Verdict(0.0, "timeout", error.what)
    except WorkerCallError as error:  # math-verify raised, or its stack overflowed: by the answer's doing
        verdict = Verdict(0.0, "malformed", error.what)
    finally:
        _idle.put(worker)
    return verdict
