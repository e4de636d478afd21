"""The verdict on one completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from unmask.sandbox.outcome import Status


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one completion."""

    value: float | None
    """The shaped reward. None if verification failed for reasons outside the completion (0 would penalise it)."""
    status: Status
    """`ok`: right. `wrong`: an answer, but not a right one. `malformed`: not an answer at all. `timeout`: the answer took too
    long to verify. `infrastructure`: the verifier failed for reasons outside the answer."""
    detail: str = field(default="", compare=False)
    """The reason, for people."""

    @property
    def solved(self) -> bool:
        return self.status == "ok"


OK = Verdict(1.0, "ok")
WRONG = Verdict(0.0, "wrong")
MALFORMED = Verdict(0.0, "malformed")
