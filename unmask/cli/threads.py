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

THREADS, SPINS = "OMP_NUM_THREADS", "GOMP_SPINCOUNT"
SMALL = 256
"""The width up to which a model has two threads: on every machine of several cores as many, which round in
the same way."""
SHORT_WAIT = 4000
"""Turns of the loop in which a thread waits for the other, before it sleeps. With the default the two are
several times slower than one where other programs use the cores (docs/performance.md has the figures)."""


def choose_threads(model: str) -> None:
    """Let torch, which is not imported yet, use two threads for a small model, unless the environment sets a
    number."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        config = json.loads(read_file(Path(model_folder(model), CONFIG)))
        if config.get("hidden_size", config.get("n_embd", SMALL + 1)) <= SMALL:
            use_two_threads()


def use_two_threads() -> None:
    if THREADS not in os.environ and num_cores() > 1:
        os.environ[THREADS] = "2"
        os.environ.setdefault(SPINS, str(SHORT_WAIT))
        if is_first_process():
            print(
                f"two threads: enough for a model this small ({THREADS} sets another number)", file=sys.stderr
            )
