"""What a finished training run shows: where its model is, the numbers that matter, and the next commands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from unmask.artifacts import MetricsLog
from unmask.config.run import DataConfig, RunConfig
from unmask.console import format_duration, format_number
from unmask.data.encoding import is_conversational
from unmask.evaluation.result_file import EvaluationResult
from unmask.models.model_paths import TRAINED_MODEL
from unmask.records import kind_of, read_examples
from unmask.redaction import masked_argument, shell_line
from unmask.training.run.log import LOG_NAME, last_loss, numbers

EXAMPLES = {"sft": "PAIRS.jsonl", "dpo": "PREFERENCES.jsonl"}
"""What stands for data that the user has to name."""


def summarize(output: Path, seconds: float, result: EvaluationResult | None = None) -> list[tuple[str, str]]:
    """Rows of a table: the model, the time, the first and last loss or reward, and the held-out score or
    loss, or else the speed.

    Args:
        output: the folder of the run.
        seconds: that the run took.
        result: of held-out problems, if there are any.
    """
    lines = numbers(MetricsLog(output / LOG_NAME).read()) if (output / LOG_NAME).is_file() else []
    steps = max((int(line.get("step", 0)) for line in lines), default=0)
    rows = [
        ("model", str(output / TRAINED_MODEL)),
        ("time", f"{format_duration(seconds)}, {steps:,} step{'s' * (steps != 1)}"),
    ]
    if not steps:
        return rows
    values: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            values.setdefault(name, []).append(value)
    return [*rows, *_trained(values, last_loss(lines)), *_held_out(result, values)]


def _trained(values: Mapping[str, Sequence[float]], loss: float) -> Iterator[tuple[str, str]]:
    """Reward, with each function's part if there are several, or else the loss, and the accuracy: each from
    its first to its last value."""
    if "reward" in values:
        yield "reward", _change(values["reward"])
        parts = [
            each for each in values if each.startswith("rewards/") and each.rpartition("/")[0] not in values
        ]
        if len(parts) > 1:
            yield from ((part, _change(values[part])) for part in parts)
    else:
        losses = [*values.get("loss", ()), *([loss] if math.isfinite(loss) else [])]
        if losses:
            yield "training loss", _change(losses)
        if "accuracy" in values:
            yield "accuracy", _change(values["accuracy"])
    if "reward_std" in values and not any(values["reward_std"]):
        yield "note", "in each step all completions had the same reward: nothing was learned"


def _held_out(
    result: EvaluationResult | None, values: Mapping[str, Sequence[float]]
) -> list[tuple[str, str]]:
    """The score or loss of held-out rows, or else the speed."""
    if result is not None:
        [scores] = result.tasks
        return [(f"held-out {name}", metric.shown(name)) for name, metric in scores.metrics.items()][:1]
    if "eval_loss" in values:
        return [("held-out loss", _change(values["eval_loss"]))]
    speeds = {"tokens per second": "tokens_per_second", "rows per second": "train_samples_per_second"}
    return [(name, format_number(values[metric][-1])) for name, metric in speeds.items() if metric in values][
        :1
    ]


def _change(values: Sequence[float]) -> str:
    """The first and the last value, once if they are shown alike."""
    return " → ".join(dict.fromkeys(map(format_number, (values[0], values[-1]))))


def next_commands(verb: str, config: RunConfig) -> list[str]:
    """Commands to continue with: the next verb, on the same task or text or on data to be named, and
    generation; after the last verb on a task, its evaluation."""
    output, data = Path(config.output_dir), config.data
    model = str(output / TRAINED_MODEL)
    task = ["--task", data.task] if data.task else []
    if data.task and isinstance(data.train, str):
        task += ["--data", data.train]
    following = {
        "pretrain": "sft" if config.training.get("attention", "causal") != "causal" else "convert",
        "convert": "sft",
        "sft": "grpo" if task else "dpo",
        "dpo": "grpo" if task else None,
    }.get(verb)
    if following == "grpo" and config.training.get("noise") in ("uniform", "hybrid"):
        following = None  # its usual method needs masks
    commands = list[list[str]]()
    few = ":" in str(data.task) and data.train is None  # a task of the user may have few problems
    kept = ("text_column", "style", "split", *(("max_rows", "eval_rows") if few else ()))
    changed = [name for name in kept if getattr(data, name) != DataConfig.model_fields[name].default]
    imports = [f"imports=[{', '.join(config.imports)}]"] if config.imports else []
    if following is not None:
        text = EXAMPLES.get(following, "TEXT.jsonl")
        if following == "convert" and isinstance(data.train, str):
            text = data.train
        words = [following, "--model", model, *(task or ["--data", text])]
        words += ["--output", str(output.parent / following)]
        if task or following == "convert":
            words += [f"data.{name}={getattr(data, name)}" for name in changed]
        commands.append([*words, *imports])
    elif task and not imports:  # `evaluate` has no `imports`
        style = ["--style", data.style] if data.style != "plain" else []
        commands.append(["evaluate", model, *task, *style])
    if not task or not commands:
        commands.append(["generate", model, *(["--chat"] if _of_chats(data) else []), "--prompt", "TEXT"])
    return [shell_line(["unmask", *map(masked_argument, words)]) for words in commands]


def _of_chats(data: DataConfig) -> bool:
    """Whether the first training row has messages, of a file that can be read line by line."""
    if data.chat_template is not None:
        return True
    if not isinstance(data.train, str) or kind_of(data.train) != ".jsonl" or not Path(data.train).is_file():
        return False
    with closing(read_examples(data.train, keep_malformed=True)) as rows:
        first = next(rows, None)
    return isinstance(first, dict) and ("conversations" in first or is_conversational(first))
