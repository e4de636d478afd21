"""Which prompts come next: what each has given so far, and draws that follow from it.

Shapes: N prompts of the data set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.artifacts import write_atomic
from unmask.diffusion.rng import Stream, uniform
from unmask.generation.output import Generation
from unmask.rl.rollouts import PromptRow

FILE = "prompts.json"


class PromptHistory:
    """The mean reward of every prompt that was answered, and draws of prompts without replacement.

    Args:
        count: prompts of the data set.
        target: prompts whose mean reward is near this are preferred: their weight is exp(-distance / spread), the spread being the
            standard deviation of all means (at least a millionth of the largest distance, and of 1). New prompts weigh as much as
            those at the target. None: all weigh the same.
    """

    def __init__(self, count: int, target: float | None = None):
        self.count, self.target = count, target
        self.seen: dict[int, tuple[int, float]] = {}  # rewards that counted, and their mean

    def add(self, prompt: int, reward: float) -> None:
        """Count a completion; NaN is none."""
        if not math.isnan(reward):
            number, mean = self.seen.get(prompt, (0, 0.0))
            self.seen[prompt] = number + 1, mean + (reward - mean) / (number + 1)

    def log_weights(self) -> Tensor:
        """The logarithm of the weight of every prompt [N]. It is bounded, so that the noise of a draw beside it is not rounded away."""
        log_weight_N = torch.zeros(self.count, dtype=torch.float64)
        if self.target is None or len(self.seen) < 2:
            return log_weight_N
        prompts = torch.tensor(list(self.seen))
        means = torch.tensor([mean for _, mean in self.seen.values()], dtype=torch.float64)
        distances = (means - self.target).abs()
        log_weight_N[prompts] = -distances / means.std().clamp_min(1e-6 * max(1.0, float(distances.max())))
        return log_weight_N

    def choose(self, number: int, seed: int, step: int, exclude: Collection[int] = ()) -> list[int]:
        """At most `number` different prompts, drawn in proportion to their weights: the same for the same history, seed and step
        (Gumbel's top-k, Kool et al. 2019)."""
        uniform_N = uniform(seed, torch.arange(self.count), step=step, stream=Stream.ROLLOUT)
        score_N = self.log_weights() - (-uniform_N.clamp_min(2.0**-53).log()).log()
        score_N[list(exclude)] = -torch.inf
        best = score_N.topk(min(number, self.count - len(set(exclude)))).indices
        return best.tolist()

    def save(self, folder: Path) -> None:
        """Write what was seen."""
        write_atomic(folder / FILE, json.dumps(sorted((prompt, *counts) for prompt, counts in self.seen.items())))

    def load(self, folder: Path) -> None:
        """Read it back. ValueError where it is of prompts that there are not, and prompts are weighed by it."""
        seen = {prompt: (number, mean) for prompt, number, mean in json.loads((folder / FILE).read_text())}
        if self.target is not None and (last := max(seen, default=0)) >= self.count:
            raise ValueError(f"{FILE} is of {last + 1} prompts or more, but the data set has {self.count}")
        self.seen = seen


@dataclass(frozen=True)
class Judged:
    """Completions and what they earned, one entry per row.

    Attributes:
        reward_BF: of each function, NaN where it does not apply.
        total_B: weighted and summed; NaN: unscored.
        extras: what reward functions tell of each beside (`log_extra`), by name.
    """

    rows: list[PromptRow]
    generation: Generation
    reward_BF: Tensor
    total_B: Tensor
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def group_B(self) -> Tensor:
        """The prompt of each completion."""
        return torch.tensor([row.sample_id for row in self.rows])

    def part(self, at: slice) -> Judged:
        """Some of the completions."""
        generation = self.generation
        lists: dict[str, Any] = {name: part[at] for name, part in vars(generation).items() if isinstance(part, list)}
        extras = {name: values[at] for name, values in self.extras.items()}
        return Judged(self.rows[at], replace(generation, **lists), self.reward_BF[at], self.total_B[at], extras)

    def replaced(self, at: Sequence[int], other: Judged) -> Judged:
        """With these rows exchanged."""
        where = {place: index for index, place in enumerate(at)}

        def merge(mine: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
            return [theirs[where[i]] if i in where else value for i, value in enumerate(mine)]

        lists: dict[str, Any] = {
            name: merge(part, getattr(other.generation, name)) for name, part in vars(self.generation).items() if isinstance(part, list)
        }
        reward_BF, total_B = self.reward_BF.clone(), self.total_B.clone()
        reward_BF[list(at)], total_B[list(at)] = other.reward_BF, other.total_B
        extras = {name: merge(values, other.extras.get(name, [None] * len(at))) for name, values in self.extras.items()}
        return Judged(merge(self.rows, other.rows), replace(self.generation, **lists), reward_BF, total_B, extras)
