"""Paired comparison of results: the first against each of the others, on the items that both have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unmask.errors import DataError
from unmask.evaluation.result_file import EvaluationResult, Item, TaskScores, is_fraction
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
    fraction: bool = False  # whether all scores are from 0 to 1

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

    Items are the same if task and id are. A metric of a whole corpus (BLEU) has no scores of items and is left out.

    Raises:
        DataError: fewer than two results, a task or an item that occurs twice in a result, or two results that share no scored item.
    """
    if len(results) < 2:
        raise DataError("a comparison needs two results", where="compare", remedy="Give two result files or more")
    first, *others = results
    found: list[Difference] = []
    shared: list[Shared] = []
    for other in others:
        before, after = by_label(first), by_label(other)
        count = len(found)
        for label in [label for label in before if label in after]:
            pairs = _pairs(before[label], after[label], (first.name, other.name))
            shared.append(_shared(label, other.name, before[label], after[label], pairs))
            found += _differences(label, other.name, before[label], after[label], pairs)
        if len(found) == count:
            what = f"shares no scored item with {first.name}: tasks {_list(after)}, there {_list(before)}"
            raise DataError(what, where=other.name, remedy="Evaluate both on the same problems (--data, --rows, and --seed if generated)")
    adjusted = holm([difference.p_value for difference in found])
    return Comparison([replace(each, adjusted=p) for each, p in zip(found, adjusted, strict=True)], shared)


def labels(tasks: Sequence[TaskScores]) -> list[str]:
    """The name of each part of a result: its task, and where a task was measured under several settings of the sampler, those that vary."""
    names = []
    for part in tasks:
        samplers = [other.sampler for other in tasks if other.task == part.task]
        varied = [
            name for name in dict.fromkeys(key for sampler in samplers for key in sampler) if len({repr(s.get(name)) for s in samplers}) > 1
        ]
        names.append(", ".join([part.task, *(f"{name} {part.sampler[name]}" for name in varied if part.sampler.get(name) is not None)]))
    return names


def by_label(result: Named) -> dict[str, TaskScores]:
    """The parts of a result by their `labels`. Raises DataError for one that is there twice."""
    found: dict[str, TaskScores] = {}
    for label, part in zip(labels(result.content.tasks), result.content.tasks, strict=True):
        if label in found:
            raise DataError(f"the task {label} is there twice", where=result.name, remedy="Give a file that `unmask evaluate` wrote")
        found[label] = part
    return found


def _pairs(before: TaskScores, after: TaskScores, names: tuple[str, str]) -> list[tuple[Item, Item]]:
    """The shared items, in the order of their ids: the same whatever the order of the files' items."""
    by_id = []
    for part, name in zip((before, after), names, strict=True):
        items = {item.id: item for item in part.items}
        if len(items) < len(part.items):
            remedy = "Give a file that `unmask evaluate` wrote"
            raise DataError(f"an item of {part.task} is there twice", where=name, remedy=remedy)
        by_id.append(items)
    return [(by_id[0][name], by_id[1][name]) for name in sorted(by_id[0].keys() & by_id[1].keys())]


def _shared(label: str, other: str, before: TaskScores, after: TaskScores, pairs: Sequence[tuple[Item, Item]]) -> Shared:
    count = len(pairs)
    unscored = sum(not one.scores or not two.scores for one, two in pairs)
    settings = list(differing(before.protocol, after.protocol))
    return Shared(label, other, count, len(before.items) - count, len(after.items) - count, unscored, settings)


def _differences(label: str, other: str, before: TaskScores, after: TaskScores, pairs: Sequence[tuple[Item, Item]]) -> Iterator[Difference]:
    for metric in dict.fromkeys(name for one, _ in pairs for name in one.scores):
        scored = [(one, two) for one, two in pairs if metric in one.scores and metric in two.scores]
        if not scored:
            continue
        groups = [one.group for one, _ in scored]
        old, new = ([item.scores[metric] for item in items] for items in zip(*scored, strict=True))
        yield Difference(
            task=label,
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


def differing(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """The keys in which two mappings differ, with both values as text; nested keys are joined by dots."""
    for name in {**before, **after}:
        one, two = before.get(name), after.get(name)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from differing(one, two, f"{prefix}{name}.")
        elif one != two:
            yield prefix + name, _text(one), _text(two)


def _text(value: Any) -> str:
    return "unset" if value is None else str(value)


def _list(parts: Mapping[str, TaskScores]) -> str:
    return ", ".join(parts) or "none"
