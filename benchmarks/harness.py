"""Helpers of the benchmarks: alternating timing, peak memory, and a heading with machine and versions."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import unmask


def heading() -> str:
    """Machine and versions."""
    threads = torch.get_num_threads()
    versions = f"unmask {unmask.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return (
        f"{platform.machine()} {platform.system()}, {threads} thread{'s' * (threads > 1)}; Python {platform.python_version()}, {versions}"
    )


def timed(contenders: Mapping[str, Callable[[], Any]], rounds: int, warm: bool = False) -> dict[str, float]:
    """Median seconds of each contender, called in turns so that a busy moment of the machine affects all. The first round is not counted,
    except with `warm` (the contenders have run before)."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(int(warm), rounds + 1):
        for name, call in contenders.items():
            started = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak bytes of tensors during a call, beyond those before it (CPU)."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events: Any = record.profiler
    changes = (event.nbytes() for event in events.kineto_results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(changes), default=0)


def report(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print a table of figures, each beside its bar."""
    print(f"\n{title}\n{heading()}\n")
    width = max(len(name) for name, _, _ in rows)
    for name, figure, bar in rows:
        print(f"  {name:<{width}}  {figure:>24}  {bar}")
