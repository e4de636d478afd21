"""Preference optimization of diffusion models: DPO on variance-reduced ELBO estimates (VRPO, Zhu et al. 2025,
LLaDA 1.5).

Shapes: B rows (pairs, whose chosen and rejected response are two documents; for KTO single responses), N
responses (for pairs: P chosen, then P rejected), M views, T tokens, R redraws.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from unmask.config.sampler import SamplerConfig
from unmask.config.user_code import load_function
from unmask.data.decoding import text_after
from unmask.data.formats import UNPAIRED
from unmask.data.pairs import joined_preferences, pair_rows, preference_rows
from unmask.data.row_store import TOKENS, first, stored_rows
from unmask.data.rows import Collator, TokenRow, separate_documents
from unmask.diffusion.likelihood import any_order, bound_views
from unmask.diffusion.log_probs import noise_groups, sum_over_views
from unmask.diffusion.views import (
    MaskRNG,
    Views,
    all_masked_views,
    exact_views,
)
from unmask.errors import ConfigError, DataError, GenerationError, TrainingError
from unmask.generation.output import end_of
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.adapters import starts_at_base
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import disable_dropout, evaluating
from unmask.preference.config import TOKENS_TOGETHER, DPOConfig
from unmask.preference.losses import (
    PreferenceLoss,
    bco_pair,
    divergence_scores,
    dpo,
    hinge,
    ipo,
    kto,
    log_ratios,
    margins,
    simpo,
)
from unmask.preference.reference_log_probs import (
    EMPTY_TABLE,
    REFERENCE_FILE,
    ReferenceTable,
    data_hashes,
    digests,
    model_hashes,
)
from unmask.rewards.answers import describe_error
from unmask.training.arguments import by_place, map_held_out
from unmask.training.config import (
    TrainingConfig,
    canvas_length,
    first_of_stream,
    rows_per_step,
    steps_per_epoch,
    total_steps,
)
from unmask.training.distributed import alone_in, failing_together
from unmask.training.metrics import SPEEDS, ProgressTarget
from unmask.training.pair_config import limits
from unmask.training.per_view_backward import Chunk, PerViewBackward
from unmask.training.reference_model import Reference, ReferenceSync, make_reference
from unmask.training.step_timer import Phases
from unmask.training.trainer import (
    Batch,
    DiffusionTrainer,
    HeldOut,
    Model,
    OptimizerClass,
    Optimizers,
    Tokenizer,
    select_rows,
)

if TYPE_CHECKING:
    import peft
    from datasets import Dataset
    from transformers import BitsAndBytesConfig

MEASURED_PAIRS, LOGGED_REDRAWS = 32, 8
"""The variance of the margin is measured on this many pairs, each with this many redraws of its masks."""
SAVE_SECONDS = 60.0
"""Time between two writes of the reference's log-probabilities, so that little is lost if the run is
killed."""
FIRST_REDRAW = 1 << 30
"""The number of the first redraw; smaller numbers are epochs."""
Judge = Callable[[list[str], list[str], list[str]], Sequence[float]]
"""Called with prompts, completions and the chosen responses; returns for each completion 1 if it wins, 0.5
for a draw, 0 if it loses."""


@dataclass(frozen=True)
class PreferenceBatch:
    """Collated rows with the views of their responses.

    Attributes:
        rows: the output of the collator, on the device.
        views: the same for policy and reference.
        reference_N: log-probabilities of the responses under the reference, in nats; None before they are
            computed.
        baseline: for KTO, a scalar (`DPOTrainer.baseline`).
    """

    rows: Batch
    views: Views
    reference_N: Tensor | None = None
    baseline: Tensor | None = None

    def select_rows(self, rows: slice) -> PreferenceBatch:
        """These rows, with their views."""
        part = select_rows(self.rows, rows)
        reference_N = self.reference_N
        if reference_N is not None:  # the first response of every row, then the second
            count = len(self.rows["sample_id"])
            reference_N = reference_N.view(-1, count)[:, rows].flatten()
        return PreferenceBatch(part, self.views.select(rows, slice(None)), reference_N, self.baseline)


class UnpairedCollator(Collator):
    """Batches of responses; `mismatched` is the batch of mismatched responses."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__([row["response"] for row in rows])
        batch["mismatched"] = super().__call__([row["mismatched"] for row in rows])
        return batch | {"desirable": torch.tensor([row["desirable"] for row in rows])}


class DPOTrainer(DiffusionTrainer):
    """Trains on `prompt`, `chosen`, `rejected` (standard or conversational; the prompt may be implicit). With
    `loss_type: kto` also on `prompt`, `completion`, `label`.

    Policy and reference see the same masks of a response. By default the reference is the model before
    training: its log-probabilities are computed before the first step, for the masks of every epoch, and
    stored in the output directory, so that training holds one model. The reference can also run during
    training, as a frozen copy or with the adapters off. Dropout is off. Gradients are computed view by view;
    views of few tokens share a pass.

    Args:
        ref_model: the reference, in place of the config's `ref_model`: a DiffusionLM, a model of
            transformers, or a path or id to load.
        train_dataset: of a stream (a `datasets.IterableDataset`) as many rows as `max_steps` needs are read,
            before training.
        judge: a function instead of the config's `judge`.
        sampler: how completions for the judge are generated; a `canvas_length` is their length.
        first_rows: use only this many of the first rows, for training and for the reference.
        rest: as in DiffusionTrainer; in the order of TRL.
    """

    config_class = DPOConfig
    train_dataset: Any
    eval_dataset: Any
    per_view: PerViewBackward

    def __init__(
        self,
        model: Model,
        ref_model: Model | None = None,
        args: DPOConfig | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: HeldOut | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: peft.PeftConfig | None = None,
        *,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        judge: Judge | None = None,
        sampler: SamplerConfig | None = None,
        first_rows: int | None = None,
        progress: ProgressTarget | None = None,
        phases: Phases | None = None,
    ):
        args = self.checked_args(args, model)
        self.ref_model = self._other_reference(args, model, ref_model)
        # first, so that a failed import is reported before the model is loaded
        named = judge or args.judge
        self.judge: Judge | None = load_function(named) if isinstance(named, str) else named
        if not (self.judge is None or callable(self.judge)):
            what, remedy = (
                f"{self.judge!r:.40} is not a function",
                "Give one: docs/preferences.md says of what",
            )
            raise ConfigError(what, where="judge", remedy=remedy)
        unpaired = args.loss_type == "kto"
        if self.judge is not None and unpaired:
            raise ConfigError(
                "kto has no chosen responses to compare with",
                where="judge",
                remedy="Use a loss of pairs, or leave it out",
            )
        self.responses_per_row = 1 if unpaired else 2
        # KTO's, over all held-out rows, so that it does not depend on the batch size
        self.eval_baseline = torch.zeros(())
        self.eval_table = ""  # the table of the held-out rows that are evaluated
        if train_dataset is not None and not isinstance(train_dataset, Sized):
            train_dataset = first_of_stream(args, train_dataset, args.max_steps * rows_per_step(args))
        super().__init__(
            model,
            args,
            data_collator or (UnpairedCollator if unpaired else Collator)(0, marking=not args.dispatched),
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            progress=progress,
            phases=phases,
        )
        if self.judge is not None and self.eval_dataset is None:
            raise ConfigError(
                "there are no held-out pairs to judge on",
                where="judge",
                remedy="Give them (data.eval), or leave it out",
            )
        self.num_given_rows = len(self.train_dataset or ())
        if first_rows is not None:
            self.train_dataset = first(self.train_dataset, first_rows)
            shorter = map_held_out(self.eval_dataset, lambda rows, _: rows and first(rows, first_rows))
            self.eval_dataset = shorter
        disable_dropout(self.lm.model)
        self.sampler = sampler or SamplerConfig()
        if (length := canvas_length(self.lm, args)) is not None:
            self.sampler = self.sampler.model_copy(update={"max_new_tokens": length})
        if self.judge is not None:
            for name, pairs in by_place(self.eval_dataset).items():
                check_prompts(self.lm, pairs, self.sampler, name)
        self.per_view = PerViewBackward(self, tokens_together=TOKENS_TOGETHER)
        self.exact = args.exact(self.lm)
        self.reference = (
            self._make_reference() if args.needs_reference and args.reference != "stored" else None
        )
        if args.sync_ref_model and self.reference is not None:
            self.add_callback(ReferenceSync(self.reference))
        self.stored: dict[str, ReferenceTable] = {}
        # time to compute the table of the training rows, and their number in all plans
        self.table_seconds, self.table_rows = 0.0, 0
        if args.needs_reference and args.reference == "stored":
            with alone_in(args.output_folder):
                self._make_tables(progress)

    @staticmethod
    def _other_reference(args: DPOConfig, model: Any, given: Model | None) -> Model | None:
        """The reference if it is not the policy before training. Raises ConfigError for one that is given
        twice, is the policy, or has no effect."""
        if given is None:
            return args.ref_model
        if isinstance(given, TrainingConfig):
            raise ConfigError("is a config", where="ref_model", remedy="Give it by name: args=...")
        if args.ref_model is not None:
            raise ConfigError("is given twice", where="ref_model", remedy="Leave it out of the config")
        if given is model and not isinstance(given, str):
            what = "is the policy itself, which training changes"
            remedy = "Leave it out: the reference is then the model before training"
            raise ConfigError(what, where="ref_model", remedy=remedy)
        if not args.needs_reference or args.reference == "adapter":
            setting = "reference" if args.needs_reference else "loss_type"
            what = f"has no effect with {setting} {getattr(args, setting)}"
            raise ConfigError(what, where=f"ref_model and {setting}", remedy="Leave one of them out")
        if isinstance(given, str | Path):
            args.ref_model = str(given)
            args.check_assigned()
        return given

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: DPOConfig, dataset: Sequence[Mapping[str, Any]], where: str
    ) -> Dataset:
        fits, report = limits(lm, args), args.data_report(where)
        how: dict[str, Any] = {"ends": lm.eos_token_ids, "processes": args.dataset_num_proc}
        given = (lm.tokenizer, dataset, fits, report)
        if args.loss_type != "kto":
            return stored_rows(partial(joined_preferences, *given, **how), TOKENS, report)
        if any("label" in row for row in islice(dataset, 100) if isinstance(row, Mapping)):
            make = partial(pair_rows, *given, formats=UNPAIRED, **how)
        else:
            pairs = {"chosen": TOKENS, "rejected": TOKENS}
            make = partial(labeled, stored_rows(partial(preference_rows, *given, **how), pairs, report))
        rows = stored_rows(make, LABELED, report)
        return stored_rows(partial(with_mismatched, rows, fits.max_length, where=where), UNPAIRED_ROW, report)

    def planned_steps(self, args: TrainingConfig) -> int:
        return total_steps(args, range(self.num_given_rows))

    def setup_seconds(self, args: DPOConfig) -> float:
        """The time to compute the reference table of the rows that the run visits."""
        rows = range(self.num_given_rows)
        scored = min(
            total_steps(args, rows) * rows_per_step(args), len(rows) * args.num_plans(rows, exact=self.exact)
        )
        return self.table_seconds / max(self.table_rows, 1) * scored

    # Views and log-probabilities.

    def plan(self, batch: Batch, draw: MaskRNG) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(batch["maskable"])
        group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
        if self.exact:
            return exact_views(group_BT, self.lm.block_size or 1)
        given = (self.lm, batch["input_ids"], group_BT, draw)
        return bound_views(*given, num_views=self.args.samples, complementary=self.args.complementary)

    def draw(self, batch: Batch) -> MaskRNG:
        draw = super().draw(batch)
        return replace(draw, iteration=0) if self.args.plan_reused or self.exact else draw

    def views_of(self, batch: PreferenceBatch) -> Views:
        return batch.views

    def tokens_of(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor | None]:
        return batch.rows["input_ids"], separate_documents(batch.rows)

    def _response_masks(self, rows: Batch) -> list[Tensor]:
        """Which tokens [B, T] belong to the first response of each row, and to the second."""
        return [rows["documents"] == number for number in range(1, self.responses_per_row + 1)]

    def sum_by_response(self, rows: Batch, value_BT: Tensor) -> Tensor:
        """The sum of token values over each response [N]."""
        return torch.cat([(value_BT * mask_BT).sum(1) for mask_BT in self._response_masks(rows)])

    def log_likelihoods(self, batch: PreferenceBatch, log_prob_BMT: Tensor) -> Tensor:
        """The log-likelihood of every response [N], or the estimate of its lower bound, in nats."""
        if not self.exact or self.lm.autoregressive:
            return self.sum_by_response(batch.rows, sum_over_views(log_prob_BMT, batch.views))
        group_BT = noise_groups(self.lm, batch.rows["maskable"], batch.rows["documents"])
        return torch.cat(
            [
                any_order(group_BT.where(mask_BT, -1), log_prob_BMT)
                for mask_BT in self._response_masks(batch.rows)
            ]
        )

    @torch.no_grad()
    def response_log_probs(self, lm: DiffusionLM, batch: PreferenceBatch) -> Tensor:
        """`log_likelihoods` [N] under a model, without gradients."""
        with evaluating(lm), self.accelerator.autocast(), self.phases("scoring"):
            return self.log_likelihoods(batch, self.per_view.log_probs(lm, batch))

    # The loss.

    def prepared(self, batches: list[Any]) -> list[Any]:
        if not batches:
            return batches
        every = self.args.log_variance_steps
        if every and (self.state.global_step + 1) % every == 0:
            self.record("margin_variance", self.margin_variance())
        with self.lockstep():
            prepared = [self.with_reference(batch) for batch in batches]
        # one baseline for all micro-batches, so that accumulating gradients changes nothing
        if self.args.loss_type == "kto":
            baseline = self.baseline(batches)
            prepared = [replace(batch, baseline=baseline) for batch in prepared]
        return prepared

    def _prepare_inputs(self, inputs: Any) -> PreferenceBatch:
        if isinstance(inputs, PreferenceBatch):
            return inputs
        # in an evaluation
        return replace(self.with_reference(self._on_device(inputs)), baseline=self.eval_baseline)

    def _on_device(self, rows: Batch) -> Batch:
        return super()._prepare_inputs(rows)

    def micro_loss(self, lm: DiffusionLM, batch: Any) -> Tensor:
        return self.loss_on(batch, self.per_view.log_probs(lm, batch))

    def loss_on(self, batch: PreferenceBatch, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> Tensor:
        log_prob_N = self.log_likelihoods(batch, log_prob_BMT)
        log_ratio_N = self.log_ratios(batch, log_prob_N)
        if self.args.loss_type == "kto":
            return self._unpaired_loss(batch, log_prob_N, log_ratio_N)
        margin_P = margins(log_ratio_N)
        losses = [self._pair_loss(batch, log_prob_N, loss) for loss in self.args.losses]
        if self.args.loss_weights:
            losses = [weight * loss_P for weight, loss_P in zip(self.args.loss_weights, losses, strict=True)]
        self._record_metrics(
            margin_P, log_prob_N, torch.arange(len(log_prob_N), device=log_prob_N.device) < len(margin_P)
        )
        return reduce(torch.add, losses).sum()

    def log_ratios(self, batch: PreferenceBatch, log_prob_N: Tensor) -> Tensor:
        """The log-probability of each response [N] relative to the reference, in nats, or in nats per
        token (as the first loss reads it)."""
        assert batch.reference_N is not None
        per_token = self.args.per_token(self.args.losses[0])
        return log_ratios(log_prob_N, batch.reference_N, self._lengths(batch) if per_token else None)

    def _lengths(self, batch: PreferenceBatch) -> Tensor:
        """The tokens of each response [N]."""
        return self.sum_by_response(batch.rows, batch.rows["maskable"])

    def _pair_loss(self, batch: PreferenceBatch, log_prob_N: Tensor, loss: PreferenceLoss) -> Tensor:
        """One of the losses, of each pair [P]."""
        beta, smoothing, args = self.args.beta, self.args.label_smoothing, self.args
        if loss == "sft":
            return -(log_prob_N / self._lengths(batch)).chunk(2)[0]
        assert batch.reference_N is not None
        score_N = divergence_scores(
            log_ratios(log_prob_N, batch.reference_N),
            args.f_divergence_type,
            alpha=args.f_alpha_divergence_coef,
        )
        if args.per_token(loss):
            score_N = score_N / self._lengths(batch)
        if loss == "bco_pair":
            return bco_pair(score_N, beta=beta)
        margin_P = margins(score_N)
        match loss:
            case "sigmoid":
                return dpo(margin_P, beta=beta, label_smoothing=smoothing)
            case "ipo":
                return ipo(margin_P, beta=beta)
            case "hinge":
                return hinge(margin_P, beta=beta)
            case "simpo":
                return simpo(margin_P, beta=beta, gamma=self.args.simpo_gamma, label_smoothing=smoothing)
            case "kto":
                raise AssertionError("kto compares no pairs")
            case _:
                assert_never(loss)

    def _unpaired_loss(self, batch: PreferenceBatch, log_prob_N: Tensor, log_ratio_N: Tensor) -> Tensor:
        """KTO. The logged margin is the distance of a log-ratio from the baseline, positive on the side of
        its label."""
        desirable_N, baseline, args = batch.rows["desirable"], batch.baseline, self.args
        assert baseline is not None
        weights = {"desirable_weight": args.desirable_weight, "undesirable_weight": args.undesirable_weight}
        loss_N = kto(log_ratio_N, desirable_N, baseline, beta=args.beta, **weights)
        self.record("kl", baseline, len(loss_N))
        self._record_metrics(
            torch.where(desirable_N, log_ratio_N - baseline, baseline - log_ratio_N), log_prob_N, desirable_N
        )
        return loss_N.sum()

    @torch.no_grad()
    def baseline(self, batches: Iterable[Batch]) -> Tensor:
        """KTO's estimate of the KL divergence from the reference: the mean log-ratio of the mismatched
        responses of all processes, at least 0. For a diffusion model likelihoods are bounds, on the same
        masks for both."""
        total: Any = torch.zeros(2, dtype=self.lm.log_prob_dtype, device=self.accelerator.device)
        with self.lockstep():
            for rows in batches:
                batch = self.with_reference(rows["mismatched"])
                log_ratio_N = self.log_ratios(batch, self.response_log_probs(self.lm, batch))
                total += torch.stack([log_ratio_N.sum(), log_ratio_N.new_tensor(len(log_ratio_N))])
        total = self.accelerator.reduce(total, "sum")
        return (total[0] / total[1]).clamp(min=0)

    def _record_metrics(self, margin: Tensor, log_prob_N: Tensor, chosen_N: Tensor) -> None:
        margin, log_prob_N = margin.detach(), log_prob_N.detach()
        self.record("margin", margin.mean(), len(margin))
        self.record("accuracy", (margin > 0).float().mean(), len(margin))
        for name, of_kind_N in (("chosen", chosen_N), ("rejected", ~chosen_N)):
            count = of_kind_N.sum()
            self.record(name, torch.where(of_kind_N, log_prob_N, 0).sum() / count.clamp_min(1), count)

    def count_items(self, batch: Any) -> Tensor:
        sample_ids = batch.rows["sample_id"]
        return torch.full((), len(sample_ids), device=sample_ids.device)

    def count_tokens(self, batch: Any) -> Tensor:
        return super().count_tokens(batch.rows)

    def count_samples(self, batch: Any) -> int:
        return super().count_samples(batch.rows)

    # The reference.

    def with_reference(self, rows: Batch) -> PreferenceBatch:
        """Rows with the views of this epoch, and the reference's log-probabilities on them."""
        draw = self.draw(rows)
        return self._with_reference(
            rows, draw, self.eval_table if self.evaluating else "train", draw.iteration
        )

    def _with_reference(self, rows: Batch, draw: MaskRNG, table_name: str, number: int) -> PreferenceBatch:
        """Rows with their views, and the reference's log-probabilities on them (0 for a loss without a
        reference).

        Args:
            table_name: the table that holds them, if the reference is `stored`.
            number: the number of the view plan in that table.
        """
        batch = PreferenceBatch(rows, self.plan(rows, draw))
        if self.reference is not None:
            with self.reference.model_in_use() as lm:
                return replace(batch, reference_N=self.response_log_probs(lm, batch))
        sample_id_B = rows["sample_id"]
        if not self.args.needs_reference:
            zero_N = torch.zeros(
                self.responses_per_row * len(sample_id_B),
                dtype=self.lm.log_prob_dtype,
                device=sample_id_B.device,
            )
            return replace(batch, reference_N=zero_N)
        stored = self.stored.get(table_name, EMPTY_TABLE)
        return replace(batch, reference_N=stored.look_up(number, sample_id_B, digests(rows, batch.views)))

    def _make_reference(self) -> Reference:
        args = self.args
        adapted = hasattr(self.lm.model, "disable_adapter")
        args.check_reference(has_adapters=adapted, sharded=self.shards_weights)
        if args.reference == "adapter" and not starts_at_base(self.lm):
            raise ConfigError(
                "the adapters already change the policy, so that its base is another model",
                where="reference",
                remedy="Use stored or frozen, or LoRA with bias none and init_lora_weights true",
            )
        # `frozen` copies the model even if it has adapters.
        copy = args.reference == "frozen"
        return make_reference(self.lm, self.accelerator, copy=copy, other=self.ref_model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A checkpoint also holds a reference that moved."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and self.args.sync_ref_model and self.reference and self.args.should_save:
            folder = Path(str(output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.reference.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.args.sync_ref_model and self.reference:
            self.reference.load(Path(checkpoint))

    def _make_tables(self, progress: Any) -> None:
        with self._reference_before_training() as lm:
            table = partial(self._table, lm, model_hashes(lm), progress)
            if self.train_dataset is not None:
                started = time.perf_counter()
                visited = self._visited_rows()
                self.stored["train"] = table("train", self.train_dataset, visited)
                self.table_seconds, self.table_rows = time.perf_counter() - started, sum(map(len, visited))
            for name, held_out in by_place(self.eval_dataset).items():
                if held_out is not None:
                    self.stored[name] = table(table_name(name), held_out, [range(len(held_out))])
            if self.args.log_variance_steps:
                pairs = first(self.train_dataset, MEASURED_PAIRS)
                redraws = [range(len(pairs))] * LOGGED_REDRAWS
                self.stored["redrawn"] = table("redrawn", pairs, redraws, FIRST_REDRAW)

    def _visited_rows(self) -> list[Sequence[int]]:
        """The indices of the training rows that the run visits under each view plan, of all processes,
        sorted. All rows of an epoch, unless the run ends within it and the order of its rows is known in
        advance. A collective."""
        args, rows = self.args, self.train_dataset
        num_plans = args.num_plans(rows, exact=self.exact)
        steps, each = total_steps(args, rows), steps_per_epoch(args, rows)
        epochs: list[Sequence[int]] = [range(len(rows))] * -(-steps // each)
        if (left := steps % each) == 0 or args.ignore_data_skip or len(epochs) > num_plans:
            return epochs[:num_plans]
        loader = self.get_train_dataloader()
        batches: Any = getattr(loader, "batch_sampler", None)
        # of one process's part of the batches
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
        if isinstance(sampler, (SeedableRandomSampler, SequentialSampler)):
            loader.set_epoch(len(epochs) - 1)
            mine = [
                row for batch in islice(batches, left * args.gradient_accumulation_steps) for row in batch
            ]
            epochs[-1] = sorted({*gather_object(mine)})
        return epochs

    def _reference_before_training(self) -> contextlib.AbstractContextManager[DiffusionLM]:
        """The reference while the tables are computed: the policy before training, or another model that is
        released afterwards. A policy that will be sharded is not on the device yet; it is copied there."""
        if self.ref_model is None and not self.uses_fsdp_or_deepspeed:
            return contextlib.nullcontext(self.lm)
        return make_reference(
            self.lm, self.accelerator, copy=self.uses_fsdp_or_deepspeed, other=self.ref_model
        ).model_in_use()

    def _table(
        self,
        lm: DiffusionLM,
        hashes: Mapping[str, str],
        progress: Any,
        name: str,
        items: Sequence[TokenRow],
        visited: Sequence[Sequence[int]],
        first_plan: int = 0,
    ) -> ReferenceTable:
        """The table of responses: read from disk, or computed and written there.

        Args:
            visited: the indices of the items under each view plan.
            first_plan: the number of the first view plan.
        """
        args = self.args
        settings = {
            name: getattr(args, name) for name in ("samples", "complementary", "seed", "bf16", "fp16")
        }
        hashes = {
            **hashes,
            **data_hashes(items, settings | {"exact": self.exact, "first_plan": first_plan}),
        }
        path = args.output_folder / f"{name}_{REFERENCE_FILE}"
        rows: Sequence[TokenRow] = items
        if args.loss_type == "kto":
            rows, visited = Responses(items), [Responses.indices(plan, len(items)) for plan in visited]

        def log_probs_of(rows: Sequence[TokenRow], plan: int) -> tuple[Tensor, Tensor]:
            collated = self._on_device(Collator(0)(rows))
            draw = MaskRNG(args.seed, collated["sample_id"], first_plan + plan)
            batch = PreferenceBatch(collated, self.plan(collated, draw))
            return self.response_log_probs(lm, batch), digests(collated, batch.views)

        def report(fraction: float) -> None:
            if progress is not None:
                progress.update(0.0, reference_scored=fraction if fraction < 1 else None)

        table = ReferenceTable.read(path, hashes, replace=args.stale_reference == "replace")
        if table is None:
            last = rows[len(rows) - 1]["sample_id"]
            table = ReferenceTable.empty(1 + last, self.responses_per_row, self.lm.log_prob_dtype)
        table = table.extended(len(visited))
        saved, unsaved = time.monotonic(), False
        for _ in table.complete(rows, visited, log_probs_of, self.accelerator, args.train_batch_size, report):
            unsaved = time.monotonic() < saved + SAVE_SECONDS
            if not unsaved and args.should_save:
                table.write(path, hashes)
                saved = time.monotonic()
        if unsaved and args.should_save:
            table.write(path, hashes)
        return table

    # The variance of the margin, and evaluation.

    @torch.no_grad()
    def margin_variance(self) -> Tensor:
        """The variance of the margin over redraws of the masks, in nats squared, averaged over the first
        pairs of the training data. The pairs are the same at every step, so that steps can be compared."""
        rows = first(self.train_dataset, MEASURED_PAIRS)
        batches = list(self.in_batches(rows, self.args.train_batch_size))
        margin_RP = torch.stack(
            [
                torch.cat([self._redrawn_margins(batch, redraw) for batch in batches])
                for redraw in range(LOGGED_REDRAWS)
            ]
        )
        return margin_RP.var(0).mean()

    def in_batches(self, rows: Sequence[Any], size: int) -> Iterator[Batch]:
        """Batches of the rows, collated, on the device."""
        for start in range(0, len(rows), size):
            batch = [rows[index] for index in range(start, min(start + size, len(rows)))]
            yield self._on_device(self.data_collator(batch))

    def _redrawn_margins(self, rows: Batch, redraw: int) -> Tensor:
        batch = self._with_reference(
            rows, MaskRNG(self.args.seed, rows["sample_id"], FIRST_REDRAW + redraw), "redrawn", redraw
        )
        return margins(self.log_ratios(batch, self.response_log_probs(self.lm, batch)))

    def held_out_metrics(self) -> Sequence[str]:
        more = ["kl"] * (self.args.loss_type == "kto") + ["win_rate"] * (self.judge is not None)
        return "loss", *SPEEDS, "margin", "accuracy", "chosen", "rejected", *more

    def measure(self, rows: Any) -> None:
        own = by_place(self.eval_dataset)
        self.eval_table = next((name for name in own if own[name] is rows), next(iter(own)))
        mine = rows.select(range(self.accelerator.process_index, len(rows), self.accelerator.num_processes))
        if self.judge is not None:
            with failing_together("judge"), self.lockstep():
                values = wins(self.judge, self.lm, mine, self.sampler)
            for value in values:
                self.record("win_rate", value)
        if self.args.loss_type == "kto":
            self.eval_baseline = self.baseline(self.in_batches(mine, self.args.eval_batch_size))


LABELED = TOKENS | {"label": "bool"}
UNPAIRED_ROW = {"response": TOKENS, "mismatched": TOKENS, "desirable": "bool"}


class Responses(Sequence[TokenRow]):
    """The responses of `UNPAIRED_ROW`s, then their mismatched ones."""

    def __init__(self, items: Sequence[Mapping[str, Any]]):
        self.items = items

    def __len__(self) -> int:
        return 2 * len(self.items)

    def __getitem__(self, index: Any) -> Any:
        mismatched, item = divmod(index, len(self.items))
        return self.items[item]["mismatched" if mismatched else "response"]

    @staticmethod
    def indices(items: Sequence[int], count: int) -> list[int]:
        """The indices of both responses of each of these items, of `count`."""
        return [*items, *(count + item for item in items)]


def labeled(pairs: Sequence[Mapping[str, TokenRow]]) -> Iterator[TokenRow]:
    """The responses of pairs with a label: all chosen ones, then all rejected ones."""
    return (pair[side] | {"label": side == "chosen"} for side in ("chosen", "rejected") for pair in pairs)


def with_mismatched(rows: Sequence[TokenRow], max_length: int, where: str) -> Iterator[dict[str, Any]]:
    """Each labeled response with its mismatched one: the same prompt, followed by the response of the
    nearest earlier row that has another prompt (the last row precedes the first), cut to `max_length` tokens.
    KTO's baseline is estimated on these, as in TRL (within batches).

    Raises:
        DataError: all rows of the dataset, called `where`, have the same prompt.
    """
    count, asked = len(rows), split_prompt(rows[0])
    nearest = next((index for index in reversed(range(count)) if split_prompt(rows[index]) != asked), None)
    if nearest is None:
        raise DataError(
            "all rows have the same prompt, but kto compares responses to different ones",
            where=where,
            remedy="Give responses to at least two prompts, or use another loss_type",
        )
    names, before = ("input_ids", "documents", "maskable"), split_prompt(rows[count - 1])
    for index, row in enumerate(rows):
        prompt = split_prompt(row)
        if before != prompt:
            nearest = index - 1
        other, before = rows[nearest], prompt
        start, other_start = len(prompt), len(split_prompt(other))
        mismatched = {
            name: (row[name][:start] + other[name][other_start:])[:max_length] for name in names
        } | {"sample_id": count + index}
        response = {name: row[name] for name in names} | {"sample_id": index}
        yield {"response": response, "mismatched": mismatched, "desirable": row["label"]}


def split_prompt(row: TokenRow) -> list[int]:
    """The token ids of the prompt."""
    return row["input_ids"][: row["maskable"].index(True)]


def table_name(held_out: str) -> str:
    """The name of the file of the table of held-out rows: eval, or eval_NAME."""
    return re.sub(r"[^\w-]", "_", held_out.replace("eval_dataset", "eval", 1))


def check_prompts(lm: DiffusionLM, pairs: Any, sampler: SamplerConfig, name: str) -> None:
    """Check that completions of all prompts of a dataset of this name can be generated.

    Raises:
        GenerationError: a prompt leaves no room for a completion, or the settings do not fit the model.
    """
    for number, pair in zip(pairs.report.numbers, pairs, strict=True):
        try:
            make_requests(lm, [split_row(pair)[0]], sampler)
        except GenerationError as error:
            where = (error.where or "").replace("prompt 0", f"{name}, row {number}")
            raise GenerationError(
                error.what, where=where, remedy=f"{error.remedy} (sampler), or leave out the judge"
            ) from error


def wins(judge: Judge, lm: DiffusionLM, pairs: Sequence[TokenRow], sampler: SamplerConfig) -> list[float]:
    """The judge's values, from 0 to 1, of one completion per pair against the chosen response. Texts are
    without special tokens.

    Raises:
        TrainingError: the judge raised, or did not return a number from 0 to 1 for each pair.
    """
    if not pairs:
        return []
    split = [split_row(pair) for pair in pairs]
    with evaluating(lm):
        completions = generate(lm, [prompt for prompt, _ in split], sampler).texts
    prompts: list[str] = lm.tokenizer.batch_decode([prompt for prompt, _ in split], skip_special_tokens=True)
    ends = lm.eos_token_ids
    chosen = [text_after(lm.tokenizer, prompt, ids[: end_of(ids, ends)], ends) for prompt, ids in split]
    try:
        values: Any = judge(prompts, completions, chosen)
        values = [float(value) for value in values]
    except (Exception, SystemExit) as error:  # user code
        raise TrainingError(
            f"raised {describe_error(error)}", where="judge", remedy="Fix it, or leave it out"
        ) from error
    if len(values) != len(completions) or not all(0 <= value <= 1 for value in values):
        raise TrainingError(
            f"returned {values!r:.80} for {len(completions)} completions",
            where="judge",
            remedy="Return 1, 0.5 or 0 for each completion",
        )
    return values


def split_row(row: TokenRow) -> tuple[list[int], list[int]]:
    """The token ids of the prompt and of the first response."""
    prompt, end = split_prompt(row), row["documents"].count(1)
    return prompt, row["input_ids"][len(prompt) : end]
