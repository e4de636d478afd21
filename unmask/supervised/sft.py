"""Supervised fine-tuning: the completion is noised, the prompt stays clean."""
# ruff: noqa: RUF009 (`setting` returns a dataclass field)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from unmask.config.run import RunConfig
from unmask.data.encoding import Learn
from unmask.data.pairs import pack, pair_rows
from unmask.data.row_store import TOKENS, stored_rows
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import MaskRNG, Views, all_masked_views, group_sizes
from unmask.errors import ConfigError
from unmask.models.adapters import has_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import as_diffusion_lm
from unmask.supervised.extra_objective import Objective
from unmask.supervised.quality import QualityObjective
from unmask.supervised.variable_length import GapObjective
from unmask.training.config_fields import setting
from unmask.training.noising import NoisingConfig, noised_views
from unmask.training.pair_config import PairConfig, limits
from unmask.training.trainer import Batch, DiffusionTrainer

if TYPE_CHECKING:
    from datasets import Dataset

VIEW_FIELDS = (
    "views",
    "loss_type",
    "quality_head",
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


@dataclass(kw_only=True)
class SFTConfig(NoisingConfig, PairConfig):
    """Settings of `SFTTrainer`."""

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
    truncate_completion: bool = setting(
        False,
        (
            "Cut a completion that is too long. Its end token is not trained on, because the cut is not the "
            "end of the answer"
        ),
    )
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
        if self.truncate_completion and self.canvas_length is not None:
            remedy = "Leave one of them out (of a task: canvas_length=null)"
            raise ConfigError(
                "a cut completion cannot fill a canvas",
                where="truncate_completion, canvas_length",
                remedy=remedy,
            )
        if self.quality_head != "off" and self.loss_type != "nll":
            what = "the quality head's loss is divided by tokens"
            raise ConfigError(what, where="quality_head and loss_type", remedy="Leave loss_type out")
        for name in VIEW_FIELDS if self.max_gap is not None else ():
            if name in self.given:
                what = "has no effect on gaps of unknown length, which hide tokens by a rule of their own"
                raise ConfigError(what, where=f"{name} and max_gap", remedy="Leave one of them out")

    def unread(self) -> set[str]:
        return super().unread() | ({*VIEW_FIELDS} if self.max_gap is not None else set())

    @property
    def excludes_adapters(self) -> str | None:
        return (
            "quality_head" if self.quality_head != "off" else "max_gap" if self.max_gap is not None else None
        )

    def check_run(self, run: RunConfig) -> None:
        super().check_run(run)
        if (key := self.excludes_adapters) and run.lora:
            raise ConfigError(
                "trains weights that adapters leave as they are",
                where=f"{key} and lora",
                remedy=f"Leave {key} out, or train without adapters (lora=null)",
            )

    @property
    def noised_copies(self) -> int:
        return self.views


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
    """

    def __init__(
        self, model: DiffusionLM | PreTrainedModel | str | Path, args: SFTConfig, *rows: Any, **named: Any
    ):
        self.objective: Objective | None = None  # beside the masked loss, or in its place
        if args.max_gap is not None:
            self.objective = GapObjective(args)
        elif args.quality_head != "off":
            self.objective = QualityObjective(args)
        if self.objective is not None:
            lm = as_diffusion_lm(model, named.get("processing_class"))
            model = self.objective.prepared(lm)
            if named.get("peft_config") is not None or has_adapters(lm):
                what = "is not trained with lora, which leaves its weights as they are"
                raise ConfigError(what, where=args.excludes_adapters, remedy="Train without adapters")
        super().__init__(model, args, *rows, **named)

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: SFTConfig, dataset: Sequence[Mapping[str, Any]], where: str
    ) -> Dataset:
        fits = limits(lm, args, truncate_completion=args.truncate_completion)
        report = args.data_report(where)
        how: dict[str, Any] = {
            "ends": lm.eos_token_ids,
            "learn": args.learn,
            "processes": args.dataset_num_proc,
        }
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
                self.args, self.lm, group_BT, batch["documents"], draw, views=self.args.views
            )
        if self.args.loss_type == "nll":
            return views
        return replace(views, weight_BMT=views.weight_BMT / _answer_sizes(batch)[:, None])

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        if self.objective is None:
            return super().micro_loss(lm, batch)
        found = self.objective.loss(lm, batch, self.training_draw(batch), self.plan)
        for name, (mean, count) in found.metrics.items():
            self.record(name, mean, count)
        return found.loss if found.views is None else found.loss + self.cross_entropy(lm, batch, found.views)

    def train(self, *arguments: Any, **named: Any) -> TrainOutput:
        with self.objective.training(self.lm) if self.objective else nullcontext():
            return super().train(*arguments, **named)

    def count_items(self, batch: Batch) -> Tensor:
        """The number of learned tokens, or with `loss_type: sequence_nll` of answers."""
        if self.args.loss_type == "nll":
            return super().count_items(batch)
        return (batch["maskable"] / _answer_sizes(batch)).sum().round().long()


def _answer_sizes(batch: Batch) -> Tensor:
    """At each learned token, the number of learned tokens of its example [B, T]; 1 elsewhere."""
    return group_sizes(torch.where(batch["maskable"], batch["documents"].long() - 1, -1))
