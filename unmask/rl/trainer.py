"""Reinforcement learning with group-relative advantages: sample, reward, plan views, take log-probabilities,
update.

Shapes: B completions, M views, T positions, F reward functions. A rollout batch is sampled once, and serves
`num_iterations` optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from unmask.diffusion.log_probs import entropies, view_log_probs
from unmask.diffusion.mixing import RandomTokens, Replaced
from unmask.diffusion.views import CanvasSteps, Drawn, MaskRNG, Views
from unmask.errors import TrainingError
from unmask.generation.output import Generation
from unmask.generation.remote.http import RemoteError
from unmask.generation.rollout import Rollout, cut_at_end, make_rollout
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import disable_dropout, evaluating
from unmask.rl.advantages import advantages, equal_rewards, kept_groups, overlong_penalty
from unmask.rl.completion_log import CompletionLog
from unmask.rl.config import GRPOConfig
from unmask.rl.methods.base import LossInputs, loss_of
from unmask.rl.methods.masking import MaskingStrategy, find_masking
from unmask.rl.policy_loss import items_of, loss_inputs, policy_views
from unmask.rl.prompts import (
    GroupSampler,
    PromptHistory,
    PromptRow,
    PromptRows,
    completion_key,
    first_prompts,
    prompt_rows,
    prompts_per_step,
)
from unmask.rl.rewarded import RewardedCompletions, mean_rewards, reward_metrics, rollout_metrics, truncated
from unmask.rl.rollout_source import RolloutSource, weights_in_use
from unmask.rl.updates import Update, check_views, learnable, plan_views
from unmask.rl.weighted_rewards import (
    RewardFunctions,
    RewardTokenizers,
    make_rewards,
    reward_identities,
)
from unmask.training.arguments import refuse_given
from unmask.training.distributed import failing_together
from unmask.training.metrics import ProgressTarget
from unmask.training.per_view_backward import Chunk, PerViewBackward
from unmask.training.reference_model import Reference, make_reference
from unmask.training.run.checkpoint import steps_done
from unmask.training.run.fingerprints import code_fingerprint
from unmask.training.step_timer import Phases
from unmask.training.trainer import (
    DiffusionTrainer,
    HeldOut,
    Model,
    OptimizerClass,
    Optimizers,
    Tokenizer,
)

if TYPE_CHECKING:
    import peft
    from transformers import BitsAndBytesConfig

UPDATES_FILE = "rollouts-{rank}.pt"


class GRPOTrainer(DiffusionTrainer):
    """Group-relative policy optimization of any DiffusionLM.

    Args:
        model: the policy, as in DiffusionTrainer.
        reward_funcs: functions as TRL calls them (sync or async), names (of tasks and others, see
            `reward_functions_named`), or reward models: sequence classifiers of one output, in memory or by
            their path or id.
        args: the config.
        train_dataset: rows with `prompt`; all other columns go to the reward functions. Of a stream (a
            `datasets.IterableDataset`) as many as `max_steps` needs are read, before training.
        eval_dataset: the same; `evaluate` reports the mean reward of greedy completions.
        reward_processing_classes: the tokenizer of each reward model, or of a single one; None: its own.
        tools, rollout_func, environment_factory: refused; see below.
        masking: a strategy that plans the views instead of the method; None: the one that the config names,
            if any.
        rest: as in DiffusionTrainer; in the order of TRL.

    Views are planned once per rollout and inner iteration, and the policy, the old policy and the reference
    share them. Dropout is off, so the first update has a ratio of exactly 1. A step holds the activations of
    one view at a time.

    Override `generate_and_score` for other rollouts and rewards, `sample` for partial rollouts or inpainted
    hints, `shaped` for additions to a reward, `token_advantages` for rewards of single steps or tokens. All
    processes call each of these at the same time, even with no rows.
    """

    config_class = GRPOConfig
    args: GRPOConfig
    per_view: PerViewBackward
    train_dataset: Any

    def __init__(
        self,
        model: Model,
        reward_funcs: RewardFunctions | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: HeldOut | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: RewardTokenizers = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: peft.PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
        *,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        masking: MaskingStrategy | None = None,
        progress: ProgressTarget | None = None,
        phases: Phases | None = None,
    ):
        refuse_given(
            {"rollout_func": rollout_func}, "is never called", "Override sample, or generate_and_score"
        )
        turns = {"tools": tools, "environment_factory": environment_factory}
        refuse_given(turns, "a rollout is one completion of a prompt, which calls no tools", "Leave it out")
        args = self.checked_args(args, model)
        self.rewards = make_rewards(reward_funcs, args, reward_processing_classes)
        self._reward_identities = reward_identities(reward_funcs)
        rows: Any = train_dataset
        if rows is not None and not isinstance(rows, Sized):
            rows = first_prompts(args, rows)
        self.prompts_per_step = prompts_per_step(args, rows)
        super().__init__(
            model,
            args,
            list,
            rows,
            eval_dataset,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            progress=progress,
            phases=phases,
        )
        if self.shards_weights:
            args.refuse_sharded_weights()
        disable_dropout(self.lm.model)
        self.masking = find_masking(args, masking, exact=self.lm.autoregressive, noise=self.lm.noise)
        args.refuse_unread(self.masking, exact=self.lm.autoregressive)
        if self.lm.canvas:
            args.refuse_for_canvas_models()
        self.method = args.build_method(self.lm.attention)
        self.per_view = PerViewBackward(
            self, separable=self.method.sums_over_views(), temperature=args.log_prob_temperature
        )
        self.reference: Reference | None = None
        if args.needs_reference:
            self.reference = make_reference(
                self.lm, self.accelerator, copy=args.sync_ref_model, other=args.ref_model
            )
        self.source = RolloutSource(self.lm, args, self.phases)
        self.history = PromptHistory(
            len(self.train_dataset.rows) if self.train_dataset is not None else 0, args.curriculum
        )
        self.completion_log = CompletionLog(args.output_folder, rows=args.num_completions_to_print)
        self.buffer: list[list[Update]] = []
        self._reused, self._reusable = 0.0, 0  # prompts whose cache a group shared, and all prompts
        self._unscored = 0  # rollouts in a row without any score
        self._performance_logged = 0

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: GRPOConfig, dataset: Sequence[Mapping[str, Any]], where: str
    ) -> PromptRows:
        return prompt_rows(lm, args, dataset, where)

    def inputs(self) -> dict[str, Any]:
        return super().inputs() | {
            "reward_funcs": self._reward_identities,
            "masking": None if self.masking is None else type(self.masking).__name__,
            "method_code": code_fingerprint(self.method),
        }

    # One update: generate, reward, advantages, plan, log-probabilities. The loss and the step follow.

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
                self._ask_next()
        batches = [updates[iteration] for updates in self.buffer[: len(micro_batches)]]
        if self.args.top_entropy_quantile < 1:
            batches = self.uncertain(batches)
        return batches, self._get_num_items_in_batch(batches, device)

    @torch.no_grad()
    def uncertain(self, batches: list[Update]) -> list[Update]:
        """The updates, without an advantage of tokens whose predictions had a low entropy: the fraction
        `top_entropy_quantile` of the step's tokens keeps it (Wang et al. 2025, "Beyond the 80/20 rule")."""
        how: Any = {"temperature": self.args.log_prob_temperature, "measure": entropies}
        entropy_BTs = []
        with evaluating(self.lm), self.accelerator.autocast(), self.lockstep():
            for batch in batches:
                rows = self.per_view.rows_per_pass(batch)
                value_BMT = view_log_probs(self.lm, *self.tokens_of(batch), batch.views, chunk=rows, **how)
                entropy_BTs.append(value_BMT.sum(1) / batch.views.target_BMT.sum(1).clamp_min(1))
        pairs = [*zip(entropy_BTs, batches, strict=True)]
        mine: list[float] = []
        for entropy_BT, batch in pairs:
            mine += entropy_BT[batch.loss_mask_BT & batch.views.target_BMT.any(1)].tolist()
        if not (every := gather_object(mine)):
            return batches
        lowest = torch.tensor(every, dtype=torch.float64).quantile(1 - self.args.top_entropy_quantile).item()
        return [
            replace(batch, advantage_BT=torch.where(entropy_BT >= lowest, batch.advantage_BT, 0))
            for entropy_BT, batch in pairs
        ]

    @torch.no_grad()
    def collect_updates(self, micro_batches: Sequence[Sequence[PromptRow]]) -> list[list[Update]]:
        """The updates of a rollout, by micro-batch: sample and reward completions, compare them within their
        groups, plan the views, and take the log-probabilities that the updates need."""
        number = self.state.global_step // self.args.num_iterations
        ahead = self.source.take(number, self._prompts_of)
        if self.args.max_staleness:
            self.record("staleness", 0 if ahead is None else self.state.global_step - ahead.step)
        if ahead is None:
            self.source.sync_weights(number, self.state.global_step)
            rows = self._choose([row for micro_batch in micro_batches for row in micro_batch], number)
        else:
            rows = ahead.rows
        rewarded = self._sampled(rows, number)
        rewarded = self._with_signal(rewarded, number)
        self._require_scores(rewarded)
        self._ask_next()  # the server samples while this process takes log-probabilities and trains
        self._move_reference()
        advantage_B, kept_B = self.group_advantages(rewarded)
        self._log_rollout(rewarded, advantage_B, kept_B)
        kept_B &= ~rewarded.total_B.isnan()
        if self.args.mask_truncated_completions:
            kept_B &= ~truncated(rewarded.generation, self.lm.eos_token_ids)
        updates, start, older = [], 0, {} if ahead is None else ahead.weights
        for micro_batch in micro_batches:
            at = slice(start, start + len(micro_batch))
            rollout = make_rollout(
                self.lm, rewarded.generation, at, self.args.block_size, sampled=self.args.corrects_for_server
            )
            rollout = rollout.whole() if self.args.after_eos == "train" else rollout
            part = rewarded.select(at)
            with self.phases("scoring"):
                updates.append(self.make_updates(part, rollout, advantage_B[at], kept_B[at], number, older))
            start = at.stop
        if (stats := self.get_cache_stats())["hits"] + stats["misses"]:
            self.record("masks/reuse_rate", stats["rate"])
        return updates

    def _sampled(self, rows: list[PromptRow], number: int) -> RewardedCompletions:
        """Rewarded completions with shaped rewards, which the history of the prompts records."""
        rewarded = self.generate_and_score(rows, temperature=self.args.temperature, step=number)
        rewarded = replace(rewarded, total_B=self.shaped(rewarded.total_B, rewarded.generation))
        for prompt, reward in gather_object(
            list(zip(rewarded.prompt_B.tolist(), rewarded.total_B.tolist(), strict=True))
        ):
            self.history.add(prompt, reward)  # the same on every process
        return rewarded

    def generate_and_score(
        self, rows: list[PromptRow], *, temperature: float, step: int | None
    ) -> RewardedCompletions:
        """Completions of the rows' prompts and their rewards, in training and in evaluations. Arguments as in
        `sample`."""
        generation = self.sample(rows, temperature=temperature, step=step)
        with failing_together("rollout"), self.phases("reward"):
            if not rows:
                no_rewards = torch.zeros(0, len(self.rewards.names))
                return RewardedCompletions(rows, generation, no_rewards, torch.zeros(0))
            columns = [row.columns for row in rows]
            result = self.rewards(columns, generation.texts, generation.tokens, self.state)
            for metric in reward_metrics(result):
                self.record(*metric)
            return RewardedCompletions(rows, generation, result.reward_BF, result.total_B, result.extras)

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
        with failing_together("rollout"), self.phases("generation"), self.lockstep():
            if rows:
                generation = self.source.generate(rows, temperature=temperature, step=step)
        self.phases.count(generated=sum(map(len, generation.tokens)))
        if generation.prompt_reuse is not None:
            self.record("prefix/reuse_rate", generation.prompt_reuse, len(rows))
            if step is not None:
                self._reused += generation.prompt_reuse * len(rows)
                self._reusable += len(rows)
        return cut_at_end(self.lm, generation)

    def shaped(self, total_B: Tensor, generation: Generation) -> Tensor:
        """The rewards [B] with the penalty of nearly truncated completions (`overlong_buffer`)."""
        if self.args.overlong_buffer is None:
            return total_B
        length_B = torch.tensor([float(len(tokens)) for tokens in generation.tokens])
        length_B = length_B + truncated(generation, self.lm.eos_token_ids)
        return total_B + overlong_penalty(
            length_B, self.args.max_completion_length, self.args.overlong_buffer
        )

    def _with_signal(self, rewarded: RewardedCompletions, step: int) -> RewardedCompletions:
        """The completions, in which groups without a learning signal are replaced by those of other prompts,
        at most `max_resample_rounds` times."""
        group, rows = self.args.num_generations, rewarded.rows
        used = [row.sample_id for row in rows]
        for attempt in range(self.args.max_resample_rounds):
            _, kept_B = self.group_advantages(rewarded)
            dropped = [start for start in range(0, len(rows), group) if not kept_B[start]]
            others = self._other_rows(len(dropped), step + (attempt + 1) * 2**20, used)
            self.record("groups_replaced", len(others) / len(rows))
            if not any(gather_object([len(others)])):
                break
            replaced = [start + repeat for start in dropped for repeat in range(group)][: len(others)]
            rewarded = rewarded.replaced(replaced, self._sampled(others, step))
        return rewarded

    def _require_scores(self, rewarded: RewardedCompletions) -> None:
        """TrainingError after `max_unscored_rollouts` rollouts in a row in which no completion on any process
        has a reward."""
        scored = any(gather_object([not all(map(math.isnan, rewarded.total_B.tolist()))]))
        self._unscored = 0 if scored else self._unscored + 1
        if self._unscored and self._unscored == self.args.max_unscored_rollouts:
            raise TrainingError(
                f"no completion of the last {self._unscored} rollouts has a reward",
                where="rewards",
                remedy="See the warnings about reward functions, fix them, and go on with --resume; or set "
                "training.max_unscored_rollouts",
            )

    def group_advantages(self, rewarded: RewardedCompletions) -> tuple[Tensor, Tensor]:
        """The advantages [B] of this process's completions, and which belong to groups that are trained on.
        A group may lie on several processes."""
        args, accelerator, count = self.args, self.accelerator, len(rewarded.rows)
        difficulty_B = rewarded.total_B
        if (name := args.difficulty_reward) is not None:
            difficulty_B = torch.where(
                difficulty_B.isnan(), torch.nan, rewarded.reward_BF[:, self.rewards.names.index(name)]
            )
        reward_B, difficulty_B, group_B = (
            accelerator.gather(part.to(accelerator.device)).cpu()
            for part in (rewarded.total_B, difficulty_B, rewarded.prompt_B)
        )
        scaling: Any = args.scale_rewards or "none"
        advantage_B = advantages(reward_B, group_B, scaling, temperature=args.softmax_temperature)
        low, high = args.difficulty or (-torch.inf, torch.inf)
        kept_B = kept_groups(difficulty_B, group_B, low, high, spread=False)
        if args.filter_zero_std_groups:
            kept_B &= ~equal_rewards(reward_B, group_B)
        mine = slice(accelerator.process_index * count, (accelerator.process_index + 1) * count)
        return advantage_B[mine], kept_B[mine]

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
        advantage_BT = self.token_advantages(rewarded, rollout, advantage_B).to(device)
        kept_B1 = kept_B[:, None]
        if advantage_BT.shape not in (kept_B1.shape, rollout.ids_BT.shape):
            raise TrainingError(
                f"returned a tensor of shape {list(advantage_BT.shape)}",
                where="token_advantages",
                remedy=f"Give one of shape {list(kept_B1.shape)} or {list(rollout.ids_BT.shape)}",
            )
        updates: list[Update] = []
        with evaluating(self.lm), self.accelerator.autocast(), self.lockstep():
            for iteration in range(self.args.num_iterations):
                views = self.views_for(rollout, MaskRNG(self.args.seed, key_B, iteration))
                # nothing is drawn: the log-probabilities are the same too
                if updates and views.equals(updates[-1].views):
                    update = replace(updates[-1])
                else:
                    update = Update(rollout, views, advantage_BT, learnable(rollout, views) & kept_B1)
                if (iteration > 0 or older) and update.old_BMT is None:
                    with weights_in_use(self.lm, older):
                        update.old_BMT = self.per_view.log_probs(self.lm, update)
                if self.reference is not None and update.reference_BMT is None:
                    with self.reference.model_in_use() as lm:
                        update.reference_BMT = self.per_view.log_probs(lm, update)
                updates.append(update)
        return updates

    def views_for(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """The views of the method (`policy_views`), or of a masking strategy."""
        sampled = self.state.global_step // self.args.num_iterations * self.args.num_iterations
        progress = sampled / max(self.state.max_steps, 1)

        def plan(rollout: Rollout) -> Views:
            if self.masking is None:
                return policy_views(self.lm, self.method, rollout, draw)
            return self.masking.plan(rollout, draw, self.args, progress)

        views = plan_views(plan, rollout, str(self.args.after_eos))
        planner = self.args.method if self.masking is None else type(self.masking).__name__
        check_views(views, rollout, f"plan of {planner}")
        return views

    # The loss.

    def micro_loss(self, lm: DiffusionLM, batch: Any) -> Tensor:
        return self.loss_on(batch, self.per_view.log_probs(lm, batch))

    def views_of(self, batch: Update) -> Views:
        return batch.views

    def tokens_of(self, batch: Update) -> tuple[Tensor, Tensor | None]:
        return batch.rollout.ids_BT, None if batch.rollout.one_document else batch.rollout.document_BT

    def loss_on(self, batch: Update, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> Tensor:
        if chunk is None or chunk[1].start == 0:
            loss_mask_BT = batch.loss_mask_BT[chunk[0]] if chunk else batch.loss_mask_BT
            self.numbers.add(lambda count: self.phases.count(trained=int(count)), loss_mask_BT.sum())
        loss = loss_of(self.method, self.loss_inputs(batch, log_prob_BMT, chunk))
        for name, values in (("clipped", loss.clipped.float()), ("kl", loss.kl), ("ratio", loss.ratio)):
            if len(values) > 0:
                self.record(name, values.mean(), len(values))
        return loss.total

    def loss_inputs(self, batch: Update, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> LossInputs:
        """What the method's loss reads, of all views or of a chunk."""
        inputs = loss_inputs(self.method, batch, log_prob_BMT, self.args.max_completion_length, chunk)
        if (sampled_BT := inputs.rollout.sampled_BT) is None:
            return inputs
        # the ratio of each token's probability under the policy to that under the server that drew it, capped
        # (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you
        # off-policy RL training")
        drawn_BT = inputs.rollout.completion_BT
        gap_BT = torch.where(drawn_BT, inputs.of_tokens(inputs.old_BMT) - sampled_BT, 0)
        weight_BT = gap_BT.exp().clamp_max(self.args.vllm_importance_sampling_cap or torch.inf)
        tokens = drawn_BT.sum()
        self.record("server_gap", gap_BT.abs().sum() / tokens, tokens)
        self.record("importance", torch.where(drawn_BT, weight_BT, 0).sum() / tokens, tokens)
        return replace(inputs, importance_BT=weight_BT.detach())

    def count_items(self, batch: Any) -> Tensor:
        return items_of(self.method, batch)

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
            torch.save(self.buffer, folder / UPDATES_FILE.format(rank=self.args.process_index))
        if self.args.should_save:
            self.history.save(folder)
            self.source.save(folder)
            if self.args.sync_ref_model and self.reference is not None:
                self.reference.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self.history.load(folder)
        self.source.load(folder)
        if self.args.sync_ref_model and self.reference is not None:
            self.reference.load(folder)
        if (steps_done(folder) or 0) % self.args.num_iterations:
            self._load_updates(folder)

    def _load_updates(self, folder: Path) -> None:
        saved = len(list(folder.glob(UPDATES_FILE.format(rank="*"))))
        if saved != self.args.world_size:
            raise TrainingError(
                f"holds the rollouts of {saved} processes, but there are {self.args.world_size}",
                where=str(folder),
                remedy="Resume with as many processes as before, or delete this checkpoint",
            )
        with torch.serialization.safe_globals(
            [Update, Rollout, Views, Replaced, Drawn, CanvasSteps, RandomTokens]
        ):
            path = folder / UPDATES_FILE.format(rank=self.args.process_index)
            self.buffer = torch.load(path, map_location=self.lm.device)
        held = [len(updates[0].loss_mask_BT) for updates in self.buffer]
        wanted = [self.args.train_batch_size] * self.args.gradient_accumulation_steps
        if held != wanted:
            raise TrainingError(
                f"holds micro-batches of {held} completions, not of {wanted}",
                where=str(folder),
                remedy="Resume with the batch sizes of that run, or delete this checkpoint",
            )

    def get_performance_stats(self) -> dict[str, Any]:
        """Time, memory and tokens per second by phase (`Phases.performance_stats`); `prompt_reuse`: the mean
        fraction of prompts whose cache a group shared; `mask_cache`: statistics of reused masks; `logged`:
        the last line of the log with a reward."""
        return super().get_performance_stats() | {
            "prompt_reuse": self._reused / self._reusable if self._reusable else None,
            "mask_cache": self.get_cache_stats(),
            "logged": next((line for line in reversed(self.state.log_history) if "reward" in line), {}),
        }

    def rewind(self, step: int) -> None:
        super().rewind(step)
        self.completion_log.rewind(step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        every = self.args.performance_log_interval
        if every and "loss" in logs and self.state.global_step // every > self._performance_logged // every:
            self._performance_logged = self.state.global_step
            logs |= self.phases.take()
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean reward of one greedy completion per prompt, or of `num_generations_eval` drawn ones:
        `eval_reward`, and `eval_rewards/NAME` of each function. Canvases of random tokens are always drawn,
        with the same random numbers at all steps. Means are over scored completions, NaN if there are none;
        `eval_unscored` is the fraction without a score. The prompts are divided among the processes.

        Raises:
            ConfigError: there is no `eval_dataset`, neither here nor in the trainer.
        """
        with self.saved_if_it_fails():
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def held_out_metrics(self) -> Sequence[str]:
        return [*mean_rewards(torch.zeros(1), self._reward_of(torch.zeros(1, len(self.rewards.names))))]

    def evaluate_rows(self, rows: PromptRows, ignore_keys: Any, metric_key_prefix: str) -> dict[str, float]:
        means = self._mean_rewards(rows)
        metrics = {f"{metric_key_prefix}_{name}": mean for name, mean in means.items()}
        self.source.send_again()
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _mean_rewards(self, prompts: PromptRows) -> dict[str, float]:
        """The mean rewards of an evaluation's completions by metric. The prompts are divided among the
        processes."""
        group, drawn, accelerator = (
            self.args.num_generations,
            self.args.num_generations_eval,
            self.accelerator,
        )
        mine = range(accelerator.process_index, len(prompts) // group, accelerator.num_processes)
        places = [(index, repeat) for index in mine for repeat in range(drawn or 1)]
        with evaluating(self.lm):
            self.source.sync_weights(None, self.state.global_step)
            rows = [prompts[index * group]._replace(repeat=repeat) for index, repeat in places]
            temperature = self.args.temperature if drawn else 0.0
            rewarded = self.generate_and_score(rows, temperature=temperature, step=None)
        everyone = gather_object(
            list(zip(places, rewarded.total_B.tolist(), rewarded.reward_BF.tolist(), strict=True))
        )
        # sorted: sums are the same for any number of processes
        _, totals, values = zip(*sorted(everyone), strict=True)
        return mean_rewards(torch.tensor(totals), self._reward_of(torch.tensor(values)))

    @contextmanager
    def saved_if_it_fails(self) -> Iterator[None]:
        """When a server does not answer or a reward function fails, save a checkpoint from which the run can
        be resumed."""
        seen, sums, ahead = dict(self.history.seen), self.means.state(), self.source.next
        try:
            yield
        except (RemoteError, TrainingError):
            self.history.seen, self.source.next = seen, ahead  # the interrupted rollout is repeated
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

    @property
    def masking_strategy(self) -> MaskingStrategy:
        """The strategy that plans the views instead of the method; without one, a strategy with an empty
        cache."""
        return self.masking or MaskingStrategy()

    def get_cache_stats(self) -> dict[str, float]:
        """The cache statistics of the masking strategy."""
        return self.masking_strategy.get_cache_stats()

    # Prompts, and what is logged of a rollout.

    def _prompts_of(self, number: int) -> list[PromptRow]:
        """This process's prompts of rollout `number` of the run, as the data loader gives them, or as the
        curriculum chooses them."""
        size, processes, mine = self.args.train_batch_size, self.args.world_size, self.args.process_index
        rows = [
            self.train_dataset[row]
            for place, row in enumerate(self._get_train_sampler().rollout(number))
            if place // size % processes == mine
        ]
        return self._choose(rows, number)

    def _choose(self, rows: list[PromptRow], step: int) -> list[PromptRow]:
        """The rows to sample: these, or as many that the curriculum chooses."""
        if self.args.curriculum is None:
            return rows
        return self._other_rows(len(rows) // self.args.num_generations, step, [])

    def _other_rows(self, prompts: int, step: int, used: list[int]) -> list[PromptRow]:
        """The groups of prompts that no process has used yet; adds them to `used`."""
        wanted = gather_object([prompts])
        used[:] = sorted(set(gather_object(used)))
        chosen = self.history.choose(sum(wanted), self.args.seed, step, exclude=used)
        used += chosen
        first, group = sum(wanted[: self.accelerator.process_index]), self.args.num_generations
        return [
            self.train_dataset[prompt * group + repeat]
            for prompt in chosen[first : first + prompts]
            for repeat in range(group)
        ]

    def _ask_next(self) -> None:
        self.source.ask_next(self.state.global_step, self.state.max_steps, self._prompts_of)

    def _reward_of(self, reward_BF: Tensor) -> dict[str, Tensor]:
        """The rewards [B] of each function, by metric."""
        metrics = [f"rewards/{name}" for name in self.rewards.names]
        return dict(zip(metrics, reward_BF.unbind(1), strict=True))

    def _log_rollout(self, rewarded: RewardedCompletions, advantage_B: Tensor, kept_B: Tensor) -> None:
        """Record the metrics of a rollout batch, and show some of its completions."""
        truncated_B = truncated(rewarded.generation, self.lm.eos_token_ids)
        reward_of = self._reward_of(rewarded.reward_BF)
        self.record("groups_kept", kept_B.float().mean(), len(kept_B))
        for metric in rollout_metrics(rewarded, reward_of, truncated_B):
            self.record(*metric)
        step = self.state.global_step + 1
        every = self.args.log_completions_steps or self.state.logging_steps
        shown = self.args.log_completions and self.is_world_process_zero()
        if shown and self.completion_log.due(step, every):
            figures = {"reward": rewarded.total_B, **reward_of}
            figures |= {"advantage": advantage_B, "truncated": truncated_B}
            columns = {
                **rewarded.extras,
                "prompt": [row.prompt for row in rewarded.rows],
                "completion": rewarded.generation.texts,
                **{name: figure_B.tolist() for name, figure_B in figures.items()},
            }
            self.completion_log.write(step, columns, self.callback_handler.callbacks)

    def _move_reference(self) -> None:
        every, step = self.args.ref_model_sync_steps, self.state.global_step
        if (
            self.reference is not None
            and self.args.sync_ref_model
            and step
            and step // every > (step - self.args.num_iterations) // every
        ):
            self.reference.move(self.args.ref_model_mixup_alpha)

    def _get_train_sampler(self, train_dataset: Any = None) -> GroupSampler:
        rows = self.train_dataset if train_dataset is None else train_dataset
        return GroupSampler(
            len(rows) // self.args.num_generations,
            prompts_per_step=self.prompts_per_step,
            group_size=self.args.num_generations,
            repeats=self.args.num_iterations,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )
