"""The result of an evaluation as a file: scores with their intervals, each item, and what is needed to run it
again.

Two results of the same command are equal except for `times` and `environment`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import ConfigDict, Field, model_validator

from unmask.artifacts import write_atomic
from unmask.errors import DataError
from unmask.evaluation.statistics import Interval

SafeCount = Annotated[int, Field(ge=0, lt=2**53)]
WITH_UNITS = {
    "AUP",
    "perplexity",
    "nats",
    "bits",
    "entropy",
    "loss",
    "nll",
    "log",
    "loglikelihood",
    "seconds",
    "tokens",
    "passes",
}
"""Words in the names of metrics that are no fractions, even if their values are from 0 to 1."""


class _Part(pydantic.BaseModel):
    # JSON has no infinite numbers and no NaN: they are written as strings, and read again.
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True
    )


class Metric(_Part):
    """A mean over items with its 95% interval, whose bounds are None where the items say nothing of them."""

    mean: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    """The standard error of the estimate over its random masks (Monte Carlo); None: scores are exact."""
    higher_is_better: bool = True

    @classmethod
    def of(cls, interval: Interval, *, higher_is_better: bool = True) -> Metric:
        """An interval in a result file."""
        low, high = (bound if math.isfinite(bound) else None for bound in (interval.low, interval.high))
        return cls(mean=interval.mean, low=low, high=high, higher_is_better=higher_is_better)

    def shown(self, name: str) -> str:
        """The mean and its bounds as text; `name` is the metric's, for `is_fraction`."""
        known = [value for value in (self.mean, self.low, self.high) if value is not None]
        mean, *bounds = (f"{value:.1%}" if is_fraction(name, known) else f"{value:,.4g}" for value in known)
        return f"{mean} [{', '.join(bounds)}]" if len(bounds) == 2 else mean


def is_fraction(metric: str, values: Iterable[float]) -> bool:
    """Whether values of a metric are shown in percent: all are from 0 to 1, and its name has no word of
    WITH_UNITS."""
    return WITH_UNITS.isdisjoint(re.split(r"[\W_]", metric)) and all(0 <= value <= 1 for value in values)


class ItemTrace(_Part):
    """The tokens of a completion as text, and the denoising step at which each came."""

    tokens: list[str]
    steps: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.tokens) != len(self.steps):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.steps)} steps")
        return self


class Item(_Part):
    """One problem: its prompt, its completions and their scores."""

    id: str
    """Names the problem: the same in every evaluation of the task."""
    group: str
    """Items of one group are not independent: intervals are over whole groups."""
    status: str = "ok"
    scores: dict[str, float] = {}
    """By metric; empty where the item could not be scored."""
    prompt: Any = None
    """A text, or messages."""
    completions: list[str] = []
    tokens: SafeCount = 0
    """Produced, over all completions."""
    steps: SafeCount = 0
    """Denoising steps, over all completions."""
    passes: SafeCount = 0
    """Forward passes, over all completions."""
    traces: list[ItemTrace] = []
    """One for each completion, if they were recorded."""
    details: dict[str, Any] = {}
    """What the task adds: a reference, the log-likelihoods of choices with their standard errors."""


class TaskScores(_Part):
    """The scores of a model on one task."""

    task: str
    protocol: dict[str, Any]
    """All that the scores depend on besides the model: data and their fingerprint, template, examples,
    sampler, estimator, seed."""
    metrics: dict[str, Metric]
    statuses: dict[str, int] = {}
    """Items by status."""
    items: list[Item] = []

    @property
    def sampler(self) -> Mapping[str, Any]:
        """The settings of the sampler; empty where nothing was generated."""
        found = self.protocol.get("sampler")
        return found if isinstance(found, Mapping) else {}

    @property
    def answers(self) -> int:
        """The number of completions."""
        return sum(len(item.completions) for item in self.items)

    def total(self, name: Literal["tokens", "steps", "passes"]) -> int:
        """The sum over all items."""
        return sum(int(getattr(item, name)) for item in self.items)


class EvaluationResult(_Part):
    """The content of a result file."""

    format: Literal[1] = 1
    model: dict[str, Any]
    """Path, revision, fingerprint of the weights, attention pattern."""
    arguments: dict[str, Any]
    """Arguments of `unmask evaluate` that run it again. Empty in results of training."""
    tasks: list[TaskScores]
    environment: dict[str, Any] = {}
    """Versions, machine, command."""
    times: dict[str, Any] = {}
    """Begin, seconds and tokens per second, over all and by task."""

    def write(self, path: str | Path) -> None:
        """Write the file atomically."""
        write_atomic(path, self.model_dump_json(indent=1) + "\n")


def with_settings(name: str, sampler: Mapping[str, Any], among: Sequence[Mapping[str, Any]]) -> str:
    """A name, with the settings of a sampler that are not the same among all samplers."""
    varied = [
        key
        for key in dict.fromkeys(key for other in among for key in other)
        if len({repr(other.get(key)) for other in among}) > 1
    ]
    given = [f"{key} {sampler[key]}" for key in varied if sampler.get(key) is not None]
    return ", ".join([name, *(given or ([f"{', '.join(varied)} unset"] if varied else []))])


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


def read_result(path: str | Path) -> EvaluationResult:
    """Read a result file. Raises a DataError if it is missing, cut, or no result."""
    remedy = "Give a file that `unmask evaluate --output FILE` wrote."
    try:
        return EvaluationResult.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=str(path), remedy=remedy) from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}." for part in first["loc"]).rstrip(".")
        what = f"is no result, or it was cut: {place + ': ' if place else ''}{first['msg']}"
        raise DataError(what, where=str(path), remedy=remedy) from error
