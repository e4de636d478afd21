"""Keeps workers alive: starts them, starts those again that end, and ends all of them with the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic

from unmask.errors import UnmaskError
from unmask.serving.app import HEALTH
from unmask.serving.served_models import ServedModels
from unmask.serving.workers.devices import environments
from unmask.serving.workers.front import FrontMetrics
from unmask.serving.workers.pool import Pool, Worker
from unmask.serving.workers.process import WorkerProcess, WorkerStartError, start_worker
from unmask.serving.workers.weights import SharedWeights

logger = logging.getLogger(__name__)
DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a worker is started again, after one quick death, two, and so on; after more the server
ends."""
QUICK = 60.0
"""Seconds after its start within which a death is a quick one."""
LOOK_EVERY = 5.0  # seconds
POLL = 0.02  # seconds


class Fleet:
    """The workers of a server, each in a process of its own: the `Engine` of the server.

    Args:
        devices: of each worker.

    Attributes:
        error: why the server cannot go on.
    """

    def __init__(self, served: ServedModels, devices: Sequence[str]):
        self.served = served
        self.pool = Pool(len(devices))
        self.weights, self.metrics = SharedWeights(self.pool.workers), FrontMetrics(self.pool)
        self.on_end: Callable[[], None] = lambda: None
        self.error: UnmaskError | None = None
        self._environments = environments(devices)
        self._processes: dict[Worker, WorkerProcess] = {}
        self._keeping: list[asyncio.Task[None]] = []

    @property
    def description(self) -> str:
        """What the workers serve, for people."""
        return next(iter(self._processes.values())).description

    async def start(self) -> None:
        """Start all workers, and wait until they are ready. WorkerStartError if one cannot start."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.pool.workers:
                    group.create_task(self._begin(worker))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._keeping = [asyncio.create_task(self._keep(worker)) for worker in self.pool.workers]

    async def stop(self, grace: float = 30.0) -> None:
        """Finish running requests for up to `grace` seconds, then stop."""
        self.pool.stopping = True
        until = monotonic() + grace
        while self.pool.in_flight and monotonic() < until:
            await asyncio.sleep(POLL)
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._processes.values()))
        await asyncio.gather(*(worker.leave() for worker in self.pool.workers))
        self._processes.clear()

    async def _begin(self, worker: Worker) -> None:
        """Start a worker, which then takes requests."""
        began = monotonic()
        process = await start_worker(self.served, *self._environments[worker.number])
        self._processes[worker], worker.end = process, process.kill
        worker.join(process.socket)
        await self.weights.catch_up(worker)
        self.pool.start_seconds = monotonic() - began

    async def _keep(self, worker: Worker) -> None:
        """Start a worker again whenever it has ended."""
        quick = 0
        while True:
            since = monotonic()
            how = await self._watch(worker, self._processes[worker])
            if self.pool.stopping:
                return
            self.metrics.deaths.inc()
            quick = quick + 1 if monotonic() - since < QUICK else 1
            logger.error("worker %d %s, and is started again", worker.number, how)
            if not await self._start_again(worker, quick):
                return

    async def _watch(self, worker: Worker, process: WorkerProcess) -> str:
        """Wait until the process of a worker ends: how it did. One whose engine fails, or that does not
        answer, is killed."""
        ended = asyncio.create_task(process.ended())
        try:
            while not (await asyncio.wait([ended], timeout=LOOK_EVERY))[0]:
                answer = await worker.ask("GET", HEALTH)
                if not ended.done() and (answer is None or not answer.is_success):
                    logger.error(
                        "worker %d %s",
                        worker.number,
                        "does not answer" if answer is None else "has an engine that fails",
                    )
                    process.kill()
            return await ended
        finally:
            worker.live = False
            ended.cancel()
            await process.end()
            await worker.leave()

    async def _start_again(self, worker: Worker, quick: int) -> bool:
        """Start a worker that has ended `quick` times in a row soon after its start. Returns whether it
        started; if not, the server ends."""
        error: UnmaskError | None = None
        for delay in DELAYS[quick - 1 :]:
            await asyncio.sleep(delay)
            try:
                await self._begin(worker)
                return True
            except WorkerStartError as raised:
                error = raised
                logger.error("worker %d cannot start: %s", worker.number, error)
        what = f"worker {worker.number} has ended {len(DELAYS) + 1} times, each time soon after its start"
        self.error = error or WorkerStartError(what, where="--workers", remedy="The log above has the causes")
        self.on_end()
        return False
