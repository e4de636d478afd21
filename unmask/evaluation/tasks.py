"""Task accuracy: generate, verify, and say how sure the figures are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unmask.config.run import SamplerConfig
from unmask.errors import ConfigError, DataError
from unmask.evaluation.overlap import check_overlap, overlap
from unmask.evaluation.statistics import Interval, paired_difference, share
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rewards.parsing import answer_of
from unmask.tasks import Task, split_of


@dataclass(frozen=True)
class TaskResult:
    """How a model did on the rows of a task.

    Attributes:
        solved: 1.0 or 0.0 per row.
        values: the shaped reward per row (Sudoku: the share of the empty cells that is right).
        groups: rows of one group share a solution; intervals resample whole groups.
        completions: what the model wrote.
        statuses: how often each status was given, over all rows, also those that could not be judged and are left out above.
        overlap: ROUGE and BLEU against the reference texts, where they were asked for.
    """

    task: str
    solved: list[float]
    values: list[float]
    groups: list[str]
    completions: list[str]
    statuses: dict[str, int] = field(default_factory=dict)
    overlap: dict[str, Interval] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> dict[str, Interval]:
        """Shares with their 95% intervals; rows whose solution is not in the task's training split also apart ("unseen"). And `overlap`."""
        shares = {"solved": share(self.solved, self.groups), "value": share(self.values, self.groups)}
        unseen = [row for row, group in enumerate(self.groups) if split_of(group) == "test"]
        if 0 < len(unseen) < len(self.groups):
            groups = [self.groups[row] for row in unseen]
            for name, values in (("solved", self.solved), ("value", self.values)):
                shares[f"{name}, {len(unseen)} unseen"] = share([values[row] for row in unseen], groups)
        return shares | self.overlap

    def gain_over(self, before: TaskResult) -> Interval:
        """The paired difference of the solved share against an earlier result on the same rows."""
        assert self.groups == before.groups, "results on different rows"
        return paired_difference(before.solved, self.solved, self.groups)

    def to_json(self) -> str:
        shares = {name: {"mean": i.mean, "low": i.low, "high": i.high} for name, i in self.metrics.items()}
        figures = {"task": self.task, "rows": len(self.solved), "metrics": shares, "statuses": self.statuses}
        return json.dumps({**figures, "completions": self.completions}, indent=1)


def _canvas(task: Task, rows: Sequence[Mapping[str, Any]], sampler: SamplerConfig | None) -> SamplerConfig:
    """Where a task knows the length of its answers (as text, not in a conversation), that is the canvas, whatever the sampler says."""
    sampler = sampler or SamplerConfig(batch_size=256)
    known = task.max_completion and rows and isinstance(rows[0]["prompt"], str)
    return sampler.model_copy(update={"max_new_tokens": task.max_completion}) if known else sampler


def check_evaluation(lm: DiffusionLM, task: Task, rows: Sequence[Mapping[str, Any]], sampler: SamplerConfig | None = None) -> None:
    """Raise now what `evaluate_task` would: a prompt that is too long, settings that do not fit the model, no sandbox for programs."""
    task.verify_all([""], rows[:1])
    make_requests(lm, [row["prompt"] for row in rows], _canvas(task, rows, sampler))


def check_metrics(task: Task, metrics: Sequence[str]) -> None:
    """Raise ConfigError for metrics that the task has no reference texts for, that are unknown, or whose library is missing."""
    if metrics and task.reference is None:
        what, remedy = f"{task.name} has no reference texts to compare with", "Leave it out, or evaluate on --task text"
        raise ConfigError(what, where=f"metric {metrics[0]}", remedy=remedy)
    check_overlap(metrics)


def evaluate_task(
    lm: DiffusionLM,
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    sampler: SamplerConfig | None = None,
    metrics: Sequence[str] = (),
) -> TaskResult:
    """Complete every row's prompt (greedily unless the sampler says otherwise) and verify the completions.

    Rows that could not be judged are left out of the shares, and counted.

    Args:
        metrics: "rouge" and "bleu" are added, of tasks with reference texts. An answer in tags is compared without what is around it.

    Raises:
        ConfigError: as `check_metrics`.
        DataError: not one row could be judged.
    """
    check_metrics(task, metrics)
    texts = generate(lm, [row["prompt"] for row in rows], _canvas(task, rows, sampler)).texts
    verdicts = task.verify_all(texts, rows)
    judged = [(v, v.value, row, text) for v, row, text in zip(verdicts, rows, texts, strict=True) if v.value is not None]
    if not judged:
        why = verdicts[0].detail if verdicts else "there are no rows"
        raise DataError(f"not one row could be judged: {why}", where=task.name, remedy="See `unmask sandbox probe`, or check the file.")
    kept, values, kept_rows, written = map(list, zip(*judged, strict=True))
    groups = [row["group"] for row in kept_rows]
    statuses = dict(Counter(str(verdict.status) for verdict in verdicts))
    compared: dict[str, Interval] = {}
    if metrics:
        references = [row[task.reference] for row in kept_rows]
        compared = overlap(metrics, [answer_of(text) or text for text in written], references, groups)
    return TaskResult(task.name, [float(v.solved) for v in kept], values, groups, written, statuses, compared)
