"""What the routes need of the engine: requests go in, frames and traces come out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from unmask.config.run import SamplerConfig
from unmask.errors import UnmaskError
from unmask.generation.frames import Frame
from unmask.generation.output import Trace
from unmask.generation.requests import Request
from unmask.models.diffusion_lm import DiffusionLM

Result = TypeVar("Result")


class ServiceError(UnmaskError):
    """A request that the server does not answer.

    Attributes:
        status: of HTTP.
    """

    status = 500


class OverloadedError(ServiceError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which there is probably room.
    """

    status = 429

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None, retry_after: int = 1):
        super().__init__(what, where=where, remedy=remedy)
        self.retry_after = retry_after


class OtherWeightsError(ServiceError):
    """A request names weights that the server does not hold."""

    status = 409


class TimeLimitError(ServiceError):
    """A request was not finished in its time, waiting included."""

    status = 504


class StoppedError(ServiceError):
    """The server is ending."""

    status = 503


@dataclass(frozen=True)
class Work:
    """A sequence to generate."""

    request: Request
    config: SamplerConfig
    frames: bool = False  # whether every step is wanted, else only the end


class Event(NamedTuple):
    """A step of a sequence, or its end."""

    index: int  # type: ignore[assignment]  # of the sequence in what was submitted
    frame: Frame | None  # set only with Work.frames
    trace: Trace | None  # set once for each sequence, at its end
    version: str | None = None  # of the weights that generate all sequences that were submitted with it


class Service(Protocol):
    """A model that generates for many at once.

    Attributes:
        name: of the model, as clients give it.
        version: of its weights, as a client named them; None: the first ones.
    """

    lm: DiffusionLM
    name: str
    version: str | None

    def submit(
        self, work: Sequence[Work], *, owner: str, priority: int = 0, timeout: float | None = None, version: str | None = None
    ) -> AsyncIterator[Event]:
        """Generate sequences. Closing the iterator (`aclose`) or cancelling its task frees all slots within one step.

        Args:
            owner: whose queue they wait in; owners take turns.
            priority: higher ones of an owner go first.
            timeout: seconds, waiting included.
            version: the weights to sample from; None: any.

        Raises:
            OverloadedError: the queue is full (429).
            OtherWeightsError: the weights have another name (409).
            GenerationError: the model cannot do what is asked (400).
            TimeLimitError: the time is over (504).
            StoppedError: the server is ending (503).
        """
        ...

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Run a function that needs the model, such as the search for the length of a gap, where the engine runs and between two of its
        steps. Errors as it raises, and StoppedError."""
        ...
