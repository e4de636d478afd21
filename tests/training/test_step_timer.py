"""Each second of a step belongs to one phase, and so does each peak of memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.tiny_runs import make
from unmask.errors import TrainingError
from unmask.training.step_timer import REST, Phases

NAMES = ("generation", "reward", "scoring", "backward", "sync")
TREES = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9), inner), max_size=3),
)
"""Phases within phases; the number is the seconds before each."""
MEGABYTES = 300
CPU = torch.device("cpu")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def walk(phases: Phases, clock: Clock, tree: list[Any], inside: str, spent: dict[str, float]) -> None:
    for name, seconds, inner in tree:
        clock.now += seconds
        spent[inside] += seconds
        with phases(name):
            walk(phases, clock, inner, name, spent)
            clock.now += 1
            spent[name] += 1


@given(st.lists(TREES, min_size=1, max_size=3))
def test_time_goes_to_the_innermost_phase_and_none_is_lost(steps):
    clock = Clock()
    phases = Phases(CPU, clock=clock)
    spent: dict[str, float] = defaultdict(float)
    for tree in steps:
        clock.now += 50  # between steps: belongs to no phase
        with phases("scoring"):
            clock.now += 3
        phases.begin_step()
        walk(phases, clock, tree, REST, spent)
        clock.now += 2
        spent[REST] += 2
        phases.end_step()
    stats = phases.performance_stats()
    assert (
        stats["seconds"] == dict(spent)
        and stats["total_seconds"] == sum(spent.values())
        and stats["steps"] == len(steps)
    )
    assert stats["share"] == pytest.approx(
        {name: seconds / sum(spent.values()) for name, seconds in spent.items()}
    )
    assert phases.take() == pytest.approx(
        {f"time/{name}": seconds / len(steps) for name, seconds in spent.items()}
    )
    assert phases.take() == {} and phases.performance_stats() == stats


def test_tokens_per_second_are_of_generation_and_of_whole_steps():
    clock = Clock()
    phases = Phases(CPU, clock=clock)
    for _ in range(2):
        phases.begin_step()
        with phases("generation"):
            clock.now += 4
            phases.count(generated=80)
        with phases("backward"):
            clock.now += 12
        phases.count(trained=60)
        phases.end_step()
        phases.count(trained=1000)  # of an evaluation, say
        taken = phases.take()
        assert taken["throughput/generated"] == 80 / 4 and taken["throughput/trained"] == 60 / 16
    assert phases.performance_stats()["tokens_per_second"] == {"generated": 160 / 8, "trained": 120 / 32}
    assert phases.performance_stats()["tokens"] == {"generated": 160, "trained": 120}


def test_a_step_that_failed_leaves_nothing_open():
    clock = Clock()
    phases = Phases(CPU, clock=clock)
    phases.begin_step()
    with contextlib.suppress(TrainingError), phases("generation"), phases("reward"):
        clock.now += 1
        raise TrainingError("no")
    phases.begin_step()
    clock.now += 5
    phases.end_step()
    phases.end_step()  # a trainer whose batches begin no step
    stats = phases.performance_stats()
    assert stats["seconds"] == {REST: 5.0, "reward": 1.0, "generation": 0.0} and stats["steps"] == 1


def test_what_is_taken_amid_a_phase_is_split_there():
    clock = Clock()
    phases = Phases(CPU, clock=clock)
    phases.begin_step()
    with phases("generation"):
        clock.now += 3
        assert phases.take()["time/generation"] == 3
        clock.now += 4
    phases.end_step()
    assert phases.take()["time/generation"] == 4 and phases.performance_stats()["seconds"]["generation"] == 7


HELD = """
import json
import torch
from unmask.training.memory import peak_memory_bytes
from unmask.training.step_timer import Phases

before = peak_memory_bytes()
phases = Phases(torch.device("cpu"), memory=True)
phases.begin_step()
with phases("scoring"):
    with phases("reward"):
        pass
    torch.ones(300, 250_000)
    with phases("backward"):
        torch.ones(100, 250_000)
phases.end_step()
first, peak = phases.take(), phases.performance_stats()["peak_memory_gb"]["scoring"]
phases.begin_step()
with phases("scoring"):
    pass
phases.end_step()
later = phases.performance_stats()["peak_memory_gb"]["scoring"]
print(json.dumps([first, phases.take()["memory/scoring_gb"], peak, later, before, peak_memory_bytes()]))
"""
"""300 MB and then 100 MB are held in two phases."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak of a part of a process")
def test_memory_is_that_of_the_phase_that_held_it():
    """Measured in a new process: an older one may reuse pages that it never returned."""
    ran = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    first, again, peak, later, before, whole = json.loads(ran.stdout.splitlines()[-1])
    small, middle, large = (first[f"memory/{name}_gb"] for name in ("reward", "backward", "scoring"))
    assert middle - small == pytest.approx(0.1, abs=0.03) and large - small == pytest.approx(0.3, abs=0.03)
    assert again < large - 0.2 and peak == later == large
    assert whole >= max(before, large * 1e9)  # the peak of the whole process continues


def test_where_the_system_does_not_tell_there_is_no_memory(monkeypatch):
    monkeypatch.setattr("unmask.training.step_timer.take_peak_memory", lambda: None)
    phases = Phases(CPU, memory=True)
    phases.begin_step()
    phases.end_step()
    assert phases.take().keys() == {f"time/{REST}"} and phases.performance_stats()["peak_memory_gb"] == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_that_of_its_allocator_and_time_waits_for_it():
    phases = Phases(torch.device("cuda"), memory=True, synchronize=True)
    base = torch.cuda.memory_allocated() / 1e9
    phases.begin_step()
    with phases("scoring"):
        torch.ones(MEGABYTES, 250_000, device="cuda")
    with phases("backward"):
        torch.cuda._sleep(1_000_000_000)
    phases.end_step()
    taken = phases.take()
    assert taken["memory/scoring_gb"] - base == pytest.approx(MEGABYTES / 1e3, abs=0.01)
    assert taken["memory/backward_gb"] - base == pytest.approx(0, abs=0.01)
    assert taken["time/backward"] > 0.1


def test_phases_are_ranges_of_a_trace():
    phases = Phases(CPU)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record,
        phases("generation"),
    ):
        torch.ones(1)
    assert "generation" in {event.key for event in record.key_averages()}


def test_a_trainer_tells_its_phases(tmp_path):
    trainer = make(
        "sft",
        tmp_path,
        max_steps=3,
        eval_dataset=[{"prompt": "ab", "completion": "c"}],
        eval_strategy="steps",
        eval_steps=1,
    )
    started = time.perf_counter()
    trainer.train()
    stats = trainer.get_performance_stats()
    assert (
        stats["steps"] == 3
        and stats["seconds"].keys() == {"forward", "backward", REST}
        and stats["peak_memory_gb"] == {}
    )
    assert 0 < stats["total_seconds"] < time.perf_counter() - started and all(
        seconds > 0 for seconds in stats["seconds"].values()
    )


def test_a_run_resumed_at_its_end_begins_no_step(tmp_path):
    make("sft", tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    trainer = make("sft", tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=True)
    stats = trainer.get_performance_stats()
    assert stats["steps"] == 0 and stats["total_seconds"] == 0
