"""Sandboxes for tests, which say what is missing where there are none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers import require_sandbox
from unmask.sandbox.isolation import Limits
from unmask.sandbox.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Sandboxes with little time."""
    require_sandbox()
    pool = Pool(limits=Limits(seconds=3.0))
    yield pool
    pool.close()


def of_sandboxes(pool: Pool) -> list[str]:
    """The command lines of all processes that run as one of a pool's users."""
    users = {uid for slot in pool._slots for uid in slot.uids}
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid in users:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    found.append(file.read().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended since
            continue
    return found
