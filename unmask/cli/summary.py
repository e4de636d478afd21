"""What a finished training run shows: where its model is, the numbers that matter, and the next commands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from unmask.artifacts import MetricsLog
from unmask.cli.inputs import evaluates
from unmask.config.run import DataConfig, RunConfig
from unmask.console import format_duration, format_number
from unmask.data.encoding import is_conversational
from unmask.evaluation.provenance import EVALUATION
from unmask.evaluation.result_file import read_result
from unmask.models.model_paths import TRAINED_MODEL
from unmask.records import kind_of, read_examples
from unmask.redaction import masked_argument, shell_line
from unmask.training.run_files import LOG_NAME, last_loss, numbers

EXAMPLES = {"sft": "PAIRS.jsonl", "dpo": "PREFERENCES.jsonl"}
"""What stands for data that the user has to name."""


def summarise(config: RunConfig, seconds: float) -> list[tuple[str, str]]:
    """Rows of a table: the model, the time, the first and last loss or reward, and the held-out score or
    loss, or else the speed.

    Args:
        seconds: that the run took.
    """
    output = Path(config.output_dir)
    lines = numbers(MetricsLog(output / LOG_NAME).read()) if (output / LOG_NAME).is_file() else []
    steps = max((int(line.get("step", 0)) for line in lines), default=0)
    rows = [
        ("model", str(output / TRAINED_MODEL)),
        ("time", f"{format_duration(seconds)}, {steps:,} step{'s' * (steps != 1)}"),
    ]
    return [*rows, *_trained(lines), *_held_out(config, lines)] if steps else rows


def _trained(lines: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Reward, the part of each function if there are several, or else the loss, and the accuracy: each from
    its first to its last value."""
    logged = dict.fromkeys(name for line in lines for name in line)
    values = {name: [line[name] for line in lines if name in line] for name in logged}
    if math.isfinite(loss := last_loss(lines)):
        values.setdefault("loss", []).append(loss)
    parts = [name for name in logged if name.startswith("rewards/") and name.rpartition("/")[0] not in logged]
    names = ["reward", *(parts if len(parts) > 1 else [])] if "reward" in logged else ["loss", "accuracy"]
    ends = {name: (values[name][0], values[name][-1]) for name in names if name in values}
    rows = [("training loss" if name == "loss" else name, _change(*pair)) for name, pair in ends.items()]
    if "reward_std" in values and not any(values["reward_std"]):
        rows.append(("note", "in each step all completions had the same reward: nothing was learnt"))
    return rows


def _held_out(config: RunConfig, lines: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """The score or loss of held-out rows, or else the speed."""
    if evaluates(config):
        [scores] = read_result(Path(config.output_dir) / EVALUATION).tasks
        return [(f"held-out {name}", metric.shown(name)) for name, metric in scores.metrics.items()][:1]
    speeds = {
        "held-out loss": "eval_loss",
        "tokens per second": "tokens_per_second",
        "rows per second": "train_samples_per_second",
    }
    found = {name: [line[metric] for line in lines if metric in line] for name, metric in speeds.items()}
    shown = [
        (name, _change(values[0], values[-1]) if name == "held-out loss" else format_number(values[-1]))
        for name, values in found.items()
        if values
    ]
    return shown[:1]


def _change(first: float, last: float) -> str:
    return " → ".join(dict.fromkeys(map(format_number, (first, last))))


def next_commands(verb: str, config: RunConfig) -> list[str]:
    """The commands that go on with the model: the next verb on the same task or text, or on data to be named,
    and a look at its texts; of a task after the last verb, its evaluation."""
    output, data = Path(config.output_dir), config.data
    model = str(output / TRAINED_MODEL)
    task = (
        ["--task", data.task, *(["--data", data.train] if isinstance(data.train, str) else [])]
        if data.task
        else []
    )
    following = {
        "pretrain": "convert",
        "convert": "sft",
        "sft": "grpo" if task else "dpo",
        "dpo": "grpo" if task else None,
    }.get(verb)
    commands = list[list[str]]()
    few = ":" in str(data.task) and data.train is None  # a task of the user may have few problems
    kept = ("text_column", "style", "split", *(("max_rows", "eval_rows") if few else ()))
    changed = [name for name in kept if getattr(data, name) != DataConfig.model_fields[name].default]
    same_data = (
        [f"data.{name}={getattr(data, name)}" for name in changed] if task or following == "convert" else []
    )
    imports = [f"imports=[{', '.join(config.imports)}]"] if config.imports else []
    if following is not None:
        text = (
            data.train
            if following == "convert" and isinstance(data.train, str)
            else EXAMPLES.get(following, "TEXT.jsonl")
        )
        source = [*(task or ["--data", text]), "--output", str(output.parent / following)]
        commands.append([following, "--model", model, *source, *same_data, *imports])
    elif task and not imports:  # of which `evaluate` knows nothing
        commands.append(
            ["evaluate", model, *task, *(["--style", data.style] if data.style != "plain" else [])]
        )
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
