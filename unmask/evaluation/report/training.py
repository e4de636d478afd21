"""What a report shows of training runs: an overview, their curves, and time and memory by phase."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.console import format_duration
from unmask.evaluation.report.content import (
    Chart,
    Charts,
    Point,
    Record,
    Section,
    Series,
    Table,
    TableCell,
    Texts,
)

UNITS = {
    "loss": "loss",
    "cross_entropy": "nats per token",
    "accuracy": "fraction of pairs",
    "margin": "log-odds",
    "win_rate": "fraction of pairs",
    "reward": "mean reward",
    "reward_std": "standard deviation",
    "kl": "nats",
    "entropy": "nats per token",
    "grad_norm": "norm",
    "learning_rate": "learning rate",
    "completion_length": "tokens",
    "truncated": "fraction of completions",
    "unscored": "fraction of completions",
    "groups_kept": "fraction of groups",
    "tokens_per_second": "tokens per second",
    "samples_per_second": "rows per second",
    "memory_gb": "GB",
    "memory/allocated_gb": "GB",
    "throughput/generated": "tokens per second",
    "throughput/trained": "tokens per second",
}
"""What the vertical axis of a metric shows; of other metrics its name is all that is known."""
MAIN = ("reward", "loss", "cross_entropy", "accuracy", "margin", "win_rate", "kl")
"""Metrics whose curves are not folded away, beside the parts of the reward."""
NOT_DRAWN = {"step", "stage", "epoch", "total_flos", "num_input_tokens_seen"}
EVALUATION_METRICS = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
WHOLE_PROCESS = "memory/allocated_gb"  # of no phase


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: the lines of its log, and what is known of it."""

    name: str
    verb: str
    color: int
    lines: Sequence[Mapping[str, Any]]
    description: str = ""
    state: str = ""
    steps: int | None = None
    """The planned steps of the whole run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its manifest."""
    rows: Sequence[Sequence[str]] = ()
    """The documents of its first training rows, with the trained tokens marked."""

    def points(self, metric: str) -> list[Point]:
        """The (step, value) pairs of a metric."""
        return [
            (line["step"], line[metric])
            for line in self.lines
            if is_number(line.get(metric)) and is_number(line.get("step"))
        ]

    def values(self, metric: str) -> list[float]:
        return [value for _, value in self.points(metric)]

    @property
    def metrics(self) -> list[str]:
        """The names of logged numbers, in the order in which they first occur."""
        return list(
            dict.fromkeys(name for line in self.lines for name, value in line.items() if is_number(value))
        )


def is_number(value: Any) -> bool:
    """Whether a value of a log is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def overview(runs: Sequence[Run]) -> Section:
    """A table of the runs."""
    header = ["Run", "Verb", "State", "Steps", "Time", "Peak memory", "Tokens per second", "Last value"]
    rows = [_overview_row(run) for run in runs]
    total = sum(sum(run.values("train_runtime")) for run in runs)
    foot = [
        TableCell(text="all runs"),
        *(TableCell(text=""),) * 3,
        TableCell(text=format_duration(total)),
        *(TableCell(text=""),) * 3,
    ]
    kept = [0, *(column for column in range(1, len(header)) if any(row[column].text != NONE for row in rows))]
    table = Table(
        caption="What was run",
        header=[header[column] for column in kept],
        groups=[("", [[row[column] for column in kept] for row in rows])],
        total=[foot[column] for column in kept] if len(runs) > 1 and total else (),
    )
    return Section(title="Runs", blocks=[table])


NONE = "\N{EM DASH}"


def _overview_row(run: Run) -> list[TableCell]:
    seconds, memory = run.values("train_runtime"), run.values("memory_gb")
    rates = run.values("tokens_per_second")
    done = max(run.values("step"), default=0)
    last = next(
        ((name, run.values(name)[-1]) for name in ("reward", "cross_entropy", "loss") if run.values(name)),
        None,
    )
    return [
        TableCell(text=run.name, detail=run.description, color=run.color),
        TableCell(text=run.verb),
        TableCell(text=run.state or NONE),
        TableCell(
            text=f"{done:,.0f} of {run.steps:,}" if run.steps and done != run.steps else f"{done:,.0f}"
        ),
        TableCell(text=format_duration(sum(seconds)) if seconds else NONE),
        TableCell(text=f"{max(memory):.2f} GB" if memory else NONE),
        TableCell(text=f"{sum(rates) / len(rates):,.0f}" if rates else NONE),
        TableCell(text=f"{last[1]:.4g}", detail=last[0].replace("_", " ")) if last else TableCell(text=NONE),
    ]


def curves(runs: Sequence[Run]) -> Section:
    """A chart for each metric of each verb, with its runs over one another."""
    verbs = list(dict.fromkeys(run.verb for run in runs))
    charts: list[Chart] = []
    folded: list[Chart] = []
    for verb in verbs:
        mine = [run for run in runs if run.verb == verb]
        main, more = _metrics(mine)
        marks = list(dict.fromkeys(mark for run in mine for mark in _stages(run)))
        before = f"{verb}: " if len(verbs) > 1 else ""
        charts += [_chart(before, name, mine, marks) for name in main]
        folded += [_chart(before, name, mine, marks) for name in more]
    intro = "Thin: means of neighboring steps. Thick: their moving average. Dashed: held-out rows."
    return Section(
        title="Curves", blocks=[Charts(charts=charts, more=folded)] if charts or folded else [], intro=intro
    )


def _metrics(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """The metrics of a verb that are shown, and those that are folded away."""
    logged = dict.fromkeys(name for run in runs for name in run.metrics)
    metrics = list(dict.fromkeys(name.removeprefix("eval_") for name in logged if _is_drawn(name)))
    parts = [name for name in metrics if name.startswith("rewards/") and name.count("/") == 1]
    main = [name for name in MAIN if name in metrics and not (name == "loss" and "cross_entropy" in metrics)]
    if len(parts) > 1:  # a single one is the reward itself
        main[1:1] = parts
    return main, [name for name in metrics if name not in main]


def _is_drawn(name: str) -> bool:
    phase = name.startswith(("time/", "memory/")) and name not in (WHOLE_PROCESS, "memory/share")
    return not (name in NOT_DRAWN or name in EVALUATION_METRICS or name.startswith("train_") or phase)


def _chart(before: str, metric: str, runs: Sequence[Run], marks: Sequence[tuple[float, str]]) -> Chart:
    series = [Series(name=run.name, color=run.color, points=run.points(metric)) for run in runs]
    series += [
        Series(
            name=f"{run.name}, held out", color=run.color, points=run.points(f"eval_{metric}"), dashed=True
        )
        for run in runs
    ]
    unit = UNITS.get(
        metric, "reward" if metric.startswith("rewards/") and metric.count("/") == 1 else "value"
    )
    title = before + metric.replace("_", " ")
    return Chart(
        title=title,
        x_label="optimizer step",
        y_label=unit,
        series=[each for each in series if each.points],
        marks=marks,
    )


def _stages(run: Run) -> Iterable[tuple[float, str]]:
    """Where each stage of a conversion after the first begins."""
    first: dict[Any, float] = {}
    for line in run.lines:
        if is_number(line.get("stage")) and is_number(line.get("step")):
            first.setdefault(line["stage"], line["step"])
    return [(step, f"stage {stage:g}") for stage, step in list(first.items())[1:]]


def phases(runs: Sequence[Run]) -> Section:
    """Time and memory of each run by phase of a step. Without blocks where nothing was logged."""
    totals = {run.name: times for run in runs if (times := _by_phase(run, "time/", ""))}
    longest = max((seconds for times in totals.values() for seconds in times.values()), default=math.inf)
    peaks = {run.name: _by_phase(run, "memory/", "_gb") for run in runs}
    largest = max((peak for found in peaks.values() for peak in found.values()), default=math.inf)
    groups = []
    for run in runs:
        times = totals.get(run.name, {})
        rows = [_phase_row(run, name, times, longest, peaks[run.name].get(name), largest) for name in times]
        if rows:
            groups.append((f"{run.name}: {sum(times.values()):.3g} s per step", rows))
    header = ["Phase", "Seconds per step", "", "Fraction", "Peak memory", ""]
    table = Table(
        caption="Mean time of a step, and peak memory, by phase",
        header=header if any(peaks.values()) else header[:4],
        groups=[(name, [row if any(peaks.values()) else row[:4] for row in rows]) for name, rows in groups],
        note=(
            "Phases do not overlap: their times add up to that of a step. Peak memory is of the process "
            "that writes the log."
        ),
    )
    return Section(title="Time and memory", blocks=[table] if groups else [])


def _by_phase(run: Run, before: str, after: str) -> dict[str, float]:
    """By phase: the mean of times, the maximum of peaks."""
    found = {}
    for name in run.metrics:
        if name.startswith(before) and name.endswith(after) and name != WHOLE_PROCESS:
            values = run.values(name)
            found[name.removeprefix(before).removesuffix(after)] = (
                max(values) if after else sum(values) / len(values)
            )
    return {name: value for name, value in sorted(found.items(), key=lambda each: -each[1]) if value > 0}


def _phase_row(
    run: Run, name: str, times: Mapping[str, float], longest: float, peak: float | None, largest: float
) -> list[TableCell]:
    return [
        TableCell(text=name),
        TableCell(text=f"{times[name]:.{2 if longest >= 1 else 4}f}"),
        TableCell(text="", length=times[name] / longest, color=run.color),
        TableCell(text=f"{times[name] / sum(times.values()):.0%}"),
        TableCell(text=NONE if peak is None else f"{peak:.2f} GB"),
        TableCell(text="", length=None if peak is None else peak / largest, color=run.color),
    ]


def learnt_rows(runs: Sequence[Run]) -> Section:
    """The training rows that runs were asked to show."""
    shown = [
        f"{run.name}, row {number}\n{text}"
        for run in runs
        for number, documents in enumerate(run.rows)
        for text in documents
    ]
    return Section(
        title="What is trained on",
        blocks=[Texts(texts=shown)] if shown else [],
        intro="The tokens between ⟦ and ⟧ are trained on.",
    )


def record_of(run: Run) -> Record:
    """How the run can be repeated."""
    return Record(title=f"Run {run.name}", values=run.settings)
