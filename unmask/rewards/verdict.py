"""Verdicts: the results of verification."""

from __future__ import annotations

from dataclasses import dataclass, field

from unmask.sandbox.outcome import Status


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one completion."""

    value: float | None
    """The reward. None if verification failed for reasons outside the completion, which 0 would penalize."""
    status: Status
    """`ok`: right. `wrong`: a wrong answer. `malformed`: not an answer at all. `timeout`: verifying the
    answer took too long. `verifier_error`: the verifier failed for reasons outside the answer."""
    detail: str = field(default="", compare=False)
    """The reason, in words."""

    @property
    def solved(self) -> bool:
        return self.status == "ok"


OK = Verdict(1.0, "ok")
WRONG = Verdict(0.0, "wrong")
MALFORMED = Verdict(0.0, "malformed")
UNCOMPUTED = Verdict(0.0, "wrong", "equal, but still to be computed")
