"""The rollout that a server samples while the trainer trains on the one before (`max_staleness`).

Rollout n is sampled from the weights after a number of updates that follows from n, not from the speed of the
server, so that a run can be repeated and resumed. A checkpoint holds these weights, and a resumed run asks
for the rollout again: the same completions follow from them, and a checkpoint waits for no server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.config import GRPOConfig
from unmask.rl.prompts import GroupSampler, PromptRow
from unmask.rl.rollout_collector import RolloutCollector

FILE = "rollout_ahead.pt"


class Training(Protocol):
    """What is used of the trainer."""

    args: GRPOConfig
    lm: DiffusionLM
    state: Any
    collector: RolloutCollector
    train_dataset: Any

    def record(self, name: str, value: Tensor | float, count: float = 1.0) -> None: ...
    def _get_train_sampler(self) -> GroupSampler: ...


@dataclass(frozen=True)
class NextRollout:
    """A rollout that the trainer does not train on yet.

    Attributes:
        number: of the rollout in the run.
        step: the updates that were made to the weights that it is sampled from.
        weights: those of them that are trained, by name.
        rows: its prompts.
        asked: whether a server samples it; False: it was read from a checkpoint.
    """

    number: int
    step: int
    weights: dict[str, Tensor]
    rows: list[PromptRow] = field(default_factory=list)
    asked: bool = False


class RolloutsAhead:
    """Asks a server for the next rollout, at most `max_staleness` updates before the trainer trains on it.
    All processes of a run call each method at the same time.

    Attributes:
        next: the next rollout; None: nothing is asked for.
    """

    def __init__(self, trainer: Training):
        self.trainer, self.args = trainer, trainer.args
        self.next: NextRollout | None = None

    def ask_next(self) -> None:
        """Ask for the rollout after the current one, if the weights are new enough for it and no one has
        asked."""
        step, updates = self.trainer.state.global_step, self.args.num_iterations
        number = step // updates + 1
        if not self.args.max_staleness or number * updates >= self.trainer.state.max_steps:
            return
        if self.next is None and step + self.args.max_staleness >= number * updates:
            trained = {
                name: weight
                for name, weight in self.trainer.lm.model.named_parameters()
                if weight.requires_grad
            }
            self._ask(
                NextRollout(number, step, {name: weight.detach().clone() for name, weight in trained.items()})
            )
        elif self.next is not None and not self.next.asked:
            self._ask(self.next)

    def take(self, number: int) -> NextRollout | None:
        """The rollout to train on now; None: nobody has asked for it, and it is to be sampled from the
        present weights."""
        taken = self.next if self.next is not None and self.next.number == number else None
        if taken is not None and not taken.asked:
            taken = self._ask(taken)
        if self.args.max_staleness:
            self.trainer.record(
                "staleness", 0 if taken is None else self.trainer.state.global_step - taken.step
            )
        self.next = None
        return taken

    def send(self) -> None:
        """Send the weights of the next rollout again, which other rows of it may be sampled from, after an
        evaluation of others."""
        if self.next is not None and self.next.asked:
            self._send(self.next)

    def save(self, folder: Path) -> None:
        """Write the weights of the next rollout into a checkpoint."""
        if self.next is not None:
            torch.save(
                {"number": self.next.number, "step": self.next.step, "weights": self.next.weights},
                folder / FILE,
            )

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises an error of torch.load if it cannot be read."""
        exists = (folder / FILE).exists()
        self.next = (
            NextRollout(**torch.load(folder / FILE, map_location=self.trainer.lm.device)) if exists else None
        )

    def rows_of(self, number: int) -> list[PromptRow]:
        """This process's rows of rollout `number` of the run, as the data loader gives them."""
        size, processes, mine = self.args.train_batch_size, self.args.world_size, self.args.process_index
        rows = enumerate(self.trainer._get_train_sampler().rollout(number))
        return [self.trainer.train_dataset[row] for place, row in rows if place // size % processes == mine]

    def _ask(self, rollout: NextRollout) -> NextRollout:
        self._send(rollout)
        rows = self.trainer.collector.choose(self.rows_of(rollout.number), rollout.number)
        self.trainer.collector.ask(rows, rollout.number)
        self.next = replace(rollout, rows=rows, asked=True)
        return self.next

    def _send(self, rollout: NextRollout) -> None:
        with weights_in_use(self.trainer.lm, rollout.weights):
            self.trainer.collector.sync_weights(rollout.number, rollout.step)


@contextmanager
def weights_in_use(lm: DiffusionLM, weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these weights, and the dictionary the model's. Nothing is copied."""
    _exchange(lm, weights)
    try:
        yield
    finally:
        _exchange(lm, weights)


def _exchange(lm: DiffusionLM, weights: dict[str, Tensor]) -> None:
    for name, weight in lm.model.named_parameters() if weights else ():
        if name in weights:
            weight.data, weights[name] = weights[name], weight.data
    torch.clear_autocast_cache()  # it knows weights by their parameters
