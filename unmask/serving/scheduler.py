"""The engines of a server, one for each model: one thread owns them, and the event loop hands it sequences
and gets their frames back.

Sequences of all models wait in one bounded queue in which owners take turns (`queues.py`), and enter
between steps, whenever one has left. The engines take turns, a step each. New weights of a model enter
between steps as well, once all that has begun on the old ones, or was prepared with them, is finished: every
answer is of one version.

A step that fails may be the fault of one sequence. Those that ran start again, one by one: their answers do
not depend on company.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter, time
from typing import Any

from unmask.errors import GenerationError
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Watched
from unmask.generation.output import Trace
from unmask.generation.remote.protocol import model_facts
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.metrics import Metrics
from unmask.serving.queues import FairQueue, Job, SideWork
from unmask.serving.submission import (
    BetweenSteps,
    Deliveries,
    Event,
    Events,
    OtherWeightsError,
    OverloadedError,
    QueueEntry,
    ReplacedError,
    Result,
    ServiceError,
    Submission,
    Work,
    cut_off_error,
    ending_error,
    hand_over,
)

logger = logging.getLogger(__name__)
RECENT = 64
"""Rounds of steps over which the throughput is measured."""
LAST_STEP = 10  # seconds that the engine has at the end for the step that it is in
ASIDE_AT_ONCE, SEARCHES_AT_ONCE = 2, 4
MOST_FAILURES = 3
"""Sequences that fail alone, one after the other, before a model counts as broken."""
MOST_WAITING = 64  # of each of these and each owner


class ModelEngine:
    """A model under a name, with an engine of its own: what is cached of its sequences is seen by no other
    model, and no adapters.

    The scheduler's thread owns it, but for its attributes up to `weights`, which others read.

    Attributes:
        parent: the name of the model on whose weights these adapters are; None: its weights are its own.
        facts: those that a client who draws for the model must share.
        created: when it was loaded, in seconds since 1970.
        version: of the weights, as a client named them; None: the first ones.
        weights: how often they have been replaced; a replacement that failed counts, too.
        running: the sequences, by ticket.
        failures: of sequences that ran alone, one after the other.
    """

    def __init__(
        self,
        lm: DiffusionLM,
        name: str,
        parent: str | None,
        make_engine: Callable[[DiffusionLM], Engine],
        metrics: Metrics,
    ):
        self.lm, self.name, self.parent = lm, name, parent
        self.facts, self.created = model_facts(lm), int(time())  # the facts take a hash of the vocabulary
        self.version: str | None = None
        self.weights = 0
        self.running: dict[int, QueueEntry] = {}
        self.failures = 0
        self.make_engine = make_engine
        """Called for a new engine after a failure."""
        self._engine, self._metrics = make_engine(lm), metrics

    def check_version(self, version: str | None) -> None:
        """Raise OtherWeightsError if the weights have another name than this one."""
        if version not in (None, self.version):
            what = f"the weights are {self.version!r}, not {version!r}"
            raise OtherWeightsError(
                what, where="version", remedy="Send them with POST /v1/weights, or name no version"
            )

    def enter(self, entry: QueueEntry) -> None:
        """Run a sequence. Raises OtherWeightsError, GenerationError, and what the model raises."""
        self.check_version(entry.submission.version)
        self.running[self._engine.submit(entry.work.request, entry.work.config)] = entry

    def drop_unwanted(self) -> None:
        """Drop the sequences that nobody waits for any more."""
        for ticket, entry in list(self.running.items()):
            if not entry.wanted:
                self._leave(ticket, "canceled")
                self._engine.cancel(ticket)

    def step(self) -> Deliveries:
        """One step of the engine, and what came of it."""
        started, passes = perf_counter(), self._engine.num_forward_passes
        finished = self._engine.step()
        self._metrics.engine_seconds.labels(self.name).inc(perf_counter() - started)
        self._metrics.forward_passes.labels(self.name).inc(self._engine.num_forward_passes - passes)
        deliveries: Deliveries = []
        # before any is finished: if the device fails, all start again
        for ticket, entry in self.running.items():
            entry.steps_left = max(entry.steps_left - 1, 0)
            if entry.watched is not None and (frame := entry.watched.look(self._engine, ticket)):
                self._measure_first_frame(entry)
                deliveries.append((entry.submission, Event(entry.index, frame, None, self.version)))
        deliveries += [self._finish(ticket, trace) for ticket, trace in finished]
        self.failures = 0
        return deliveries

    def renew(self) -> list[QueueEntry]:
        """Go on with a new engine. Returns the sequences that ran in the old one."""
        self._metrics.engine_failures.labels(self.name).inc()
        ran, self._engine = list(self.running.values()), self.make_engine(self.lm)
        self.running.clear()
        return ran

    def count_end(self, outcome: str) -> None:
        """A sequence has ended."""
        self._metrics.sequences.labels(self.name, outcome).inc()

    def _finish(self, ticket: int, trace: Trace) -> tuple[Submission, Event]:
        entry = self._leave(ticket, "finished")
        revealed = sum(step >= 0 for step in trace.steps)
        self._metrics.tokens.labels(self.name).inc(revealed)
        self._metrics.prompt_tokens.labels(self.name).inc(entry.work.request.hidden.count(False))
        frame = entry.watched.last(trace) if entry.watched is not None else None
        self._measure_first_frame(entry)
        return entry.submission, Event(entry.index, frame, trace, self.version)

    def _measure_first_frame(self, entry: QueueEntry) -> None:
        """The time to the first frame of a sequence that is watched."""
        if entry.watched is not None and not entry.seen:
            entry.seen = True
            self._metrics.first_frame_seconds.observe(monotonic() - entry.submission.started)

    def _leave(self, ticket: int, outcome: str) -> QueueEntry:
        self.count_end(outcome)
        return self.running.pop(ticket)


class Scheduler:
    """Generates for many at once, with one or several models. `start` it, and `stop` it at the end.

    A sequence that fails ends with its own error, or with a `ServiceError`; the others go on, with a new
    engine.

    Args:
        models: by the names that clients give.
        adapters: models that share the weights of the first one, by their names.
        batch_size: the most sequences that run at once, of all models.
        max_batch_tokens: as of `Engine`, for each model.
        queue_size: the most sequences that wait, for all models.
        deterministic: whether every sequence is computed separately, so that company does not change the last
            bits of its answer.

    Attributes:
        models: all of them, by name, the first one first.
        on_end: is called in the engines' thread when that ends, because it was stopped or because no new
            engine could be made.
    """

    def __init__(
        self,
        models: Mapping[str, DiffusionLM],
        *,
        adapters: Mapping[str, DiffusionLM] | None = None,
        batch_size: int = 8,
        max_batch_tokens: int | None = None,
        queue_size: int = 256,
        deterministic: bool = False,
    ):
        self.batch_size, self.queue_size, self.deterministic = batch_size, queue_size, deterministic
        self.metrics = Metrics()
        self.on_end: Callable[[], None] = lambda: None
        make_engine = partial(Engine, batch_size=batch_size, max_batch_tokens=max_batch_tokens)
        parents = {**dict.fromkeys(models), **dict.fromkeys(adapters or {}, next(iter(models)))}
        self.models = {
            name: ModelEngine(lm, name, parents[name], make_engine, self.metrics)
            for name, lm in {**models, **(adapters or {})}.items()
        }
        self.side_work = SideWork(ASIDE_AT_ONCE, MOST_WAITING)
        """What `aside` runs."""
        self._searches = SideWork(SEARCHES_AT_ONCE, MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="unmask-engine", daemon=True)
        self._changed = threading.Condition()  # guards the following
        self._queue: FairQueue[QueueEntry] = FairQueue()
        self._jobs: deque[Job] = deque()
        self.open_submissions: set[Submission] = set()
        """Submissions of which sequences wait or run."""
        self._stopping = False
        # which run one by one, before all others; the engines' thread owns it
        self._again: deque[QueueEntry] = deque()
        # of recent rounds: their seconds, the steps that sequences made in them, whether others waited
        self._pace = 0.0, 0.0, False
        self.metrics.queue_length.set_function(self._queue.__len__)
        self.metrics.running.set_function(lambda: self._num_running)

    @property
    def failing(self) -> list[str]:
        """The models that do not work: all once the engines' thread has ended."""
        alive = self._thread.is_alive()
        return [name for name, model in self.models.items() if not alive or model.failures >= MOST_FAILURES]

    @property
    def healthy(self) -> bool:
        """Whether any model works."""
        return len(self.failing) < len(self.models)

    @property
    def _num_running(self) -> int:
        return sum(len(model.running) for model in self.models.values())

    def start(self) -> None:
        """Start the engines' thread."""
        self._thread.start()

    async def stop(self, grace: float = 30.0) -> None:
        """Accept nothing more, and end when what was accepted has finished; after `grace` seconds end the
        rest with StoppedError."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for work in (self.side_work, self._searches):
            work.stop(ending_error())  # since what follows would be refused
        if self._thread.ident is None:
            return
        await asyncio.to_thread(self._thread.join, grace)
        self._end_all()
        await asyncio.to_thread(self._thread.join, LAST_STEP)

    def submit(
        self,
        model: str,
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
            model: the name of the model.
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
        self.models[model].check_version(version)
        if self.deterministic:
            work = [
                replace(each, config=each.config.model_copy(update={"deterministic": True})) for each in work
            ]
        with self._changed:
            self._check_stopping()
            if weights is not None and (
                weights != self.models[model].weights
                or any(job.exclusive and job.model == model for job in self._jobs)
            ):
                raise ReplacedError("new weights are loaded", where="version", remedy="Send it again")
            self._make_room(len(work), owner)
            submission = Submission(
                model, work, version, timeout, since, self._forget, prepared=weights is not None
            )
            for index, each in enumerate(work):
                watched = Watched(each.request) if each.frames else None
                self._queue.push(
                    QueueEntry(submission, index, watched, each.request.most_steps), owner, priority
                )
            self.open_submissions.add(submission)
            self._changed.notify()
        return Events(submission)

    def check_room(self, count: int, owner: str) -> None:
        """Raise what `submit` would raise for `count` sequences of an owner, before they are prepared:
        OverloadedError, GenerationError for more than may wait at all, or StoppedError."""
        with self._changed:
            self._check_stopping()
            self._gives_way(count, owner)

    async def aside(self, function: Callable[[], Result], *, owner: str) -> Result:
        """Run a function that takes long and needs no model, such as one that compiles a constraint, in a
        thread of its own, one at a time of each owner. Errors as it raises, OverloadedError and
        StoppedError."""
        self._check_stopping()
        return await self.side_work.run(function, owner)

    async def search(self, model: str, function: Callable[[BetweenSteps], Result], *, owner: str) -> Result:
        """Run a function that uses a model again and again, such as the search for the length of a gap, as
        `aside` runs one.

        Args:
            function: hands what needs the model, a short part at a time, to its argument. That raises
                CancelledError once nobody waits for the result.
        """
        self._check_stopping()
        loop, left = asyncio.get_running_loop(), threading.Event()

        def between_steps(part: Callable[[], Any]) -> Any:
            if left.is_set():
                raise CancelledError
            return asyncio.run_coroutine_threadsafe(self.between_steps(part, model), loop).result()

        try:
            return await self._searches.run(lambda: function(between_steps), owner)
        finally:
            left.set()

    async def between_steps(self, function: Callable[[], Result], model: str | None = None) -> Result:
        """Run a function that needs a model in the engines' thread, between two steps; and after new weights
        of the model of this name that wait already. Errors as it raises, StoppedError, and OverloadedError if
        as many functions wait as sequences may."""
        return await self._do(Job(function, model))

    async def replace_weights(self, model: str, load: Callable[[], None], version: str) -> None:
        """Call `load` in the engines' thread once the submissions to this model that have begun, or were
        prepared with its old weights, are finished. The others get the new weights, unless they name others.
        Raises what `load` raises; the weights then keep their name."""

        def replace() -> None:
            load()
            self.models[model].version = version

        await self._do(Job(replace, model, exclusive=True))

    async def _do(self, job: Job) -> Any:
        with self._changed:
            self._check_stopping()
            if (
                sum((other.model, other.exclusive) == (job.model, job.exclusive) for other in self._jobs)
                >= self.queue_size
            ):
                raise self._overloaded()
            self._jobs.append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.done)

    def _check_stopping(self) -> None:
        if self._stopping:
            raise ending_error()

    def _make_room(self, count: int, owner: str) -> None:
        """Refuse what does not fit in the queue: of all that waits, the latest of whoever has most."""
        while (last := self._gives_way(count, owner)) is not None:
            self._withdraw(last)
            self._deliver([(last, self._overloaded())])

    def _gives_way(self, count: int, owner: str) -> Submission | None:
        """The submission to evict so that `count` more sequences of an owner fit; None: they fit already.
        Raises OverloadedError if none may be evicted."""
        if count > self.queue_size:
            what = f"{count} sequences at once, of {self.queue_size} that may wait"
            raise GenerationError(
                what, where="n", remedy="Ask for fewer, or start the server with a larger --queue-size"
            )
        if len(self._queue) + count <= self.queue_size:
            return None
        longest = self._queue.of(self._queue.longest())
        last = next((entry.submission for entry in reversed(longest) if not entry.submission.begun), None)
        if last is None or len(longest) - len(last.work) < len(self._queue.of(owner)) + count:
            raise self._overloaded()
        return last

    def _overloaded(self) -> OverloadedError:
        """Tells to come back when what waits now has had its turns: whoever comes before would only wait
        behind it."""
        seconds, steps, _ = self._pace
        waiting = sum(entry.steps_left for entry in self._queue)
        return OverloadedError("too many requests wait", waiting * seconds / steps if steps else 0.0)

    def _forget(self, submission: Submission) -> None:
        """Drop the sequences that nobody waits for any more: the waiting ones now; the running ones are
        dropped between steps."""
        with self._changed:
            if submission.closed:
                self.open_submissions.discard(submission)
            self._queue.remove(lambda entry: entry.submission is submission and not entry.wanted)

    def _withdraw(self, submission: Submission) -> None:
        self._queue.remove(lambda entry: entry.submission is submission)

    def _end_all(self) -> None:
        """End everything that is left."""
        with self._changed:
            self._stopping = True
            left, jobs = list(self.open_submissions), list(self._jobs)
            self.open_submissions.clear()
            self._jobs.clear()
            self._queue.remove(lambda entry: True)
            self._changed.notify()
        stopped = cut_off_error()
        self._deliver([(submission, stopped) for submission in left])
        for job in jobs:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(stopped)

    # In the engines' thread

    def _run(self) -> None:
        try:
            while self.wait_for_work():
                self._drop_unwanted()
                self._do_job()
                self._admit()
                began, left, full = monotonic(), self._steps_left, bool(self._queue)
                for model in [model for model in self.models.values() if model.running]:
                    with self._recovering(model, stepping=True):
                        self._deliver(model.step())
                self._measure(monotonic() - began, left - self._steps_left, full=full)
        except Exception:  # user code: a model of which no engine can be made any more
            logger.exception("the engine cannot go on")
        finally:
            self._end_all()
            self.on_end()

    @property
    def _steps_left(self) -> int:
        """The most steps that all running sequences still take."""
        return sum(entry.steps_left for model in self.models.values() for entry in model.running.values())

    def _measure(self, seconds: float, steps: int, *, full: bool) -> None:
        """Count a round of steps. A sequence that ends early has come nearer to its end by all that it had
        left. Rounds in which nothing waited, so that few may have run, count only until there are others."""
        before, made, were_full = self._pace
        if full >= were_full:
            kept = 1 - 1 / RECENT if full == were_full else 0.0
            self._pace = kept * before + seconds, kept * made + steps, full

    def wait_for_work(self) -> bool:
        """Wait until there is something to do; False: the server ends."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_running or self._again or self._queue or self._jobs or self._stopping
            )
            return bool(self._num_running or self._again or self._queue or self._jobs)

    def _drop_unwanted(self) -> None:
        with self._changed:
            self._jobs = deque(job for job in self._jobs if not job.done.cancelled())
        for model in self.models.values():
            with self._recovering(model):
                model.drop_unwanted()

    def _do_job(self) -> None:
        """Do the first job that may be done now: one between two steps, so that none holds up what runs for
        long."""
        with self._changed:
            job = next((job for job in self._jobs if self._may_run(job)), None)
            if job is None:
                return
            self._jobs.remove(job)
            if job.exclusive and job.model is not None:
                self.models[job.model].weights += 1
        job.run()

    @property
    def _replaced(self) -> set[str | None]:
        """The models for which new weights wait."""
        return {job.model for job in self._jobs if job.exclusive}

    def _may_run(self, job: Job) -> bool:
        """Whether no earlier job has to replace the weights that this one needs, and what it has to wait for
        is finished."""
        if job.model is None:
            return True
        first = next(
            other for other in self._jobs if other is job or (other.exclusive and other.model == job.model)
        )
        return first is job and not (job.exclusive and self._is_busy(job.model))

    def _is_busy(self, model: str) -> bool:
        """Whether a submission to a model keeps its weights and is not finished."""
        begun = any(
            entry.submission.keeps_weights for entry in self._queue if entry.submission.model == model
        )
        return (
            bool(self.models[model].running)
            or begun
            or any(entry.submission.model == model for entry in self._again)
        )

    def _admit(self) -> None:
        """Give the engines as many sequences as may run."""
        while self._num_running < self.batch_size and (entry := self._next()):
            model = self.models[entry.submission.model]
            with self._recovering(model):
                try:
                    model.enter(entry)
                except (GenerationError, OtherWeightsError) as error:
                    self._deliver([(entry.submission, error)])
                except Exception:  # user code: of a model
                    self._deliver([(entry.submission, _failure())])
                    raise

    def _next(self) -> QueueEntry | None:
        """The sequence that enters next; None if it has to wait. Of a model whose weights wait to be replaced
        only those of submissions that keep them enter."""
        if self._again or any(
            entry.alone for model in self.models.values() for entry in model.running.values()
        ):
            return self._again.popleft() if not self._num_running else None
        with self._changed:
            replaced = self._replaced
            entry = self._queue.pop(
                lambda entry: entry.submission.keeps_weights or entry.submission.model not in replaced
            )
            if entry is not None:
                entry.submission.begun = True
            return entry

    @contextlib.contextmanager
    def _recovering(self, model: ModelEngine, *, stepping: bool = False) -> Iterator[None]:
        """A context in which a model that fails gets a new engine, where the sequences that ran start again,
        each by itself. One whose step failed by itself ends. The sequences of other models go on."""
        try:
            yield
        except Exception as error:  # user code: of a model, on any device; the state of its engine is unknown
            logger.error(
                "the engine of %s failed, with %d sequences", model.name, len(model.running), exc_info=error
            )
            by_itself, ran = stepping and self._num_running == 1, model.renew()
            if by_itself:
                model.count_end("failed")
                model.failures += not isinstance(error, GenerationError)
                self._deliver(
                    [(ran[0].submission, error if isinstance(error, GenerationError) else _failure())]
                )
                return
            for entry in ran:
                entry.alone = True
                self._again.append(entry)

    def _deliver(self, deliveries: Deliveries) -> None:
        """Give events and errors to the event loops of the submissions: one wake-up a loop."""
        for loop in {submission.loop for submission, _ in deliveries}:
            own = [delivery for delivery in deliveries if delivery[0].loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it whoever waited
                loop.call_soon_threadsafe(hand_over, own)


def _failure() -> ServiceError:
    return ServiceError(
        "the engine failed while this request ran", remedy="Send it again; the server's log has the cause"
    )
