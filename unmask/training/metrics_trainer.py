"""A transformers.Trainer that logs means over all processes, continues them after a resume, and stops at values that are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from unmask.errors import ConfigError
from unmask.training.memory import memory_metrics
from unmask.training.run_log import Means, RunCallback, Throughput, check_finite, read_sums
from unmask.training.step_timer import Phases

Batch = dict[str, Any]
"""Tensors by name, and the flag `one_document`."""
STEP_LOSSES = ("loss", "train_loss")
"""Means over steps: since the last log line, and over the whole run."""


class MetricsTrainer(Trainer):
    """Metrics of a trainer.

    Attributes:
        means: metrics since the last log line, of training or of the evaluation in progress.
        phases: time and memory by phase of a step.
    """

    means: Means
    phases: Phases
    _throughput: Throughput
    _run_callback: RunCallback

    def record(self, name: str, value: Tensor | float, count: float = 1.0) -> None:
        """Add a mean over `count` things to the metric's mean in the next log line."""
        self.means.add(name, float(value) * count, count)

    def record_loss(self, loss: Tensor) -> Tensor:
        """Add a micro-batch's part of a step's loss to the logged mean. transformers' own sums are lost on resume."""
        for name in STEP_LOSSES:
            self.means.add(name, float(loss), self.accelerator.sync_gradients)  # a step is counted with its last micro-batch
        return loss

    def count_tokens(self, batch: Batch) -> Tensor:
        """The number of tokens without padding, which the model card reports."""
        return (batch["documents"] > 0).sum()

    def count_samples(self, batch: Batch) -> int:
        """The rows of this process's micro-batch, which `samples_per_second` counts."""
        return len(batch["sample_id"])

    @contextlib.contextmanager
    def measuring(self, prefix: str) -> Iterator[None]:
        """Inside, metrics are recorded as an evaluation's, under this prefix, separately from those of training."""
        if prefix == "train":
            raise ConfigError(
                "train is reserved for the summary of a run", where="metric_key_prefix", remedy="Use another, such as train_rows"
            )
        training, self.means = self.means, Means(f"{prefix}_")
        try:
            yield
        finally:
            self.means = training

    def finite(self, name: str, value: Tensor) -> Tensor:
        """Return the value, or raise TrainingError if it is not finite."""
        check_finite(name, value, self.state.global_step)
        return value

    def get_performance_stats(self) -> dict[str, Any]:
        """Time, peak memory (with `log_memory_usage`) and tokens per second by phase: see `Phases.performance_stats`."""
        return self.phases.performance_stats()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.means.load(read_sums(Path(checkpoint)) if self.is_world_process_zero() else {})  # the saved sums cover all processes

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        self._throughput.samples += self.count_samples(inputs)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(self.count_tokens(inputs).to(self.args.device)).sum())

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None or self.accelerator.scaler is not None:  # a float16 scaler skips steps whose gradients are not finite
            return norm
        return self.finite("gradient norm", norm)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs |= self.means.take(lambda name: name not in STEP_LOSSES or name in logs)
        if "loss" in logs:  # a line of training, not of evaluation
            logs |= self._throughput.take(self.state.num_input_tokens_seen, self._initial_num_input_tokens_seen)
        memory = memory_metrics(self.args.device)
        self._run_callback.memory_gb = memory["memory_gb"]
        if self.args.log_memory_usage:
            logs |= memory
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Batch) -> int:
        return 0
