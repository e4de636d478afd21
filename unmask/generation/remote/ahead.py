"""A server that samples in the background, while the caller does other work."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, NamedTuple

from unmask.config.run import SamplerConfig
from unmask.generation.output import Generation
from unmask.generation.remote.backends import Backend
from unmask.models.diffusion_lm import DiffusionLM


class Asked(NamedTuple):
    """Completions that are on their way, and the keys of their noise."""

    keys: Sequence[int]
    generation: AsyncResult[Generation]


class AheadBackend:
    """A backend that can be asked in advance, for one list of prompts at a time.

    Args:
        backend: samples.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.asked: Asked | None = None

    def ask(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int]) -> None:
        """Begin to sample from the weights sent last, in a thread. `generate` with the same keys returns the
        completions."""
        thread = ThreadPool(1)  # a process that exits does not wait for it
        self.asked = Asked(keys, thread.apply_async(self.backend.generate, (prompts, config, keys)))
        thread.close()

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
    ) -> Generation:
        """Complete prompts, or wait for the completions that were asked for with these keys, or raise the
        error that they met."""
        if self.asked is None or self.asked.keys != keys:
            return self.backend.generate(prompts, config, keys)
        asked, self.asked = self.asked, None
        return asked.generation.get()

    def due(self, step: int | None) -> bool:
        return self.backend.due(step)

    def wait(self) -> None:
        """Wait until the server has sampled what it was asked for, from the weights that it has."""
        if self.asked is not None:
            self.asked.generation.wait()

    def sync(self, lm: DiffusionLM, step: int) -> None:
        """Send weights. All processes must `wait` before any sends them."""
        self.backend.sync(lm, step)

    def close(self) -> None:
        self.backend.close()
