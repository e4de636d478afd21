"""A report of runs and evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.evaluation.report import scores, traces, training
from unmask.evaluation.report.content import PageBlock, Report, Section
from unmask.evaluation.report.scores import Result
from unmask.evaluation.report.training import Run


def make_report(
    *,
    title: str,
    subtitle: str = "",
    entries: Sequence[str],
    runs: Sequence[Run] = (),
    results: Sequence[Result] = (),
    more: Sequence[Section] = (),
    last: Sequence[PageBlock] = (),
) -> Report:
    """The report. `entries` are the names of runs and models by their colors; `more` are sections before the
    curves, `last` blocks at the end."""
    sections = [training.overview(runs)] if runs else []
    if results:
        sections += [scores.tables(results), scores.speed(results)]
    sections += more
    if results:
        sections += [traces.decoding_order(results), traces.answers(results)]
    if runs:
        sections += [training.curves(runs), training.phases(runs), training.learnt_rows(runs)]
    records: list[PageBlock] = [
        *last,
        *(training.record_of(run) for run in runs if run.settings),
        *map(scores.record_of, results),
    ]
    sections.append(Section(title="How to repeat this", blocks=records))
    return Report(
        title=title,
        subtitle=subtitle,
        entries=entries,
        sections=[section for section in sections if section.blocks],
    )
