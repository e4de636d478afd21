"""The result of an evaluation as a file: scores with their intervals, each item, and what is needed to run it again.

Two results of the same command are equal but for `times` and `environment`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import ConfigDict, Field, model_validator

from unmask.artifacts import read_file, write_atomic
from unmask.errors import DataError

FORMAT: Literal[1] = 1
Count = Annotated[int, Field(ge=0, lt=2**53)]
WITH_UNITS = {"perplexity", "nats", "bits", "entropy", "loss", "nll", "log", "loglikelihood", "seconds", "tokens", "passes"}
"""Words in the names of metrics that are no fractions, whatever their values."""


class _Part(pydantic.BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def is_fraction(name: str, values: Iterable[float]) -> bool:
    """Whether these values of a metric are fractions, which are shown in percent: from 0 to 1, and without a unit."""
    return WITH_UNITS.isdisjoint(re.split("[ _-]", name)) and all(0 <= value <= 1 for value in values)


class Metric(_Part):
    """A mean over items with its 95% interval, whose bounds are None where the items say nothing of them."""

    mean: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    """Of the estimate itself, over its random masks (Monte Carlo); None: the score of each item is exact."""
    higher_is_better: bool = True

    def shown(self, name: str) -> str:
        """The mean and the bounds of the metric of this name: in percent where they are fractions with an interval, of which more is
        better."""
        if self.low is None or self.high is None:
            return f"{self.mean:,.4g}"
        if self.higher_is_better and is_fraction(name, [self.mean, self.low, self.high]):
            return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}]"
        return f"{self.mean:,.4g} [{self.low:,.4g}, {self.high:,.4g}]"


class Trace(_Part):
    """The tokens of a completion as text, and the denoising step at which each came."""

    tokens: list[str]
    steps: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.tokens) != len(self.steps):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.steps)} steps")
        return self


class Item(_Part):
    """One problem: what was asked, what came, and its scores."""

    id: str
    """Of the problem alone: the same in every evaluation of the task."""
    group: str
    """Items of one group are not independent: intervals resample whole groups."""
    status: str = "ok"
    scores: dict[str, float] = {}
    """By metric; empty where the item could not be scored."""
    prompt: Any = None
    """A text, or messages."""
    completions: list[str] = []
    tokens: Count = 0
    """Produced, over all completions."""
    steps: Count = 0
    """Denoising steps, over all completions."""
    passes: Count = 0
    """Forward passes, over all completions."""
    traces: list[Trace] = []
    """One for each completion, if they were recorded."""
    details: dict[str, Any] = {}
    """What the task adds: a reference, the log-likelihoods of choices with their standard errors."""


class TaskScores(_Part):
    """The scores of a model on one task."""

    task: str
    protocol: dict[str, Any]
    """All that the scores depend on beside the model: data and their fingerprint, template, examples, sampler, estimator, seed."""
    metrics: dict[str, Metric]
    statuses: dict[str, int] = {}
    """Items by status."""
    items: list[Item] = []

    @property
    def sampler(self) -> Mapping[str, Any]:
        """The settings of the sampler; empty where none was used."""
        sampler = self.protocol.get("sampler")
        return sampler if isinstance(sampler, Mapping) else {}

    def total(self, name: Literal["tokens", "steps", "passes"]) -> int:
        """Of all items."""
        return sum(int(getattr(item, name)) for item in self.items)


class EvaluationResult(_Part):
    """The content of a result file."""

    format: Literal[1] = FORMAT
    model: dict[str, Any]
    """Path, revision, fingerprint of the weights, attention pattern."""
    arguments: dict[str, Any]
    """Of `unmask evaluate`: they run it again. Empty in results of training."""
    tasks: list[TaskScores]
    environment: dict[str, Any] = {}
    """Versions, machine, command."""
    times: dict[str, Any] = {}
    """Begin, seconds and tokens per second, over all and by task."""

    def write(self, path: str | Path) -> None:
        """Write the file atomically."""
        write_atomic(path, self.model_dump_json(indent=1) + "\n")


def _finite(text: str) -> float:
    """A number of a file. Raises DataError for NaN and infinity, which no file holds that Unmask wrote."""
    number = float(text)
    if not math.isfinite(number):
        raise DataError(f"{text:.20} is no finite number", remedy="Give a file that `unmask evaluate --output FILE` wrote.")
    return number


def read_result(path: str | Path) -> EvaluationResult:
    """Read a result file. Raises a DataError if it is missing, cut, of another format, or no result."""
    remedy = "Give a file that `unmask evaluate --output FILE` wrote."
    try:
        content = json.loads(read_file(path), parse_constant=_finite, parse_float=_finite)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=str(path), remedy=remedy) from error
    except DataError as error:
        raise error.moved(str(path)) from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, an endless number, lists in lists without end
        raise DataError("is no whole JSON file: it was cut, or is another file", where=str(path), remedy=remedy) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        what = "is no result" if version is None else f"is of format {version}, and this version of Unmask reads {FORMAT}"
        raise DataError(what, where=str(path), remedy=remedy if version is None else "Run the evaluation again with this version.")
    try:
        return EvaluationResult.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(what, where=str(path), remedy=remedy) from error
