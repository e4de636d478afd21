"""What the worker of symbolic.py runs: math-verify, strictly, on one answer and its reference."""

from __future__ import annotations

import resource

from math_verify import LatexExtractionConfig, parse, verify

from unmask.rewards.verdict import MALFORMED, OK, WRONG, Verdict

MEMORY = 4 << 30
# At once, not in a call: nothing but this module runs in its process.
resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def judge(answer: str, reference: str) -> Verdict:
    """`malformed` where nothing mathematical can be read. Never a comparison of strings."""
    read = [
        parse(f"$\\boxed{{{text}}}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (answer, reference)
    ]
    if not read[0]:
        return MALFORMED
    return OK if verify(read[1], read[0], timeout_seconds=None) else WRONG
