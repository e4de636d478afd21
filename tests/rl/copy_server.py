"""A server in the process of the tests: it samples from the weights that it was sent, as slowly as it is
told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import llama_lm
from tests.training.tiny_runs import make
from unmask.generation.output import Generation
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.trainer import GRPOTrainer

REMOTE = {"backend": "server", "url": "http://127.0.0.1:9"}


class CopyServer:
    """A backend with a model of its own: passes of a model and of its copy share hooks, and cannot run at the
    same time.

    Attributes:
        delays: seconds before each answer, over and over.
        version: the updates made to the weights that it holds.
        sampled: for each request the version that it was sampled from, and the keys of its noise.
        failing: the number of the request, from 0, that fails with this error.
    """

    def __init__(self, *delays: float, failing: dict[int, Exception] | None = None):
        self.lm, self.version = llama_lm(), -1
        self.delays: Iterator[float] = cycle(delays or (0.0,))
        self.failing = failing or {}
        self.sampled: list[tuple[int, list[int]]] = []
        self.busy = False

    def generate(self, prompts: Any, config: Any, keys: Any = None) -> Generation:
        number = len(self.sampled)
        self.sampled.append((self.version, list(keys)))
        self.busy = True
        try:
            time.sleep(next(self.delays))
            if number in self.failing:
                raise self.failing[number]
            return generate(self.lm, prompts, config, keys)
        finally:
            self.busy = False

    def due(self, step: int | None) -> bool:
        return True

    def sync(self, lm: DiffusionLM, step: int) -> None:
        assert not self.busy, "it gets weights while it samples"
        self.lm.model.load_state_dict(lm.model.state_dict())
        self.version = step

    def close(self) -> None: ...


def trainer_of(
    server: CopyServer, folder: Path, lm: DiffusionLM | None = None, **settings: Any
) -> GRPOTrainer:
    """A trainer whose rollouts come from this server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unmask.rl.rollout_source.make_backend", lambda *_: server)
        return make("grpo", folder, lm, rollout=REMOTE, **settings)  # type: ignore[return-value]
