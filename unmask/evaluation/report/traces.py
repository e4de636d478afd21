"""What a report shows of single answers: the order of decoding, and the step at which each token came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.evaluation.report.content import Answer, HeatMap, Problem, Section
from unmask.evaluation.report.scores import Result, ScoreEntry, entries_by_task
from unmask.evaluation.result_file import Item, ItemTrace

ANSWERS_IN_MAP, POSITIONS_IN_MAP = 40, 160
PROBLEMS_SHOWN = 3
"""Problems of each task that are shown."""


def decoding_order(results: Sequence[Result]) -> Section:
    """A heat map for each model and task whose traces were recorded."""
    maps = [
        heat
        for task, entries in entries_by_task(results).items()
        for entry in entries
        if (heat := _heat(task, entry)) is not None
    ]
    intro = "A row is an answer, a column a position in it. The stronger the color, the later the token came."
    return Section(title="Decoding order", blocks=maps, intro=intro)


def _heat(task: str, entry: ScoreEntry) -> HeatMap | None:
    traces = [
        trace
        for item in entry.scores.items
        for trace in item.traces[:1]
        if any(step >= 0 for step in trace.steps)
    ]
    if not traces:
        return None
    shown = traces[:ANSWERS_IN_MAP]
    note = (
        f"{_order(traces)} {len(shown)} of {len(traces)} answers are drawn."
        if len(shown) < len(traces)
        else _order(traces)
    )
    return HeatMap(
        title=f"{entry.name}: {task}",
        color=entry.color,
        x_label="position of the token",
        y_label=f"{len(shown)} {'answers' if len(shown) > 1 else 'answer'}",
        rows=[_fractions(trace) for trace in shown],
        note=note,
    )


def _fractions(trace: ItemTrace) -> list[float | None]:
    last = max(max(trace.steps), 1)
    return [step / last if step >= 0 else None for step in trace.steps[:POSITIONS_IN_MAP]]


def _order(traces: Sequence[ItemTrace]) -> str:
    """How far decoding goes from left to right."""
    pairs = [
        pair for trace in traces for pair in zip(trace.steps, trace.steps[1:], strict=False) if min(pair) >= 0
    ]
    if not pairs:
        return "No two neighboring tokens were recorded."
    rising, equal = (
        sum(left < right for left, right in pairs) / len(pairs),
        sum(left == right for left, right in pairs) / len(pairs),
    )
    return (
        f"Of neighboring tokens, the left one came first in {rising:.0%} of pairs, both in one step in "
        f"{equal:.0%}."
    )


def answers(results: Sequence[Result]) -> Section:
    """The first problems of each task whose answers were traced, with the answers of all models."""
    blocks = [
        problem for task, entries in entries_by_task(results).items() for problem in _problems(task, entries)
    ]
    intro = "Small numbers: the denoising step at which a token came. The stronger the color, the later."
    return Section(title="Answers", blocks=blocks, intro=intro)


def _problems(task: str, entries: Sequence[ScoreEntry]) -> list[Problem]:
    by_id: dict[str, list[tuple[ScoreEntry, Item]]] = {}
    for entry in entries:
        for item in entry.scores.items:
            if item.traces and item.traces[0].tokens:
                by_id.setdefault(item.id, []).append((entry, item))
    return [
        Problem(
            title=f"{task}, problem {name}",
            prompt=text_of_prompt(found[0][1].prompt),
            answers=[_answer(entry, item) for entry, item in found],
        )
        for name, found in list(by_id.items())[:PROBLEMS_SHOWN]
    ]


def _answer(entry: ScoreEntry, item: Item) -> Answer:
    scores = [f"{name} {value:.4g}" for name, value in item.scores.items()]
    work = [
        f"{count} {name}"
        for name, count in (("tokens", item.tokens), ("steps", item.steps), ("passes", item.passes))
        if count
    ]
    facts = [*([item.status] if item.status != "ok" else []), *scores, *work]
    return Answer(
        name=entry.name,
        color=entry.color,
        tokens=item.traces[0].tokens,
        steps=item.traces[0].steps,
        facts=facts,
    )


def text_of_prompt(prompt: Any) -> str:
    """A text as it is; messages one below the other, each after its role."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
    return "" if prompt is None else str(prompt)
