"""What a report shows of evaluations: scores with intervals, paired differences, and speed against quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from unmask.evaluation.curve import SPEEDS
from unmask.evaluation.report.content import Cell, Chart, Charts, Record, Section, Series, Table
from unmask.evaluation.report.geometry import minus
from unmask.evaluation.result_file import EvaluationResult, Metric, TaskScores, is_fraction
from unmask.evaluation.statistics import Interval, paired_difference


class Result(NamedTuple):
    """An evaluation of a model, with its name and color."""

    name: str
    color: int
    content: EvaluationResult


class Entry(NamedTuple):
    """The scores of a model on a task; the name has the settings in which its evaluations of the task differ."""

    model: str
    name: str
    color: int
    scores: TaskScores


def entries_by_task(results: Sequence[Result]) -> dict[str, list[Entry]]:
    """The scores of all models by task."""
    found: dict[str, list[tuple[Result, TaskScores]]] = {}
    for result in results:
        for scores in result.content.tasks:
            found.setdefault(scores.task, []).append((result, scores))
    named = {}
    for task, pairs in found.items():
        labels = _differences([scores.sampler for _, scores in pairs])
        named[task] = [
            Entry(result.name, ", ".join(filter(None, (result.name, label))), result.color, scores)
            for (result, scores), label in zip(pairs, labels, strict=True)
        ]
    return named


def _differences(samplers: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each sampler the settings that are not the same in all."""
    names = dict.fromkeys(name for sampler in samplers for name in sampler)
    varied = [name for name in names if len({repr(sampler.get(name)) for sampler in samplers}) > 1]
    return [_label({name: sampler.get(name) for name in varied}) for sampler in samplers]


def _label(settings: Mapping[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in settings.items() if value is not None]
    return ", ".join(given) if given or not settings else f"{', '.join(settings)} unset"


def tables(results: Sequence[Result]) -> Section:
    """The scores of each task, what they cost, and how models differ on the problems that they share."""
    blocks: list[Table] = []
    for task, entries in entries_by_task(results).items():
        blocks.append(score_table(task, entries))
        blocks += filter(None, (work_table(task, entries), difference_table(task, entries)))
    return Section(title="Scores", blocks=blocks, intro="Brackets and bars: 95% intervals that resample groups of dependent problems.")


def score_table(task: str, entries: Sequence[Entry]) -> Table:
    """A row for each model under each metric, with its interval; `work_table` has those of speed."""
    groups = []
    for metric in dict.fromkeys(name for entry in entries for name in entry.scores.metrics if name not in SPEEDS):
        found = [(entry, entry.scores.metrics[metric]) for entry in entries if metric in entry.scores.metrics]
        figures = Figures(metric, [value for _, value in found])
        rows = [
            [Cell(text=entry.name, color=entry.color), figures.mean(value), figures.interval(value), figures.drawn(value, entry.color)]
            for entry, value in found
        ]
        groups.append((figures.heading, rows))
    return Table(caption=task, header=["Model", "Score", "95% interval", ""], groups=groups, note=_problems(entries))


def _problems(entries: Sequence[Entry]) -> str:
    """The number of problems by status, said once where it is the same for all models."""
    by_entry = {entry.name: _statuses(entry.scores) for entry in entries if entry.scores.items}
    different = set(by_entry.values())
    lines = different if len(different) == 1 else [f"{name}: {statuses}" for name, statuses in by_entry.items()]
    return "".join(f"{line}. " for line in lines).strip()


def _statuses(scores: TaskScores) -> str:
    statuses = ", ".join(f"{count} {status}" for status, count in scores.statuses.items() if count)
    return f"{len(scores.items)} problems{f' ({statuses})' if set(scores.statuses) - {'ok'} else ''}"


class Figures:
    """How the values of a metric are written: as percentages if they are fractions, otherwise with equal decimals.

    Args:
        name: of the metric.
        values: of all models.
    """

    def __init__(self, name: str, values: Sequence[Metric]):
        ends = [end for value in values for end in (value.mean, value.low, value.high) if end is not None and math.isfinite(end)]
        self.name = name
        self.fraction = is_fraction(name, ends)
        largest = max(map(abs, ends), default=1.0) or 1.0
        self.decimals = 1 if self.fraction else min(max(2 - math.floor(math.log10(largest)), 0), 5)
        self.bounded = any(value.low is not None or value.high is not None for value in values)
        self.low, self.high = _tenths(ends) if self.fraction else _around(ends)

    @property
    def heading(self) -> str:
        """The metric's name, and what its bars span."""
        span = f"{100 * self.low:.0f} to {100 * self.high:.0f}%" if self.fraction else minus(f"{self.low:.3g} to {self.high:.3g}")
        return f"{self.name} · bars span {span}" if self.bounded else self.name

    def text(self, value: float, unit: str = "%") -> str:
        """One value."""
        return minus(f"{100 * value:.1f}{unit}" if self.fraction else f"{value:,.{self.decimals}f}")

    def mean(self, value: Metric) -> Cell:
        error = value.standard_error
        return Cell(text=self.text(value.mean), detail="" if error is None else f"± {self.text(error, '')} by its masks")

    def interval(self, value: Metric) -> Cell:
        ends = [end if end is not None and math.isfinite(end) else None for end in (value.low, value.high)]
        if ends == [None, None]:
            return Cell(text="")
        return Cell(text="", detail=f"[{', '.join('∞' if end is None else self.text(end, '') for end in ends)}]")

    def drawn(self, value: Metric, color: int) -> Cell:
        if value.low is None and value.high is None:
            return Cell(text="")
        ends = (self.low if value.low is None else value.low, value.mean, self.high if value.high is None else value.high)
        low, mean, high = ((end - self.low) / (self.high - self.low) for end in ends)
        return Cell(text="", span=(low, mean, high), color=color)


def _tenths(ends: Sequence[float]) -> tuple[float, float]:
    """The tenths around fractions."""
    low = math.floor(10 * min((min(end, 0.95) for end in ends), default=0.0))
    high = math.ceil(10 * max(ends, default=1.0))
    return low / 10, max(high, low + 1) / 10


def _around(ends: Sequence[float]) -> tuple[float, float]:
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def answers_of(scores: TaskScores) -> int:
    """The number of completions."""
    return sum(len(item.completions) for item in scores.items)


def passes_per_answer(scores: TaskScores) -> float | None:
    """Forward passes per completion; None where there are none."""
    passes = sum(item.passes for item in scores.items)
    return passes / answers_of(scores) if passes and answers_of(scores) else None


def work_table(task: str, entries: Sequence[Entry]) -> Table | None:
    """Tokens, steps and forward passes per answer; None where nothing was generated."""
    rows = []
    for entry in entries:
        answers, items = answers_of(entry.scores), entry.scores.items
        sums = [sum(getattr(item, name) for item in items) for name in ("tokens", "steps", "passes")]
        if answers and sums[2]:
            cells = [Cell(text=f"{number:,.1f}") for number in (*(each / answers for each in sums), sums[0] / sums[2])]
            rows.append([Cell(text=entry.name, color=entry.color), Cell(text=f"{answers:,}"), *cells])
    header = ["Model", "Answers", "Tokens each", "Steps each", "Passes each", "Tokens per pass"]
    return Table(caption=f"{task}: work for an answer", header=header, groups=[("", rows)]) if rows else None


def difference_table(task: str, entries: Sequence[Entry]) -> Table | None:
    """Each model, where it took the most forward passes, against the one before it, on the problems that both have; None where no two
    models share any."""
    models = dict.fromkeys(entry.model for entry in entries)
    slowest = [max((entry for entry in entries if entry.model == name), key=_passes) for name in models]
    found = [(before, after, metric, interval) for before, after in pairwise(slowest) for metric, interval in _paired(before, after)]
    if not found:
        return None
    ends = [abs(end) for *_, interval in found for end in (interval.low, interval.high, interval.mean) if math.isfinite(end)]
    largest = max(ends, default=1.0) or 1.0
    rows = []
    for before, after, metric, interval in found:
        value = after.scores.metrics[metric]
        figures = Figures(metric, [before.scores.metrics[metric], value])
        low, mean, high = (_signed(figures, end) for end in (interval.low, interval.mean, interval.high))
        better = (interval.mean > 0) == value.higher_is_better
        verdict: Any = ("gain" if better else "loss") if interval.excludes(0.0) else "unclear"
        words = "unclear" if verdict == "unclear" else "better" if better else "worse"
        span = tuple(0.5 + end / largest / 2 for end in (interval.low, interval.mean, interval.high))
        cells = [Cell(text=mean, verdict=verdict), Cell(text="", detail=f"[{low}, {high}]"), Cell(text=words, verdict=verdict)]
        name = Cell(text=f"{after.name} against {before.name}", color=after.color)
        rows.append([name, *cells, Cell(text="", span=span, verdict=verdict)])  # type: ignore[arg-type]
    metric = found[0][2]
    unit = "percentage points" if Figures(metric, [slowest[0].scores.metrics[metric]]).fraction else "its own units"
    header = ["Comparison", "Difference", "95% interval", "Verdict", ""]
    note = f"Paired differences of {metric} in {unit}, on the problems that both were given. The line in the middle of a bar is 0."
    return Table(caption=f"{task}: what made a difference", header=header, groups=[("", rows)], note=note, centered=True)


def _passes(entry: Entry) -> float:
    return passes_per_answer(entry.scores) or 0.0


def _signed(figures: Figures, value: float) -> str:
    if not math.isfinite(value):
        return minus("-∞" if value < 0 else "+∞")
    return minus(f"{100 * value:+.1f}" if figures.fraction else f"{value:+,.{figures.decimals}f}")


def _paired(before: Entry, after: Entry) -> list[tuple[str, Interval]]:
    """The first metric that items of both have, with its difference on the items that they share."""
    for metric in before.scores.metrics:
        if metric in after.scores.metrics:
            old = {item.id: item for item in before.scores.items if metric in item.scores}
            shared = [(old[item.id], item) for item in after.scores.items if metric in item.scores and item.id in old]
            if shared:
                first, second = ([item.scores[metric] for item in items] for items in zip(*shared, strict=True))
                return [(metric, paired_difference(first, second, [item.group for _, item in shared]))]
    return []


def speed(results: Sequence[Result]) -> Section:
    """Score against forward passes per answer, for each task that a model did with several samplers."""
    charts = [chart for task, entries in entries_by_task(results).items() if (chart := _speed_chart(task, entries)) is not None]
    intro = "A point is a setting of the sampler, listed above with its score. Further left is faster, further up better."
    return Section(title="Speed against quality", blocks=[Charts(charts=charts)] if charts else [], intro=intro)


def _speed_chart(task: str, entries: Sequence[Entry]) -> Chart | None:
    metric = next(iter(entries[0].scores.metrics), None)
    series = []
    for model in dict.fromkeys(entry.model for entry in entries):
        mine = [entry for entry in entries if entry.model == model and metric in entry.scores.metrics]
        known = [(passes, entry) for entry in mine if (passes := passes_per_answer(entry.scores)) is not None]
        known.sort(key=lambda each: each[0])
        if len(known) > 1:
            values = [entry.scores.metrics[str(metric)] for _, entry in known]
            bounds = [_bounds(value) for value in values]
            points = [(passes, value.mean) for (passes, _), value in zip(known, values, strict=True)]
            series.append(Series(name=model, color=known[0][1].color, points=points, bounds=bounds))
    if not series or metric is None:
        return None
    fraction = Figures(metric, [entry.scores.metrics[metric] for entry in entries if metric in entry.scores.metrics]).fraction
    return Chart(title=task, x_label="forward passes per answer", y_label=metric, series=series, percent=fraction)


def _bounds(value: Metric) -> tuple[float, float]:
    return (-math.inf if value.low is None else value.low, math.inf if value.high is None else value.high)


def record_of(result: Result) -> Record:
    """How the evaluation can be repeated."""
    content = result.content
    protocols = {scores.task: scores.protocol for scores in content.tasks}
    values = {"model": content.model, "arguments": content.arguments, "protocols": protocols}
    return Record(title=f"Evaluation of {result.name}", values=values | {"environment": content.environment, "times": content.times})
