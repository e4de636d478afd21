"""Reinforcement learning with group-relative advantages: sample, reward, plan views, score, clip.

Shapes: B completions, V views, T positions, F reward functions. A rollout batch is the completions of one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedModel

from unmask.config import SamplerConfig
from unmask.data.chat import encode_prompt
from unmask.data.rows import column, naming, pad_rows
from unmask.diffusion.noise import sequence_key
from unmask.diffusion.score import score
from unmask.diffusion.views import Draw, Views
from unmask.errors import ConfigError, DataError
from unmask.generation.sampler import generate
from unmask.generation.trace import Generation
from unmask.methods import Rollout, get_method
from unmask.models.diffusion_lm import DiffusionLM, disable_dropout, evaluating
from unmask.objectives.policy import AdvantageKind, advantages, clipped_surrogate
from unmask.sandbox.outcome import Status
from unmask.training.rewards import RewardFunction, Rewards
from unmask.training.trainer import DiffusionTrainer, StageConfig

Update = dict[str, Any]  # a micro-batch of completions with the views and scores of one inner iteration


@dataclass(kw_only=True)
class GRPOConfig(StageConfig):
    """Settings of `GRPOTrainer`. `per_device_train_batch_size` counts completions, as in TRL."""

    learning_rate: float = field(default=3e-6, metadata={"help": "The peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "How the learning rate goes."})
    method: str = field(default="diffu-grpo", metadata={"help": "diffu-grpo, or cj-grpo (trajectory replay)."})
    num_generations: int = field(default=8, metadata={"help": "Completions per prompt: the group."})
    num_iterations: int = field(
        default=1, metadata={"help": "Updates per rollout batch (mu), each with masks of its own; save_steps is rounded up to a multiple."}
    )
    beta: float = field(default=0.0, metadata={"help": "Weight of the KL to the model as given; 0: no reference is kept."})
    epsilon: float = field(default=0.5, metadata={"help": "Clip range of the ratio below 1."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Clip range above 1; unset: epsilon."})
    advantage: AdvantageKind = field(default="r-mean", metadata={"help": "r-mean, z-score or leave-one-out."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling, and of the log-probabilities that are trained."})
    max_completion_length: int = field(default=128, metadata={"help": "Tokens of the canvas behind the prompt."})
    steps: int | None = field(default=None, metadata={"help": "Denoising steps of a rollout; unset: one token per step."})
    block_size: int | None = field(default=None, metadata={"help": "Decoding block of a rollout; unset: the whole completion."})
    policy: str = field(default="confidence", metadata={"help": "Unmasking policy of a rollout."})
    prompt_mask_rate: float = field(default=0.15, metadata={"help": "diffu-grpo: share of the prompt's tokens that are hidden."})
    segments: int | None = field(default=None, metadata={"help": "cj-grpo: merge the steps into this many views; unset: a view per step."})
    reward_workers: int = field(
        default=0, metadata={"help": "Processes for each reward function given by its path; 0: it runs in the training process."}
    )
    reward_weights: list[float] | None = field(default=None, metadata={"help": "One weight per reward function; unset: all 1."})
    rollout_batch_size: int = field(default=256, metadata={"help": "Sequences per forward pass of a rollout."})

    def __post_init__(self) -> None:
        super().__post_init__()
        get_method(self.method)
        if self.advantage not in get_args(AdvantageKind):
            what, remedy = f"unknown advantage {self.advantage!r}", f"Use one of {', '.join(get_args(AdvantageKind))}"
            raise ConfigError(what, where="advantage", remedy=remedy)
        if self.segments is not None and self.segments < 1:
            raise ConfigError(f"{self.segments} segments", where="segments", remedy="Give at least 1, or leave it out")
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}", where="temperature", remedy="Explore with a temperature above 0")
        if self.save_steps >= 1:  # a checkpoint amid the updates of a rollout could not be resumed exactly
            self.save_steps: float = math.ceil(self.save_steps / self.num_iterations) * self.num_iterations
        self.sampler(temperature=self.temperature, seed=self.seed)  # raises for settings that cannot be sampled with

    def sampler(self, *, temperature: float, seed: int) -> SamplerConfig:
        """How rollouts are sampled."""
        return SamplerConfig(
            max_new_tokens=self.max_completion_length,
            steps=self.steps,
            block_size=self.block_size,
            policy=self.policy,  # type: ignore[arg-type]
            temperature=temperature,
            seed=seed,
            batch_size=self.rollout_batch_size,
            trace=True,
        )


class GRPOTrainer(DiffusionTrainer):
    """Group-relative policy optimisation of any DiffusionLM.

    Args:
        model: the policy; a DiffusionLM, or a path or id to load.
        reward_funcs: functions as TRL calls them (sync or async), or names (of tasks and others, see `find_rewards`).
        args: the config.
        train_dataset: rows with `prompt`; all other columns go to the reward functions.
        eval_dataset: the same; `evaluate` reports the mean reward of greedy completions.
        rest: as in DiffusionTrainer.

    Masks are planned once per rollout and inner iteration, and the same masks score the policy, the old policy and the
    reference. Dropout is off, so the first update has a ratio of exactly 1.
    """

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        reward_funcs: Sequence[RewardFunction | str] | RewardFunction | str,
        args: GRPOConfig | None = None,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        **rest: Any,
    ):
        args = args or GRPOConfig()
        self.rewards = Rewards(reward_funcs, args.reward_weights, args.reward_workers)
        self.method = get_method(args.method)
        completions = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if completions % args.num_generations:
            what = f"{completions} completions a step are not a multiple of {args.num_generations}"
            remedy = "Change per_device_train_batch_size or gradient_accumulation_steps"
            raise ConfigError(what, where="num_generations", remedy=remedy)
        self.prompts_per_step = completions // args.num_generations
        if train_dataset is not None and len(train_dataset) < self.prompts_per_step:
            what = f"{len(train_dataset)} prompts, but a step needs {self.prompts_per_step}"
            raise ConfigError(what, where="train_dataset", remedy="Give more prompts, or make the step smaller")
        super().__init__(model, args, train_dataset, eval_dataset, data_collator=list, **rest)
        disable_dropout(self.lm.model)
        self.reference = self.lm.frozen_copy() if args.beta > 0 else None
        self.buffer: list[list[Update]] = []

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: GRPOConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Any:
        for index, prompt in enumerate(column(dataset, "prompt", where)):
            with naming(f"{where}, row {index}"):
                tokens = len(encode_prompt(lm.tokenizer, prompt)) + args.max_completion_length
            if tokens > (lm.context_length or tokens):
                what = f"{tokens} tokens with the completion, but the model's context is {lm.context_length}"
                raise DataError(what, where=f"{where}, row {index}", remedy="Lower max_completion_length or drop the row")
        return PromptRows(dataset, args.num_generations)

    def micro_loss(self, lm: DiffusionLM, batch: Mapping[str, Any]) -> Tensor:
        log_prob_BT = self._log_probs(lm, batch["rollout"], batch["views"])
        old_BT = log_prob_BT.detach() if batch["old"] is None else batch["old"]
        high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        loss = clipped_surrogate(
            log_prob_BT, old_BT, batch["reference"], batch["advantage"], clip_low=self.args.epsilon, clip_high=high, beta=self.args.beta
        )
        scored_BT = batch["rollout"].completion_BT
        tokens = float(scored_BT.sum())
        self.record("clipped", loss.clipped_BT[scored_BT].float().mean(), tokens)
        self.record("kl", loss.kl_BT[scored_BT].mean(), tokens)
        return loss.loss_BT[scored_BT].sum()

    def count_items(self, batch: Mapping[str, Any]) -> Tensor:
        return batch["rollout"].completion_BT.sum()

    def count_tokens(self, batch: Mapping[str, Any]) -> Tensor:
        return (batch["rollout"].documents_BT > 0).sum()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Tensor | None]:
        """All micro-batches of an optimizer step: new completions, or the buffered ones with the next masks."""
        micro_batches = [rows for _, rows in zip(range(0 if self.over else num_batches), epoch_iterator, strict=False)]
        iteration = self.state.global_step % self.args.num_iterations
        if micro_batches and (iteration == 0 or not self.buffer):
            self.model.train()  # so that the rewards count as training metrics
            self.buffer = self.experience(micro_batches)
        batches = [updates[iteration] for updates in self.buffer[: len(micro_batches)]]
        return batches, self._get_num_items_in_batch(batches, device)

    @torch.no_grad()
    def experience(self, micro_batches: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Update]]:
        """Sample, reward and score the completions of one optimizer step."""
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        step = self.state.global_step // self.args.num_iterations
        generation = self.sample(rows, temperature=self.args.temperature, seed=self.args.seed + step)
        reward_BF = self.rewards(rows, generation.texts, generation.tokens)
        self._record_rewards(reward_BF, generation)
        group_B = torch.tensor([row["sample_id"] for row in rows])
        advantage_B = self._advantages(self.rewards.total(reward_BF), group_B)
        made, start = [], 0
        for micro_batch in micro_batches:
            at = slice(start, start + len(micro_batch))
            made.append(self._score_rollout(rows[at], make_rollout(self.lm, generation, at), advantage_B[at].to(self.lm.device), step))
            start = at.stop
        return made

    def sample(self, rows: Sequence[Mapping[str, Any]], *, temperature: float, seed: int) -> Generation:
        """Completions of the rows' prompts. A completion depends on (seed, sample, repeat) alone."""
        keys = [sequence_key([row["sample_id"]], row["repeat"]) for row in rows]
        return generate(self.lm, [row["prompt"] for row in rows], self.args.sampler(temperature=temperature, seed=seed), keys)

    def evaluate(
        self, eval_dataset: Sequence[Any] | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean reward of greedy completions, one per prompt."""
        prompts: Any = self.eval_dataset if eval_dataset is None else self._checked_rows(self.lm, self.args, eval_dataset, "eval_dataset")
        rows = [prompts[i] for i in range(0, len(prompts), self.args.num_generations)]
        generation = self.sample(rows, temperature=0.0, seed=self.args.seed)
        total_B = self.rewards.total(self.rewards(rows, generation.texts, generation.tokens))
        metrics = {f"{metric_key_prefix}_reward": float(total_B.nanmean())}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return GroupSampler(
            len(train_dataset if train_dataset is not None else self.train_dataset) // self.args.num_generations,
            prompts=self.prompts_per_step,
            group=self.args.num_generations,
            repeats=self.args.num_iterations,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )

    def _log_probs(self, lm: DiffusionLM, rollout: Rollout, views: Views) -> Tensor:
        """Log-probabilities of the completion tokens [B, T] as the method defines them."""
        log_prob_BVT = score(
            lm, rollout.ids_BT, rollout.documents_BT, views, temperature=self.args.temperature, chunk=self.args.score_chunk
        )
        return (views.weight_BVT * log_prob_BVT).sum(1)

    def _score_rollout(self, rows: Sequence[Mapping[str, Any]], rollout: Rollout, advantage_B: Tensor, step: int) -> list[Update]:
        key_B = torch.tensor([sequence_key([row["sample_id"], step], row["repeat"]) for row in rows], device=self.lm.device)
        updates: list[Update] = []
        with evaluating(self.lm), self.accelerator.autocast():
            for iteration in range(self.args.num_iterations):
                views = self.method.plan(rollout, Draw(self.args.seed, key_B, iteration), self.args)
                # Of a single update the policy itself is the old policy.
                old = self._log_probs(self.lm, rollout, views) if self.args.num_iterations > 1 else None
                reference = self._log_probs(self.reference, rollout, views) if self.reference is not None else None
                updates.append({"rollout": rollout, "advantage": advantage_B, "views": views, "old": old, "reference": reference})
        return updates

    def _advantages(self, reward_B: Tensor, group_B: Tensor) -> Tensor:
        """Advantages of this process's completions; groups may lie on several."""
        here = slice(self.accelerator.process_index * len(reward_B), (self.accelerator.process_index + 1) * len(reward_B))
        device = self.accelerator.device
        reward_B, group_B = self.accelerator.gather(reward_B.to(device)), self.accelerator.gather(group_B.to(device))
        return advantages(reward_B, group_B, self.args.advantage)[here]

    def _record_rewards(self, reward_BF: Tensor, generation: Generation) -> None:
        total_B = self.rewards.total(reward_BF)
        lengths = [len(tokens) for tokens in generation.tokens]
        self.record("unscored", total_B.isnan().float().mean(), len(total_B))
        self.record("completion_length", sum(lengths) / len(lengths), len(lengths))
        columns = [("reward", total_B), *zip([f"rewards/{name}" for name in self.rewards.names], reward_BF.unbind(1), strict=True)]
        for name, reward_B in columns:
            scored_B = reward_B[~reward_B.isnan()]
            if len(scored_B) > 0:
                self.record(name, scored_B.mean(), len(scored_B))
            if counts := self.rewards.statuses.get(name.removeprefix("rewards/")):
                for status in get_args(Status):
                    self.record(f"{name}/{status}", counts[status] / len(reward_B), len(reward_B))
            if name == "reward" and len(scored_B) > 1:
                self.record("reward_std", scored_B.std(), len(scored_B))


def make_rollout(lm: DiffusionLM, generation: Generation, at: slice) -> Rollout:
    """The canvases of a slice of a generation, padded on the right."""
    assert generation.trace is not None
    traces, tokens, prompts = generation.trace[at], generation.tokens[at], generation.prompts[at]

    def padded(rows: list[list[int]], fill: int) -> Tensor:
        return pad_rows(rows, fill).to(lm.device)

    prompt_BT = padded([[1] * len(p) + [0] * len(t.canvas) for p, t in zip(prompts, traces, strict=True)], 0).bool()
    completion = [[0] * len(p) + [1] * len(c) + [0] * (len(t.canvas) - len(c)) for p, c, t in zip(prompts, tokens, traces, strict=True)]
    return Rollout(
        ids_BT=padded([p + t.canvas for p, t in zip(prompts, traces, strict=True)], lm.pad_token_id),
        documents_BT=padded([[1] * (len(p) + len(t.canvas)) for p, t in zip(prompts, traces, strict=True)], 0),
        prompt_BT=prompt_BT,
        completion_BT=padded(completion, 0).bool(),
        steps_BT=padded([[-1] * len(p) + t.steps for p, t in zip(prompts, traces, strict=True)], -1),
    )


class PromptRows(torch.utils.data.Dataset):
    """Prompts, each repeated for its group: item i is prompt i // group, repeat i % group."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], group: int):
        self.rows, self.group = rows, group

    def __len__(self) -> int:
        return len(self.rows) * self.group

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample_id, repeat = divmod(index, self.group)
        return {**self.rows[sample_id], "sample_id": sample_id, "repeat": repeat}


class GroupSampler(Sampler[int]):
    """Shuffled prompts, cut into steps; each prompt comes with its whole group, each step as often as it is updated on."""

    def __init__(self, count: int, *, prompts: int, group: int, repeats: int, seed: int):
        self.count, self.prompts, self.group, self.repeats, self.seed, self.epoch = count, prompts, group, repeats, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count // self.prompts * self.prompts * self.group * self.repeats

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        for start in range(0, self.count - self.prompts + 1, self.prompts):
            for _ in range(self.repeats):
                for sample_id in order[start : start + self.prompts]:
                    yield from range(sample_id * self.group, (sample_id + 1) * self.group)
