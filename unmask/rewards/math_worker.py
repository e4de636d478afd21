"""The worker of symbolic.py: math-verify in strict mode, on one answer and its reference."""

from __future__ import annotations

import resource

from math_verify import LatexExtractionConfig, parse, verify

from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict

MEMORY = 4 << 30
# At import, because the process runs this module alone.
resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def compare(answer: str, reference: str) -> Verdict:
    """The verdict on an answer: `malformed` if math-verify reads no formula in it. Strings are never compared."""
    parsed = [
        parse(f"$\\boxed{{{text}}}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (answer, reference)
    ]
    if not parsed[0]:
        return MALFORMED
    return OK if verify(parsed[1], parsed[0], timeout_seconds=None) else WRONG
