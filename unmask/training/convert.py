"""Conversion of a causal model to a diffusion model, in three stages. A stage is one Trainer run.

Stage 1 trains attention and the mask token's own embedding row, stage 2 everything, stage 3 everything at a low rate with
an auxiliary next-token loss, so that the model keeps what it knew.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.rows import Row, column, pair_rows, text_rows
from unmask.diffusion.schedules import get_schedule
from unmask.diffusion.views import Draw, Views, all_masked_views, complementary_pair, random_views
from unmask.errors import ConfigError
from unmask.models.attention import Pattern
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import as_diffusion_lm, with_pattern
from unmask.training.trainer import Batch, DiffusionTrainer, Progress, StageConfig, row_length, steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class ConversionStage:
    """One stage of a conversion.

    Attributes:
        share: of the training steps.
        rate: times the learning rate.
        attention_only: train attention and the mask token's embedding row, nothing else.
        lm_loss: weight of the auxiliary next-token loss.
    """

    share: float
    rate: float
    attention_only: bool = False
    lm_loss: float = 0.0


STAGES = (
    ConversionStage(share=0.1, rate=0.5, attention_only=True),
    ConversionStage(share=0.6, rate=1.0),
    ConversionStage(share=0.3, rate=0.3, lm_loss=0.1),
)


@dataclass(kw_only=True)
class ConvertConfig(StageConfig):
    """Settings of `ConvertTrainer`."""

    learning_rate: float = field(default=5e-4, metadata={"help": "The base rate; the stages use 0.5, 1 and 0.3 times this."})
    attention: Pattern = field(default="bidirectional", metadata={"help": "The pattern to convert to: bidirectional or block_causal."})
    block_size: int | None = field(default=None, metadata={"help": "The attention block, for block_causal."})
    logit_shift: bool | None = field(default=None, metadata={"help": "Keep predicting token i + 1 at row i; unset: no."})
    schedule: str = field(default="linear", metadata={"help": "The noise schedule: linear or cosine."})
    complementary: bool = field(default=False, metadata={"help": "Two views a row, each hiding what the other shows."})
    min_time: float = field(default=1e-3, metadata={"help": "The lowest time t; bounds the weight 1/t."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    packing: bool = field(default=True, metadata={"help": "Lay documents end to end; they do not see one another."})
    canvas_length: int | None = field(default=None, metadata={"help": "As in SFT, for rows of prompt and completion."})


class StageTrainer(DiffusionTrainer):
    """One stage, on `conversion_rows`: the diffusion loss, with what the stage freezes and adds."""

    def __init__(self, *arguments: Any, stage: ConversionStage, **rest: Any):
        self.stage = stage
        super().__init__(*arguments, **rest)

    def plan(self, batch: Batch, draw: Draw) -> Views:
        schedule = get_schedule(self.args.schedule)
        plan = complementary_pair if self.args.complementary else random_views
        return plan(self.groups(batch), draw, schedule, low=self.args.min_time)

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        total = super().micro_loss(lm, batch)
        if self.stage.lm_loss == 0:
            return total
        views = all_masked_views(batch["maskable"])
        return total + self.stage.lm_loss * self.cross_entropy(lm.as_causal(), batch, views, "lm_cross_entropy")

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Weight decay must not move the embedding rows that stage 1 freezes."""
        names = super().get_decay_parameter_names(model)
        if not self.stage.attention_only:
            return names
        table = model.get_input_embeddings().weight
        frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table}
        return [name for name in names if name not in frozen]


class ConvertTrainer:
    """Converts a causal model on text, or on prompts and completions, in the three stages of `STAGES`.

    Each stage writes its checkpoints under `output_dir/stage-N`; `train(resume_from_checkpoint=True)` goes on in the middle
    of any of them.

    Args:
        model: a DiffusionLM, or a path or id to load. Its weights are changed in place.
        args: pattern, steps and rates. `max_steps` (or the epochs) are shared out among the stages.
        train_dataset: rows with `text`, or with `prompt` and `completion` (then only the completion is noised).
        eval_dataset: the same, held out; each stage ends with an evaluation.
        stages: what each stage trains and how fast.
        progress: a stage of a progress display to keep up to date.
        rest: as in DiffusionTrainer, but for `peft_config`.

    Raises:
        ConfigError: a causal pattern, or adapters.
        DataError: a row without its columns, or no text.
    """

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        args: ConvertConfig,
        train_dataset: Sequence[Mapping[str, Any]],
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        *,
        stages: Sequence[ConversionStage] = STAGES,
        progress: Progress | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **rest: Any,
    ):
        if args.attention == "causal":
            raise ConfigError("conversion to causal attention", where="attention", remedy="Use bidirectional or block_causal")
        if rest.get("peft_config") is not None:
            remedy = "Convert the weights themselves; then train adapters with SFTTrainer"
            raise ConfigError("conversion with adapters, which its stages would freeze", where="peft_config", remedy=remedy)
        lm = as_diffusion_lm(model, processing_class)
        self.lm = with_pattern(lm, args.attention, args.block_size, args.logit_shift)
        self.args, self.stages, self.progress, self.rest = args, stages, progress, rest
        self.train_rows = conversion_rows(self.lm, args, train_dataset, "train_dataset")
        self.eval_rows = None if eval_dataset is None else conversion_rows(self.lm, args, eval_dataset, "eval_dataset")
        self.log_history: list[dict[str, float]] = []

    def train(self, resume_from_checkpoint: bool = False) -> None:
        """Run the stages, or those that are not finished yet."""
        steps, first = self._steps(), 0
        for number, stage in enumerate(self.stages, start=1):
            last = round(sum(s.share for s in self.stages[:number]) / sum(s.share for s in self.stages) * steps)
            if last > first:
                self._run(number, stage, first, last, steps, resume_from_checkpoint)
            first = last
        self.lm.model.eval()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the converted model."""
        if self.args.should_save:
            self.lm.save(output_dir or str(self.args.output_dir))

    def _run(self, number: int, stage: ConversionStage, first: int, last: int, steps: int, resume: bool) -> None:
        folder = Path(str(self.args.output_dir)) / f"stage-{number}"
        args = copy.copy(self.args)
        args.output_dir, args.max_steps, args.learning_rate = str(folder), last - first, self.args.learning_rate * stage.rate
        args.seed = self.args.seed + number - 1  # else each stage would see the rows and masks of the one before again
        progress = None if self.progress is None else Portion(self.progress, first / steps, last / steps)
        trainer = StageTrainer(self.lm, args, self.train_rows, self.eval_rows, stage=stage, progress=progress, **self.rest)
        with freezing(trainer.lm, stage):
            trainer.train(resume_from_checkpoint=resume)
        if self.eval_rows is not None:
            trainer.evaluate()
        self.log_history += [{**line, "step": line["step"] + first, "stage": number} for line in trainer.state.log_history]

    def _steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(steps_per_epoch(self.args, self.train_rows) * self.args.num_train_epochs)


def conversion_rows(lm: DiffusionLM, args: ConvertConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Sequence[Row]:
    """Rows of prompt and completion or of messages, or of text."""
    if len(dataset) > 0 and not {"completion", "messages"}.isdisjoint(dataset[0]):
        return pair_rows(lm.tokenizer, dataset, row_length(lm, args), canvas_length=args.canvas_length, where=where)
    return text_rows(lm.tokenizer, column(dataset, args.text_column, where), row_length(lm, args), packed=args.packing, where=where)


@dataclass
class Portion:
    """A part of a stage of the progress display."""

    whole: Progress
    start: float
    stop: float

    def update(self, fraction: float, **metrics: float) -> None:
        self.whole.update(self.start + fraction * (self.stop - self.start), **metrics)


@contextmanager
def freezing(lm: DiffusionLM, stage: ConversionStage) -> Iterator[None]:
    """Inside, only what the stage trains takes gradients: for `attention_only` the attention modules and the mask token's row."""
    table = lm.model.get_input_embeddings().weight
    before = {parameter: parameter.requires_grad for parameter in lm.model.parameters()}
    if not stage.attention_only:
        yield
        return
    attention = {p for module in lm.model.modules() if type(module).__name__.endswith("Attention") for p in module.parameters()}
    for parameter in before:
        parameter.requires_grad_(parameter in attention or parameter is table)
    mask_row = torch.zeros(len(table), 1, dtype=table.dtype, device=table.device)
    mask_row[lm.mask_token_id] = 1
    hook = table.register_hook(lambda gradient: gradient * mask_row)
    try:
        yield
    finally:
        hook.remove()
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)
