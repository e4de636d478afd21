"""Settings of the trainers that train on answers to prompts: which rows are used, and how they are truncated
or filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unmask.data.pairs import RowLimits
from unmask.data.report import DataReport
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config import NEUTRAL, TrainingConfig, canvas_length, row_length
from unmask.training.config_fields import setting


@dataclass(kw_only=True)
class PairConfig(TrainingConfig):
    """Settings of the trainers that train on answers to prompts."""

    canvas_length: int | None = setting(
        None,
        "Fill completions with EOS to this many tokens, all trained on: bidirectional sampling fills the "
        "whole canvas. Unset: only the rest of "
        "the last block of a block-causal model",
        low=1,
    )
    bad_rows: Literal["error", "skip"] = setting(
        "error",
        "How to handle unusable rows: error, or skip (leave them out and count them by reason)",
        choices=("error", "skip"),
        on_resume=NEUTRAL,  # the rows are compared
    )
    truncate_prompt: bool = setting(
        False, "Keep only the end of a prompt that leaves no room for the completion"
    )

    def data_report(self, where: str) -> DataReport:
        """An empty report that follows `bad_rows` and `max_unknown`."""
        return DataReport(where, skip=self.bad_rows == "skip", max_unknown=self.max_unknown)


def limits(lm: DiffusionLM, args: PairConfig, *, truncate_completion: bool = False) -> RowLimits:
    """The size limits of a row for this model."""
    return RowLimits(
        max_length=row_length(lm, args),
        canvas_length=canvas_length(lm, args),
        block_size=lm.block_size or 1,
        truncate_prompt=args.truncate_prompt,
        truncate_completion=truncate_completion,
        context=lm.context_length,
    )
