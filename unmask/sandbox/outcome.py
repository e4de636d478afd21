"""What came of judging something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "wrong", "malformed", "timeout", "infrastructure"]


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        status: ok: every test passed. wrong: one did not, or the program raised or ended. malformed: it is no program. timeout.
            infrastructure: the sandbox failed before the program ran, or the tests are broken.
        passed, total: tests.
        detail: the first failure.
    """

    status: Status
    passed: int = 0
    total: int = 0
    detail: str = ""
