"""An engine whose steps the tests release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.servers import Stall
from unmask.generation.engine.engine import Engine


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    """Every step of an engine waits for a release."""
    allowed, step = Stall(0), Engine.step

    def held(self: Engine) -> Any:
        allowed.begun += 1
        assert allowed.acquire(timeout=30)
        return step(self)

    monkeypatch.setattr(Engine, "step", held)
    yield allowed
    allowed.release(1000)
