r"""Whether two mathematical answers are equal: exact for plain numbers, otherwise by math-verify.

math-verify runs in a separate process, which is killed if an answer takes too long (`44**35**19`). Wrong
answers that it would accept are rejected before: a relation for a value (`7=5` would count as 5), a
percentage for a number, other units, letters that the reference lacks.

Equal is not enough for an answer: the formula of a problem equals its answer. Given the question,
`equivalent` accepts results only (`final_form.py`, `work_left.py`).
"""

from __future__ import annotations

import functools
import operator
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import accumulate
from queue import SimpleQueue

from unmask.rewards.final_form import SCIENTIFIC, UNIT, is_final
from unmask.rewards.spelling import MACRO, bare, exact, is_word, plain, without_thousands, words
from unmask.rewards.timeouts import DEADLINE
from unmask.rewards.verdict import MALFORMED, OK, UNCOMPUTED, WRONG, Verdict
from unmask.rewards.workers import RewardWorker, WorkerCallError, WorkerError, WorkerTimeoutError
from unmask.sandbox.launch import BATCH_OVER

MAX_ANSWER = 512
COMPARE_SECONDS = 5.0
"""Processor time of one comparison, so that verdicts do not depend on the load of the host."""
WAIT_SECONDS = 60.0
"""Its time in all."""
WORKERS = 4
"""Number of processes. Each starts when it is first needed."""
NUMBER = re.compile(
    r"([+-]?)(?:([1-9][0-9]{0,2}(?:[, ][0-9]{3})+|[0-9]+)(?:\.([0-9]+))?|\.([0-9]+))(?:/([0-9]+))?"
)
FRACTION = re.compile(r"([+-]?)\\frac\{([0-9]+)\}\{([0-9]+)\}")
DECIMAL = re.compile(r"[0-9]*\.[0-9]+")
FACTORLESS = re.compile(rf"(?<![0-9a-zA-Z.}}]){SCIENTIFIC.pattern}(?= ?(?:$|,|\\text))")
"""A number in scientific notation that no other factor precedes or follows."""
KNOWN = re.compile(
    "frac|sqrt|pi|infty|emptyset|pm|mp|cdot|times|div|cup|cap|circ|angle|begin|end|binom|log|ln|lg|exp|sin"
    "|cos|tan|cot|sec|csc|arcsin|arccos|arctan|"
    "alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|le|ge|ne|lt|gt|in|text|textbf|textrm|mathrm|mbox"
    "|mathbb|mathbf|ldots|cdots"
)
"""Macros that an answer may have in addition to those of the reference."""
SAME = re.compile(
    r"\\(?:le|ne|in|notin|approx|equiv|sim|cong|to|mapsto|subset|subseteq)(?![a-zA-Z])|[=<:,%']|percent"
    r"|\\circ"
)
"""Relations, commas, primes and signs of percent and degrees: math-verify ignores those that only one side
has."""
UPPER = re.compile(r"\\[a-zA-Z]+|[A-Z](?!_)")


def equivalent(answer: str, reference: str, question: str | None = None) -> Verdict:
    """The verdict on whether an answer (LaTeX or plain text) equals the reference.

    With a question (`""`: unknown), an answer that still has to be computed, or that the question contains,
    is `wrong`.

    `malformed`: empty, longer than `MAX_ANSWER` characters, or unreadable for math-verify. `timeout`: more
    than `COMPARE_SECONDS`.
    `verifier_error`: math-verify is not installed.
    """
    if not answer.strip() or len(answer) > MAX_ANSWER:
        return MALFORMED
    answer, reference = bare(answer, reference, question or "")
    written = words(answer), words(reference)
    if written[0] == written[1] or (written[0].lower() == written[1].lower() and is_word(reference)):
        return OK
    asked = plain(question or "")
    final = question is None or is_final(answer, reference, f"{asked} ; {without_thousands(asked)}")
    numbers = (number(answer), number(reference))
    if None not in numbers:
        return WRONG if numbers[0] != numbers[1] else OK if final else UNCOMPUTED
    if not _readable(answer, reference):
        return MALFORMED
    if not _comparable(answer, reference):
        return WRONG
    if not final:
        return UNCOMPUTED
    try:
        return _verified(
            *(_exact(_distinct(text, reference)) for text in (answer, reference)), final=question is not None
        )
    except WorkerTimeoutError as error:
        return Verdict(0.0, "timeout", error.what)
    except WorkerCallError as error:  # the answer made math-verify raise or overflow its stack
        return Verdict(0.0, "malformed", error.what)
    except WorkerError as error:
        return Verdict(None, "verifier_error", error.what)


def number(text: str) -> Fraction | None:
    r"""The value of an integer, a decimal (1,234.5), a quotient of integers (-3/4, \frac{3}{4}) or a number
    in scientific notation (6\times10^5); None for other or too long text."""
    if len(text) > MAX_ANSWER:
        return None
    if found := SCIENTIFIC.fullmatch(text):
        return _scientific(found)
    if found := FRACTION.fullmatch(text):
        sign, whole, divisor = found.groups()
        decimals = ""
    elif found := NUMBER.fullmatch(text):
        sign, whole, decimals, bare_decimals, divisor = found.groups()
        decimals = decimals or bare_decimals or ""
    else:
        return None
    if divisor and not int(divisor):
        return None
    digits = re.sub("[, ]", "", whole or "0") + decimals
    value = Fraction(int(digits), int(divisor or 1) * 10 ** len(decimals))
    return -value if sign == "-" else value


def _scientific(found: re.Match[str]) -> Fraction:
    """The value of what `SCIENTIFIC` matches."""
    return Fraction(found[1]) * Fraction(10) ** int(found[2] or found[3])


def _readable(answer: str, reference: str) -> bool:
    """Whether an answer is a single formula with known macros and balanced braces."""
    known = MACRO.findall(reference)
    depths = [0, *accumulate(1 if brace == "{" else -1 for brace in re.findall(r"(?<!\\)[{}]", answer))]
    spaced = re.search(r"[0-9]\s+[0-9]", answer) and not re.search(r"[0-9]\s+[0-9]", reference)
    return (
        min(depths) == depths[-1] == 0
        and answer.isascii()
        and "$" not in answer
        and not spaced
        and all(KNOWN.fullmatch(macro) or macro in known for macro in MACRO.findall(answer))
    )


def _comparable(answer: str, reference: str) -> bool:
    """Whether both have the same relations, commas and signs of units, and the answer no letters that the
    reference lacks."""
    bare, bare_reference = UNIT.sub("", answer), UNIT.sub("", reference).strip(" ()")
    letters, known = (set(re.findall("[a-zA-Z]", MACRO.sub("", text))) for text in (bare, bare_reference))
    signs = (
        sorted(SAME.findall(text.replace(">", "<").replace(r"\ge", r"\le"))) for text in (answer, reference)
    )
    # words alone were compared before
    return bool(bare_reference) and letters <= known and operator.eq(*signs)


def _distinct(text: str, reference: str) -> str:
    """The text with other names for capital letters that the reference also has as small ones: math-verify
    reads both alike."""
    small = set(re.findall("[a-z]", MACRO.sub("", UNIT.sub("", reference))))
    return UPPER.sub(
        lambda found: f"{found[0].lower()}_{{99}}" if found[0].lower() in small else found[0], text
    )


def _exact(text: str) -> str:
    """The text with decimals as fractions, because math-verify compares decimals to six digits only, and
    without scientific notation."""
    text = FACTORLESS.sub(lambda found: exact(_scientific(found)), text)
    return DECIMAL.sub(lambda found: exact(Fraction(found[0])), text)


def equivalent_all(answers: Iterable[tuple[str, ...]]) -> list[Verdict]:
    """The verdict on each answer with its reference (and its question, if that is given), several at a time.
    Answers that are not begun at `DEADLINE` have none."""
    deadline = DEADLINE.get()

    def verdict(answer: tuple[str, ...]) -> Verdict:
        late = time.monotonic() > deadline
        return Verdict(None, "verifier_error", BATCH_OVER) if late else equivalent(*answer)

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(verdict, answers))


idle_workers: SimpleQueue[RewardWorker] = SimpleQueue()
"""The processes that compare answers and are free."""
for _ in range(WORKERS):
    idle_workers.put(RewardWorker("unmask.rewards.math_worker:compare"))


@functools.lru_cache(maxsize=65_536)
def _verified(answer: str, reference: str, final: bool) -> Verdict:
    worker = idle_workers.get()
    try:
        verdict: Verdict = worker.apply((answer, reference, final), {}, WAIT_SECONDS, COMPARE_SECONDS)
    finally:
        idle_workers.put(worker)
    return verdict
