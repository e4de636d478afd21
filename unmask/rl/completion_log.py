"""Samples of completions: on the terminal, in a file, and in trackers that accept tables."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from unmask.artifacts import MetricsLog, plain, write_atomic
from unmask.console import show_table
from unmask.data.encoding import is_messages

COMPLETIONS_FILE = "completions.jsonl"
SHOWN_CHARACTERS = 400
"""Characters of a text shown on the terminal; files and trackers get all of it."""


class CompletionLog:
    """Shows and stores a few completions at regular steps.

    Args:
        folder: where `completions.jsonl` is written, one completion per line.
        rows: completions in a sample; None: all.
    """

    def __init__(self, folder: Path, *, rows: int | None = 8):
        self.rows = rows
        self._log = MetricsLog(folder / COMPLETIONS_FILE)
        self._last = 0

    def due(self, step: int, every: int) -> bool:
        """Whether the rollout for this optimizer step (from 1) is sampled: the first of a run, then the first
        in each `every` steps."""
        return self._last == 0 or step // every > self._last // every

    def write(
        self, step: int, columns: Mapping[str, Sequence[Any]], callbacks: Iterable[TrainerCallback] = ()
    ) -> None:
        """Show and store a sample of the first process.

        Args:
            step: the optimizer step that the completions are for, from 1.
            columns: by name, a value per completion: texts, messages, numbers (NaN: none). Rows are taken at
                even distances.
            callbacks: the trainer's callbacks; TensorBoard, W&B and trackio get the sample as a table
                `completions`.
        """
        self._last = step
        count = len(next(iter(columns.values())))
        shown = min(count, self.rows or count)
        picked = [
            {name: values[i * count // shown] for name, values in columns.items()} for i in range(shown)
        ]
        for row in picked:
            self._log.write({"step": step} | row | {"step": step})
        texts = [[_shown(value) for value in row.values()] for row in picked]
        show_table(texts, f"completions of step {step}", columns)
        rows = [[_scalar(value) for value in row.values()] for row in picked]
        for callback in callbacks:
            _track(callback, step, list(columns), rows)

    def rewind(self, step: int) -> None:
        """Drop the samples after a step's checkpoint; the resumed run takes them again."""
        lines = self._log.read() if self._log.path.exists() else []
        kept = [line for line in lines if line["step"] <= step]
        self._last = kept[-1]["step"] if kept else 0
        if len(kept) < len(lines):
            write_atomic(self._log.path, "".join(json.dumps(line) + "\n" for line in kept))


def _track(callback: TrainerCallback, step: int, names: list[str], rows: list[list[Any]]) -> None:
    if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
        lines = [names, ["---"] * len(names), *([_markdown(_text(value)) for value in row] for row in rows)]
        callback.tb_writer.add_text(
            "completions", "\n".join(f"| {' | '.join(line)} |" for line in lines), step
        )
    elif isinstance(callback, (WandbCallback, TrackioCallback)):
        tracker = importlib.import_module("wandb" if isinstance(callback, WandbCallback) else "trackio")
        tracker.log({"completions": tracker.Table(columns=names, data=rows), "train/global_step": step})


def _scalar(value: Any) -> str | float | None:
    """A value for a cell of a table: messages as JSON, a lone surrogate as its number."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()


def _text(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    """A value for the terminal: of messages the last one, and of a long text both ends."""
    text = _text(_scalar(value[-1].get("content") if is_messages(value) else value))
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[: SHOWN_CHARACTERS // 2]} ... {text[-SHOWN_CHARACTERS // 2 :]}"


def _markdown(text: str) -> str:
    """The text escaped for Markdown and HTML."""
    return re.sub(r"[^\w\s.,:;=?'\"-]|_", lambda found: f"&#{ord(found[0])};", text).replace("\n", "<br>")
