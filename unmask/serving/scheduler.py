"""The engine of a server: one thread owns it, and the event loop hands it sequences and gets their frames back.

Sequences wait in a bounded queue in which owners take turns (`fair_queue.py`), and enter between steps, whenever one has left. New weights
enter between steps as well, once no submission has begun that is not finished: every answer is of one model.

A step that fails may be the fault of one sequence. Those that ran start again, one by one: their answers do not depend on company.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from typing import Any

from unmask.errors import GenerationError
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Watched
from unmask.generation.output import Trace
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.fair_queue import FairQueue
from unmask.serving.metrics import Metrics
from unmask.serving.service import (
    BetweenSteps,
    Event,
    OtherWeightsError,
    OverloadedError,
    Result,
    ServiceError,
    Work,
    cut_off_error,
    ending_error,
)
from unmask.serving.side_work import SideWork
from unmask.serving.submission import Entry, Events, Submission

logger = logging.getLogger(__name__)
RECENT = 64
"""Sequences over whose ends the throughput is measured."""
LONGEST_RETRY = 300  # seconds
LAST_STEP = 10  # seconds that the engine has at the end for the step that it is in
ASIDE_AT_ONCE, SEARCHES_AT_ONCE = 2, 4
MOST_WAITING = 64  # of each of these and each owner
MOST_FAILURES = 3
"""Sequences that fail alone, one after the other, before the server counts as broken."""


@dataclass
class Job:
    """A function that needs the model."""

    function: Callable[[], Any]
    exclusive: bool  # whether it waits until no sequence runs, and lets none enter before it
    done: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function, unless whoever wanted it has left."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.function())
            except Exception as error:  # user code: whatever the function raises is for whoever wanted it
                self.done.set_exception(error)


Deliveries = list[tuple[Submission, Event | Exception]]


class Scheduler:
    """Generates for many at once: the `Service` of a server. `start` it, and `stop` it at the end.

    A sequence that fails ends with its own error, or with a `ServiceError`; the others go on, with a new engine.

    Args:
        batch_size: the most sequences that run at once.
        max_batch_tokens: as of `Engine`.
        queue_size: the most sequences that wait.
        deterministic: whether every sequence is computed separately, so that company does not change the last bits of its answer.

    Attributes:
        on_end: is called in the engine's thread when that ends, because it was stopped or because no new engine could be made.
    """

    def __init__(
        self,
        lm: DiffusionLM,
        name: str,
        *,
        batch_size: int = 8,
        max_batch_tokens: int | None = None,
        queue_size: int = 256,
        deterministic: bool = False,
        metrics: Metrics | None = None,
    ):
        self.lm, self.name, self.queue_size, self.deterministic = lm, name, queue_size, deterministic
        self.version: str | None = None
        self.metrics = metrics or Metrics()
        self.on_end: Callable[[], None] = lambda: None
        self._make_engine = lambda: Engine(lm, batch_size=batch_size, max_batch_tokens=max_batch_tokens)
        self._aside, self._searches = SideWork(ASIDE_AT_ONCE, MOST_WAITING), SideWork(SEARCHES_AT_ONCE, MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="unmask-engine", daemon=True)
        self._changed = threading.Condition()  # guards the following
        self._queue: FairQueue[Entry] = FairQueue()
        self._jobs: deque[Job] = deque()
        self._open: set[Submission] = set()
        self._stopping = False
        self._engine = self._make_engine()  # the engine's thread owns the following
        self._running: dict[int, Entry] = {}  # by ticket
        self._again: deque[Entry] = deque()  # which run one by one, before all others
        self._failures = 0  # one after the other
        self._ends: deque[float] = deque([monotonic()], maxlen=RECENT)  # when recent sequences ended
        self.metrics.queue_length.set_function(self._queue.__len__)
        self.metrics.running.set_function(self._running.__len__)

    @property
    def healthy(self) -> bool:
        """Whether the engine works."""
        return self._thread.is_alive() and self._failures < MOST_FAILURES

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    async def stop(self, grace: float = 30.0) -> None:
        """Accept nothing more, and end when what was accepted has finished; after `grace` seconds end the rest with StoppedError."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for work in (self._aside, self._searches):
            work.stop(ending_error())  # since what follows would be refused
        if self._thread.ident is None:
            return
        await asyncio.to_thread(self._thread.join, grace)
        self._end_all()
        await asyncio.to_thread(self._thread.join, LAST_STEP)

    def submit(
        self,
        work: Sequence[Work],
        *,
        owner: str,
        priority: int = 0,
        timeout: float | None = None,
        since: float | None = None,
        version: str | None = None,
    ) -> Events:
        """As of `Service`. Refusals are raised here, before the first event, and later ones by the iterator."""
        self.check_version(version)
        if self.deterministic:
            work = [replace(each, config=each.config.model_copy(update={"deterministic": True})) for each in work]
        with self._changed:
            self._check_stopping()
            self._make_room(len(work), owner)
            submission = Submission(work, version, timeout, since, self._forget)
            for index, each in enumerate(work):
                watched = Watched(each.request, self.lm.mask_token_id) if each.frames else None
                self._queue.push(Entry(submission, index, watched), owner, priority)
            self._open.add(submission)
            self._changed.notify()
        return Events(submission)

    def check_version(self, version: str | None) -> None:
        """As of `Service`."""
        if version not in (None, self.version):
            what = f"the weights are {self.version!r}, not {version!r}"
            raise OtherWeightsError(what, where="version", remedy="Send them with POST /v1/weights, or name no version")

    async def aside(self, function: Callable[[], Result], *, owner: str) -> Result:
        """As of `Service`."""
        self._check_stopping()
        return await self._aside.run(function, owner)

    async def search(self, function: Callable[[BetweenSteps], Result], *, owner: str) -> Result:
        """As of `Service`."""
        self._check_stopping()
        loop, left = asyncio.get_running_loop(), threading.Event()

        def between_steps(part: Callable[[], Any]) -> Any:
            if left.is_set():
                raise CancelledError
            return asyncio.run_coroutine_threadsafe(self.between_steps(part), loop).result()

        try:
            return await self._searches.run(lambda: function(between_steps), owner)
        finally:
            left.set()

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Run a function that needs the model in the engine's thread, between two steps. Errors as it raises, StoppedError, and
        OverloadedError if as many functions wait as sequences may."""
        return await self._do(Job(function, exclusive=False))

    async def replace_weights(self, load: Callable[[], None], version: str) -> None:
        """Call `load` in the engine's thread once the submissions that have begun are finished. Those that wait get the new weights, unless
        they name others. Raises what `load` raises; the weights then keep their name."""

        def replace() -> None:
            load()
            self.version = version

        await self._do(Job(replace, exclusive=True))

    async def _do(self, job: Job) -> Any:
        with self._changed:
            self._check_stopping()
            if sum(other.exclusive == job.exclusive for other in self._jobs) >= self.queue_size:
                raise self._overloaded(1)
            self._jobs.append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.done)

    def _check_stopping(self) -> None:
        if self._stopping:
            raise ending_error()

    def _make_room(self, count: int, owner: str) -> None:
        """Refuse what does not fit in the queue: of all that waits, the latest of whoever has most."""
        if count > self.queue_size:
            what = f"{count} sequences at once, of {self.queue_size} that may wait"
            raise GenerationError(what, where="n", remedy="Ask for fewer, or start the server with a larger --queue-size")
        while (excess := len(self._queue) + count - self.queue_size) > 0:
            theirs = self._queue.of(self._queue.longest())
            last = next((entry.submission for entry in reversed(theirs) if not entry.submission.begun), None)
            if last is None or len(theirs) - len(last.work) < len(self._queue.of(owner)) + count:
                raise self._overloaded(excess)
            self._withdraw(last)
            self._deliver([(last, self._overloaded(excess))])

    def _overloaded(self, excess: int) -> OverloadedError:
        pace = (monotonic() - self._ends[0]) / len(self._ends)
        retry = min(max(math.ceil(excess * pace), 1), LONGEST_RETRY)
        return OverloadedError("too many requests wait", remedy=f"Try again in {retry} seconds", retry_after=retry)

    def _forget(self, submission: Submission) -> None:
        """Drop the sequences that nobody waits for any more: the waiting ones now; the running ones are dropped between steps."""
        with self._changed:
            if submission.closed:
                self._open.discard(submission)
            self._queue.remove(lambda entry: entry.submission is submission and not entry.wanted)

    def _withdraw(self, submission: Submission) -> None:
        self._queue.remove(lambda entry: entry.submission is submission)

    def _end_all(self) -> None:
        """End everything that is left."""
        with self._changed:
            self._stopping = True
            left, jobs = list(self._open), list(self._jobs)
            self._open.clear()
            self._jobs.clear()
            self._queue.remove(lambda entry: True)
            self._changed.notify()
        stopped = cut_off_error()
        self._deliver([(submission, stopped) for submission in left])
        for job in jobs:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(stopped)

    # In the engine's thread

    def _run(self) -> None:
        try:
            while self._wait():
                stepping = False
                try:
                    self._drop_unwanted()
                    self._do_job()
                    self._admit()
                    stepping = bool(self._running)
                    if stepping:
                        self._step()
                except Exception as error:  # user code: of a model, on any device; the state of the engine is unknown
                    self._recover(error, stepping=stepping)
        except Exception:  # user code: a model of which no engine can be made any more
            logger.exception("the engine cannot go on")
        finally:
            self._end_all()
            self.on_end()

    def _wait(self) -> bool:
        """Wait until there is something to do; False: the server ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._again or self._queue or self._jobs or self._stopping)
            return bool(self._running or self._again or self._queue or self._jobs)

    def _drop_unwanted(self) -> None:
        with self._changed:
            self._jobs = deque(job for job in self._jobs if not job.done.cancelled())
        for ticket, entry in list(self._running.items()):
            if not entry.wanted:
                self._leave(ticket, "cancelled")
                self._engine.cancel(ticket)

    def _do_job(self) -> None:
        """Do the first job, if it may be done now: one between two steps, so that none holds up what runs for long."""
        with self._changed:
            busy = self._running or self._again or any(entry.submission.begun for entry in self._queue)
            if not self._jobs or (self._jobs[0].exclusive and busy):
                return
            job = self._jobs.popleft()
        job.run()

    def _admit(self) -> None:
        """Give the engine as many sequences as may run; while a job waits to be alone, only those of submissions that have begun."""
        while len(self._running) < self._engine.batch_size and (entry := self._next()):
            try:
                self.check_version(entry.submission.version)
                ticket = self._engine.submit(entry.work.request, entry.work.config)
            except (GenerationError, OtherWeightsError) as error:
                self._deliver([(entry.submission, error)])
            except Exception as error:  # user code: of a model
                self._deliver([(entry.submission, _failure())])
                raise error
            else:
                self._running[ticket] = entry

    def _next(self) -> Entry | None:
        """The sequence that enters next; None if it has to wait."""
        if self._again or any(entry.alone for entry in self._running.values()):
            return self._again.popleft() if not self._running else None
        with self._changed:
            exclusive = bool(self._jobs and self._jobs[0].exclusive)
            entry = self._queue.pop(lambda entry: entry.submission.begun or not exclusive)
            if entry is not None:
                entry.submission.begun = True
            return entry

    def _step(self) -> None:
        """One step of the engine, and what came of it."""
        started, passes = perf_counter(), self._engine.num_forward_passes
        finished = self._engine.step()
        self.metrics.engine_seconds.inc(perf_counter() - started)
        self.metrics.forward_passes.inc(self._engine.num_forward_passes - passes)
        deliveries: Deliveries = [self._finish(ticket, trace) for ticket, trace in finished]
        for ticket, entry in self._running.items():
            if entry.watched is not None and (frame := entry.watched.look(self._engine, ticket)):
                self._measure_first_frame(entry)
                deliveries.append((entry.submission, Event(entry.index, frame, None, self.version)))
        self._failures = 0
        self._deliver(deliveries)

    def _finish(self, ticket: int, trace: Trace) -> tuple[Submission, Event]:
        entry = self._leave(ticket, "finished")
        revealed = sum(step >= 0 for step in trace.steps)
        self.metrics.tokens.inc(revealed)
        self.metrics.prompt_tokens.inc(entry.work.request.length - sum(entry.work.request.hidden))
        frame = entry.watched.last(trace) if entry.watched is not None else None
        self._measure_first_frame(entry)
        return entry.submission, Event(entry.index, frame, trace, self.version)

    def _measure_first_frame(self, entry: Entry) -> None:
        """The time to the first frame of a sequence that is watched."""
        if entry.watched is not None and not entry.seen:
            entry.seen = True
            self.metrics.first_frame_seconds.observe(monotonic() - entry.submission.started)

    def _leave(self, ticket: int, outcome: str) -> Entry:
        self.metrics.sequences.labels(outcome).inc()
        self._ends.append(monotonic())
        return self._running.pop(ticket)

    def _recover(self, error: Exception, *, stepping: bool) -> None:
        """Go on with a new engine, in which the sequences that ran start again, each by itself. One whose step failed by itself ends."""
        logger.error("the engine failed, with %d sequences", len(self._running), exc_info=error)
        self.metrics.engine_failures.inc()
        ran, self._engine = list(self._running.items()), self._make_engine()
        if stepping and len(ran) == 1:
            [(ticket, entry)] = ran
            self._leave(ticket, "failed")
            self._failures += not isinstance(error, GenerationError)
            self._deliver([(entry.submission, error if isinstance(error, GenerationError) else _failure())])
            return
        self._running.clear()
        for _, entry in ran:
            entry.alone = True
            self._again.append(entry)

    def _deliver(self, deliveries: Deliveries) -> None:
        """Give events and errors to the event loops of the submissions: one wake-up a loop."""
        for loop in {submission.loop for submission, _ in deliveries}:
            theirs = [delivery for delivery in deliveries if delivery[0].loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it whoever waited
                loop.call_soon_threadsafe(_hand_over, theirs)


def _failure() -> ServiceError:
    return ServiceError("the engine failed while this request ran", remedy="Send it again; the server's log has the cause")


def _hand_over(deliveries: Iterable[tuple[Submission, Event | Exception]]) -> None:
    """In the event loop's thread."""
    for submission, found in deliveries:
        submission.add(found) if isinstance(found, Event) else submission.fail(found)
