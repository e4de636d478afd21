"""Pre-training of a causal model: next-token prediction on text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.data.rows import Row, column, text_rows
from unmask.diffusion.views import Draw, Views, all_masked_views
from unmask.errors import ModelError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.trainer import Batch, DiffusionTrainer, StageConfig, row_length


@dataclass(kw_only=True)
class PretrainConfig(StageConfig):
    """Settings of `PretrainTrainer`."""

    learning_rate: float = field(default=1e-3, metadata={"help": "The peak learning rate of AdamW."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    packing: bool = field(default=True, metadata={"help": "Lay documents end to end; they do not see one another."})


class PretrainTrainer(DiffusionTrainer):
    """Trains a causal model to predict the next token.

    The data set has a text column; every document begins with BOS and ends with EOS. Mixed precision (`bf16`, `fp16`),
    `dataloader_num_workers`, `dataloader_pin_memory` and all else are those of TrainingArguments; `log_memory` logs memory.

    Raises:
        ModelError: the model is not causal.
        DataError: no text column, or no text.
    """

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: PretrainConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Sequence[Row]:
        if not lm.autoregressive:
            raise ModelError(f"pre-training needs a causal model, not {lm}", where="model", remedy="Use ConvertTrainer or SFTTrainer")
        return text_rows(lm.tokenizer, column(dataset, args.text_column, where), row_length(lm, args), packed=args.packing, where=where)

    def plan(self, batch: Batch, draw: Draw) -> Views:
        return all_masked_views(batch["maskable"])
