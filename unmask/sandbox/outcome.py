"""Outcomes: the results of testing a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "wrong", "malformed", "timeout", "verifier_error"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of testing a program.

    Attributes:
        status: ok: all tests passed. wrong: a test failed, or the program raised or ended. malformed: not a
            program. timeout: the time limit was exceeded. verifier_error: the sandbox failed before the
            program ran, or the tests are broken.
        passed, total: numbers of tests.
        detail: the first failure.
    """

    status: Status
    passed: int = 0
    total: int = 0
    detail: str = ""
