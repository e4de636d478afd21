"""How many threads torch uses on a CPU."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from unmask.artifacts import num_cores, read_file
from unmask.console import is_first_process
from unmask.models.model_paths import CONFIG, model_folder

THREADS = "OMP_NUM_THREADS"
SMALL = 256
"""The width up to which matrix products are no faster on several threads; on a machine that is busy, threads that wait for one another
make them several times slower (docs/performance.md has the figures)."""


def choose_threads(model: str) -> None:
    """Let torch, which is not imported yet, use one thread for a small model, unless the environment sets a number."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        config = json.loads(read_file(Path(model_folder(model), CONFIG)))
        if config.get("hidden_size", config.get("n_embd", SMALL + 1)) <= SMALL:
            use_one_thread()


def use_one_thread() -> None:
    if THREADS not in os.environ and num_cores() > 1:
        os.environ[THREADS] = "1"
        if is_first_process():
            print(f"one thread: a model this small is no faster on several ({THREADS} sets another number)", file=sys.stderr)
