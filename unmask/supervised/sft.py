"""Supervised fine-tuning: the completion is noised, the prompt stays clean."""
# ruff: noqa: RUF009 (`setting` returns a dataclass field)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from unmask.data.encoding import Learn
from unmask.data.pairs import pair_rows
from unmask.data.report import Rows
from unmask.data.rows import Row
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import Draw, Views, all_masked_views, group_sizes
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config_fields import setting
from unmask.training.noise_config import NoisingConfig
from unmask.training.pair_config import PairConfig, limits
from unmask.training.trainer import Batch, DiffusionTrainer


@dataclass(kw_only=True)
class SFTConfig(NoisingConfig, PairConfig):
    """Settings of `SFTTrainer`."""

    views: int = setting(1, "Noised copies of each row in a step, with stratified times", low=1)
    aggregation: str = setting(
        "token", "The unit of equal weight in the loss: token, or sequence (each answer)", choices=("token", "sequence")
    )
    learn: Learn = setting("all", "The assistant's turns that are learnt: all, or the last", choices=get_args(Learn))
    packing: bool = setting(False, "Pack examples into rows of max_length; they do not attend to one another")
    truncate_completion: bool = setting(
        False, "Cut a completion that is too long. No end token is then learnt, because the cut is not the end of the answer"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncate_completion and self.canvas_length is not None:
            remedy = "Leave one of them out (of a task: canvas_length=null)"
            raise ConfigError("a cut completion cannot fill a canvas", where="truncate_completion, canvas_length", remedy=remedy)

    @property
    def noised_copies(self) -> int:
        return self.views


class SFTTrainer(DiffusionTrainer):
    """Fine-tunes any model on conversations, prompts and completions, or text, in any record format of `unmask.data.formats`.

    The loss is sum(CE / t) / completion tokens, over the whole accumulated batch on all processes. A causal model gets the next-token loss.
    d1 (Zhao et al. 2025) divides each micro-batch by its own tokens instead. With `aggregation: sequence` each answer's sum is divided by
    its own tokens and averaged over answers, as in LLaDA (Nie et al. 2025, its GUIDELINES.md).
    The end token is learnt, padding never. A completion is filled up with learnt EOS to the end of its attention block or `canvas_length`.
    """

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: SFTConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Rows[Row]:
        fits = limits(lm, args, truncate_completion=args.truncate_completion)
        report = args.data_report(where)
        return pair_rows(lm.tokenizer, dataset, fits, report, ends=lm.eos_token_ids, learn=args.learn, packed=args.packing)

    def plan(self, batch: Batch, draw: Draw) -> Views:
        if self.lm.autoregressive:
            views = all_masked_views(batch["maskable"])
        else:
            group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
            views = self.args.plan(self.lm, group_BT, batch["documents"], draw, views=self.args.views)
        if self.args.aggregation == "token":
            return views
        return replace(views, weight_BMT=views.weight_BMT / _answer_sizes(batch)[:, None])

    def count_items(self, batch: Batch) -> Tensor:
        """The number of learnt tokens, or with `aggregation: sequence` of answers."""
        if self.args.aggregation == "token":
            return super().count_items(batch)
        return (batch["maskable"] / _answer_sizes(batch)).sum().round().long()


def _answer_sizes(batch: Batch) -> Tensor:
    """At each learnt token, the number of learnt tokens of its example [B, T]; 1 elsewhere."""
    return group_sizes(torch.where(batch["maskable"], batch["documents"].long() - 1, -1))
