"""Verdicts on programs, from their tests in sandboxes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

from unmask.rewards.timeouts import DEADLINE
from unmask.rewards.verdict import OK, Verdict
from unmask.sandbox.outcome import Outcome
from unmask.sandbox.pool import SandboxPool, SlotJob
from unmask.variables import ACCEPT_UNSANDBOXED


@functools.cache
def shared_pool() -> SandboxPool:
    """The sandbox pool of this process. SandboxError on a host without isolation, unless `ACCEPT_UNSANDBOXED`
    is set."""
    return SandboxPool(accept_unsandboxed=os.environ.get(ACCEPT_UNSANDBOXED) == "1")


def verify_programs(jobs: Iterable[SlotJob | None]) -> list[Verdict]:
    """The verdict on each program; `malformed` for None, a completion without a program. Those not done at
    `DEADLINE` have none."""
    pool, deadline = shared_pool(), DEADLINE.get()
    futures = [pool.submit(job, deadline) if job else None for job in jobs]
    return [
        verdict_of(future.result()) if future else Verdict(0.0, "malformed", "no program")
        for future in futures
    ]


def verdict_of(outcome: Outcome) -> Verdict:
    """A verdict whose value is the fraction of passed tests; None if the sandbox or the tests failed."""
    if outcome.status == "ok":
        return OK
    value = None if outcome.status == "verifier_error" else outcome.passed / max(1, outcome.total)
    return Verdict(value, outcome.status, outcome.detail)
