"""Reinforcement learning with group-relative advantages: sample, reward, plan views, score, compare.

Shapes: B completions, V views, T positions, F reward functions. A rollout batch is the completions of one optimizer step.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedModel

from unmask.data.chat import encode_prompt
from unmask.data.rows import column, naming
from unmask.diffusion.noise import sequence_key
from unmask.diffusion.views import Draw, Views, all_masked_views
from unmask.errors import ConfigError, DataError, TrainingError
from unmask.generation.sampler import generate
from unmask.generation.trace import Generation
from unmask.methods import Rollout, Scores, get_method
from unmask.methods.base import learnable
from unmask.methods.masking import MaskingStrategy, find_masking
from unmask.models.diffusion_lm import DiffusionLM, disable_dropout, evaluating
from unmask.models.load import first_line
from unmask.objectives.policy import advantages, count_items, kept_groups, overlong_penalty, shares
from unmask.sandbox.outcome import Status
from unmask.training.checkpoints import steps_done
from unmask.training.grpo_config import GRPOConfig
from unmask.training.prompts import Judged, PromptHistory
from unmask.training.reference import Reference
from unmask.training.rewards import RewardFunction, Rewards
from unmask.training.rollouts import GroupSampler, PromptRows, cut_at_end, make_rollout
from unmask.training.viewwise import Piece, ViewwiseTrainer

BUFFER_FILE = "rollouts-{rank}.pt"


@dataclass
class Update:
    """A micro-batch of completions with the views and scores of one inner iteration.

    Attributes:
        advantage_BT: of each completion [B, 1] (or of each token).
        learnt_BT: the tokens that count.
        old_BVT: the scores of the policy that sampled; None: this is the only update, so the policy itself is that.
        reference_BVT: those of the reference, if the policy is held to one.
        fresh: whether the weights are still those that sampled.
    """

    rollout: Rollout
    views: Views
    advantage_BT: Tensor
    learnt_BT: Tensor
    old_BVT: Tensor | None
    reference_BVT: Tensor | None
    fresh: bool


class GRPOTrainer(ViewwiseTrainer):
    """Group-relative policy optimisation of any DiffusionLM.

    Args:
        model: the policy; a DiffusionLM, or a path or id to load.
        reward_funcs: functions as TRL calls them (sync or async), or names (of tasks and others, see `find_rewards`).
        args: the config.
        train_dataset: rows with `prompt`; all other columns go to the reward functions.
        eval_dataset: the same; `evaluate` reports the mean reward of greedy completions.
        masking: a strategy that plans the views in the method's place; None: the one that the config names, if any.
        rest: as in DiffusionTrainer.

    Masks are planned once per rollout and inner iteration, and the same masks score the policy, the old policy and the
    reference. Dropout is off, so the first update has a ratio of exactly 1. Of several views one is gone through at a time.
    """

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        reward_funcs: Sequence[RewardFunction | str] | RewardFunction | str,
        args: GRPOConfig | None = None,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        *,
        masking: MaskingStrategy | None = None,
        **rest: Any,
    ):
        args = args or GRPOConfig()
        self.rewards = Rewards(
            reward_funcs, args.reward_weights, args.reward_workers, seconds=args.reward_timeout, errors=args.reward_errors
        )
        self.method = get_method(args.method)
        self.prompts_per_step = prompts_per_step(args, train_dataset)
        super().__init__(model, args, train_dataset, eval_dataset, data_collator=list, **rest)
        disable_dropout(self.lm.model)
        self.masking = find_masking(args, masking, exact=self.lm.autoregressive)
        self.temperature = args.temperature
        self.separable = self.method.separable and args.ratio == "token"
        self.reference = Reference(self.lm, moves=args.reference_sync_steps is not None) if args.needs_reference else None
        self.buffer: list[list[Update]] = []
        self.history = PromptHistory(0 if train_dataset is None else len(train_dataset), args.curriculum)

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: GRPOConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Any:
        for index, prompt in enumerate(column(dataset, "prompt", where)):
            with naming(f"{where}, row {index}"):
                tokens = len(encode_prompt(lm.tokenizer, prompt)) + args.max_completion_length
            if tokens > (lm.context_length or tokens):
                what = f"{tokens} tokens with the completion, but the model's context is {lm.context_length}"
                raise DataError(what, where=f"{where}, row {index}", remedy="Lower max_completion_length or drop the row")
        return PromptRows(dataset, args.num_generations)

    # The loss.

    def views_of(self, batch: Update) -> Views:
        return batch.views

    def tokens_of(self, batch: Update) -> tuple[Tensor, Tensor]:
        return batch.rollout.ids_BT, batch.rollout.documents_BT

    def known_scores(self, batch: Update) -> Tensor | None:
        return batch.old_BVT if batch.fresh else None

    def loss_on(self, batch: Update, log_prob_BVT: Tensor, piece: Piece | None = None) -> Tensor:
        loss = self.method.loss(self.scores_of(batch, log_prob_BVT, piece), self.args)
        for name, values in (("clipped", loss.clipped.float()), ("kl", loss.kl), ("ratio", loss.ratio)):
            if len(values) > 0:
                self.record(name, values.mean(), len(values))
        return loss.total

    def scores_of(self, batch: Update, log_prob_BVT: Tensor, piece: Piece | None = None) -> Scores:
        """What the method's loss reads, of all views or of a piece."""
        rows, at = piece or (slice(None), slice(None))
        rollout, views = batch.rollout, batch.views
        share_BT = shares(batch.learnt_BT, self.args.aggregation, rollout.steps_BT.clamp_min(0), self.args.max_completion_length)[rows]
        if piece is not None:
            rollout, views = rollout.rows(rows), views.piece(rows, at)
            share_BT = share_BT * views.scored_BVT.any(1)
        old_BVT = log_prob_BVT.detach() if batch.old_BVT is None else batch.old_BVT[rows, at]
        reference_BVT = None if batch.reference_BVT is None else batch.reference_BVT[rows, at]
        if self.args.beta and self.args.kl_to == "old":
            reference_BVT = old_BVT
        return Scores(log_prob_BVT, old_BVT, reference_BVT, rollout, views, batch.advantage_BT[rows], share_BT)

    def count_items(self, batch: Any) -> Tensor:
        return count_items(batch.learnt_BT, self.args.aggregation)

    def count_tokens(self, batch: Any) -> Tensor:
        return (batch.rollout.documents_BT > 0).sum()

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # made on the device

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A checkpoint also holds the completions that are still to be learnt from, what prompts gave, and a reference that moved."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            return
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if self.state.global_step % self.args.num_iterations:
            torch.save(self.buffer, folder / BUFFER_FILE.format(rank=self.args.process_index))
        if self.args.should_save:
            self.history.save(folder)
            if self.args.reference_sync_steps is not None and self.reference is not None:
                self.reference.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        with telling(folder):
            self.history.load(folder)
            if self.args.reference_sync_steps is not None and self.reference is not None:
                self.reference.load(folder)
            if (steps_done(folder) or 0) % self.args.num_iterations:
                path = folder / BUFFER_FILE.format(rank=self.args.process_index)
                if not zipfile.is_zipfile(path):
                    raise OSError(f"{path.name} is missing or torn")
                with torch.serialization.safe_globals([Update, Rollout, Views]):
                    self.buffer = torch.load(path, map_location=self.lm.device)

    # Rollouts.

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Tensor | None]:
        """All micro-batches of an optimizer step: new completions, or the buffered ones with the next masks."""
        micro_batches = [rows for _, rows in zip(range(0 if self.over else num_batches), epoch_iterator, strict=False)]
        iteration = self.state.global_step % self.args.num_iterations
        if micro_batches and (iteration == 0 or not self.buffer):
            self.model.train()  # so that the rewards count as training metrics
            self._move_reference()
            self.buffer = self.experience(micro_batches)
        batches = [updates[iteration] for updates in self.buffer[: len(micro_batches)]]
        return batches, self._get_num_items_in_batch(batches, device)

    @torch.no_grad()
    def experience(self, micro_batches: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Update]]:
        """Sample, reward and score the completions of one optimizer step."""
        step = self.state.global_step // self.args.num_iterations
        judged = self.collect([row for micro_batch in micro_batches for row in micro_batch], step)
        generation = judged.generation
        self._record_rewards(judged)
        advantage_B, kept_B = self._advantages(judged.total_B, judged.group_B)
        self.record("groups_kept", kept_B.float().mean(), len(kept_B))
        kept_B &= ~judged.total_B.isnan()
        if self.args.mask_truncated:
            kept_B &= ~self.truncated(generation)
        made, start = [], 0
        for micro_batch in micro_batches:
            at = slice(start, start + len(micro_batch))
            rollout = make_rollout(self.lm, generation, at, self.args.block_size)
            made.append(self._score_rollout(judged.rows[at], rollout, advantage_B[at], kept_B[at], step))
            start = at.stop
        if (stats := self.get_cache_stats())["hits"] + stats["misses"]:
            self.record("masks/reuse_rate", stats["rate"])
        return made

    def collect(self, rows: list[Mapping[str, Any]], step: int) -> Judged:
        """Completions of the rows' prompts (of a curriculum, of its own), rewarded; where a group teaches nothing those of another
        prompt, as often as `dynamic_sampling` says."""
        group = self.args.num_generations
        used: list[int] = []
        if self.args.curriculum is not None:
            rows = self._other_rows(len(rows) // group, step, used)
        used += [row["sample_id"] for row in rows]
        judged = self.judge(rows, step)
        self._note(judged)
        for number in range(self.args.dynamic_sampling):
            _, kept_B = self._advantages(judged.total_B, judged.group_B)
            dull = [at for at in range(0, len(rows), group) if not kept_B[at]]
            others = self._other_rows(len(dull), step + (number + 1) * 2**20, used)
            self.record("groups_replaced", len(others) / len(rows))
            if not any(gather_object([len(others)])):
                break
            made = self.judge(others, step) if others else None
            self._note(made)
            if made is not None:
                judged = judged.replaced([at + repeat for at in dull for repeat in range(group)][: len(others)], made)
        return judged

    def judge(self, rows: list[Mapping[str, Any]], step: int) -> Judged:
        """Sample and reward."""
        generation = self.sample(rows, temperature=self.args.temperature, seed=self.args.seed + step)
        scored = self.rewards(rows, generation.texts, generation.tokens, self.state)
        self._record_calls(len(rows))
        return Judged(rows, generation, scored.value_BF, self.shaped(self.rewards.total(scored), generation))

    def _note(self, judged: Judged | None) -> None:
        """Let every process know what every process' prompts gave."""
        mine = [] if judged is None else list(zip(judged.group_B.tolist(), judged.total_B.tolist(), strict=True))
        for prompt, reward in gather_object(mine):
            self.history.add(prompt, reward)

    def _other_rows(self, prompts: int, step: int, used: list[int]) -> list[Mapping[str, Any]]:
        """The groups of so many prompts that are not used yet, on no process; these are then used."""
        wanted = gather_object([prompts])
        used[:] = sorted(set(gather_object(used)))
        chosen = self.history.choose(sum(wanted), self.args.seed, step, exclude=used)
        used += chosen
        first = sum(wanted[: self.accelerator.process_index])
        group = self.args.num_generations
        return [self.train_dataset[prompt * group + repeat] for prompt in chosen[first : first + prompts] for repeat in range(group)]

    def sample(self, rows: Sequence[Mapping[str, Any]], *, temperature: float, seed: int) -> Generation:
        """Completions of the rows' prompts. A completion depends on (seed, sample, repeat) alone."""
        keys = [sequence_key([row["sample_id"]], row["repeat"]) for row in rows]
        config = self.args.sampler(temperature=temperature, seed=seed)
        return cut_at_end(self.lm, generate(self.lm, [row["prompt"] for row in rows], config, keys))

    def truncated(self, generation: Generation) -> Tensor:
        """Which completions [B] fill their canvas without an end."""
        return torch.tensor([not tokens or tokens[-1] != self.lm.eos_token_id for tokens in generation.tokens])

    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor:
        """The rewards, less for what is nearly too long."""
        if self.args.overlong_buffer is None:
            return total_B
        limit = self.args.max_completion_length
        length_B = torch.tensor([float(len(tokens)) for tokens in generation.tokens]) + self.truncated(generation)
        return total_B + overlong_penalty(length_B, limit, self.args.overlong_buffer)

    def views_for(self, rollout: Rollout, draw: Draw) -> Views:
        """The views of the method, or of a masking strategy. Of a causal model all are one: what it predicts does not depend on what is
        hidden, so that its likelihood is exact."""
        if self.lm.autoregressive:
            return all_masked_views(rollout.completion_BT)
        if self.masking is None:
            return self.method.plan(rollout, draw, self.args)
        sampled = self.state.global_step // self.args.num_iterations * self.args.num_iterations
        return self.masking.plan(rollout, draw, self.args, sampled / max(self.state.max_steps, 1))

    def get_cache_stats(self) -> dict[str, float]:
        """How often the masking strategy reuses what it made: see there."""
        return (self.masking or MaskingStrategy()).get_cache_stats()

    def _score_rollout(
        self, rows: Sequence[Mapping[str, Any]], rollout: Rollout, advantage_B: Tensor, kept_B: Tensor, step: int
    ) -> list[Update]:
        device = self.lm.device
        key_B = torch.tensor([sequence_key([row["sample_id"], step], row["repeat"]) for row in rows], device=device)
        advantage_B1, kept_B1 = advantage_B[:, None].to(device), kept_B[:, None].to(device)
        updates: list[Update] = []
        with evaluating(self.lm), self.accelerator.autocast():
            for iteration in range(self.args.num_iterations):
                views = self.views_for(rollout, Draw(self.args.seed, key_B, iteration))
                update = Update(rollout, views, advantage_B1, learnable(rollout, views) & kept_B1, None, None, fresh=iteration == 0)
                if self.args.num_iterations > 1:  # of a single update the policy itself is the old policy
                    update.old_BVT = self.score_views(self.lm, update)
                if self.reference is not None:
                    with self.reference.scoring() as lm:
                        update.reference_BVT = self.score_views(lm, update)
                updates.append(update)
        return updates

    def _move_reference(self) -> None:
        every, step = self.args.reference_sync_steps, self.state.global_step
        if self.reference is not None and every is not None and step and step // every > (step - self.args.num_iterations) // every:
            self.reference.move(self.args.reference_sync_share)

    def _advantages(self, reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages of this process's completions, and which groups teach; groups may lie on several processes."""
        here = slice(self.accelerator.process_index * len(reward_B), (self.accelerator.process_index + 1) * len(reward_B))
        device = self.accelerator.device
        reward_B, group_B = (self.accelerator.gather(part.to(device)).cpu() for part in (reward_B, group_B))
        advantage_B = advantages(reward_B, group_B, self.args.advantage, temperature=self.args.softmax_temperature)
        low, high = self.args.difficulty or (-torch.inf, torch.inf)
        kept_B = kept_groups(reward_B, group_B, low, high, spread=self.args.drop_equal_groups)
        return advantage_B[here], kept_B[here]

    def evaluate(
        self, eval_dataset: Sequence[Any] | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean reward of greedy completions, one per prompt."""
        prompts: Any = self.eval_dataset if eval_dataset is None else self._checked_rows(self.lm, self.args, eval_dataset, "eval_dataset")
        rows = [prompts[i] for i in range(0, len(prompts), self.args.num_generations)]
        generation = self.sample(rows, temperature=0.0, seed=self.args.seed)
        total_B = self.rewards.total(self.rewards(rows, generation.texts, generation.tokens, self.state))
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

    def _record_calls(self, count: int) -> None:
        """What came of the last calls of the reward functions."""
        for name in self.rewards.names:
            for status in get_args(Status) if name in self.rewards.statuses else ():
                self.record(f"rewards/{name}/{status}", self.rewards.statuses[name][status] / count, count)
            for kind, number in self.rewards.failures[name].items():
                self.record(f"rewards/{name}/{kind}", number / count, count)
        for metric, values in self.rewards.logged.items():
            for value in values:
                self.record(metric, value)

    def _record_rewards(self, judged: Judged) -> None:
        generation, total_B, count = judged.generation, judged.total_B, len(judged.rows)
        lengths = [len(tokens) for tokens in generation.tokens]
        self.record("unscored", total_B.isnan().float().mean(), count)
        self.record("truncated", self.truncated(generation).float().mean(), count)
        self.record("completion_length", sum(lengths) / count, count)
        columns = [("reward", total_B), *zip([f"rewards/{name}" for name in self.rewards.names], judged.reward_BF.unbind(1), strict=True)]
        for name, reward_B in columns:
            scored_B = reward_B[~reward_B.isnan()]
            if len(scored_B) > 0:
                self.record(name, scored_B.mean(), len(scored_B))
            if name == "reward" and len(scored_B) > 1:
                self.record("reward_std", scored_B.std(), len(scored_B))


@contextmanager
def telling(folder: Path) -> Iterator[None]:
    """Errors about a checkpoint's files then say what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        what = f"cannot be gone on from: {first_line(error)}"
        raise TrainingError(what, where=str(folder), remedy="Delete this checkpoint, or use the settings it was made with") from error


def prompts_per_step(args: GRPOConfig, dataset: Sequence[Any] | None) -> int:
    """Prompts of an optimizer step, over all ranks.

    Raises:
        ConfigError: a step cannot hold whole groups, or the prompts do not make one step.
    """
    completions = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if completions % args.num_generations:
        what = f"{completions} completions a step are not a multiple of {args.num_generations}"
        remedy = "Change per_device_train_batch_size or gradient_accumulation_steps"
        raise ConfigError(what, where="num_generations", remedy=remedy)
    chooses = args.curriculum is not None or args.dynamic_sampling
    if chooses and args.world_size > 1 and args.train_batch_size % args.num_generations:
        what = f"{args.train_batch_size} completions a device do not hold whole groups of {args.num_generations}"
        raise ConfigError(what, where="per_device_train_batch_size", remedy="Use a multiple, or leave out curriculum and dynamic_sampling")
    prompts = completions // args.num_generations
    if dataset is not None and len(dataset) < prompts:
        what = f"{len(dataset)} prompts, but a step needs {prompts}"
        raise ConfigError(what, where="train_dataset", remedy="Give more prompts, or make the step smaller")
    return prompts
