"""Settings of the trainers that train on answers to prompts: which rows are used, and how they are truncated
or filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unmask.data.pairs import RowLimits
from unmask.data.report import DataReport
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config import NEUTRAL, TrainingConfig, canvas_length, row_length
from unmask.training.config_fields import setting


@dataclass
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
    max_length: int = setting(1024, "Maximum tokens in a training row", low=2)
    truncation_mode: Literal["keep_start", "keep_end"] | None = setting(
        None,
        "What is kept of a row that is too long: keep_start (the completion loses its end, and its end token "
        "is not trained on) or keep_end (the prompt loses its beginning); unset: such a row is unusable",
        choices=("keep_start", "keep_end"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncation_mode == "keep_start" and self.canvas_length is not None:
            raise ConfigError(
                "a cut completion cannot fill a canvas",
                where="truncation_mode, canvas_length",
                remedy="Leave one of them out (of a task: canvas_length=null)",
            )

    def data_report(self, where: str) -> DataReport:
        """An empty report that follows `bad_rows` and `max_unknown`."""
        return DataReport(where, skip=self.bad_rows == "skip", max_unknown=self.max_unknown)


def limits(lm: DiffusionLM, args: PairConfig) -> RowLimits:
    """The size limits of a row for this model."""
    return RowLimits(
        max_length=row_length(lm, args),
        canvas_length=canvas_length(lm, args),
        block_size=lm.block_size or 1,
        from_prompt=lm.canvas,
        truncate_prompt=args.truncation_mode == "keep_end",
        truncate_completion=args.truncation_mode == "keep_start",
        context=lm.context_length,
    )
