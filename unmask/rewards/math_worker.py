"""The worker of symbolic.py: one answer and its reference, read by math-verify, compared exactly."""

from __future__ import annotations

import logging
import operator
import re
import resource
from functools import cache, lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse

from unmask.rewards.equality import same
from unmask.rewards.final_form import UNIT
from unmask.rewards.spelling import split_at, unit_of
from unmask.rewards.verdict import MALFORMED, OK, UNCOMPUTED, WRONG, Verdict
from unmask.rewards.work_left import as_final

MEMORY = 4 << 30
SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|.)")


@cache
def limit_memory() -> None:
    """Once in the process, which makes nothing but comparisons; not at import, which leaves the importing
    process as it is."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # it warns that this process has to limit the time
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def compare(answer: str, reference: str, final: bool) -> Verdict:
    """The verdict on an answer: `malformed` if math-verify reads no formula in it. Strings are never
    compared.

    The members of lists and unions may have any order. With `final`, an answer that leaves more to be
    computed than the reference does is wrong.
    """
    limit_memory()
    (kind, parts), (wanted_kind, wanted) = _parts(answer), _parts(reference)
    if kind == wanted_kind == "":
        return _compare_formulas(answer, reference, final)
    if kind != wanted_kind or len(parts) != len(wanted):
        return WRONG
    ordered = kind not in (",", r"\cup")
    verdicts = []
    for each in wanted:
        tried = [(compare(part, each, final), part) for part in (parts[:1] if ordered else parts)]
        verdict, part = next((pair for pair in tried if pair[0].detail or pair[0].solved), tried[0])
        parts.remove(part)
        verdicts.append(verdict)
    return next((verdict for verdict in verdicts if not verdict.solved), OK)


def _parts(text: str) -> tuple[str, list[str]]:
    """How a text is composed, as by commas, `\\cup`, colons or a pair of brackets, and of what."""
    for separator in (",", r"\cup", ":"):
        if len(parts := split_at(separator, text)) > 1:
            return separator, parts
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(parts := split_at(",", text[1:-1])) > 1:
        return text[0] + text[-1], parts
    return "", [text]


def _compare_formulas(answer: str, reference: str, final: bool) -> Verdict:
    """The verdict on a formula, which may omit the unit of its reference. math-verify ignores the base of a
    number."""
    units, wanted_units = (
        [unit_of(found[0]) for found in UNIT.finditer(text)] for text in (answer, reference)
    )
    given, wanted = (_formula(UNIT.sub("", text).strip()) for text in (answer, reference))
    if given is None:
        return MALFORMED
    subscripts = (sorted(SUBSCRIPT.findall(text)) for text in (answer, reference))
    if (units and units != wanted_units) or operator.ne(*subscripts) or not same(given, wanted):
        return WRONG
    return OK if not final or as_final(given, wanted) else UNCOMPUTED


@lru_cache(maxsize=1024)
def _formula(text: str) -> Any:
    """The formula that math-verify reads in a text, or None."""
    box = f"$\\boxed{{{text}}}$"
    return next(
        iter(
            parse(
                box,
                extraction_config=[LatexExtractionConfig()],
                fallback_mode="no_fallback",
                parsing_timeout=None,
            )
        ),
        None,
    )
