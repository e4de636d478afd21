"""Walks: each takes the way of a user who comes from another tool, from the first line of its guide to the
last, on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.tiny_runs import unmask


def walk(*arguments: str | Path) -> Any:
    """A command that must work."""
    called = unmask(*arguments)
    assert called.exit_code == 0, called.output
    return called
