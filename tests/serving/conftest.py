"""An engine whose steps the tests release."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from unmask.generation.engine.engine import Engine


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Every step of an engine waits for a release."""
    allowed, step = threading.Semaphore(0), Engine.step

    def held(self: Engine) -> Any:
        assert allowed.acquire(timeout=30)
        return step(self)

    monkeypatch.setattr(Engine, "step", held)
    yield allowed
    allowed.release(1000)
