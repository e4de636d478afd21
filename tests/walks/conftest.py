"""Walks: each takes the way of a user who comes from another tool, from the first line of its guide to the last, on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import shared_path
from tests.training.conftest import unmask
from unmask.models.load import load


def walk(*arguments: str | Path) -> Any:
    """A command that must work."""
    called = unmask(*arguments)
    assert called.exit_code == 0, called.output
    return called


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real small model, to be read in both directions: what stands for a published diffusion model."""
    path = tmp_path_factory.mktemp("walks") / "stories"
    load(shared_path("models", "stories260K"), attention="bidirectional").save(path)
    return path
