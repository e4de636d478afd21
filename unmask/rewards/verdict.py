"""What a grader says about one completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from unmask.sandbox.outcome import Status


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one completion."""

    value: float | None
    """The shaped reward; None where nothing could be judged: never 0, for that would blame the completion."""
    status: Status
    """`ok`: right. `wrong`: an answer, but not a right one. `malformed`: not an answer at all. `timeout`: judging it took too long, by
    the answer's own doing. `infrastructure`: the grader failed, through no doing of the answer."""
    detail: str = field(default="", compare=False)
    """Why, for people."""

    @property
    def solved(self) -> bool:
        return self.status == "ok"


OK = Verdict(1.0, "ok")
WRONG = Verdict(0.0, "wrong")
MALFORMED = Verdict(0.0, "malformed")
