"""Reinforcement learning with group-relative advantages: sample, reward, plan views, take log-probabilities,
update.

Shapes: B completions, M views, T positions, F reward functions. A rollout batch is sampled once, and serves
`num_iterations` optimizer steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from unmask.diffusion.views import Draw, Views
from unmask.errors import ConfigError, TrainingError
from unmask.generation.output import Generation
from unmask.generation.remote.http import RemoteError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import disable_dropout, evaluating
from unmask.rl.config import GRPOConfig
from unmask.rl.methods.base import LossInputs, loss_of
from unmask.rl.methods.masking import MaskingStrategy, find_masking
from unmask.rl.policy_loss import items_of, loss_inputs, policy_views
from unmask.rl.prompts import (
    GroupSampler,
    PromptRow,
    PromptRows,
    completion_key,
    first_prompts,
    prompt_rows,
    prompts_per_step,
)
from unmask.rl.reward_identities import reward_identities
from unmask.rl.rollout import Rollout, check_views, learnable, make_rollout, plan_views
from unmask.rl.rollout_collector import RewardedCompletions, RolloutCollector
from unmask.rl.rollouts_ahead import RolloutsAhead, weights_in_use
from unmask.rl.update_buffer import Update, load_updates, reading_checkpoint, save_updates
from unmask.rl.weighted_rewards import RewardFunction, make_rewards
from unmask.training.checkpoints import steps_done
from unmask.training.hardware_checks import refuse_unknown_arguments
from unmask.training.metrics import measuring
from unmask.training.per_view_backward import Chunk, PerViewBackward
from unmask.training.reference_model import Reference, make_reference
from unmask.training.resume.fingerprints import code_fingerprint
from unmask.training.trainer import DiffusionTrainer


class GRPOTrainer(DiffusionTrainer):
    """Group-relative policy optimisation of any DiffusionLM.

    Args:
        model: the policy; a DiffusionLM, or a path or id to load.
        reward_funcs: functions as TRL calls them (sync or async), or names (of tasks and others, see
            `reward_functions_named`).
        args: the config.
        train_dataset: rows with `prompt`; all other columns go to the reward functions. Of a stream (a
            `datasets.IterableDataset`) as many as `max_steps` needs are read, before training.
        eval_dataset: the same; `evaluate` reports the mean reward of greedy completions.
        masking: a strategy that plans the views instead of the method; None: the one that the config names,
            if any.
        rest: as in DiffusionTrainer.

    Views are planned once per rollout and inner iteration, and the policy, the old policy and the reference
    share them. Dropout is off, so the first update has a ratio of exactly 1. A step holds the activations of
    one view at a time.

    Override `sample` for partial rollouts or inpainted hints, `judge` for the rewards of completions,
    `shaped` for additions to a reward, `token_advantages` for rewards of single steps or tokens. All
    processes call each of these at the same time, even with no rows.
    """

    args: GRPOConfig
    per_view: PerViewBackward

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        reward_funcs: Sequence[RewardFunction | str] | RewardFunction | str = (),
        args: GRPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        *,
        masking: MaskingStrategy | None = None,
        **rest: Any,
    ):
        args = args or GRPOConfig()
        refuse_unknown_arguments(
            args, rest.keys() - inspect.signature(DiffusionTrainer.__init__).parameters.keys()
        )
        rewards = make_rewards(reward_funcs, args)
        self._reward_identities = reward_identities(reward_funcs)
        rows: Any = train_dataset
        if rows is not None and not isinstance(rows, Sized):
            rows = first_prompts(args, rows)
        self.prompts_per_step = prompts_per_step(args, rows)
        super().__init__(model, args, rows, eval_dataset, data_collator=list, **rest)
        for conflict in args.sharding_conflicts() if self.shards_weights else ():
            if conflict.on:
                raise ConfigError(conflict.what, where=conflict.where, remedy=conflict.remedy)
        disable_dropout(self.lm.model)
        self.masking = find_masking(args, masking, exact=self.lm.autoregressive)
        args.refuse_unread(self.masking, exact=self.lm.autoregressive)
        self.method = args.build_method(self.lm.attention)
        self.per_view = PerViewBackward(
            self, separable=self.method.sums_over_views(), temperature=args.log_prob_temperature
        )
        self.reference = self._make_reference() if args.needs_reference else None
        self.collector = RolloutCollector(self, rewards)
        self.ahead = RolloutsAhead(self)
        self.buffer: list[list[Update]] = []
        self._performance_logged = 0

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: GRPOConfig, dataset: Sequence[Mapping[str, Any]], where: str
    ) -> PromptRows:
        return prompt_rows(lm, args, dataset, where)

    def inputs(self) -> dict[str, Any]:
        masking = None if self.masking is None else type(self.masking).__name__
        code = code_fingerprint(self.method)
        return super().inputs() | {
            "reward_funcs": self._reward_identities,
            "masking": masking,
            "method_code": code,
        }

    # Methods to override.

    def judge(self, rows: list[PromptRow], step: int) -> RewardedCompletions:
        """Sample and reward completions of the rows' prompts for this rollout."""
        return self.collector.judge(rows, step)

    def sample(self, rows: Sequence[PromptRow], *, temperature: float, step: int | None) -> Generation:
        """Completions of the rows' prompts; see `RolloutCollector.sample`."""
        return self.collector.sample(rows, temperature=temperature, step=step)

    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor:
        """The rewards [B] with the penalty of nearly truncated completions (`overlong_buffer`)."""
        return self.collector.shaped(total_B, generation)

    def token_advantages(
        self, rewarded: RewardedCompletions, rollout: Rollout, advantage_B: Tensor
    ) -> Tensor:
        """The advantages of the tokens of a micro-batch [B, T], or [B, 1] if all tokens of a completion have
        the same.

        For rewards of single steps (MDPO, He et al. 2025), `rollout.step_BT` has the step that revealed each
        token.

        Args:
            rewarded: the completions and their rewards.
            rollout: their canvases.
            advantage_B: the advantage of each completion in its group.
        """
        return advantage_B[:, None]

    # The loss.

    def micro_loss(self, lm: DiffusionLM, batch: Any) -> Tensor:
        return self.loss_on(batch, self.per_view.log_probs(lm, batch))

    def views_of(self, batch: Update) -> Views:
        return batch.views

    def tokens_of(self, batch: Update) -> tuple[Tensor, Tensor | None]:
        return batch.rollout.ids_BT, None if batch.rollout.one_document else batch.rollout.document_BT

    def loss_on(self, batch: Update, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> Tensor:
        if chunk is None or chunk[1].start == 0:
            learnt_BT = batch.learnt_BT[chunk[0]] if chunk else batch.learnt_BT
            self.numbers.add(lambda count: self.phases.count(trained=int(count)), learnt_BT.sum())
        loss = loss_of(self.method, self.loss_inputs(batch, log_prob_BMT, chunk))
        for name, values in (("clipped", loss.clipped.float()), ("kl", loss.kl), ("ratio", loss.ratio)):
            if len(values) > 0:
                self.record(name, values.mean(), len(values))
        return loss.total

    def loss_inputs(self, batch: Update, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> LossInputs:
        """What the method's loss reads, of all views or of a chunk."""
        inputs = loss_inputs(
            self.method,
            *(
                batch.rollout,
                batch.views,
                log_prob_BMT,
                batch.advantage_BT,
                batch.learnt_BT,
                batch.old_BMT,
                batch.reference_BMT,
            ),
            max_completion_length=self.args.max_completion_length,
            chunk=chunk,
        )
        sampled_BT = inputs.rollout.sampled_BT
        return (
            inputs
            if sampled_BT is None
            else replace(inputs, importance_BT=self._importance(inputs, inputs.rollout))
        )

    def _importance(self, inputs: LossInputs, rollout: Rollout) -> Tensor:
        """The ratio [B, T] of each token's probability under the policy to that under the server that drew
        it, at most `importance_cap` (truncated importance sampling, Yao et al. 2025, "Your efficient RL
        framework secretly brings you off-policy RL training")."""
        assert rollout.sampled_BT is not None
        gap_BT = torch.where(rollout.completion_BT, inputs.of_tokens(inputs.old_BMT) - rollout.sampled_BT, 0)
        weight_BT = gap_BT.exp().clamp_max(self.args.importance_cap or torch.inf)
        tokens = rollout.completion_BT.sum()
        self.record("server_gap", gap_BT.abs().sum() / tokens, tokens)
        self.record("importance", torch.where(rollout.completion_BT, weight_BT, 0).sum() / tokens, tokens)
        return weight_BT.detach()

    def count_items(self, batch: Any) -> Tensor:
        return items_of(self.method, batch.rollout, batch.views, batch.learnt_BT)

    def count_tokens(self, batch: Any) -> Tensor:
        return (batch.rollout.document_BT > 0).sum()

    def count_samples(self, batch: Any) -> int:
        """Completions."""
        return len(batch.rollout.ids_BT)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # on the device already

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A checkpoint also holds the updates left on the current rollout, the weights that the next one is
        sampled from, the rewards of prompts, and a reference that moved."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            return
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if self.state.global_step % self.args.num_iterations:
            save_updates(folder, self.buffer, self.args)
        if self.args.should_save:
            self.collector.history.save(folder)
            self.ahead.save(folder)
            if self.args.reference_sync_steps is not None and self.reference is not None:
                self.reference.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        with reading_checkpoint(folder):
            self.collector.history.load(folder)
            self.ahead.load(folder)
            if self.args.reference_sync_steps is not None and self.reference is not None:
                self.reference.load(folder)
            if (steps_done(folder) or 0) % self.args.num_iterations:
                self.buffer = load_updates(folder, self.args, self.lm.device)

    def get_performance_stats(self) -> dict[str, Any]:
        """Time, memory and tokens per second by phase (`Phases.performance_stats`); `prompt_reuse`: the mean
        fraction of prompts whose cache a group shared; `mask_cache`: statistics of reused masks; `logged`:
        the last line of the log with a reward."""
        logged: dict[str, Any] = next(
            (line for line in reversed(self.state.log_history) if "reward" in line), {}
        )
        own = {
            "prompt_reuse": self.collector.prompt_reuse,
            "mask_cache": self.get_cache_stats(),
            "logged": logged,
        }
        return super().get_performance_stats() | own

    def rewind(self, step: int) -> None:
        super().rewind(step)
        self.collector.completion_log.rewind(step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        every = self.args.performance_log_interval
        if every and "loss" in logs and self.state.global_step // every > self._performance_logged // every:
            self._performance_logged = self.state.global_step
            logs |= self.phases.take()
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Sequence[Any] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The mean reward of greedy completions, one per prompt: `eval_reward`, and `eval_rewards/NAME` of
        each function. Means are over scored completions, NaN if there are none; `eval_unscored` is the
        fraction without a score. The prompts are divided among the processes.

        Raises:
            ConfigError: there is no `eval_dataset`, neither here nor in the trainer.
        """
        prompts = self.held_out_rows(eval_dataset)
        with self.saved_if_it_fails(), measuring(self, metric_key_prefix):
            metrics = {
                f"{metric_key_prefix}_{name}": mean
                for name, mean in self.collector.mean_rewards(prompts).items()
            }
            self.ahead.send()
            self.log(metrics)
            self.control: Any = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics

    @contextmanager
    def saved_if_it_fails(self) -> Iterator[None]:
        """When a server does not answer or a reward function fails, save a checkpoint from which the run can
        be resumed."""
        seen, sums, ahead = dict(self.collector.history.seen), self.means.state(), self.ahead.next
        try:
            yield
        except (RemoteError, TrainingError):
            self.collector.history.seen, self.ahead.next = seen, ahead  # the interrupted rollout is repeated
            self.numbers.drop()
            self.means.load(sums)
            step = self.state.global_step
            exists = (self.args.output_folder / f"checkpoint-{step}").exists()
            # gathered before any process creates it
            if self.is_in_train and step and not any(gather_object([exists])):
                self._save_checkpoint(self.model, None)
                # the first process to exit ends the others while they write
                self.accelerator.wait_for_everyone()
            raise

    # Rollouts.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """All micro-batches of an optimizer step: new completions, or the buffered ones with the next
        views."""
        if not self.over:
            self.phases.begin_step()
        micro_batches = list(islice(epoch_iterator, 0 if self.over else num_batches))
        iteration = self.state.global_step % self.args.num_iterations
        if micro_batches:
            with self.saved_if_it_fails():
                if iteration == 0 or not self.buffer:
                    self.buffer = self.collect_updates(micro_batches)
                self.ahead.ask_next()
        batches = [updates[iteration] for updates in self.buffer[: len(micro_batches)]]
        return batches, self._get_num_items_in_batch(batches, device)

    @torch.no_grad()
    def collect_updates(self, micro_batches: Sequence[Sequence[PromptRow]]) -> list[list[Update]]:
        """Sample and reward completions for one optimizer step, and take the log-probabilities that its
        updates need."""
        step = self.state.global_step // self.args.num_iterations
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        if (sampling := self.ahead.take(step)) is None:
            self.collector.sync_weights(step, self.state.global_step)
            rows = self.collector.choose(rows, step)
        rewarded = self.collector.collect(rows if sampling is None else sampling.rows, step)
        self.collector.require_scores(rewarded)
        self.ahead.ask_next()  # the server samples while this process takes log-probabilities and trains
        self._move_reference()
        generation = rewarded.generation
        advantage_B, kept_B = self.collector.advantages(rewarded)
        self.record("groups_kept", kept_B.float().mean(), len(kept_B))
        self.collector.record_rollout(rewarded, advantage_B)
        kept_B &= ~rewarded.total_B.isnan()
        if self.args.mask_truncated:
            kept_B &= ~self.collector.truncated(generation)
        updates, start = [], 0
        for micro_batch in micro_batches:
            at = slice(start, start + len(micro_batch))
            rollout = make_rollout(
                self.lm, generation, at, self.args.block_size, sampled=self.args.corrects_for_server
            )
            rollout = rollout.whole() if self.args.beyond_eos == "learnt" else rollout
            with self.phases("scoring"):
                older = {} if sampling is None else sampling.weights
                updates.append(
                    self.make_updates(rewarded.select(at), rollout, advantage_B[at], kept_B[at], step, older)
                )
            start = at.stop
        if (stats := self.get_cache_stats())["hits"] + stats["misses"]:
            self.record("masks/reuse_rate", stats["rate"])
        return updates

    def views_for(self, rollout: Rollout, draw: Draw) -> Views:
        """The views of the method (`policy_views`), or of a masking strategy."""
        if self.lm.autoregressive:
            return policy_views(self.lm, self.method, rollout, draw)
        sampled = self.state.global_step // self.args.num_iterations * self.args.num_iterations
        progress = sampled / max(self.state.max_steps, 1)

        def plan(rollout: Rollout) -> Views:
            if self.masking is None:
                return policy_views(self.lm, self.method, rollout, draw)
            return self.masking.plan(rollout, draw, self.args, progress)

        views = plan_views(plan, rollout, str(self.args.beyond_eos))
        check_views(
            views,
            rollout,
            f"plan of {self.args.method if self.masking is None else type(self.masking).__name__}",
        )
        return views

    @property
    def masking_strategy(self) -> MaskingStrategy:
        """The strategy that plans the views instead of the method; without one, a strategy with an empty
        cache."""
        return self.masking or MaskingStrategy()

    def get_cache_stats(self) -> dict[str, float]:
        """The cache statistics of the masking strategy."""
        return self.masking_strategy.get_cache_stats()

    def make_updates(
        self,
        rewarded: RewardedCompletions,
        rollout: Rollout,
        advantage_B: Tensor,
        kept_B: Tensor,
        step: int,
        older: dict[str, Tensor],
    ) -> list[Update]:
        """The updates of a micro-batch of rollout `step`. `older`: the trained weights that it was sampled
        from; {}: the present ones."""
        device = self.lm.device
        keys_B = torch.tensor([completion_key(row, step) for row in rewarded.rows])
        key_B, kept_B, advantage_B = (
            each.to(device, non_blocking=True) for each in (keys_B, kept_B, advantage_B)
        )
        advantage_BT, kept_B1 = (
            self.token_advantages(rewarded, rollout, advantage_B).to(device),
            kept_B[:, None],
        )
        if advantage_BT.shape not in (kept_B1.shape, rollout.ids_BT.shape):
            remedy = f"Give one of shape {list(kept_B1.shape)} or {list(rollout.ids_BT.shape)}"
            raise TrainingError(
                f"returned a tensor of shape {list(advantage_BT.shape)}",
                where="token_advantages",
                remedy=remedy,
            )
        updates: list[Update] = []
        with evaluating(self.lm), self.accelerator.autocast(), self.lockstep():
            for iteration in range(self.args.num_iterations):
                views = self.views_for(rollout, Draw(self.args.seed, key_B, iteration))
                # nothing is drawn: the log-probabilities are the same too
                if updates and views.equals(updates[-1].views):
                    update = replace(updates[-1])
                else:
                    update = Update(
                        rollout, views, advantage_BT, learnable(rollout, views) & kept_B1, None, None
                    )
                if (iteration > 0 or older) and update.old_BMT is None:
                    with weights_in_use(self.lm, older):
                        update.old_BMT = self.per_view.log_probs(self.lm, update)
                if self.reference is not None and update.reference_BMT is None:
                    with self.reference.model_in_use() as lm:
                        update.reference_BMT = self.per_view.log_probs(lm, update)
                updates.append(update)
        return updates

    def _make_reference(self) -> Reference:
        moves = self.args.reference_sync_steps is not None
        return make_reference(self.lm, self.accelerator, copy=moves, path=self.args.reference_model)

    def _move_reference(self) -> None:
        every, step = self.args.reference_sync_steps, self.state.global_step
        if (
            self.reference is not None
            and every is not None
            and step
            and step // every > (step - self.args.num_iterations) // every
        ):
            self.reference.move(self.args.reference_sync_share)

    def _get_train_sampler(self, train_dataset: Any = None) -> GroupSampler:
        return GroupSampler(
            len(train_dataset if train_dataset is not None else self.train_dataset)
            // self.args.num_generations,
            prompts_per_step=self.prompts_per_step,
            group_size=self.args.num_generations,
            repeats=self.args.num_iterations,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )
