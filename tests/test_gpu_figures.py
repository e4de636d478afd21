"""On a GPU: `make bench-gpu`, with everything narrow."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import gpu
from tests.helpers import GPU, needs_gpu

pytestmark = [*needs_gpu, pytest.mark.slow]


@pytest.mark.parametrize("part", ["8B", "LLaDA", "SDAR", "GRPO"])  # 0.6B compiles
def test_every_figure_is_measured(part, tmp_path, monkeypatch):
    words = [
        "--device",
        GPU,
        "--scale",
        "64",
        "--batches",
        "1",
        "--only",
        part,
        "--out",
        str(tmp_path / "gpu"),
    ]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    gpu.main()
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len(rows) > 1 and not [row for row in rows if "trace" in row] and (tmp_path / "gpu.md").read_text()
