"""Sandboxes for tests; without one a test is skipped, and says what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import require_sandbox
from unmask.sandbox.isolation import SandboxLimits
from unmask.sandbox.pool import SandboxPool


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    """Sandboxes with short time limits."""
    require_sandbox()
    pool = SandboxPool(limits=SandboxLimits(seconds=3.0, wall_seconds=9.0))
    yield pool
    pool.close()
