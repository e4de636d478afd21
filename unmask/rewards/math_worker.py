"""The worker of symbolic.py: math-verify in strict mode, on one answer and its reference."""

from __future__ import annotations

import resource
from functools import cache

from math_verify import LatexExtractionConfig, parse, verify

from unmask.rewards.verdict import MALFORMED, OK, UNCOMPUTED, WRONG, Verdict
from unmask.rewards.work_left import as_final

MEMORY = 4 << 30


@cache
def limit_memory() -> None:
    """Once in the process, which makes nothing but comparisons; not at import, which leaves the importing process as it is."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def compare(answer: str, reference: str, final: bool) -> Verdict:
    """The verdict on an answer: `malformed` if math-verify reads no formula in it. Strings are never compared.

    With `final`, an answer that leaves more to be computed than the reference does is wrong.
    """
    limit_memory()
    parsed = [
        parse(f"$\\boxed{{{text}}}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (answer, reference)
    ]
    if not parsed[0]:
        return MALFORMED
    if not verify(parsed[1], parsed[0], timeout_seconds=None):
        return WRONG
    return OK if not final or as_final(parsed[0][0], parsed[1][0]) else UNCOMPUTED
