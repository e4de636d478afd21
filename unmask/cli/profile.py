"""A few steps of a run under torch.profiler: a trace for Perfetto, and tables of what takes the time."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import profile, schedule
from transformers import TrainerCallback

from unmask.cli.dry_run import short_trainer
from unmask.cli.run import training_arguments
from unmask.config.run import RunConfig, inputs_of, refuse_existing
from unmask.training.step_timer import Phases

SHOWN = 15
"""Operators in the table; the trace has them all."""

TableRows = list[dict[str, str]]


def profile_run(verb: str, config: RunConfig, trace: Path, steps: int) -> dict[str, TableRows]:
    """Run a few steps of every stage, with the settings of a short run, and record all but the first.

    Args:
        trace: where the trace goes, as JSON that Perfetto and chrome://tracing open; gzipped if its name ends
            in .gz.
        steps: to record, after one warm-up (grpo: rollouts, each with all its updates).

    Returns:
        Tables by title: of the phases, and of the operators that take the most time.

    Raises:
        UnmaskError: the trace exists and may not be overwritten, or an error of the run itself.
    """
    refuse_existing(
        trace,
        "Choose another with --trace, or replace it with --overwrite",
        overwrite=config.overwrite,
        inputs=inputs_of(config),
    )
    args = training_arguments(verb, config)
    updates = args.updates_per_batch
    recorded = ((1 + steps) * len(args.parts()) - 1) * updates
    phases = Phases(args.device, synchronize=True, memory=True)
    recorder = profile(schedule=schedule(wait=0, warmup=updates, active=recorded, repeat=1))
    advance = Advance(recorder, phases, updates)
    short = short_trainer(verb, config, args, (1 + steps) * updates, phases=phases, callbacks=[advance])
    with short as trainer, recorder:
        trainer.train()
    if args.should_save:
        write_trace(recorder, trace)
    tables = {"phases": by_phase(phases, recorded), **by_operator(recorder, recorded)}
    return {title: lines for title, lines in tables.items() if lines}


class Advance(TrainerCallback):
    """Advances the profiler after every step, and resets the phases after the warm-up."""

    def __init__(self, recorder: profile, phases: Phases, warmup: int):
        self.recorder, self.phases, self.left = recorder, phases, warmup

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.phases.end_step()  # before the profiler takes time
        self.recorder.step()
        self.left -= 1
        if self.left == 0:
            self.phases.reset()


def write_trace(recorder: profile, path: Path) -> None:
    """Write the trace atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name  # the suffix decides whether it is gzipped
        recorder.export_chrome_trace(str(written))
        os.replace(written, path)


def by_phase(phases: Phases, steps: int) -> TableRows:
    """Time and peak memory of each phase, the longest first."""
    stats = phases.performance_stats()
    peaks = stats["peak_memory_gb"]
    return [
        {
            "phase": name,
            "ms a step": f"{seconds / steps * 1e3:,.1f}",
            "share": f"{stats['share'][name]:.1%}",
            "peak GB": f"{peaks[name]:.3g}" if name in peaks else "-",
        }
        for name, seconds in sorted(stats["seconds"].items(), key=lambda item: -item[1])
    ]


def by_operator(recorder: profile, steps: int) -> dict[str, TableRows]:
    """The operators that take the most time on the CPU, without the operators that they call, and the kernels
    on a GPU.

    Computed from the profiler's raw events: its `key_averages` takes minutes for the millions of events of a
    rollout.
    """
    profiler: Any = recorder.profiler
    spans, kernels = [], []
    for event in profiler.kineto_results.events():
        span = Span(event.start_thread_id(), event.start_ns(), -event.end_ns(), event.name())
        if event.activity_type() == "cpu_op" and not event.is_async():
            spans.append(span)
        elif event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            kernels.append(span)
    return {
        "operators on the CPU": top(*own_times(spans), steps),
        "kernels on the GPU": top(*own_times(kernels, nested=False), steps),
    }


class Span(NamedTuple):
    """An event, in nanoseconds. In sorted order threads are contiguous, and an event precedes those within
    it."""

    thread: int
    start: int
    minus_end: int
    name: str


def own_times(spans: list[Span], nested: bool = True) -> tuple[Counter[str], Counter[str]]:
    """Nanoseconds and calls by name. With `nested`, a span's time excludes spans within it, and calls by its
    own name do not count."""
    own: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    around: list[Span] = []
    for span in sorted(spans):
        while around and (around[-1].thread != span.thread or -around[-1].minus_end <= span.start):
            around.pop()
        length = -span.minus_end - span.start
        own[span.name] += length
        if nested and around:
            own[around[-1].name] -= length
        if not (nested and around and around[-1].name == span.name):
            calls[span.name] += 1
        around.append(span)
    return own, calls


def top(own: Counter[str], calls: Counter[str], steps: int) -> TableRows:
    """The names that take the most time."""
    return [
        {
            "name": name,
            "calls a step": f"{calls[name] / steps:,.1f}",
            "ms a step": f"{nanoseconds / steps / 1e6:,.2f}",
            "share": f"{nanoseconds / own.total():.1%}",
        }
        for name, nanoseconds in own.most_common(SHOWN)
    ]
