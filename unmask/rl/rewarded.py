"""The rewarded completions of a rollout, and the metrics that follow from them.

Shapes: B completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from unmask.generation.output import Generation
from unmask.rl.advantages import equal_rewards
from unmask.rl.prompts import PromptRow
from unmask.rl.weighted_rewards import RewardResult
from unmask.sandbox.outcome import Status
from unmask.training.metrics import metric_of_function

CountedMean = tuple[str, Tensor | float, int]
"""A name, a mean, and the number of values that it is the mean of."""


@dataclass(frozen=True)
class RewardedCompletions:
    """Completions and their rewards, one entry per row.

    Attributes:
        reward_BF: the value of each function, without weights; NaN where it does not apply.
        total_B: the weighted sum; NaN: unscored.
        extras: the columns that reward functions logged (`log_extra`), by name.
    """

    rows: list[PromptRow]
    generation: Generation
    reward_BF: Tensor
    total_B: Tensor
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def prompt_B(self) -> Tensor:
        """The number of each completion's prompt in the dataset."""
        return torch.tensor([row.sample_id for row in self.rows])

    def select(self, index: slice) -> RewardedCompletions:
        """Some of the completions."""
        lists: dict[str, Any] = {
            name: part[index] for name, part in vars(self.generation).items() if isinstance(part, list)
        }
        extras = {name: values[index] for name, values in self.extras.items()}
        return RewardedCompletions(
            self.rows[index],
            replace(self.generation, **lists),
            self.reward_BF[index],
            self.total_B[index],
            extras,
        )

    def replaced(self, at: Sequence[int], other: RewardedCompletions) -> RewardedCompletions:
        """The same with the rows `at` replaced by those of another."""
        source = {row: index for index, row in enumerate(at)}

        def merge(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
            return [new[source[row]] if row in source else value for row, value in enumerate(old)]

        lists: dict[str, Any] = {
            name: merge(part, getattr(other.generation, name))
            for name, part in vars(self.generation).items()
            if isinstance(part, list)
        }
        reward_BF, total_B = self.reward_BF.clone(), self.total_B.clone()
        reward_BF[list(at)], total_B[list(at)] = other.reward_BF, other.total_B
        extras = {
            name: merge(values, other.extras.get(name, [None] * len(at)))
            for name, values in self.extras.items()
        }
        return RewardedCompletions(
            merge(self.rows, other.rows), replace(self.generation, **lists), reward_BF, total_B, extras
        )


def truncated(generation: Generation, ends: Sequence[int]) -> Tensor:
    """Which completions [B] fill their canvas without an end token."""
    return torch.tensor(
        [not tokens or tokens[-1] not in ends for tokens in generation.tokens], dtype=torch.bool
    )


def reward_metrics(result: RewardResult) -> Iterator[CountedMean]:
    """The verdicts, failures and logged metrics of reward functions."""
    count = len(result.total_B)
    for name, failures in result.failures.items():
        for status in get_args(Status) if name in result.statuses else ():
            yield f"rewards/{name}/{status}", result.statuses[name][status] / count, count
        for kind, number in failures.items():
            yield f"rewards/{name}/{kind}", number / count, count
    for metric, values in result.logged.items():
        for value in values:
            yield metric_of_function(metric), value, 1


def rollout_metrics(
    rewarded: RewardedCompletions, reward_of: Mapping[str, Tensor], truncated_B: Tensor
) -> Iterator[CountedMean]:
    """The metrics of a rollout batch. `reward_of`: the rewards of each function, by metric."""
    generation, total_B, count = rewarded.generation, rewarded.total_B, len(rewarded.rows)
    lengths = [len(tokens) for tokens in generation.tokens]
    yield "unscored", total_B.isnan().float().mean(), count
    yield "truncated", truncated_B.float().mean(), count
    yield "completion_length", sum(lengths) / count, count
    entropies = [
        entropy
        for trace, length in (zip(generation.trace, lengths, strict=True) if generation.trace else ())
        for entropy in trace.entropies[:length]
    ]
    if entropies:
        yield "entropy", sum(entropies) / len(entropies), len(entropies)
    for name, reward_B in {"reward": total_B, **reward_of}.items():
        scored_B = reward_B[~reward_B.isnan()]
        if len(scored_B) > 0:
            yield name, scored_B.mean(), len(scored_B)
        if name == "reward" and len(scored_B) > 1:
            equal = equal_rewards(scored_B, torch.zeros(len(scored_B), dtype=torch.long)).all()
            yield "reward_std", torch.where(equal, 0, scored_B.std()), len(scored_B)


def mean_rewards(total_B: Tensor, reward_of: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean of the scored completions by metric; NaN if there are none."""
    means = {"reward": total_B.nanmean(), "unscored": total_B.isnan().float().mean()}
    means |= {name: reward_B.nanmean() for name, reward_B in reward_of.items()}
    return {name: float(mean) for name, mean in means.items()}
