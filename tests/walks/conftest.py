"""What walks start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import shared_path
from unmask.models.load import load


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real small model, to be read in both directions: what stands for a published diffusion model."""
    path = tmp_path_factory.mktemp("walks") / "stories"
    load(shared_path("models", "stories260K"), attention="bidirectional").save(path)
    return path
