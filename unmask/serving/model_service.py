"""One model of a server, as the routes see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.scheduler import Scheduler
from unmask.serving.service import BetweenSteps, Events, Result, Work


@dataclass(frozen=True)
class ModelService:
    """The `Service` of a scheduler's model of this name."""

    scheduler: Scheduler
    name: str

    @property
    def lm(self) -> DiffusionLM:
        return self.scheduler.models[self.name].lm

    @property
    def parent(self) -> str | None:
        return self.scheduler.models[self.name].parent

    @property
    def version(self) -> str | None:
        return self.scheduler.models[self.name].version

    @property
    def weights(self) -> int:
        return self.scheduler.models[self.name].weights

    def check_version(self, version: str | None) -> None:
        """As of `Service`."""
        self.scheduler.models[self.name].check_version(version)

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
        """As of `Service`."""
        return self.scheduler.submit(
            self.name, work, owner=owner, priority=priority, timeout=timeout, since=since, version=version, weights=weights
        )

    def check_room(self, count: int, owner: str) -> None:
        """As of `Service`."""
        self.scheduler.check_room(count, owner)

    async def aside(self, function: Callable[[], Result], *, owner: str) -> Result:
        """As of `Service`."""
        return await self.scheduler.aside(function, owner=owner)

    async def search(self, function: Callable[[BetweenSteps], Result], *, owner: str) -> Result:
        """As of `Service`."""
        return await self.scheduler.search(self.name, function, owner=owner)
