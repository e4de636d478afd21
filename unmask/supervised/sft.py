"""Supervised fine-tuning: the completion is noised, the prompt stays clean."""
# ruff: noqa: RUF009 (`setting` returns a dataclass field)

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from unmask.config.run import RunConfig
from unmask.data.encoding import Learn
from unmask.data.pairs import pack, pair_rows
from unmask.data.row_store import TOKENS, stored_rows
from unmask.data.rows import Column, TokenRow, check_dataset
from unmask.data.streamed_rows import StreamedRows
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import MaskRNG, Views, all_masked_views, group_sizes
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.supervised.canvas import NOT_ON_CANVASES, ONLY_ON_CANVASES, CanvasObjective, next_tokens
from unmask.supervised.extra_objective import Objective
from unmask.supervised.quality import QualityObjective
from unmask.supervised.variable_length import GapObjective
from unmask.training.config_fields import described, setting
from unmask.training.distributed import without_repeats
from unmask.training.metrics import ProgressTarget
from unmask.training.noising import NoisingConfig, noised_views
from unmask.training.pair_config import PairConfig, limits
from unmask.training.step_timer import Phases
from unmask.training.text_config import streamed_rows
from unmask.training.trainer import (
    Batch,
    DiffusionTrainer,
    HeldOut,
    Model,
    OptimizerClass,
    Optimizers,
    Tokenizer,
)

if TYPE_CHECKING:
    import peft
    from datasets import Dataset
    from transformers import BitsAndBytesConfig

VIEW_FIELDS = (
    "views",
    "loss_type",
    "quality_head",
    "noise",
    "p_uniform",
    "schedule",
    "weighting",
    "min_time",
    "max_time",
    "num_timesteps",
    "exact_count",
    "cart_p",
    "logprob_batch_size",
)
"""The settings of noised copies of a row."""
CANVAS_LENGTH = 256  # of the released DiffusionGemma
PACKED_TOGETHER = 1000
"""Rows of a stream that are made, and packed, together, as in TRL."""


@described
@dataclass
class SFTConfig(PairConfig, NoisingConfig):
    """Settings of `SFTTrainer`."""

    learning_rate: float = setting(2e-5, "The peak learning rate of AdamW")
    views: int = setting(1, "Noised copies of each row in a step, with stratified times", low=1)
    loss_type: str = setting(
        "nll",
        "nll: every token has equal weight; sequence_nll: every answer has",
        choices=("nll", "sequence_nll"),
    )
    learn: Learn = setting(
        "all", "The assistant's turns to train on: all, or the last", choices=get_args(Learn)
    )
    packing: bool = setting(False, "Pack examples into rows of max_length; they do not attend to one another")
    quality_head: str = setting(
        "off",
        "A head that learns, from the model's own samples, which visible tokens are right. off: none "
        "is trained; alone: only the head is; "
        "joint: the model too, by the sum of both losses",
        choices=("off", "alone", "joint"),
    )
    quality_tokens: int = setting(
        4,
        "Hidden tokens of each row that the model fills in, in one step, to train the head",
        low=1,
        needs=("quality_head=alone|joint",),
    )
    canvases: str = setting(
        "one",
        "For DiffusionGemma: one random canvas of each row in a step, or all of them",
        choices=("one", "all"),
    )
    self_conditioning_p: float = setting(
        0.5,
        "For DiffusionGemma: the probability that a row's canvases are conditioned on what the model "
        "predicts in a first pass",
        low=0.0,
        high=1.0,
    )
    encoder_loss_weight: float = setting(
        1.0, "For DiffusionGemma: the weight of the encoder's next-token loss", low=0.0
    )
    model_prediction_type: str = setting(
        "mean",
        "For DiffusionGemma: what the logits predict. mean: each token; mean_loo: each token as if its own "
        "noised value were not seen",
        choices=("mean", "mean_loo"),
    )
    max_gap: int | None = setting(
        None,
        (
            "Learn to fill gaps of unknown length, of up to this many tokens, with an expand and a delete "
            "token; unset: no gaps"
        ),
        low=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quality_head != "off" and self.loss_type != "nll":
            what = "the quality head's loss is divided by tokens"
            raise ConfigError(what, where="quality_head and loss_type", remedy="Leave loss_type out")
        for name in VIEW_FIELDS if self.max_gap is not None else ():
            if name in self.given:
                what = "has no effect on gaps of unknown length, which hide tokens by a rule of their own"
                raise ConfigError(what, where=f"{name} and max_gap", remedy="Leave one of them out")

    @property
    def needing_masks(self) -> str | None:
        return self.excludes_adapters  # both objectives know which tokens are hidden

    def unread(self) -> set[str]:
        return super().unread() | ({*VIEW_FIELDS} if self.max_gap is not None else set())

    @property
    def excludes_adapters(self) -> str | None:
        return (
            "quality_head" if self.quality_head != "off" else "max_gap" if self.max_gap is not None else None
        )

    def check_run(self, run: RunConfig, *, has_adapters: bool) -> None:
        super().check_run(run, has_adapters=has_adapters)
        if (key := self.excludes_adapters) and run.lora:
            raise ConfigError(
                "trains weights that adapters leave as they are",
                where=f"{key} and lora",
                remedy=f"Leave {key} out, or train without adapters (lora=null)",
            )

    @property
    def noised_copies(self) -> int:
        return self.views

    @property
    def noised_canvases(self) -> int:
        return 1 if self.canvases == "one" else -(-self.max_length // CANVAS_LENGTH)

    def workload(self, blueprint: ModelSpec, run: RunConfig) -> Workload | None:
        work = super().workload(blueprint, run)
        assert work is not None
        conditioned = work.canvas > 0 and self.self_conditioning_p > 0
        return replace(work, forward_only_passes=int(conditioned))


class SFTTrainer(DiffusionTrainer):
    """Fine-tunes any model on conversations, prompts and completions, or text, in any record format of
    `unmask.data.formats`.

    The loss is sum(CE / t) / completion tokens, over the whole accumulated batch on all processes. A causal
    model gets the next-token loss. d1 (Zhao et al. 2025) divides each micro-batch by its own tokens instead.
    With `loss_type: sequence_nll` each answer's sum is divided by its own tokens and averaged over answers,
    as in LLaDA (Nie et al. 2025, its GUIDELINES.md). With a `quality_head` the loss has the head's part
    (`unmask.supervised.quality`): the mean over rows, weighted by their tokens. With a `max_gap` the loss is
    that of gaps of unknown length alone (`unmask.supervised.variable_length`), in which no end token is. The
    end token is learned, padding never. A completion is filled up with learned EOS to the end of its
    attention block or `canvas_length`.

    Args:
        train_dataset: also a stream (`datasets.IterableDataset`), which is read in its order while training.
        formatting_func: makes the text of a row, all of which is trained on.
        rest: as in DiffusionTrainer; in the order of TRL.
    """

    config_class = SFTConfig
    streams = True

    def __init__(
        self,
        model: Model | None = None,
        args: SFTConfig | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: HeldOut | None = None,
        processing_class: Tokenizer | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: peft.PeftConfig | None = None,
        formatting_func: Callable[[Any], str] | None = None,
        *,
        model_init: Callable[..., Any] | None = None,
        progress: ProgressTarget | None = None,
        phases: Phases | None = None,
    ):
        if not (formatting_func is None or callable(formatting_func)):
            what, remedy = (
                f"{formatting_func!r:.40} is not a function",
                "Give one that makes the text of a row",
            )
            raise ConfigError(what, where="formatting_func", remedy=remedy)
        self.formatting_func = formatting_func
        self.objective: Objective | None = None  # beside the masked loss, or in its place
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            compute_loss_func,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
            progress=progress,
            phases=phases,
        )

    def prepared_model(self, lm: DiffusionLM, args: SFTConfig) -> DiffusionLM:
        if args.max_gap is not None:
            self.objective = GapObjective(args)
        elif args.quality_head != "off":
            self.objective = QualityObjective(args)
        lm = lm.with_noise(args.noise, args.p_uniform)
        args.check_trained_noise(lm.noise)
        without_effect = NOT_ON_CANVASES if lm.canvas else ONLY_ON_CANVASES
        given = [name for name in without_effect if name in args.given]
        # a record of a run names all with their defaults, as it knows no model
        if {*without_effect} <= args.given | args.unread():
            given = [name for name in given if getattr(args, name) != getattr(SFTConfig, name)]
        if given:
            what = f"has no effect on {'a' if lm.canvas else 'another model than'} DiffusionGemma"
            raise ConfigError(what, where=given[0], remedy="Leave it out for this model")
        if lm.canvas:
            self.objective = CanvasObjective(args)
        return lm if self.objective is None else self.objective.prepared(lm)

    def _checked_rows(self, lm: DiffusionLM, args: SFTConfig, dataset: Any, where: str) -> Any:
        if self.formatting_func is not None and dataset is not None:
            check_dataset(dataset, where, streams=True)
            dataset = with_text(dataset, self.formatting_func)
        return super()._checked_rows(lm, args, dataset, where)

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: SFTConfig, dataset: Iterable[Mapping[str, Any]], where: str
    ) -> Dataset | StreamedRows:
        fits = limits(lm, args)
        if lm.canvas:  # which are filled when they are drawn
            fits = replace(fits, block_size=1)
        how: dict[str, Any] = {"ends": lm.eos_token_ids, "learn": args.learn}

        def rows_of_stream(examples: Iterable[Any]) -> Iterator[TokenRow]:
            report = args.data_report(where)
            rows = pair_rows(lm.tokenizer, examples, fits, report, processes=1, **how)
            while some := list(islice(rows, PACKED_TOGETHER)):
                report.unknown.check(where)
                yield from pack(some, fits.max_length) if args.packing else some

        if not isinstance(dataset, Sized):
            return streamed_rows(Column(dataset, None, where), rows_of_stream, args)
        report, how = args.data_report(where), how | {"processes": args.dataset_num_proc}
        rows = stored_rows(partial(pair_rows, lm.tokenizer, dataset, fits, report, **how), TOKENS, report)
        if args.packing:
            rows = stored_rows(partial(pack, rows, fits.max_length), TOKENS, report)
            report.packed = len(rows)
        return rows

    def plan(self, batch: Batch, draw: MaskRNG) -> Views:
        """Noised copies, whose masks `random_views` draws (`unmask.diffusion.views`) and `Noise.weight`
        weights: 1/t with the linear schedule."""
        if self.lm.autoregressive:
            views = all_masked_views(batch["maskable"])
        else:
            group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
            views = noised_views(
                *(self.args, self.lm, batch["input_ids"], group_BT, batch["documents"], draw),
                views=self.args.views,
            )
        if self.args.loss_type == "nll":
            return views
        return replace(views, weight_BMT=views.weight_BMT / _answer_sizes(batch)[:, None])

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        if isinstance(self.objective, CanvasObjective) and batches:
            self._count_tokens(self.objective, batches)
        return super().prepared(batches)

    def evaluate_rows(self, rows: Any, ignore_keys: Any, metric_key_prefix: str) -> dict[str, float]:
        if isinstance(self.objective, CanvasObjective):
            batches = (without_repeats(each, self.accelerator) for each in self.get_eval_dataloader(rows))
            self._count_tokens(self.objective, batches)
        return super().evaluate_rows(rows, ignore_keys, metric_key_prefix)

    def _count_tokens(self, objective: CanvasObjective, batches: Iterable[Batch]) -> None:
        """Count the tokens of all processes' batches, by which the losses on canvases and on next tokens are
        averages."""
        counts = [torch.stack([self.count_items(batch), next_tokens(batch).sum()]) for batch in batches]
        of_ranks = self.accelerator.gather(torch.stack(counts).sum(0)[None].to(self.args.device))
        canvas, causal = of_ranks.view(-1, 2).sum(0).double()
        objective.next_token_weight = canvas / causal.clamp_min(1)

    def held_out_metrics(self) -> Sequence[str]:
        more = ("quality_loss", "filled_in_right") if self.args.quality_head != "off" else ()
        return *super().held_out_metrics(), *more

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        if self.objective is None:
            return super().micro_loss(lm, batch)
        found = self.objective.loss(lm, batch, self.training_draw(batch), self.plan)
        for name, (mean, count) in found.metrics.items():
            self.record(name, mean, count)
        return found.loss if found.views is None else found.loss + self.cross_entropy(lm, batch, found.views)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> TrainOutput:
        with self.objective.training(self.lm) if self.objective else nullcontext():
            return super()._inner_training_loop(*arguments, **named)

    def count_items(self, batch: Batch) -> Tensor:
        """The number of learned tokens, of tokens of canvases, or with `loss_type: sequence_nll` of
        answers."""
        if (
            self.objective
            and (items := self.objective.items(self.lm, batch, self.training_draw(batch))) is not None
        ):
            return items
        if self.args.loss_type == "nll":
            return super().count_items(batch)
        return (batch["maskable"] / _answer_sizes(batch)).sum().round().long()


def _answer_sizes(batch: Batch) -> Tensor:
    """At each learned token, the number of learned tokens of its example [B, T]; 1 elsewhere."""
    return group_sizes(torch.where(batch["maskable"], batch["documents"].long() - 1, -1))


def with_text(dataset: Any, formatting_func: Callable[[Any], str]) -> Any:
    """Rows of the text that a function makes of each, as in TRL; rows of tokens are unchanged."""

    def with_its_text(row: Any) -> dict[str, str]:
        return {"text": formatting_func(row)}

    first_row = next(iter(dataset), None)
    if isinstance(first_row, Mapping) and "input_ids" in first_row:
        return dataset
    if hasattr(dataset, "map"):
        known = {"load_from_cache_file": False} if hasattr(dataset, "cache_files") else {}  # by its name
        return dataset.map(with_its_text, remove_columns=dataset.column_names, **known)
    if hasattr(dataset, "__len__"):
        return [*map(with_its_text, dataset)]
    from datasets import IterableDataset

    return IterableDataset.from_generator(lambda: map(with_its_text, dataset))
