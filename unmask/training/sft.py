"""Supervised fine-tuning: the completion is noised, the prompt stays clean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.data.rows import Row, pair_rows
from unmask.diffusion.views import Draw, Views, all_masked_views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.noising import NoisingConfig
from unmask.training.stage_config import canvas, row_length
from unmask.training.trainer import Batch, DiffusionTrainer


@dataclass(kw_only=True)
class SFTConfig(NoisingConfig):
    """Settings of `SFTTrainer`."""

    views: int = field(default=1, metadata={"help": "Noised copies of each row in a step, with stratified times."})
    canvas_length: int | None = field(
        default=None,
        metadata={"help": "Fill completions with EOS to this many tokens, all learnt: bidirectional sampling fills the whole canvas."},
    )


class SFTTrainer(DiffusionTrainer):
    """Fine-tunes any model on prompts and completions, `messages` or `text` (standard or conversational, in TRL's formats).

    The loss is sum(CE / t) / completion tokens (LLaDA, Nie et al. 2025, eq. 5); a causal model gets plain next-token loss.
    EOS is learnt, padding never; with a `canvas_length` the canvas behind a completion is EOS too.
    """

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: SFTConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Sequence[Row]:
        return pair_rows(lm.tokenizer, dataset, row_length(lm, args), canvas_length=canvas(lm, args), where=where)

    def plan(self, batch: Batch, draw: Draw) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(batch["maskable"])
        return self.args.plan(self.lm, self.groups(batch), batch["documents"], draw, views=self.args.views)
