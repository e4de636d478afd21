"""Where completions come from: the model itself or a server, which may sample the next rollout while the
trainer trains on the present one (`max_staleness`).

Rollout n is sampled from the weights after a number of updates that follows from n, not from the speed of the
server, so that a run can be repeated and resumed. A checkpoint holds these weights, and a resumed run asks
for the rollout again: the same completions follow from them, and a checkpoint waits for no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.generation.output import Generation
from unmask.generation.remote.backends import AheadBackend, Backend, make_backend
from unmask.models.adapters import has_adapters, merged
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.config import GRPOConfig
from unmask.rl.prompts import PromptRow, completion_key
from unmask.training.distributed import failing_together
from unmask.training.step_timer import Phases

FILE = "rollout_ahead.pt"
PromptsOf = Callable[[int], list[PromptRow]]
"""Returns this process's prompts of a rollout, by its number in the run."""


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


class RolloutSource:
    """Samples completions, and asks a server for the next rollout at most `max_staleness` updates before the
    trainer trains on it. All processes of a run call each method at the same time.

    Attributes:
        backend: samples from the model itself, or from a server.
        next: the next rollout; None: nothing is asked for.
    """

    def __init__(self, lm: DiffusionLM, args: GRPOConfig, phases: Phases):
        self.lm, self.args, self.phases = lm, args, phases
        backend = make_backend(args.rollout_config, lm, str(args.output_dir))
        self.backend: Backend = AheadBackend(backend) if args.max_staleness else backend
        self.next: NextRollout | None = None

    def generate(self, rows: Sequence[PromptRow], *, temperature: float, step: int | None) -> Generation:
        """Completions of the rows' prompts for this rollout (None: an evaluation), or those that were asked
        for."""
        return self.backend.generate(*self._request(rows, temperature, step))

    def _request(
        self, rows: Sequence[PromptRow], temperature: float, step: int | None
    ) -> tuple[list[Any], SamplerConfig, list[int]]:
        """The prompts, settings and keys with which a backend samples."""
        return (
            [row.prompt if row.ids is None else row.ids for row in rows],
            self.args.sampler(temperature, self.lm.noise),
            [completion_key(row, step) for row in rows],
        )

    def sync_weights(self, step: int | None, updates: int) -> None:
        """Send the weights, named by the updates that were made to them, to a server if they are due before
        this rollout (None: an evaluation, for which they always are). All processes wait until it has
        them."""
        if not self.backend.due(step):
            return
        if isinstance(self.backend, AheadBackend):
            with failing_together("rollout"):  # no process sends while the server samples for another one
                self.backend.wait()
        with self.phases("sync"), failing_together("rollout"):
            whole = self.args.rollout_config.sync != "lora" and has_adapters(self.lm)
            self.backend.sync(merged(self.lm) if whole else self.lm, updates)

    def ask_next(self, step: int, max_steps: int, prompts_of: PromptsOf) -> None:
        """After `step` updates, ask for the rollout after the current one, if the weights are new enough for
        it and no one has asked."""
        number = step // self.args.num_iterations + 1
        first_update = number * self.args.num_iterations
        if not self.args.max_staleness or first_update >= max_steps:
            return
        if self.next is None and step + self.args.max_staleness >= first_update:
            weights = {
                name: weight.detach().clone()
                for name, weight in self.lm.model.named_parameters()
                if weight.requires_grad
            }
            self.next = NextRollout(number, step, weights)
        if self.next is not None and not self.next.asked:
            self._ask(self.next, prompts_of)

    def take(self, number: int, prompts_of: PromptsOf) -> NextRollout | None:
        """The rollout to train on now; None: nobody has asked for it, and it is to be sampled from the
        present weights."""
        taken = self.next if self.next is not None and self.next.number == number else None
        if taken is not None and not taken.asked:
            taken = self._ask(taken, prompts_of)
        self.next = None
        return taken

    def _ask(self, rollout: NextRollout, prompts_of: PromptsOf) -> NextRollout:
        assert isinstance(self.backend, AheadBackend)
        self._send(rollout)
        rows = prompts_of(rollout.number)
        if rows:
            self.backend.ask(*self._request(rows, self.args.temperature, rollout.number))
        self.next = replace(rollout, rows=rows, asked=True)
        return self.next

    def send_again(self) -> None:
        """Send the weights of the next rollout after an evaluation of others: other rows of it may be sampled
        from them."""
        if self.next is not None and self.next.asked:
            self._send(self.next)

    def _send(self, rollout: NextRollout) -> None:
        with weights_in_use(self.lm, rollout.weights):
            self.sync_weights(rollout.number, rollout.step)

    def save(self, folder: Path) -> None:
        """Write the weights of the next rollout into a checkpoint."""
        if self.next is not None:
            stored = {name: getattr(self.next, name) for name in ("number", "step", "weights")}
            torch.save(stored, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        path = folder / FILE
        self.next = NextRollout(**torch.load(path, map_location=self.lm.device)) if path.exists() else None


@contextmanager
def weights_in_use(lm: DiffusionLM, weights: dict[str, Tensor]) -> Iterator[None]:
    """Exchange the model's weights with those of the dictionary for a while. Nothing is copied."""
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
