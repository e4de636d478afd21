"""What a report shows of evaluations: scores with intervals, paired differences, and speed against
quality."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from unmask.evaluation.comparison import Difference, differences_of, shared_items
from unmask.evaluation.curve import SPEEDS
from unmask.evaluation.report.content import Chart, Charts, Record, Section, Series, Table, TableCell, Trend
from unmask.evaluation.report.pictures import minus
from unmask.evaluation.result_file import EvaluationResult, Metric, TaskScores, is_fraction, with_settings

WORDS: dict[Trend, str] = {"gain": "better", "loss": "worse", "unclear": "unclear"}


class Result(NamedTuple):
    """An evaluation of a model, with its name and color."""

    name: str
    color: int
    content: EvaluationResult


class ScoreEntry(NamedTuple):
    """The scores of a model on a task; the name has the settings in which its evaluations of the task
    differ."""

    model: str
    name: str
    color: int
    scores: TaskScores


def entries_by_task(results: Sequence[Result]) -> dict[str, list[ScoreEntry]]:
    """The scores of all models by task."""
    found: dict[str, list[tuple[Result, TaskScores]]] = {}
    for result in results:
        for scores in result.content.tasks:
            found.setdefault(scores.task, []).append((result, scores))
    named = {}
    for task, pairs in found.items():
        samplers = [scores.sampler for _, scores in pairs]
        named[task] = [
            ScoreEntry(
                result.name, with_settings(result.name, scores.sampler, samplers), result.color, scores
            )
            for result, scores in pairs
        ]
    return named


def tables(results: Sequence[Result]) -> Section:
    """The scores of each task, what they cost, and how models differ on the problems that they share."""
    blocks = [
        table
        for task, entries in entries_by_task(results).items()
        for make in (score_table, work_table, difference_table)
        if (table := make(task, entries)) is not None
    ]
    intro = "Brackets and bars: 95% intervals over groups of dependent problems."
    return Section(title="Scores", blocks=blocks, intro=intro)


def score_table(task: str, entries: Sequence[ScoreEntry]) -> Table:
    """A row for each model under each metric, with its interval; `work_table` has those of speed."""
    groups = []
    for metric in dict.fromkeys(name for entry in entries for name in entry.scores.metrics):
        if metric in SPEEDS:
            continue
        found = [(entry, entry.scores.metrics[metric]) for entry in entries if metric in entry.scores.metrics]
        figures = Figures(metric, [value for _, value in found])
        rows = [
            [TableCell(text=entry.name, color=entry.color), *figures.cells(value, entry.color)]
            for entry, value in found
        ]
        groups.append((figures.heading, rows))
    header = ["Model", "Score", "95% interval", ""]
    return Table(caption=task, header=header, groups=groups, note=_problems(entries))


def _problems(entries: Sequence[ScoreEntry]) -> str:
    """The number of problems by status, said once where it is the same for all models."""
    lines = {}
    for entry in entries:
        scores = entry.scores
        statuses = ", ".join(f"{count} {status}" for status, count in scores.statuses.items() if count)
        if scores.items:
            shown = f" ({statuses})" if set(scores.statuses) - {"ok"} else ""
            lines[entry.name] = f"{len(scores.items)} problems{shown}."
    same = len(set(lines.values())) == 1
    return " ".join(set(lines.values()) if same else (f"{name}: {line}" for name, line in lines.items()))


class Figures:
    """How the values of a metric are written: as percentages if they are fractions, otherwise with equal
    decimals.

    Args:
        name: of the metric.
        values: of all models.
    """

    def __init__(self, name: str, values: Sequence[Metric]):
        ends = [end for value in values for end in (value.mean, *bounds_of(value)) if math.isfinite(end)]
        ends = ends or [0.0, 1.0]
        low, high = min(ends), max(ends)
        self.name, self.fraction = name, is_fraction(name, ends)
        self.bounded = any(math.isfinite(bound) for value in values for bound in bounds_of(value))
        if self.fraction:  # the bars span the tenths around all values
            first = math.floor(10 * min(low, 0.95))
            self.low, self.high = first / 10, max(math.ceil(10 * high), first + 1) / 10
            self.decimals = 1
        else:
            margin = 0.05 * (high - low) or 0.5
            self.low, self.high = low - margin, high + margin
            self.decimals = min(max(2 - math.floor(math.log10(max(abs(low), abs(high)) or 1.0)), 0), 5)

    @property
    def heading(self) -> str:
        """The metric's name, and what its bars span."""
        span = f"{self.low:.3g} to {self.high:.3g}"
        span = f"{100 * self.low:.0f} to {100 * self.high:.0f}%" if self.fraction else minus(span)
        return f"{self.name} · bars span {span}" if self.bounded else self.name

    def text(self, value: float, unit: str = "%", sign: str = "") -> str:
        """One value; with the sign "+" it is a difference."""
        if self.fraction:
            return minus(f"{100 * value:{sign}.1f}{unit}")
        return minus(f"{value:{sign},.{self.decimals}f}")

    def interval(self, low: float, high: float, sign: str = "") -> str:
        """An interval in brackets; nothing if it has no bounds."""
        if math.isinf(low) and math.isinf(high):
            return ""
        ends = ("∞" if math.isinf(end) else self.text(end, "", sign) for end in (low, high))
        return f"[{', '.join(ends)}]"

    def cells(self, value: Metric, color: int) -> list[TableCell]:
        """The mean, its interval, and both drawn."""
        error = value.standard_error
        detail = "" if error is None else f"± {self.text(error, '')} by its masks"
        interval, span = self.interval(*bounds_of(value)), None
        if interval and math.isfinite(value.mean):
            ends = (bounds_of(value)[0], value.mean, bounds_of(value)[1])
            low, middle, high = ((end - self.low) / (self.high - self.low) for end in ends)
            span = (low, middle, high)
        mean = TableCell(text=self.text(value.mean), detail=detail)
        return [
            mean,
            TableCell(text="", detail=interval),
            TableCell(text="", span=span, color=color if span else None),
        ]


def bounds_of(value: Metric) -> tuple[float, float]:
    """The interval of a metric; infinite where it has no bound."""
    return -math.inf if value.low is None else value.low, math.inf if value.high is None else value.high


def passes_per_answer(entry: ScoreEntry) -> float:
    """Forward passes per completion; 0 where there are none."""
    return entry.scores.total("passes") / (entry.scores.answers or 1)


def work_table(task: str, entries: Sequence[ScoreEntry]) -> Table | None:
    """Tokens, steps and forward passes per answer; None where nothing was generated."""
    rows = []
    for entry in entries:
        answers = entry.scores.answers
        tokens, steps, passes = (entry.scores.total(name) for name in ("tokens", "steps", "passes"))
        if answers and passes:
            cells = [
                TableCell(text=f"{number:,.1f}")
                for number in (tokens / answers, steps / answers, passes / answers, tokens / passes)
            ]
            rows.append(
                [TableCell(text=entry.name, color=entry.color), TableCell(text=f"{answers:,}"), *cells]
            )
    header = ["Model", "Answers", "Tokens each", "Steps each", "Passes each", "Tokens per pass"]
    return Table(caption=f"{task}: work for an answer", header=header, groups=[("", rows)]) if rows else None


def difference_table(task: str, entries: Sequence[ScoreEntry]) -> Table | None:
    """Each model, where it took the most forward passes, against the one before it, on the problems that both
    have; None where no two models share any."""
    by_model: dict[str, list[ScoreEntry]] = {}
    for entry in entries:
        by_model.setdefault(entry.model, []).append(entry)
    slowest = [max(found, key=passes_per_answer) for found in by_model.values()]
    pairs = [(before, after, next(_differences(before, after), None)) for before, after in pairwise(slowest)]
    found = [(before, after, each) for before, after, each in pairs if each is not None]
    if not found:
        return None
    metric = found[0][2].metric
    figures = Figures(
        metric, [entry.scores.metrics[metric] for entry in slowest if metric in entry.scores.metrics]
    )
    changes = [each.change for *_, each in found]
    ends = [abs(end) for each in changes for end in (each.low, each.mean, each.high) if math.isfinite(end)]
    largest = max(ends) or 1.0
    rows = [
        [
            TableCell(text=f"{b.name} against {a.name}", color=b.color),
            *_difference_cells(each, figures, largest),
        ]
        for a, b, each in found
    ]
    unit = "percentage points" if figures.fraction else "its own units"
    return Table(
        caption=f"{task}: what made a difference",
        header=["Comparison", "Difference", "95% interval", "Verdict", ""],
        groups=[("", rows)],
        note=f"Paired differences of {metric} in {unit}, on the problems that both were given. "
        "The line in the middle of a bar is 0.",
        centered=True,
    )


def _differences(before: ScoreEntry, after: ScoreEntry) -> Iterator[Difference]:
    """The differences of two models in each metric that shared items have."""
    pairs = shared_items(before.scores, after.scores, (before.name, after.name))
    return differences_of(after.scores.task, after.name, before.scores, pairs)


def _difference_cells(difference: Difference, figures: Figures, largest: float) -> list[TableCell]:
    """The difference, its interval, a verdict, and a bar, of which half is `largest` wide."""
    change = difference.change
    better = (change.mean > 0) == difference.higher_is_better
    verdict: Trend = "unclear" if not change.excludes(0.0) else "gain" if better else "loss"
    interval = figures.interval(change.low, change.high, "+")
    low, mean, high = (0.5 + end / largest / 2 for end in (change.low, change.mean, change.high))
    return [
        TableCell(text=figures.text(change.mean, "", "+"), verdict=verdict),
        TableCell(text="", detail=interval),
        TableCell(text=WORDS[verdict], verdict=verdict),
        TableCell(text="", span=(low, mean, high) if interval else None, verdict=verdict),
    ]


def in_words(entries: Sequence[ScoreEntry]) -> list[str]:
    """For the stages of a pipeline, evaluated on the same problems: how many each solved, and the change from
    the stage before."""
    figures = Figures("solved", [entry.scores.metrics["solved"] for entry in entries])
    first = entries[0].scores.metrics["solved"]
    interval = figures.interval(*bounds_of(first))
    phrases = [f"{figures.text(first.mean)} of the problems solved, 95% interval {interval}"]
    for before, after in pairwise(entries):
        [found] = [each for each in _differences(before, after) if each.metric == "solved"]
        change, now = found.change, f"{figures.text(found.after)} of the problems solved"
        phrase = f"still {now}"
        if change.mean:
            chance = "" if change.excludes(0.0) else ", which may be chance"
            points = figures.text(change.mean, "", "+")
            phrase = f"{figures.text(found.before)} → {now}, {points} points{chance}"
        if interval := figures.interval(change.low, change.high, "+"):
            phrase += f"; 95% interval of the change {interval}"
        phrases.append(phrase)
    return phrases


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


def _speed_chart(task: str, entries: Sequence[ScoreEntry]) -> Chart | None:
    metric = next(iter(entries[0].scores.metrics), "")
    known = [(entry, entry.scores.metrics[metric]) for entry in entries if metric in entry.scores.metrics]
    series = []
    for model in dict.fromkeys(entry.model for entry in entries):
        mine = [(passes_per_answer(entry), entry, value) for entry, value in known if entry.model == model]
        mine = sorted((each for each in mine if each[0]), key=lambda each: each[0])
        if len(mine) > 1:
            points = [(passes, value.mean) for passes, _, value in mine]
            bounds = [bounds_of(value) for *_, value in mine]
            series.append(Series(name=model, color=mine[0][1].color, points=points, bounds=bounds))
    if not series:
        return None
    return Chart(
        title=task,
        x_label="forward passes per answer",
        y_label=metric,
        series=series,
        percent=Figures(metric, [value for _, value in known]).fraction,
    )


def record_of(result: Result) -> Record:
    """How the evaluation can be repeated."""
    content = result.content
    protocols = {scores.task: scores.protocol for scores in content.tasks}
    values = {"model": content.model, "arguments": content.arguments, "protocols": protocols}
    return Record(
        title=f"Evaluation of {result.name}",
        values=values | {"environment": content.environment, "times": content.times},
    )
