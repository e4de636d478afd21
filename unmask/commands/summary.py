"""What a finished training run shows: where its model is, the numbers that matter, and the next command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog
from unmask.commands.inputs import evaluates
from unmask.config.run import DataConfig, RunConfig
from unmask.console import format_duration, format_number
from unmask.evaluation.provenance import EVALUATION
from unmask.evaluation.result_file import read_result
from unmask.models.model_files import TRAINED_MODEL
from unmask.redaction import masked_argument, shell_line
from unmask.training.run_log import LOG_NAME, last_loss

EXAMPLES = {"sft": "PAIRS.jsonl", "dpo": "PREFERENCES.jsonl"}
"""What stands for data that the user has to name."""


def summarise(verb: str, config: RunConfig, seconds: float) -> list[tuple[str, str]]:
    """Rows of a table: the model, the time, the last loss or reward, and the held-out score or loss, or else the speed.

    Args:
        seconds: that the run took.
    """
    output = Path(config.output_dir)
    lines = MetricsLog(output / LOG_NAME).read() if (output / LOG_NAME).is_file() else []
    steps = max((int(line["step"]) for line in lines), default=0)
    rows = [("model", str(output / TRAINED_MODEL)), ("time", f"{format_duration(seconds)}, {steps:,} step{'s' * (steps != 1)}")]
    if not steps:
        return rows
    if (reward := last(lines, "reward")) is not None:
        rows.append(("last reward", format_number(reward)))
    elif math.isfinite(loss := last_loss(lines)):
        rows.append(("last loss", format_number(loss)))
    return [*rows, *_held_out(config, lines)]


def _held_out(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The score or loss of held-out rows, or else the speed."""
    if evaluates(config):
        [scores] = read_result(Path(config.output_dir) / EVALUATION).tasks
        return [(f"held-out {name}", metric.shown(name)) for name, metric in scores.metrics.items()][:1]
    speeds = {"held-out loss": "eval_loss", "tokens per second": "tokens_per_second", "rows per second": "train_samples_per_second"}
    found = [(name, format_number(value)) for name, metric in speeds.items() if (value := last(lines, metric)) is not None]
    return found[:1]


def last(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The last value of a metric."""
    return next((float(line[name]) for line in reversed(lines) if name in line), None)


def next_command(verb: str, config: RunConfig) -> str:
    """The command that goes on with the model: the next verb on the same task or text, or on data to be named; after the last one, a look
    at the model."""
    output, data = Path(config.output_dir), config.data
    model = str(output / TRAINED_MODEL)
    task = ["--task", data.task, *(["--data", data.train] if isinstance(data.train, str) else [])] if data.task else []
    following = {"pretrain": "convert", "convert": "sft", "sft": "grpo" if task else "dpo", "dpo": "grpo" if task else None}.get(verb)
    if following is None:
        words = ["evaluate", model, *task] if task and not config.imports else ["generate", model, "--prompt", "TEXT"]
    else:
        text = data.train if following == "convert" and isinstance(data.train, str) else EXAMPLES.get(following, "TEXT.jsonl")
        words = [following, "--model", model, *(task or ["--data", text]), "--output", str(output.parent / following)]
        if task or following == "convert":  # the same data
            kept = {name: getattr(data, name) for name in ("text_column", "style", "split")}
            words += [f"data.{name}={value}" for name, value in kept.items() if value != DataConfig.model_fields[name].default]
        if config.imports:
            words.append(f"imports=[{', '.join(config.imports)}]")
    return shell_line(["unmask", *map(masked_argument, words)])
