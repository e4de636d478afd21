"""One model of a server, as the routes see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.scheduler import Scheduler
from unmask.serving.service import BetweenSteps, Result, Work
from unmask.serving.submission import Events


@dataclass(frozen=True)
class ModelService:
    """A model that generates for many at once: that of a scheduler under this name, by which clients ask for
    it."""

    scheduler: Scheduler
    name: str

    @property
    def lm(self) -> DiffusionLM:
        return self.scheduler.models[self.name].lm

    @property
    def parent(self) -> str | None:
        """The name of the model whose weights it shares, of which it is adapters; None: its weights are its
        own."""
        return self.scheduler.models[self.name].parent

    @property
    def version(self) -> str | None:
        """Of its weights, as a client named them; None: the first ones."""
        return self.scheduler.models[self.name].version

    @property
    def weights(self) -> int:
        """How often its weights have been replaced."""
        return self.scheduler.models[self.name].weights

    def check_version(self, version: str | None) -> None:
        """Raise OtherWeightsError if the weights have another name than this one."""
        self.scheduler.models[self.name].check_version(version)

    def check_room(self, count: int, owner: str) -> None:
        """Raise what `submit` would raise for so many sequences of an owner, before they are prepared:
        OverloadedError, GenerationError for more than may wait at all, or StoppedError."""
        self.scheduler.check_room(count, owner)

    def submit(
        self,
        work: Sequence[Work],
        *,
        owner: str,
        priority: int = 0,
        timeout: float | None = None,
        since: float | None = None,
        version: str | None = None,
        weights: int | None = None,
    ) -> Events:
        """Generate sequences. Refusals are raised here, before the first event, and later errors by the
        iterator.

        Args:
            owner: whose queue they wait in; owners take turns.
            priority: higher ones of an owner go first.
            timeout: seconds, waiting included.
            since: when they began, by the clock of the event loop; None: now.
            version: the weights to sample from; None: any.
            weights: those with which the work was prepared, by the number of replacements before them. They
                are kept until it is finished. None: any.

        Raises:
            OverloadedError: the queue is full (429).
            OtherWeightsError: the weights have another name (409).
            ReplacedError: the work was prepared with other weights, or new ones wait to be loaded.
            GenerationError: the model cannot do what is asked (400).
            TimeLimitError: the time is over (504).
            StoppedError: the server is ending (503).
        """
        return self.scheduler.submit(
            self.name,
            work,
            owner=owner,
            priority=priority,
            timeout=timeout,
            since=since,
            version=version,
            weights=weights,
        )

    async def aside(self, function: Callable[[], Result], *, owner: str) -> Result:
        """Run a function that takes long and needs no model, such as one that compiles a constraint, in a
        thread of its own, one at a time of each owner. Errors as it raises, OverloadedError and
        StoppedError."""
        return await self.scheduler.aside(function, owner=owner)

    async def search(self, function: Callable[[BetweenSteps], Result], *, owner: str) -> Result:
        """Run a function that uses the model again and again, such as the search for the length of a gap, as
        `aside` runs one.

        Args:
            function: hands what needs the model, a short part at a time, to its argument. That raises
                CancelledError once nobody waits for the result.
        """
        return await self.scheduler.search(self.name, function, owner=owner)
