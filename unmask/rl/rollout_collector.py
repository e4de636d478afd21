"""From prompts to rewarded completions: sampled by the model or a server, and selected by the rewards of
their groups.

Shapes: B completions, F reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from unmask.config.run import SamplerConfig
from unmask.errors import TrainingError
from unmask.generation.output import Generation
from unmask.generation.remote.ahead import AheadBackend
from unmask.generation.remote.backends import Backend, make_backend
from unmask.models.adapters import has_adapters, merged
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating
from unmask.rl.completion_log import CompletionLog
from unmask.rl.config import GRPOConfig
from unmask.rl.losses import advantages, equal_rewards, kept_groups, overlong_penalty
from unmask.rl.prompts import PromptHistory, PromptRow, completion_key
from unmask.rl.rollout import cut_at_end
from unmask.rl.weighted_rewards import RewardResult, Rewards
from unmask.sandbox.outcome import Status
from unmask.training.distributed import failing_together
from unmask.training.run_log import metric_of_function
from unmask.training.step_timer import Phases


class Collecting(Protocol):
    """What a collector uses of its trainer. Users may override `sample`, `judge` and `shaped`."""

    args: GRPOConfig
    lm: DiffusionLM
    accelerator: Accelerator
    phases: Phases
    state: Any
    train_dataset: Any
    callback_handler: Any

    def record(self, name: str, value: Tensor | float, count: float = 1.0) -> None: ...
    def lockstep(self) -> AbstractContextManager[None]: ...
    def is_world_process_zero(self) -> bool: ...
    def sample(self, rows: Sequence[PromptRow], *, temperature: float, step: int | None) -> Generation: ...
    def judge(self, rows: list[PromptRow], step: int) -> RewardedCompletions: ...
    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor: ...


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
        generation = self.generation
        lists: dict[str, Any] = {
            name: part[index] for name, part in vars(generation).items() if isinstance(part, list)
        }
        extras = {name: values[index] for name, values in self.extras.items()}
        return RewardedCompletions(
            self.rows[index], replace(generation, **lists), self.reward_BF[index], self.total_B[index], extras
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


class RolloutCollector:
    """Samples and rewards completions for a trainer.

    Attributes:
        rewards: the reward functions.
        history: the mean reward of every prompt so far.
        backend: samples from the model itself, or from a server.
        completion_log: samples of completions for the user.
    """

    def __init__(self, trainer: Collecting, rewards: Rewards):
        self.trainer, self.rewards = trainer, rewards
        self.lm, self.args = trainer.lm, trainer.args
        args = self.args
        self.history = PromptHistory(
            len(trainer.train_dataset.rows) if trainer.train_dataset is not None else 0, args.curriculum
        )
        backend = make_backend(args.rollout_config, trainer.lm, str(args.output_dir))
        self.backend: Backend = AheadBackend(backend) if args.max_staleness else backend
        self.completion_log = CompletionLog(
            args.output_folder, every=args.log_completions_steps, rows=args.log_completions_rows
        )
        self._reuse_sum, self._reuse_count = 0.0, 0
        self._unscored = 0

    def choose(self, rows: list[PromptRow], step: int) -> list[PromptRow]:
        """The rows to sample: these, or as many that the curriculum chooses."""
        return (
            rows
            if self.args.curriculum is None
            else self._other_rows(len(rows) // self.args.num_generations, step, [])
        )

    def ask(self, rows: list[PromptRow], step: int) -> None:
        """Make the server begin with the completions of these rows, for which `sample` waits."""
        assert isinstance(self.backend, AheadBackend)
        if rows:
            self.backend.ask(*self._request(rows, self.args.temperature, step))

    def collect(self, rows: list[PromptRow], step: int) -> RewardedCompletions:
        """Rewarded completions of the rows' prompts. Groups without a learning signal are replaced by those
        of other prompts, at most `dynamic_sampling` times."""
        group = self.args.num_generations
        used = [row.sample_id for row in rows]
        rewarded = self.trainer.judge(rows, step)
        for attempt in range(self.args.dynamic_sampling):
            _, kept_B = self.advantages(rewarded)
            dropped = [start for start in range(0, len(rows), group) if not kept_B[start]]
            others = self._other_rows(len(dropped), step + (attempt + 1) * 2**20, used)
            self.trainer.record("groups_replaced", len(others) / len(rows))
            if not any(gather_object([len(others)])):
                break
            replaced = [start + repeat for start in dropped for repeat in range(group)][: len(others)]
            rewarded = rewarded.replaced(replaced, self.trainer.judge(others, step))
        return rewarded

    def require_scores(self, rewarded: RewardedCompletions) -> None:
        """TrainingError after `max_unscored_rollouts` rollouts in a row in which no completion on any process
        has a reward."""
        self._unscored = (
            0
            if any(gather_object([not all(map(math.isnan, rewarded.total_B.tolist()))]))
            else self._unscored + 1
        )
        if self._unscored and self._unscored == self.args.max_unscored_rollouts:
            what = f"no completion of the last {self._unscored} rollouts has a reward, so nothing is learnt"
            remedy = (
                "See the warnings about reward functions, fix them, and go on with --resume; or set "
                "training.max_unscored_rollouts"
            )
            raise TrainingError(what, where="rewards", remedy=remedy)

    def judge(self, rows: list[PromptRow], step: int) -> RewardedCompletions:
        """Sample and reward completions. All processes call it at the same time, even with no rows."""
        rewarded = self.sample_and_reward(rows, temperature=self.args.temperature, step=step)
        rewarded = replace(rewarded, total_B=self.trainer.shaped(rewarded.total_B, rewarded.generation))
        for prompt, reward in gather_object(
            list(zip(rewarded.prompt_B.tolist(), rewarded.total_B.tolist(), strict=True))
        ):
            self.history.add(prompt, reward)  # the same on every process
        return rewarded

    def sample_and_reward(
        self, rows: list[PromptRow], *, temperature: float, step: int | None
    ) -> RewardedCompletions:
        """Completions and their rewards. Arguments as in `sample`."""
        generation = self.trainer.sample(rows, temperature=temperature, step=step)
        with failing_together("rollout"), self.trainer.phases("reward"):
            if rows:
                result = self.rewards(
                    [row.columns for row in rows], generation.texts, generation.tokens, self.trainer.state
                )
                self._record_rewards(result)
                return RewardedCompletions(rows, generation, result.reward_BF, result.total_B, result.extras)
        return RewardedCompletions(rows, generation, torch.zeros(0, len(self.rewards.names)), torch.zeros(0))

    def sample(self, rows: Sequence[PromptRow], *, temperature: float, step: int | None) -> Generation:
        """Completions of the rows' prompts. A completion depends only on the weights and (seed, step, sample,
        repeat).

        Args:
            step: the number of the rollout; None: an evaluation, whose noise is the same at all steps.

        Raises:
            GenerationError: a process cannot sample: its server does not answer (RemoteError), or its model
                returns NaN.
        """
        generation = Generation([], [], [], [], [], [], trace=[])
        with failing_together("rollout"), self.trainer.phases("generation"), self.trainer.lockstep():
            if rows:
                generation = self.backend.generate(*self._request(rows, temperature, step))
        self.trainer.phases.count(generated=sum(map(len, generation.tokens)))
        if generation.prompt_reuse is not None:
            self.trainer.record("prefix/reuse_rate", generation.prompt_reuse, len(rows))
            if step is not None:
                self._reuse_sum += generation.prompt_reuse * len(rows)
                self._reuse_count += len(rows)
        return cut_at_end(self.lm, generation)

    def _request(
        self, rows: Sequence[PromptRow], temperature: float, step: int | None
    ) -> tuple[list[Any], SamplerConfig, list[int]]:
        """The prompts, settings and keys with which a backend samples."""
        config = self.args.sampler(temperature=temperature, seed=self.args.seed)
        return (
            [row.prompt if row.ids is None else row.ids for row in rows],
            config,
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
        with self.trainer.phases("sync"), failing_together("rollout"):
            whole = self.args.rollout_config.sync != "lora" and has_adapters(self.lm)
            self.backend.sync(merged(self.lm) if whole else self.lm, updates)

    def truncated(self, generation: Generation) -> Tensor:
        """Which completions [B] fill their canvas without an end token."""
        return torch.tensor(
            [not tokens or tokens[-1] not in self.lm.eos_token_ids for tokens in generation.tokens],
            dtype=torch.bool,
        )

    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor:
        """The rewards [B] with the penalty of nearly truncated completions (`overlong_buffer`)."""
        if self.args.overlong_buffer is None:
            return total_B
        limit = self.args.max_completion_length
        length_B = torch.tensor([float(len(tokens)) for tokens in generation.tokens]) + self.truncated(
            generation
        )
        return total_B + overlong_penalty(length_B, limit, self.args.overlong_buffer)

    def advantages(self, rewarded: RewardedCompletions) -> tuple[Tensor, Tensor]:
        """The advantages [B] of this process's completions, and which belong to groups that are learnt from.
        A group may lie on several processes."""
        count, accelerator = len(rewarded.rows), self.trainer.accelerator
        difficulty_B = rewarded.total_B
        if (name := self.args.difficulty_reward) is not None:
            difficulty_B = torch.where(
                difficulty_B.isnan(), torch.nan, rewarded.reward_BF[:, self.rewards.names.index(name)]
            )
        local = slice(accelerator.process_index * count, (accelerator.process_index + 1) * count)
        tensors = (rewarded.total_B, difficulty_B, rewarded.prompt_B)
        reward_B, difficulty_B, group_B = (
            accelerator.gather(part.to(accelerator.device)).cpu() for part in tensors
        )
        advantage_B = advantages(
            reward_B, group_B, self.args.advantage or "r-mean", temperature=self.args.softmax_temperature
        )
        low, high = self.args.difficulty or (-torch.inf, torch.inf)
        kept_B = kept_groups(difficulty_B, group_B, low, high, spread=False)
        if self.args.drop_equal_groups:
            kept_B &= kept_groups(reward_B, group_B, -torch.inf, torch.inf, spread=True)
        return advantage_B[local], kept_B[local]

    def _other_rows(self, prompts: int, step: int, used: list[int]) -> list[PromptRow]:
        """The groups of prompts that no process has used yet; adds them to `used`."""
        wanted = gather_object([prompts])
        used[:] = sorted(set(gather_object(used)))
        chosen = self.history.choose(sum(wanted), self.args.seed, step, exclude=used)
        used += chosen
        first = sum(wanted[: self.trainer.accelerator.process_index])
        group = self.args.num_generations
        return [
            self.trainer.train_dataset[prompt * group + repeat]
            for prompt in chosen[first : first + prompts]
            for repeat in range(group)
        ]

    def mean_rewards(self, prompts: Any) -> dict[str, float]:
        """The mean rewards of greedy completions, one per prompt, by metric. The prompts are divided among
        the processes."""
        trainer, group = self.trainer, self.args.num_generations
        mine = range(
            trainer.accelerator.process_index, len(prompts) // group, trainer.accelerator.num_processes
        )
        with evaluating(self.lm):
            self.sync_weights(None, trainer.state.global_step)
            rewarded = self.sample_and_reward(
                [prompts[index * group] for index in mine], temperature=0.0, step=None
            )
        everyone = gather_object(
            list(zip(mine, rewarded.total_B.tolist(), rewarded.reward_BF.tolist(), strict=True))
        )
        # sorted: sums are the same for any number of processes
        _, totals, values = zip(*sorted(everyone), strict=True)
        total_B, reward_BF = torch.tensor(totals), torch.tensor(values)
        means = {"reward": total_B.nanmean(), "unscored": total_B.isnan().float().mean()}
        means |= {
            f"rewards/{name}": reward_B.nanmean()
            for name, reward_B in zip(self.rewards.names, reward_BF.unbind(1), strict=True)
        }
        return {name: float(mean) for name, mean in means.items()}

    @property
    def prompt_reuse(self) -> float | None:
        """The mean fraction of prompts whose key-value cache a group shared, in this process's rollouts;
        None: unknown."""
        return self._reuse_sum / self._reuse_count if self._reuse_count else None

    # Metrics.

    def _record_rewards(self, result: RewardResult) -> None:
        """Record the verdicts, failures and metrics of reward functions."""
        count = len(result.total_B)
        for name in self.rewards.names:
            for status in get_args(Status) if name in result.statuses else ():
                self.trainer.record(f"rewards/{name}/{status}", result.statuses[name][status] / count, count)
            for kind, number in result.failures[name].items():
                self.trainer.record(f"rewards/{name}/{kind}", number / count, count)
        for metric, values in result.logged.items():
            for value in values:
                self.trainer.record(metric_of_function(metric), value)

    def record_rollout(self, rewarded: RewardedCompletions, advantage_B: Tensor) -> None:
        """Record the metrics of a rollout batch, and show some of its completions."""
        generation, total_B, count = rewarded.generation, rewarded.total_B, len(rewarded.rows)
        lengths, truncated_B = [len(tokens) for tokens in generation.tokens], self.truncated(generation)
        self.trainer.record("unscored", total_B.isnan().float().mean(), count)
        self.trainer.record("truncated", truncated_B.float().mean(), count)
        self.trainer.record("completion_length", sum(lengths) / count, count)
        entropies = [
            e for trace, n in zip(generation.trace or [], lengths, strict=True) for e in trace.entropies[:n]
        ]
        if entropies:
            self.trainer.record("entropy", sum(entropies) / len(entropies), len(entropies))
        named = {
            f"rewards/{name}": reward_B
            for name, reward_B in zip(self.rewards.names, rewarded.reward_BF.unbind(1), strict=True)
        }
        for name, reward_B in {"reward": total_B, **named}.items():
            scored_B = torch.tensor(
                [value for value in reward_B.tolist() if not math.isnan(value)], dtype=reward_B.dtype
            )
            if len(scored_B) > 0:
                self.trainer.record(name, scored_B.mean(), len(scored_B))
            if name == "reward" and len(scored_B) > 1:
                equal = equal_rewards(scored_B, torch.zeros(len(scored_B), dtype=torch.long)).all()
                self.trainer.record("reward_std", torch.where(equal, 0, scored_B.std()), len(scored_B))
        step = self.trainer.state.global_step + 1
        if self.trainer.is_world_process_zero() and self.completion_log.due(step):
            columns = {
                **rewarded.extras,
                "prompt": [row.prompt for row in rewarded.rows],
                "completion": generation.texts,
            }
            figures = {"reward": total_B, **named, "advantage": advantage_B, "truncated": truncated_B}
            columns |= {name: figure_B.tolist() for name, figure_B in figures.items()}
            self.completion_log.write(step, columns, self.trainer.callback_handler.callbacks)
