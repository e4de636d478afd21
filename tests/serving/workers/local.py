"""Workers in the process of the tests: the application of a worker over a scheduler, on a Unix socket, behind
a server for clients."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serving.servers import listening
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.app import AppSettings
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import Scheduler
from unmask.serving.server import GracefulServer, make_server, open_port
from unmask.serving.workers.front import FrontMetrics, make_front
from unmask.serving.workers.pool import Pool
from unmask.serving.workers.weights import SharedWeights
from unmask.serving.workers.worker import UNLIMITED, WorkerApp, bound


class LocalWorker:
    """A worker whose connections can be cut as those of a process that is killed."""

    def __init__(self, lm: DiffusionLM, path: str, limits: RequestLimits, **scheduling: Any):
        self.path, self.scheduler = path, Scheduler({"tiny": lm}, **scheduling)
        self.server: GracefulServer = make_server(
            WorkerApp(self.scheduler, limits), self.scheduler, connections=UNLIMITED, grace=0
        )

    @property
    def connections(self) -> list[Any]:
        """Those that are open."""
        return list(self.server.server_state.connections)

    def value(self, series: str, **labels: str) -> float:
        """What its scheduler has measured."""
        return self.scheduler.metrics.registry.get_sample_value(series, labels) or 0.0

    def lose(self) -> None:
        """Cut all connections, and let nobody connect any more."""
        Path(self.path).unlink(missing_ok=True)
        for connection in self.connections:
            connection.loop.call_soon_threadsafe(connection.transport.abort)


@dataclass
class LocalPool:
    """A server with such workers, and its address."""

    url: str
    pool: Pool
    weights: SharedWeights
    workers: list[LocalWorker]
    front: GracefulServer


class Standing:
    """The engine of a server whose workers nobody ends."""

    on_end: Callable[[], None]

    def __init__(self, pool: Pool):
        self.pool = pool

    async def stop(self, grace: float = 0.0) -> None:
        self.pool.stopping = True


@contextmanager
def serving_locally(
    lms: Sequence[DiffusionLM], settings: AppSettings | None = None, *, grace: float = 0, **scheduling: Any
) -> Iterator[LocalPool]:
    """A server with a worker for each of these models, which nothing else uses meanwhile."""
    settings, pool = settings or AppSettings(), Pool(len(lms))
    weights, workers = SharedWeights(pool.workers), []
    with open_port("127.0.0.1", 0) as port, ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unmask-"))
        for lm, worker in zip(lms, pool.workers, strict=True):
            workers.append(LocalWorker(lm, f"{folder}/{worker.number}", settings.limits, **scheduling))
            listener = stack.enter_context(bound(workers[-1].path))
            stack.enter_context(listening(workers[-1].server, listener))
            worker.join(workers[-1].path)
            worker.live = True
        front = make_server(
            make_front(pool, weights, settings, FrontMetrics(pool)), Standing(pool), grace=grace
        )
        stack.enter_context(listening(front, port))
        yield LocalPool(f"http://127.0.0.1:{port.getsockname()[1]}", pool, weights, workers, front)
