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
    versions = (
        f"unmask {unmask.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    return (
        f"{platform.machine()} {platform.system()}, {threads} thread{'s' * (threads > 1)}; Python "
        f"{platform.python_version()}, {versions}"
    )


def turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warm: bool = False
) -> dict[str, list[float]]:
    """Seconds of each contender in each round, called in turns so that a busy moment of the machine affects
    all. The first round is not counted, except with `warm` (the contenders have run before)."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(int(warm), rounds + 1):
        for name, call in contenders.items():
            started = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def timed(contenders: Mapping[str, Callable[[], Any]], rounds: int, warm: bool = False) -> dict[str, float]:
    """Median seconds of each contender, called in `turns`."""
    return {name: statistics.median(values) for name, values in turns(contenders, rounds, warm).items()}


def ratio(seconds: Mapping[str, list[float]], one: str, other: str) -> float:
    """The median over the rounds of how many times as long one contender took as the other."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


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
