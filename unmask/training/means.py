"""Means of metrics from one log line to the next, of all processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from accelerate.utils import gather_object

Sums = dict[str, list[float]]
"""By name, the sum of what was measured and how much that was."""


class Means:
    """What this process measured since each name was last taken."""

    def __init__(self) -> None:
        self._sums: Sums = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` things that were measured."""
        self._sums[name][0] += total
        self._sums[name][1] += count

    def take(self, is_due: Callable[[str], bool]) -> dict[str, float]:
        """The means of all processes of the names that are due, which begin anew. All processes must ask at the same time."""
        mine = {name: self._sums.pop(name) for name in [*self._sums] if is_due(name)}
        return {name: total / count for name, (total, count) in _everywhere(mine).items() if count > 0}

    def state(self) -> Sums:
        """This process's sums, to be given to `load`."""
        return {name: [*parts] for name, parts in self._sums.items()}

    def state_everywhere(self) -> Sums:
        """The sums of all processes, to be given to `load` on one of them. All processes must ask at the same time."""
        return _everywhere(self._sums)

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from these sums in place of one's own."""
        self._sums.clear()
        self._sums.update({name: [*parts] for name, parts in state.items()})


def _everywhere(sums: Sums) -> Sums:
    """Sums of all processes, which may have different names."""
    ranks = gather_object([dict(sums)])
    names = dict.fromkeys(name for each in ranks for name in each)
    return {name: [sum(part) for part in zip(*(each[name] for each in ranks if name in each), strict=True)] for name in names}
