"""Paired comparison of results: the first against each of the others, on the items that both have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unmask.errors import DataError
from unmask.evaluation.result_file import EvaluationResult, Item, TaskScores, is_fraction, with_settings
from unmask.evaluation.statistics import Interval, holm, paired_difference, sign_flip_p_value


class Named(NamedTuple):
    """A result and the name to call it by."""

    name: str
    content: EvaluationResult


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between two results on their shared items."""

    task: str
    metric: str
    other: str  # the result that is compared with the first one
    items: int  # shared, with this score in both
    before: float  # mean of the first result
    after: float
    change: Interval  # after - before
    p_value: float
    adjusted: float = 1.0  # by Holm, over all differences of a comparison
    higher_is_better: bool = True
    fraction: bool = False  # whether its values are shown in percent

    @property
    def significant(self) -> bool:
        """At 5% over all differences of the comparison."""
        return self.adjusted <= 0.05

    @property
    def verdict(self) -> str:
        """better, worse, or "" if the difference may be chance."""
        if not self.significant:
            return ""
        return "better" if (self.change.mean > 0) == self.higher_is_better else "worse"


@dataclass(frozen=True)
class Shared:
    """How many items of a task two results share, and the settings in which their protocols differ."""

    task: str
    other: str
    shared: int
    only_first: int
    only_other: int
    unscored: int  # of the shared ones: without a score in either
    settings: list[tuple[str, str, str]]  # name, first, other


class Comparison(NamedTuple):
    """The differences of all results from the first one."""

    differences: list[Difference]
    shared: list[Shared]


def compare(results: Sequence[Named]) -> Comparison:
    """Compare the first result with each of the others, on every task and metric of items.

    Items are the same if task and id are. A metric of a whole corpus (BLEU) has no scores of items and is
    left out, as are parts that have no items (groups of tasks, areas under curves).

    Raises:
        DataError: fewer than two results, a task or an item that occurs twice in a result, or two results
            that share no scored item.
    """
    if len(results) < 2:
        raise DataError(
            "a comparison needs two results", where="compare", remedy="Give two result files or more"
        )
    first, *others = results
    found: list[Difference] = []
    shared: list[Shared] = []
    for other in others:
        before, after = (
            {label: part for label, part in by_label(result).items() if part.items}
            for result in (first, other)
        )
        count = len(found)
        for label in [label for label in before if label in after]:
            pairs = shared_items(before[label], after[label], (first.name, other.name))
            shared.append(_shared(label, other.name, before[label], after[label], pairs))
            found += differences_of(label, other.name, before[label], pairs)
        if len(found) == count:
            what = f"shares no scored item with {first.name}: tasks {_list(after)}, there {_list(before)}"
            raise DataError(
                what,
                where=other.name,
                remedy="Evaluate both on the same problems (--data, --rows, and --seed if generated)",
            )
    adjusted = holm([difference.p_value for difference in found])
    return Comparison([replace(each, adjusted=p) for each, p in zip(found, adjusted, strict=True)], shared)


def labels(tasks: Sequence[TaskScores]) -> list[str]:
    """The name of each part of a result: its task, and where a task was measured under several settings of
    the sampler, those that vary."""
    samplers = {
        name: [part.sampler for part in tasks if part.task == name] for name in {part.task for part in tasks}
    }
    return [with_settings(part.task, part.sampler, samplers[part.task]) for part in tasks]


def by_label(result: Named) -> dict[str, TaskScores]:
    """The parts of a result by their `labels`. Raises DataError for one that is there twice."""
    found: dict[str, TaskScores] = {}
    for label, part in zip(labels(result.content.tasks), result.content.tasks, strict=True):
        if label in found:
            raise DataError(
                f"the task {label} is there twice",
                where=result.name,
                remedy="Give a file that `unmask evaluate` wrote",
            )
        found[label] = part
    return found


def shared_items(before: TaskScores, after: TaskScores, names: tuple[str, str]) -> list[tuple[Item, Item]]:
    """The items that two results share, in the order of their ids. `names` are those of the results, for the
    DataError if an item is there twice."""
    by_id = []
    for part, name in zip((before, after), names, strict=True):
        items = {item.id: item for item in part.items}
        if len(items) < len(part.items):
            remedy = "Give a file that `unmask evaluate` wrote"
            raise DataError(f"an item of {part.task} is there twice", where=name, remedy=remedy)
        by_id.append(items)
    return [(by_id[0][name], by_id[1][name]) for name in sorted(by_id[0].keys() & by_id[1].keys())]


def _shared(
    label: str, other: str, before: TaskScores, after: TaskScores, pairs: Sequence[tuple[Item, Item]]
) -> Shared:
    count = len(pairs)
    unscored = sum(not one.scores or not two.scores for one, two in pairs)
    settings = list(differing(before.protocol, after.protocol))
    return Shared(
        label, other, count, len(before.items) - count, len(after.items) - count, unscored, settings
    )


def differences_of(
    task: str, other: str, before: TaskScores, pairs: Sequence[tuple[Item, Item]]
) -> Iterator[Difference]:
    """The difference in each metric of pairs of items, from `before` to the result named `other`; not yet
    corrected for their number."""
    for metric in dict.fromkeys(name for one, _ in pairs for name in one.scores):
        scored = [
            (one, two)
            for one, two in pairs
            if all(math.isfinite(item.scores.get(metric, math.nan)) for item in (one, two))
        ]
        if not scored:
            continue
        groups = [one.group for one, _ in scored]
        old, new = ([item.scores[metric] for item in items] for items in zip(*scored, strict=True))
        yield Difference(
            task=task,
            metric=metric,
            other=other,
            items=len(scored),
            before=sum(old) / len(old),
            after=sum(new) / len(new),
            change=paired_difference(old, new, groups),
            p_value=sign_flip_p_value([b - a for a, b in zip(old, new, strict=True)], groups),
            higher_is_better=before.metrics[metric].higher_is_better if metric in before.metrics else True,
            fraction=is_fraction(metric, [*old, *new]),
        )


def differing(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """The keys in which two mappings differ, with both values as text. Keys stand after `prefix`; nested ones
    are joined by dots."""
    for name in {**before, **after}:
        one, two = before.get(name), after.get(name)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from differing(one, two, f"{prefix}{name}.")
        elif one != two:
            first, second = ("unset" if value is None else str(value) for value in (one, two))
            yield prefix + name, first, second


def _list(parts: Mapping[str, TaskScores]) -> str:
    return ", ".join(parts) or "none"
