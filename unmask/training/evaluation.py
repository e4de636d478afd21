"""The half of the shared trainer that measures: held-out rows, and metrics of an evaluation apart from those of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from accelerate.utils import slice_tensors
from torch import Tensor, nn
from transformers import Trainer

from unmask.data.report import Rows
from unmask.errors import ConfigError, DataError, TrainingError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.lockstep import lockstep
from unmask.training.means import Means

Batch = dict[str, Any]
"""Tensors by name, and `one_document`."""


class EvaluatingTrainer(Trainer):
    """transformers.Trainer that evaluates on rows as a stage describes them, with a loss that is the mean over what it is summed of.

    Attributes:
        lm: the model.
        means: what was recorded since the last log line.
    """

    lm: DiffusionLM
    means: Means
    _measured = ""
    """What the names of metrics begin with: of an evaluation its prefix."""
    streams = False
    """Whether the data set may be a stream, which has no length."""

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: Any, dataset: Any, where: str) -> Any:
        """The user's rows as the collator reads them."""
        return dataset

    @classmethod
    def _checked_rows(cls, lm: DiffusionLM, args: Any, dataset: Any, where: str) -> Any:
        if dataset is None:
            return None
        if isinstance(dataset, Mapping):
            raise DataError(f"are several data sets: {', '.join(map(str, dataset))}", where=where, remedy="Give one of them")
        if not isinstance(dataset, Sized) and not cls.streams:
            raise DataError("is a stream, or has no length", where=where, remedy="Give a list of rows or a datasets.Dataset")
        if isinstance(dataset, Sized) and len(dataset) == 0:
            raise DataError("the data set is empty", where=where, remedy="Give at least one row")
        rows = cls.make_rows(lm, args, dataset, where)
        if isinstance(rows, Rows) and args.should_save:
            rows.report.show()
        return rows

    def record(self, name: str, value: Tensor | float, count: float = 1.0) -> None:
        """Average a metric into the next log line."""
        self.means.add(f"{self._measured}{name}", float(value) * count, count)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """As in transformers.Trainer, on the held-out rows or on others, as the stage describes them.

        Raises:
            ConfigError: there are none, or the prefix is that of the summary of a run.
        """
        rows = self.held_out_rows(eval_dataset)
        with self.measuring(metric_key_prefix):
            self.measure(rows)
            return super().evaluate(rows, ignore_keys, metric_key_prefix)

    def measure(self, rows: Any) -> None:
        """What a stage measures of held-out rows beside the loss, before it."""

    @contextlib.contextmanager
    def measuring(self, prefix: str) -> Iterator[None]:
        """Inside, what is recorded is of an evaluation, and is logged by itself, under this prefix."""
        if prefix == "train":
            what, remedy = "is how the summary of a run is told", "Use another, as in train_rows"
            raise ConfigError(what, where="metric_key_prefix", remedy=remedy)
        kept = self.means, self._measured
        self.means, self._measured = Means(), f"{prefix}_"
        try:
            yield
        finally:
            self.means, self._measured = kept

    def held_out_rows(self, dataset: Any = None) -> Any:
        """The rows of a data set as the collator reads them; None: those given as `eval_dataset`."""
        rows = self.eval_dataset if dataset is None else dataset
        if rows is None:
            raise ConfigError("there is nothing to evaluate on", where="eval_dataset", remedy="Give it to evaluate, or to the trainer")
        made = rows is self.eval_dataset or isinstance(rows, Rows)
        return rows if made else self._checked_rows(self.lm, self.args, rows, "eval_dataset")

    def predict(self, *_: Any, **__: Any) -> Any:
        """A row has no logits of its own: they hang on what is hidden."""
        raise TrainingError("there is nothing to predict of whole rows", where="predict", remedy="Use evaluate, or generate")

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:
            what, remedy = f"an evaluation gives no {self.args.metric_for_best_model!r}", f"Use one of {', '.join(metrics)}"
            raise ConfigError(what, where="metric_for_best_model", remedy=remedy) from error

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        rows, loss = self._unrepeated(inputs), torch.zeros((), dtype=self.lm.score_dtype, device=self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager(), self.lockstep():
            if len(rows["sample_id"]) > 0:
                loss, _ = self.compute_loss(model, self._prepare_inputs(rows), return_outputs=True)
        return loss.detach(), None, None

    def _unrepeated(self, batch: Batch) -> Batch:
        """Without the rows that accelerate fills the last batches up with, so that all processes have as many."""
        state, size = self.accelerator.gradient_state, len(batch["sample_id"])
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch
        own = min(max(state.remainder - self.accelerator.process_index * size, 0), size)
        return slice_tensors(batch, slice(own))

    @property
    def sharded(self) -> bool:
        """Whether checkpoints are those of FSDP or DeepSpeed, with other files."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    @property
    def shares_weights(self) -> bool:
        """Whether every process holds a part of the weights, so that each forward pass takes all processes: FSDP and ZeRO 3."""
        return self.is_fsdp_enabled or (self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage == 3)

    def lockstep(self) -> contextlib.AbstractContextManager[None]:
        """Inside, processes may make different numbers of passes without gradients, and must not wait for one another otherwise."""
        return lockstep(self.lm, self.args.device) if self.shares_weights else contextlib.nullcontext()
