"""Serves until a signal comes, in one process or in several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unmask.serving.app import AppSettings, make_app
from unmask.serving.connections import ConnectionLimits
from unmask.serving.served_models import ServedModels, description
from unmask.serving.server import make_server
from unmask.serving.workers.fleet import Fleet
from unmask.serving.workers.front import make_front


@dataclass(frozen=True)
class Serving:
    """A server.

    Attributes:
        models: what it serves; with workers, what each of them does.
        settings: who may use it.
        listener: its port.
        connections: their limits.
        on_start: called once, when it accepts connections, with a description of the models.
    """

    models: ServedModels
    settings: AppSettings
    listener: socket.socket
    connections: ConnectionLimits
    on_start: Callable[[str], object]

    def run(self, devices: Sequence[str] = ()) -> None:
        """Serve until a signal comes.

        Args:
            devices: of the workers; none: this process has the models.

        Raises:
            UnmaskError: a model cannot be loaded, or a worker ends again and again.
        """
        if devices:
            asyncio.run(self._serve_by_workers(Fleet(self.models, devices)))
            return
        scheduler = self.models.make_scheduler()
        server = make_server(
            make_app(scheduler, self.settings),
            scheduler,
            connections=self.connections,
            grace=self.models.grace,
            on_start=lambda: self.on_start(description(scheduler)),
        )
        server.run(sockets=[self.listener])

    async def _serve_by_workers(self, fleet: Fleet) -> None:
        try:
            await fleet.start()
            server = make_server(
                make_front(fleet.pool, fleet.weights, self.settings, fleet.metrics),
                fleet,
                connections=self.connections,
                grace=self.models.grace,
                on_start=lambda: self.on_start(fleet.description),
            )
            await server.serve(sockets=[self.listener])
        finally:
            await fleet.stop(grace=0)
        if fleet.error is not None:
            raise fleet.error
