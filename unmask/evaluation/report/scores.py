"""What a report shows of evaluations: scores with intervals, paired differences, and speed against
quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from unmask.evaluation.comparison import Difference, differences_of, shared_items
from unmask.evaluation.curve import SPEEDS
from unmask.evaluation.report.content import Cell, Chart, Charts, Record, Section, Series, Table, Verdict
from unmask.evaluation.report.pictures import minus
from unmask.evaluation.result_file import EvaluationResult, Metric, TaskScores, is_fraction, with_settings

WORDS: dict[Verdict, str] = {"gain": "better", "loss": "worse", "unclear": "unclear"}


class Result(NamedTuple):
    """An evaluation of a model, with its name and color."""

    name: str
    color: int
    content: EvaluationResult


class Entry(NamedTuple):
    """The scores of a model on a task; the name has the settings in which its evaluations of the task
    differ."""

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
        samplers = [scores.sampler for _, scores in pairs]
        named[task] = [
            Entry(result.name, with_settings(result.name, scores.sampler, samplers), result.color, scores)
            for result, scores in pairs
        ]
    return named


def tables(results: Sequence[Result]) -> Section:
    """The scores of each task, what they cost, and how models differ on the problems that they share."""
    blocks: list[Table] = []
    for task, entries in entries_by_task(results).items():
        blocks.append(score_table(task, entries))
        blocks += filter(None, (work_table(task, entries), difference_table(task, entries)))
    return Section(
        title="Scores",
        blocks=blocks,
        intro="Brackets and bars: 95% intervals over groups of dependent problems.",
    )


def score_table(task: str, entries: Sequence[Entry]) -> Table:
    """A row for each model under each metric, with its interval; `work_table` has those of speed."""
    groups = []
    for metric in dict.fromkeys(
        name for entry in entries for name in entry.scores.metrics if name not in SPEEDS
    ):
        found = [(entry, entry.scores.metrics[metric]) for entry in entries if metric in entry.scores.metrics]
        figures = Figures(metric, [value for _, value in found])
        rows = [
            [
                Cell(text=entry.name, color=entry.color),
                figures.mean(value),
                figures.interval(value),
                figures.drawn(value, entry.color),
            ]
            for entry, value in found
        ]
        groups.append((figures.heading, rows))
    return Table(
        caption=task, header=["Model", "Score", "95% interval", ""], groups=groups, note=_problems(entries)
    )


def _problems(entries: Sequence[Entry]) -> str:
    """The number of problems by status, said once where it is the same for all models."""
    by_entry = {entry.name: _statuses(entry.scores) for entry in entries if entry.scores.items}
    different = set(by_entry.values())
    lines = (
        different if len(different) == 1 else [f"{name}: {statuses}" for name, statuses in by_entry.items()]
    )
    return "".join(f"{line}. " for line in lines).strip()


def _statuses(scores: TaskScores) -> str:
    statuses = ", ".join(f"{count} {status}" for status, count in scores.statuses.items() if count)
    return f"{len(scores.items)} problems{f' ({statuses})' if set(scores.statuses) - {'ok'} else ''}"


class Figures:
    """How the values of a metric are written: as percentages if they are fractions, otherwise with equal
    decimals.

    Args:
        name: of the metric.
        values: of all models.
    """

    def __init__(self, name: str, values: Sequence[Metric]):
        ends = [
            end
            for value in values
            for end in (value.mean, value.low, value.high)
            if end is not None and math.isfinite(end)
        ]
        self.name = name
        self.fraction = is_fraction(name, ends)
        largest = max(map(abs, ends), default=1.0) or 1.0
        self.decimals = 1 if self.fraction else min(max(2 - math.floor(math.log10(largest)), 0), 5)
        self.bounded = any(value.low is not None or value.high is not None for value in values)
        self.low, self.high = _tenths(ends) if self.fraction else _around(ends)

    @property
    def heading(self) -> str:
        """The metric's name, and what its bars span."""
        span = (
            f"{100 * self.low:.0f} to {100 * self.high:.0f}%"
            if self.fraction
            else minus(f"{self.low:.3g} to {self.high:.3g}")
        )
        return f"{self.name} · bars span {span}" if self.bounded else self.name

    def text(self, value: float, unit: str = "%") -> str:
        """One value."""
        return minus(f"{100 * value:.1f}{unit}" if self.fraction else f"{value:,.{self.decimals}f}")

    def mean(self, value: Metric) -> Cell:
        error = value.standard_error
        return Cell(
            text=self.text(value.mean),
            detail="" if error is None else f"± {self.text(error, '')} by its masks",
        )

    def interval(self, value: Metric) -> Cell:
        ends = [end if end is not None and math.isfinite(end) else None for end in (value.low, value.high)]
        if ends == [None, None]:
            return Cell(text="")
        return Cell(
            text="", detail=f"[{', '.join('∞' if end is None else self.text(end, '') for end in ends)}]"
        )

    def drawn(self, value: Metric, color: int) -> Cell:
        if (value.low is None and value.high is None) or not math.isfinite(value.mean):
            return Cell(text="")
        ends = (
            self.low if value.low is None else value.low,
            value.mean,
            self.high if value.high is None else value.high,
        )
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


def passes_per_answer(entry: Entry) -> float:
    """Forward passes per completion; 0 where there are none."""
    return entry.scores.total("passes") / (entry.scores.answers or 1)


def work_table(task: str, entries: Sequence[Entry]) -> Table | None:
    """Tokens, steps and forward passes per answer; None where nothing was generated."""
    rows = []
    for entry in entries:
        answers = entry.scores.answers
        tokens, steps, passes = (entry.scores.total(name) for name in ("tokens", "steps", "passes"))
        if answers and passes:
            cells = [
                Cell(text=f"{number:,.1f}")
                for number in (tokens / answers, steps / answers, passes / answers, tokens / passes)
            ]
            rows.append([Cell(text=entry.name, color=entry.color), Cell(text=f"{answers:,}"), *cells])
    header = ["Model", "Answers", "Tokens each", "Steps each", "Passes each", "Tokens per pass"]
    return Table(caption=f"{task}: work for an answer", header=header, groups=[("", rows)]) if rows else None


def difference_table(task: str, entries: Sequence[Entry]) -> Table | None:
    """Each model, where it took the most forward passes, against the one before it, on the problems that both
    have; None where no two models share any."""
    models = dict.fromkeys(entry.model for entry in entries)
    slowest = [
        max((entry for entry in entries if entry.model == name), key=passes_per_answer) for name in models
    ]
    found = [
        (before, after, each)
        for before, after in pairwise(slowest)
        if (each := _first_difference(task, before, after))
    ]
    if not found:
        return None
    metric = found[0][2].metric
    figures = Figures(
        metric, [entry.scores.metrics[metric] for entry in slowest if metric in entry.scores.metrics]
    )
    ends = [
        abs(end)
        for *_, each in found
        for end in (each.change.low, each.change.mean, each.change.high)
        if math.isfinite(end)
    ]
    largest = max(ends, default=1.0) or 1.0
    rows = [
        [Cell(text=f"{b.name} against {a.name}", color=b.color), *_difference_cells(each, figures, largest)]
        for a, b, each in found
    ]
    unit = "percentage points" if figures.fraction else "its own units"
    header = ["Comparison", "Difference", "95% interval", "Verdict", ""]
    note = (
        f"Paired differences of {metric} in {unit}, on the problems that both were given. The line in the "
        "middle of a bar is 0."
    )
    return Table(
        caption=f"{task}: what made a difference",
        header=header,
        groups=[("", rows)],
        note=note,
        centered=True,
    )


def _first_difference(task: str, before: Entry, after: Entry) -> Difference | None:
    """In the first metric that shared items have."""
    pairs = shared_items(before.scores, after.scores, (before.name, after.name))
    return next(differences_of(task, after.name, before.scores, pairs), None)


def _difference_cells(difference: Difference, figures: Figures, largest: float) -> list[Cell]:
    """The difference, its interval, a verdict, and a bar, of which half is `largest` wide."""
    change = difference.change
    better = (change.mean > 0) == difference.higher_is_better
    verdict: Verdict = "unclear" if not change.excludes(0.0) else "gain" if better else "loss"
    low, mean, high = (_signed(figures, end) for end in (change.low, change.mean, change.high))
    if not math.isfinite(change.low):
        return [
            Cell(text=mean, verdict=verdict),
            Cell(text=""),
            Cell(text=WORDS[verdict], verdict=verdict),
            Cell(text=""),
        ]
    span = (0.5 + change.low / largest / 2, 0.5 + change.mean / largest / 2, 0.5 + change.high / largest / 2)
    return [
        Cell(text=mean, verdict=verdict),
        Cell(text="", detail=f"[{low}, {high}]"),
        Cell(text=WORDS[verdict], verdict=verdict),
        Cell(text="", span=span, verdict=verdict),
    ]


def _signed(figures: Figures, value: float) -> str:
    return minus(f"{100 * value:+.1f}" if figures.fraction else f"{value:+,.{figures.decimals}f}")


def in_words(entries: Sequence[Entry]) -> list[str]:
    """For the stages of a pipeline, evaluated on the same problems: how many each solved, and the change from
    the stage before."""
    figures = Figures("solved", [entry.scores.metrics["solved"] for entry in entries])
    first = entries[0].scores.metrics["solved"]
    phrases = [
        f"{figures.text(first.mean)} of the problems solved, 95% interval {figures.interval(first).detail}"
    ]
    for before, after in pairwise(entries):
        pairs = shared_items(before.scores, after.scores, (before.name, after.name))
        [found] = [
            each for each in differences_of("", after.name, before.scores, pairs) if each.metric == "solved"
        ]
        phrases.append(_change_in_words(found, figures))
    return phrases


def _change_in_words(difference: Difference, figures: Figures) -> str:
    change = difference.change
    low, mean, high = (_signed(figures, end) for end in (change.low, change.mean, change.high))
    chance = "" if change.excludes(0.0) else ", which may be chance"
    values = (
        f"{figures.text(difference.before)} → {figures.text(difference.after)} of the problems solved, "
        f"{mean} points{chance}"
    )
    values = f"still {figures.text(difference.after)} of the problems solved" if change.mean == 0 else values
    return f"{values}; 95% interval of the change [{low}, {high}]" if math.isfinite(change.low) else values


def speed(results: Sequence[Result]) -> Section:
    """Score against forward passes per answer, for each task that a model did with several samplers."""
    charts = [
        chart
        for task, entries in entries_by_task(results).items()
        if (chart := _speed_chart(task, entries)) is not None
    ]
    intro = (
        "A point is a setting of the sampler, listed above with its score. Further left is faster, further "
        "up better."
    )
    return Section(
        title="Speed against quality", blocks=[Charts(charts=charts)] if charts else [], intro=intro
    )


def _speed_chart(task: str, entries: Sequence[Entry]) -> Chart | None:
    metric = next(iter(entries[0].scores.metrics), None)
    series = []
    for model in dict.fromkeys(entry.model for entry in entries):
        mine = [entry for entry in entries if entry.model == model and metric in entry.scores.metrics]
        known = [(passes, entry) for entry in mine if (passes := passes_per_answer(entry))]
        known.sort(key=lambda each: each[0])
        if len(known) > 1:
            values = [entry.scores.metrics[str(metric)] for _, entry in known]
            bounds = [_bounds(value) for value in values]
            points = [(passes, value.mean) for (passes, _), value in zip(known, values, strict=True)]
            series.append(Series(name=model, color=known[0][1].color, points=points, bounds=bounds))
    if not series or metric is None:
        return None
    fraction = Figures(
        metric, [entry.scores.metrics[metric] for entry in entries if metric in entry.scores.metrics]
    ).fraction
    return Chart(
        title=task, x_label="forward passes per answer", y_label=metric, series=series, percent=fraction
    )


def _bounds(value: Metric) -> tuple[float, float]:
    return (-math.inf if value.low is None else value.low, math.inf if value.high is None else value.high)


def record_of(result: Result) -> Record:
    """How the evaluation can be repeated."""
    content = result.content
    protocols = {scores.task: scores.protocol for scores in content.tasks}
    values = {"model": content.model, "arguments": content.arguments, "protocols": protocols}
    return Record(
        title=f"Evaluation of {result.name}",
        values=values | {"environment": content.environment, "times": content.times},
    )
