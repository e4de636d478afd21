"""Pre-training of a causal model: next-token prediction on text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.config.run import AttentionName, RunConfig
from unmask.data.rows import TokenRow
from unmask.data.streamed_rows import StreamedRows
from unmask.diffusion.views import MaskRNG, Views, all_masked_views
from unmask.errors import ModelError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config_fields import described
from unmask.training.text_config import TextConfig, corpus_rows
from unmask.training.trainer import Batch, DiffusionTrainer


@described
@dataclass
class PretrainConfig(TextConfig):
    """Settings of `PretrainTrainer`."""

    learning_rate: float = field(default=1e-3, metadata={"help": "The peak learning rate of AdamW."})

    from_scratch = True

    def trained_pattern(self, run: RunConfig) -> AttentionName:
        return "causal"


class PretrainTrainer(DiffusionTrainer):
    """Trains a causal model to predict the next token.

    The dataset has a text column, and may be a stream (see `corpus_rows`). Every document begins with BOS and
    ends with EOS.

    Raises:
        ModelError: the model is not causal.
        DataError: no text column, or no text.
    """

    config_class = PretrainConfig
    streams = True

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: PretrainConfig, dataset: Iterable[Mapping[str, Any]], where: str
    ) -> Sequence[TokenRow] | StreamedRows:
        if not lm.autoregressive:
            raise ModelError(
                f"pre-training needs a causal model, not {lm}",
                where="model",
                remedy="Use ConvertTrainer or SFTTrainer",
            )
        return corpus_rows(lm, args, dataset, where)

    def plan(self, batch: Batch, draw: MaskRNG) -> Views:
        return all_masked_views(batch["maskable"])
