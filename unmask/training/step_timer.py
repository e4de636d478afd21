"""Time, memory and tokens by phase of training steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from unmask.training.memory import take_allocated_peak, take_peak_memory

REST = "other"  # the part of a step outside of all phases, such as the optimizer's update


@dataclass
class Tally:
    """Totals by phase over some steps."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peak_gb: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: int = 0

    def tokens_per_second(self) -> dict[str, float]:
        """Generated tokens per second of the generation phase, and trained tokens per second of whole
        steps."""
        spent = {"generated": self.seconds.get("generation", 0.0), "trained": sum(self.seconds.values())}
        return {name: count / spent[name] for name, count in self.tokens.items() if spent[name]}


class Phases:
    """Time, peak memory and tokens by phase of training steps.

        phases.begin_step()
        with phases("generation"):
            ...
            phases.count(generated=1024)
        phases.end_step()

    Reinforcement learning has the phases generation, reward, scoring, forward, backward and sync; `other` is
    the rest of a step. Of nested phases only the inner one counts, so that the times of all phases add up to
    that of the steps. Outside of a step (in an evaluation) nothing counts. Every phase is a range of that
    name in a trace of torch.profiler. Not thread-safe.

    Args:
        device: of the model.
        synchronize: wait for the GPU where a phase begins and ends. Else its time is that of the Python code,
            which may run ahead.
        memory: measure the peak memory of each phase: allocated memory on a GPU, the resident memory of the
            process on a CPU (Linux; nothing elsewhere). Every phase resets both counters, for other readers
            too (`take_peak_memory`, `take_allocated_peak`).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        synchronize: bool = False,
        memory: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.device, self.synchronize, self.memory, self.clock = device, synchronize, memory, clock
        self._open: list[str] = []
        self._since = 0.0
        self._taken, self._total = Tally(), Tally()

    def begin_step(self) -> None:
        """Begin an optimizer step. If the one before failed, this ends it."""
        self._account()
        self._open = [REST]

    def end_step(self) -> None:
        """End the optimizer step, if one was begun."""
        self._account()
        if self._open:
            for tally in (self._taken, self._total):
                tally.steps += 1
        self._open = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Inside, time and memory count for this phase, except in nested phases."""
        counts = bool(self._open)
        with record_function(name):
            if counts:
                self._account()
                self._open.append(name)
            try:
                yield
            finally:
                if counts:
                    self._account()
                    self._open.pop()

    def count(self, **tokens: int) -> None:
        """Add to the completion tokens of the step: `generated=`, `trained=`."""
        for tally in (self._taken, self._total) if self._open else ():
            for name, count in tokens.items():
                tally.tokens[name] += count

    def take(self) -> dict[str, float]:
        """Metrics since the last call: `time/NAME` in seconds per step, `memory/NAME_gb`, and tokens of this
        process per second: `throughput/generated` (of the time in generation), `throughput/trained` (of whole
        steps)."""
        self._account()
        taken, self._taken = self._taken, Tally()
        return {
            **{f"time/{name}": seconds / max(taken.steps, 1) for name, seconds in taken.seconds.items()},
            **{f"memory/{name}_gb": peak for name, peak in taken.peak_gb.items()},
            **{f"throughput/{name}": rate for name, rate in taken.tokens_per_second().items()},
        }

    def performance_stats(self) -> dict[str, Any]:
        """Totals since the start of this process: steps, total_seconds; by phase seconds, share, and
        peak_memory_gb if measured; tokens and tokens_per_second as in `take`."""
        self._account()
        total = sum(self._total.seconds.values())
        return {
            "steps": self._total.steps,
            "total_seconds": total,
            "seconds": dict(self._total.seconds),
            "share": {name: seconds / total for name, seconds in self._total.seconds.items() if total},
            "peak_memory_gb": dict(self._total.peak_gb),
            "tokens": dict(self._total.tokens),
            "tokens_per_second": self._total.tokens_per_second(),
        }

    def reset(self) -> None:
        """Reset all totals, for example after a warm-up."""
        self._account()
        self._taken, self._total = Tally(), Tally()

    def _account(self) -> None:
        """Add the time and memory since the last call to the phase that was running."""
        if self.synchronize and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now, peak = self.clock(), None
        if self.memory:
            peak = take_allocated_peak(self.device) if self.device.type == "cuda" else take_peak_memory()
        for tally in (self._taken, self._total) if self._open else ():
            name = self._open[-1]
            tally.seconds[name] += now - self._since
            if peak is not None:
                tally.peak_gb[name] = max(tally.peak_gb[name], peak / 1e9)
        self._since = now
