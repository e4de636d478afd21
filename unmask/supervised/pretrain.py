"""Pre-training on text: of a causal model by its next tokens, or of a diffusion model from the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.config.run import AttentionName, RunConfig
from unmask.data.rows import TokenRow
from unmask.data.streamed_rows import StreamedRows
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import MaskRNG, Views, all_masked_views
from unmask.errors import ConfigError, ModelError
from unmask.models.attention import DEFAULT_BLOCK, check_pattern
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import with_pattern
from unmask.training.config_fields import described, setting
from unmask.training.noising import NOISING_FIELDS, NoisingConfig, noised_views
from unmask.training.text_config import TextConfig, corpus_rows
from unmask.training.trainer import Batch, DiffusionTrainer


@described
@dataclass
class PretrainConfig(NoisingConfig, TextConfig):
    """Settings of `PretrainTrainer`."""

    learning_rate: float = field(default=1e-3, metadata={"help": "The peak learning rate of AdamW."})
    attention: AttentionName = field(
        default="causal",
        metadata={"help": "The pattern to train: causal, or for a diffusion model from the start another"},
    )
    block_size: int | None = setting(None, f"The attention block, for block_causal; unset: {DEFAULT_BLOCK}")

    from_scratch = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention == "block_causal" and self.block_size is None:
            self.block_size = DEFAULT_BLOCK
        check_pattern(self.attention, self.block_size)
        if self.attention == "causal" and (given := sorted(self.given & NOISING_FIELDS)):
            what = "has no effect on a causal model, which is not noised"
            raise ConfigError(what, where=given[0], remedy="Leave it out, or set attention")

    def unread(self) -> set[str]:
        return super().unread() | ({*NOISING_FIELDS} if self.attention == "causal" else set())

    def patterns(self) -> list[AttentionName]:
        return [self.attention]

    def trained_pattern(self, run: RunConfig) -> AttentionName:
        return self.attention


class PretrainTrainer(DiffusionTrainer):
    """Trains a causal model to predict the next token, or with another `attention` a diffusion model to
    predict noised tokens, as conversion does.

    The dataset has a text column, and may be a stream (see `corpus_rows`). Every document begins with BOS and
    ends with EOS.

    Raises:
        ModelError: the model is not causal, and `attention` is.
        DataError: no text column, or no text.
    """

    config_class = PretrainConfig
    streams = True

    def prepared_model(self, lm: DiffusionLM, args: PretrainConfig) -> DiffusionLM:
        if args.attention == "causal":
            return lm
        return with_pattern(lm, args.attention, args.block_size).with_noise(args.noise, args.p_uniform)

    @classmethod
    def make_rows(
        cls, lm: DiffusionLM, args: PretrainConfig, dataset: Iterable[Mapping[str, Any]], where: str
    ) -> Sequence[TokenRow] | StreamedRows:
        if args.attention == "causal" and not lm.autoregressive:
            raise ModelError(
                f"pre-training needs a causal model, not {lm}",
                where="model",
                remedy="Use SFTTrainer" if lm.canvas else "Use ConvertTrainer or SFTTrainer",
            )
        return corpus_rows(lm, args, dataset, where)

    def plan(self, batch: Batch, draw: MaskRNG) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(batch["maskable"])
        group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
        return noised_views(self.args, self.lm, batch["input_ids"], group_BT, batch["documents"], draw)
