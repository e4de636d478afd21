"""What the model answers to lm-eval: the numbers and texts that it expects, which also know how they came
about.

lm-eval passes answers on as they are, to metrics, filters, caches and other processes. So the standard error
of a log-likelihood, and the work that went into a text, are attributes of the number and of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class LogLikelihood(float):
    """A log-likelihood, or an estimate of a lower bound, in nats.

    Attributes:
        differences: of `Bound.difference_BP`: their squares add up to the variance of the estimate; empty
            where it is exact.
    """

    differences: tuple[float, ...]

    def __new__(cls, value: float, differences: Iterable[float] = ()) -> LogLikelihood:
        self = super().__new__(cls, value)
        self.differences = tuple(differences)
        return self

    def __getnewargs__(self) -> tuple[float, tuple[float, ...]]:  # type: ignore[override]
        return float(self), self.differences

    @property
    def standard_error(self) -> float:
        """Over the random masks, in nats; NaN where it is not known."""
        return math.sqrt(sum(difference**2 for difference in self.differences))

    def moved(self, signs: Iterable[float]) -> LogLikelihood:
        """The estimate with each difference added or subtracted: equally likely, to the second moment, with
        random signs."""
        return LogLikelihood(
            float(self)
            + sum(sign * difference for sign, difference in zip(signs, self.differences, strict=False))
        )


class AnswerText(str):
    """A generated text.

    Attributes:
        tokens: of the completion, before it was cut at a stop string.
        steps: denoising steps.
        passes: forward passes.
    """

    tokens: int
    steps: int
    passes: int

    def __new__(cls, text: str, tokens: int = 0, steps: int = 0, passes: int = 0) -> AnswerText:
        self = super().__new__(cls, text)
        self.tokens, self.steps, self.passes = tokens, steps, passes
        return self

    def __getnewargs__(self) -> tuple[str, int, int, int]:  # type: ignore[override]
        return str(self), self.tokens, self.steps, self.passes
