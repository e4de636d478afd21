"""The engine of one model of a server, and the sequences that run in it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter

from unmask.generation.engine.engine import Engine
from unmask.generation.output import Trace
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.metrics import Metrics
from unmask.serving.service import Event, OtherWeightsError
from unmask.serving.submission import Deliveries, Entry, Submission

MOST_FAILURES = 3
"""Sequences that fail alone, one after the other, before a model counts as broken."""


class ModelEngine:
    """A model under a name, with an engine of its own: what is cached of its sequences is seen by no other
    model, and no adapters.

    The scheduler's thread owns it, but for `lm`, `name`, `parent`, `version` and `weights`, which others
    read.

    Attributes:
        parent: the name of the model on whose weights these adapters are; None: its weights are its own.
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
        self.version: str | None = None
        self.weights = 0
        self.running: dict[int, Entry] = {}
        self.failures = 0
        self._make_engine, self._engine, self._metrics = make_engine, make_engine(lm), metrics

    def check_version(self, version: str | None) -> None:
        """Raise OtherWeightsError if the weights have another name than this one."""
        if version not in (None, self.version):
            what = f"the weights are {self.version!r}, not {version!r}"
            raise OtherWeightsError(
                what, where="version", remedy="Send them with POST /v1/weights, or name no version"
            )

    def enter(self, entry: Entry) -> None:
        """Run a sequence. Raises OtherWeightsError, GenerationError, and what the model raises."""
        self.check_version(entry.submission.version)
        self.running[self._engine.submit(entry.work.request, entry.work.config)] = entry

    def drop_unwanted(self) -> None:
        """Drop the sequences that nobody waits for any more."""
        for ticket, entry in list(self.running.items()):
            if not entry.wanted:
                self._leave(ticket, "cancelled")
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

    def renew(self) -> list[Entry]:
        """Go on with a new engine. Returns the sequences that ran in the old one."""
        self._metrics.engine_failures.labels(self.name).inc()
        ran, self._engine = list(self.running.values()), self._make_engine(self.lm)
        self.running.clear()
        return ran

    def count_end(self, outcome: str) -> None:
        """A sequence has ended."""
        self._metrics.sequences.labels(self.name, outcome).inc()

    def _finish(self, ticket: int, trace: Trace) -> tuple[Submission, Event]:
        entry = self._leave(ticket, "finished")
        revealed = sum(step >= 0 for step in trace.steps)
        self._metrics.tokens.labels(self.name).inc(revealed)
        self._metrics.prompt_tokens.labels(self.name).inc(
            entry.work.request.length - sum(entry.work.request.hidden)
        )
        frame = entry.watched.last(trace) if entry.watched is not None else None
        self._measure_first_frame(entry)
        return entry.submission, Event(entry.index, frame, trace, self.version)

    def _measure_first_frame(self, entry: Entry) -> None:
        """The time to the first frame of a sequence that is watched."""
        if entry.watched is not None and not entry.seen:
            entry.seen = True
            self._metrics.first_frame_seconds.observe(monotonic() - entry.submission.started)

    def _leave(self, ticket: int, outcome: str) -> Entry:
        self.count_end(outcome)
        return self.running.pop(ticket)
