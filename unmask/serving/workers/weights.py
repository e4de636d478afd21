"""The weights of all workers: every one holds the same, also those that are started later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from unmask.errors import ModelError
from unmask.serving.submission import ServiceError
from unmask.serving.weights import Files, Folder, Served
from unmask.serving.workers.pool import LostWorkerError, NoWorkerError, Worker

logger = logging.getLogger(__name__)
WEIGHTS = "/weights"
"""Where a worker reads weights (PUT), takes those that it has read (POST), or forgets them (DELETE)."""


class RefusedError(ServiceError):
    """A worker has refused weights, with this status."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None, status: int = 400):
        super().__init__(what, where=where, remedy=remedy)
        self.status = status


@dataclass(frozen=True)
class Given:
    """Weights that replaced the first ones of a model.

    Attributes:
        files: of the folder; others in their place differ from them.
    """

    model: str
    folder: Folder
    version: str
    files: Files

    @property
    def unchanged(self) -> bool:
        """Whether the files are still those that were given."""
        try:
            return self.folder.files() == self.files
        except (OSError, ModelError):
            return False


class SharedWeights:
    """Replaces weights of all workers: they read and check them first, and only if all of them can, all take
    them. Those of one model are replaced one after the other; reading alone holds up other models, and
    workers that start.

    Attributes:
        latest: of each model whose first weights were replaced.
    """

    def __init__(self, workers: Sequence[Worker]):
        self.workers = workers
        self.latest: dict[str, Given] = {}
        # models of which a worker has other weights
        self._lacking: dict[Worker, set[str]] = {worker: set() for worker in workers}
        self._starting: set[Worker] = set()  # workers that have yet to catch up
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of each model
        self._reading = asyncio.Lock()  # guards `latest` besides

    async def replace(self, model: str, folder: Folder, version: str) -> Served:
        """`Replace` for all workers. One that ends after all have read them gets the new weights when it
        starts again.

        Raises:
            RefusedError: a worker refuses them, and all keep those that they have.
            LostWorkerError: one ended while it read them, with the same outcome.
            NoWorkerError: none is ready.
        """
        turn = self._turns.setdefault(model, asyncio.Lock())
        async with turn:
            async with self._reading:
                ready = [
                    worker
                    for worker in self.workers
                    if worker.client is not None and worker not in self._starting
                ]
                workers = {worker: worker.starts for worker in ready}
                if not workers:
                    raise NoWorkerError("no worker is ready", remedy="Send it again")
                with folder.reading():
                    new = Given(model, folder, version, await asyncio.to_thread(folder.files))
                outcomes = await asyncio.gather(
                    *(self._read(worker, new) for worker in workers), return_exceptions=True
                )
                if error := next((outcome for outcome in outcomes if outcome is not None), None):
                    await asyncio.gather(
                        *(worker.ask("DELETE", WEIGHTS, params={"model": model}) for worker in workers)
                    )
                    raise error
                self.latest[model] = new
            took = await asyncio.gather(
                *(self._take(worker, new, process) for worker, process in workers.items())
            )
        return {"version": version, "workers": sum(took)}

    async def catch_up(self, worker: Worker) -> None:
        """Make a worker that was started live, with the latest weights. One that cannot have them any more
        waits for the next ones."""
        self._starting.add(worker)
        async with self._reading:
            self._starting.discard(worker)
            self._lacking[worker] = set(self.latest)
            for latest in self.latest.values():
                try:
                    if not await asyncio.to_thread(lambda given: given.unchanged, latest):
                        raise ServiceError("their files have changed since")
                    await self._read(worker, latest)
                except ServiceError as error:
                    logger.error(
                        "worker %d cannot have the weights %r, and waits for the next: %s",
                        worker.number,
                        latest.version,
                        error,
                    )
                else:
                    await self._take(worker, latest, worker.starts)
            self._admit(worker)

    def _admit(self, worker: Worker) -> None:
        """Let a worker have requests if it has all weights, and has not ended meanwhile."""
        worker.live = worker.client is not None and not self._lacking[worker]

    async def _read(self, worker: Worker, new: Given) -> None:
        """Have a worker read weights, and check them."""
        folder = {
            "path": str(new.folder.path),
            "given": new.folder.given,
            "roots": [str(root) for root in new.folder.roots],
        }
        body = {"model": new.model, "version": new.version, **folder}
        answer = await worker.ask("PUT", WEIGHTS, json=body, timeout=None)
        if answer is None:
            raise LostWorkerError(
                f"worker {worker.number} ended while it read them, and nothing has changed",
                remedy="Send it again",
            )
        if not answer.is_success:
            raise RefusedError(**answer.json(), status=answer.status_code)

    async def _take(self, worker: Worker, new: Given, process: int) -> bool:
        """Have a process of a worker take what it has read, once the requests that it has begun are finished.
        Whether it did: if not, it ends."""
        answer = (
            await worker.ask("POST", WEIGHTS, params={"model": new.model}, timeout=None)
            if worker.starts == process
            else None
        )
        if worker.starts != process:  # the one that was started since catches up
            return False
        took = answer is not None and answer.is_success
        if took:
            self._lacking[worker].discard(new.model)
        else:
            self._lacking[worker].add(new.model)
            logger.error(
                "worker %d ended before it had the new weights, with which it is started again", worker.number
            )
            worker.end()
        self._admit(worker)
        return took
