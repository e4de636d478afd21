r"""Whether an answer is computed: in a form like that of its reference, and no formula of the problem.

This reads text. `work_left.py` counts what a parsed formula leaves to be computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

QUOTIENT = re.compile(r"\\frac\{([0-9.]+)\}\{([0-9.]+)\}|([0-9.]+) ?/ ?([0-9.]+)")
TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}")
UNIT = re.compile(rf"{TEXT.pattern}(?:\^[0-9])?")
UNIT_OR_SIGN = re.compile(rf"{UNIT.pattern}|\^\{{? ?\\circ ?\}}?|\\?[$%]")
SCIENTIFIC = re.compile(
    r"([+-]?[1-9](?:\.[0-9]+)?) ?(?:\\times|\\cdot|\*) ?10\^(?:\{(-?[0-9]{1,3})\}|(-?[0-9])(?![0-9]))"
)
"""A number in scientific notation. Its first factor is at least 1 and below 10: `60\\times10^4` is still to
be computed."""
KINDS = {
    "integer": re.compile(r"[+-]?[1-9][0-9]{0,2}(?:[, ]?[0-9]{3})+|[+-]?[0-9]+"),
    "decimal": re.compile(r"[+-]?(?:[1-9][0-9]{0,2}(?:[, ]?[0-9]{3})+|[0-9]*)\.[0-9]+"),
    "fraction": re.compile(r"[+-]?(?:\\frac\{[0-9]+\}\{[0-9]+\}|[0-9]+/[0-9]+)|\\frac\{-[0-9]+\}\{[0-9]+\}"),
    "scientific": SCIENTIFIC,
    "mixed number": re.compile(r"[+-]?[0-9]+ ?\\frac\{[0-9]+\}\{[0-9]+\}"),
}
FUNCTION = re.compile(r"\\(?:binom|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|div)(?![a-zA-Z])")


Rules = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
"""Patterns, and what is written in their place, one after the other."""
ONE = r"1(?:\.0*)?(?![0-9.])"
NO_OPS: Rules = [
    (r"(^|[=(\[{,]|\\cdot|\\times|\\frac) ?\+ ?|- ?-", r"\1"),
    (r"\+ ?(?=[+-])|(?<=-) ?\+ ?", ""),
    (rf"{TEXT.pattern}|\\?[{{}}]|[\[\]]", r"\1"),
    (r"\(([^()+=<>,-]*)\)", r"\1"),
    (r"(?:^|\+) ?\( ?(-[^()+-]*)\)|(?<![0-9.])0+(?=[0-9])", r"\1"),
    (
        (
            rf"(?:\\(?:cdot|times|div)|[*/]) ?{ONE}|(?<![0-9.]){ONE} ?(?:\\cdot|\\times|\*)|[+-] "
            rf"?0(?![0-9.])|\^{ONE}"
        ),
        "",
    ),
    (rf"(?<![0-9.]){ONE} ?(?=[a-zA-Z\\(])", ""),
    (r"(?<![0-9]) ?(?:\\cdot|\\times|\*)(?![a-zA-Z])|(?:\\cdot|\\times|\*) ?(?![0-9a-zA-Z])", ""),
]
"""What changes the text of a formula, but not the formula: products and quotients with 1, sums with 0, and
brackets around no sum."""


def is_final(answer: str, reference: str, question: str) -> bool:
    """Whether an answer may be the result of a problem. All three are in the spelling of `spelling.plain`.

    Its fractions are in lowest terms; it calls only functions that the reference calls; for a reference that
    is a number it is a number; and it does not occur in the question, unless it is a number in the
    reference's notation.
    """
    kind, wanted = number_kind(answer), number_kind(reference)
    return (
        lowest_terms(answer)
        and not set(FUNCTION.findall(answer)) - set(FUNCTION.findall(reference))
        and (wanted is None or kind is not None)
        and (
            (kind is not None and kind == wanted)
            or not (occurs(answer, question) or occurs(unadorned(answer), unadorned(question)))
        )
    )


def unadorned(text: str) -> str:
    """The text without `NO_OPS`, to find it in another text without them."""
    return substituted(text, NO_OPS).strip()


def substituted(text: str, rules: Rules) -> str:
    """The text after these substitutions."""
    for pattern, instead in rules:
        text = re.sub(pattern, instead, text)
    return text


def lowest_terms(text: str) -> bool:
    """Whether all quotients of numbers in a text are of integers, in lowest terms, and none has the divisor
    1."""
    pairs = [list(filter(None, found.groups())) for found in QUOTIENT.finditer(text)]
    return all(
        over.isdigit() and under.isdigit() and int(under) > 1 and math.gcd(int(over), int(under)) == 1
        for over, under in pairs
    )


def number_kind(text: str) -> str | None:
    """How a number, with or without a unit, is written: a key of `KINDS`; None for anything else."""
    bare = UNIT_OR_SIGN.sub("", text).strip()
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(bare)), None)


def occurs(answer: str, question: str) -> bool:
    """Whether a formula occurs in a question, however spaced."""
    spaced = r" ?".join(re.escape(character) for character in answer.replace(" ", ""))
    return re.search(rf"(?<![0-9A-Za-z.\\]){spaced}(?![0-9A-Za-z])", question) is not None
