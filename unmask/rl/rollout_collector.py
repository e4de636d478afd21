"""From prompts to judged completions: sampled here or by a server, rewarded, and chosen by what they teach.

Shapes: B completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from unmask.generation.output import Generation
from unmask.generation.remote.backends import make_backend
from unmask.models.adapters import has_adapters, merged
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating
from unmask.rl.completion_log import Samples
from unmask.rl.config import GRPOConfig
from unmask.rl.losses import advantages, kept_groups, overlong_penalty
from unmask.rl.prompts import PromptHistory, PromptRow, completion_key
from unmask.rl.reward_functions import RewardResult, Rewards
from unmask.rl.rollout import cut_at_end
from unmask.sandbox.outcome import Status
from unmask.training.distributed import failing_together
from unmask.training.run_log import metric_of_function
from unmask.training.step_timer import Phases


class Collecting(Protocol):
    """The trainer that a collector collects for. `sample`, `judge` and `shaped` are there to be overridden."""

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
    def judge(self, rows: list[PromptRow], step: int) -> Judged: ...
    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor: ...


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


class RolloutCollector:
    """From prompts to judged completions, for a trainer.

    Attributes:
        rewards: the reward functions.
        history: what prompts have given.
        backend: what samples: the model itself, or a server.
        log: samples of completions.
    """

    def __init__(self, trainer: Collecting, rewards: Rewards):
        self.trainer, self.rewards = trainer, rewards
        self.lm, self.args = trainer.lm, trainer.args
        args = self.args
        self.history = PromptHistory(len(trainer.train_dataset.rows) if trainer.train_dataset is not None else 0, args.curriculum)
        self.backend = make_backend(args.rollouts, trainer.lm, str(args.output_dir))
        self.log = Samples(Path(str(args.output_dir)), every=args.log_completions_steps, rows=args.log_completions_rows)
        self._reused, self._read = 0.0, 0

    def collect(self, rows: list[PromptRow], step: int) -> Judged:
        """Completions of the rows' prompts (of a curriculum, of its own), rewarded; where a group teaches nothing those of another
        prompt, as often as `dynamic_sampling` says."""
        group = self.args.num_generations
        used: list[int] = []
        if self.args.curriculum is not None:
            rows = self._other_rows(len(rows) // group, step, used)
        used += [row.sample_id for row in rows]
        judged = self.trainer.judge(rows, step)
        for number in range(self.args.dynamic_sampling):
            _, kept_B = self.advantages(judged)
            dull = [at for at in range(0, len(rows), group) if not kept_B[at]]
            others = self._other_rows(len(dull), step + (number + 1) * 2**20, used)
            self.trainer.record("groups_replaced", len(others) / len(rows))
            if not any(gather_object([len(others)])):
                break
            judged = judged.replaced(
                [at + repeat for at in dull for repeat in range(group)][: len(others)], self.trainer.judge(others, step)
            )
        return judged

    def judge(self, rows: list[PromptRow], step: int) -> Judged:
        """Sample and reward. Every process does so at the same time, be it with no rows."""
        answered = self.answer(rows, temperature=self.args.temperature, step=step)
        judged = replace(answered, total_B=self.trainer.shaped(answered.total_B, answered.generation))
        for prompt, reward in gather_object(list(zip(judged.group_B.tolist(), judged.total_B.tolist(), strict=True))):
            self.history.add(prompt, reward)  # the same on every process
        return judged

    def answer(self, rows: list[PromptRow], *, temperature: float, step: int | None) -> Judged:
        """Completions, and what the reward functions give for them. Arguments as of `sample`."""
        generation = self.trainer.sample(rows, temperature=temperature, step=step)
        with failing_together("rollout"), self.trainer.phases("reward"):
            if rows:
                result = self.rewards([row.columns for row in rows], generation.texts, generation.tokens, self.trainer.state)
                self._record_rewards(result)
                return Judged(rows, generation, result.value_BF, result.total_B, result.extras)
        return Judged(rows, generation, torch.zeros(0, len(self.rewards.names)), torch.zeros(0))

    def sample(self, rows: Sequence[PromptRow], *, temperature: float, step: int | None) -> Generation:
        """Completions of the rows' prompts. Beside the weights, a completion depends on (seed, step, sample, repeat) alone.

        Args:
            step: the number of the rollout; None: an evaluation, whose noise is the same at all steps.

        Raises:
            GenerationError: one of the processes cannot sample: its server stays away (RemoteError), its model gives NaN.
        """
        keys = [completion_key(row, step) for row in rows]
        config = self.args.sampler(temperature=temperature, seed=self.args.seed)
        generation = Generation([], [], [], [], [], [], trace=[])
        with failing_together("rollout"), self.trainer.phases("generation"), self.trainer.lockstep():
            if rows:
                generation = self.backend.generate([row.prompt for row in rows], config, keys)
        self.trainer.phases.count(generated=sum(map(len, generation.tokens)))
        if generation.prompt_reuse is not None:
            self.trainer.record("prefix/reuse_rate", generation.prompt_reuse, len(rows))
            if step is not None:
                self._reused += generation.prompt_reuse * len(rows)
                self._read += len(rows)
        return cut_at_end(self.lm, generation)

    def sync_weights(self, step: int | None) -> None:
        """Give a server the weights as they are, where they are due before this rollout (None: an evaluation, before which they always
        are). No process goes on before it has them."""
        if not self.backend.due(step):
            return
        with self.trainer.phases("sync"), failing_together("rollout"):
            whole = self.args.rollouts.sync != "lora" and has_adapters(self.lm)
            self.backend.sync(merged(self.lm) if whole else self.lm, self.trainer.state.global_step)

    def truncated(self, generation: Generation) -> Tensor:
        """Which completions [B] fill their canvas without an end token."""
        return torch.tensor([not tokens or tokens[-1] not in self.lm.eos_token_ids for tokens in generation.tokens], dtype=torch.bool)

    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor:
        """The rewards, less for what is nearly too long."""
        if self.args.overlong_buffer is None:
            return total_B
        limit = self.args.max_completion_length
        length_B = torch.tensor([float(len(tokens)) for tokens in generation.tokens]) + self.truncated(generation)
        return total_B + overlong_penalty(length_B, limit, self.args.overlong_buffer)

    def advantages(self, judged: Judged) -> tuple[Tensor, Tensor]:
        """Advantages [B] of this process's completions, and which of them are of groups that teach. Groups may lie on several processes."""
        count, accelerator = len(judged.rows), self.trainer.accelerator
        asked_B = judged.total_B
        if (name := self.args.difficulty_reward) is not None:
            asked_B = torch.where(asked_B.isnan(), torch.nan, judged.reward_BF[:, self.rewards.names.index(name)])
        here = slice(accelerator.process_index * count, (accelerator.process_index + 1) * count)
        parts = (judged.total_B, asked_B, judged.group_B)
        reward_B, asked_B, group_B = (accelerator.gather(part.to(accelerator.device)).cpu() for part in parts)
        advantage_B = advantages(reward_B, group_B, self.args.advantage or "r-mean", temperature=self.args.softmax_temperature)
        low, high = self.args.difficulty or (-torch.inf, torch.inf)
        kept_B = kept_groups(asked_B, group_B, low, high, spread=False)
        if self.args.drop_equal_groups:
            kept_B &= kept_groups(reward_B, group_B, -torch.inf, torch.inf, spread=True)
        return advantage_B[here], kept_B[here]

    def _other_rows(self, prompts: int, step: int, used: list[int]) -> list[PromptRow]:
        """The groups of so many prompts that are not used yet, on no process; these are then used."""
        wanted = gather_object([prompts])
        used[:] = sorted(set(gather_object(used)))
        chosen = self.history.choose(sum(wanted), self.args.seed, step, exclude=used)
        used += chosen
        first = sum(wanted[: self.trainer.accelerator.process_index])
        group = self.args.num_generations
        return [
            self.trainer.train_dataset[prompt * group + repeat] for prompt in chosen[first : first + prompts] for repeat in range(group)
        ]

    def mean_rewards(self, prompts: Any) -> dict[str, float]:
        """The mean reward of greedy completions, one per prompt, by metric. Every process answers its share of the prompts."""
        trainer, group = self.trainer, self.args.num_generations
        mine = range(trainer.accelerator.process_index, len(prompts) // group, trainer.accelerator.num_processes)
        with evaluating(self.lm):
            self.sync_weights(None)
            judged = self.answer([prompts[index * group] for index in mine], temperature=0.0, step=None)
        everyone = gather_object(list(zip(mine, judged.total_B.tolist(), judged.reward_BF.tolist(), strict=True)))
        _, totals, values = zip(*sorted(everyone), strict=True)  # in one order, so that the means are the same on any number of processes
        total_B, reward_BF = torch.tensor(totals), torch.tensor(values)
        means = {"reward": total_B.nanmean(), "unscored": total_B.isnan().float().mean()}
        means |= {f"rewards/{name}": reward_B.nanmean() for name, reward_B in zip(self.rewards.names, reward_BF.unbind(1), strict=True)}
        return {name: float(mean) for name, mean in means.items()}

    @property
    def prompt_reuse(self) -> float | None:
        """The mean share of the prompts of this process's rollouts that was read once for a whole group; None where it is not known."""
        return self._reused / self._read if self._read else None

    # What is told.

    def _record_rewards(self, result: RewardResult) -> None:
        """The verdicts, failures and own metrics of reward functions."""
        count = len(result.total_B)
        for name in self.rewards.names:
            for status in get_args(Status) if name in result.statuses else ():
                self.trainer.record(f"rewards/{name}/{status}", result.statuses[name][status] / count, count)
            for kind, number in result.failures[name].items():
                self.trainer.record(f"rewards/{name}/{kind}", number / count, count)
        for metric, values in result.logged.items():
            for value in values:
                self.trainer.record(metric_of_function(metric), value)

    def record_rollout(self, judged: Judged, advantage_B: Tensor) -> None:
        """Metrics of a rollout batch, and samples of it."""
        generation, total_B, count = judged.generation, judged.total_B, len(judged.rows)
        lengths, truncated_B = [len(tokens) for tokens in generation.tokens], self.truncated(generation)
        self.trainer.record("unscored", total_B.isnan().float().mean(), count)
        self.trainer.record("truncated", truncated_B.float().mean(), count)
        self.trainer.record("completion_length", sum(lengths) / count, count)
        entropies = [e for trace, n in zip(generation.trace or [], lengths, strict=True) for e in trace.entropies[:n]]
        if entropies:
            self.trainer.record("entropy", sum(entropies) / len(entropies), len(entropies))
        named = {f"rewards/{name}": reward_B for name, reward_B in zip(self.rewards.names, judged.reward_BF.unbind(1), strict=True)}
        for name, reward_B in {"reward": total_B, **named}.items():
            scored_B = reward_B[~reward_B.isnan()]
            if len(scored_B) > 0:
                self.trainer.record(name, scored_B.mean(), len(scored_B))
            if name == "reward" and len(scored_B) > 1:
                self.trainer.record("reward_std", scored_B.std(), len(scored_B))
        step = self.trainer.state.global_step + 1
        if self.trainer.is_world_process_zero() and self.log.due(step):
            texts = {**judged.extras, "prompt": [row.prompt for row in judged.rows], "completion": generation.texts}
            figures = {"reward": total_B, **named, "advantage": advantage_B, "truncated": truncated_B}
            self.log.write(step, texts | {n: part.tolist() for n, part in figures.items()}, self.trainer.callback_handler.callbacks)
