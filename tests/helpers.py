"""What several tests share."""

from __future__ import annotations

import os
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def shared_path(*parts: str) -> pathlib.Path:
    """A file of the shared data beside the checkout (or under $UNMASK_SHARED); skips the test where it is absent."""
    root = pathlib.Path(os.environ.get("UNMASK_SHARED", REPOSITORY.parent / "shared"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs the shared test data, and {'/'.join(parts)} is not there (set UNMASK_SHARED to its folder)")
    return path
