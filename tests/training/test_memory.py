"""The peak memory of the device that trains."""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.training.tiny_runs import make
from unmask.artifacts import MetricsLog
from unmask.training import memory
from unmask.training.memory import memory_metrics, peak_memory_bytes, take_allocated_peak, take_peak_memory
from unmask.training.step_timer import Phases

CARD = torch.device("cuda", 0)


class Allocator:
    """torch.cuda's figures for a card of 10 GB."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def hold(self, allocated: int, reserved: int) -> None:
        self.allocated, self.reserved = max(self.allocated, allocated), max(self.reserved, reserved)

    def reset(self, device: torch.device) -> None:
        self.allocated = self.reserved = 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """A simulated GPU."""
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: allocator.reserved)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10_000_000_000)
    )
    monkeypatch.setattr(memory, "earlier_peaks", {})
    monkeypatch.setattr(memory, "warned_devices", set())
    return allocator


def test_on_a_cpu_it_is_the_resident_peak():
    assert memory_metrics(torch.device("cpu")) == {
        "memory_gb": pytest.approx(peak_memory_bytes() / 1e9, rel=0.01)
    }


def test_on_a_gpu_it_is_what_its_allocator_reserved_and_phases_do_not_lower_it(card):
    card.hold(4_000_000_000, 5_000_000_000)
    before = {"memory_gb": 5.0, "memory/allocated_gb": 4.0, "memory/share": 0.5}
    assert memory_metrics(CARD) == before
    phases = Phases(CARD, memory=True)
    phases.begin_step()
    with phases("scoring"):
        card.hold(1_000_000_000, 2_000_000_000)
    phases.end_step()
    assert phases.take()["memory/scoring_gb"] == 1.0 and memory_metrics(CARD) == before
    card.hold(5_000_000_000, 6_000_000_000)
    assert take_allocated_peak(CARD) == 5_000_000_000 and take_allocated_peak(CARD) == 0
    assert memory_metrics(CARD) == {"memory_gb": 6.0, "memory/allocated_gb": 5.0, "memory/share": 0.6}


def test_a_card_that_is_nearly_full_is_told_of_once(card):
    card.hold(1_000_000_000, 9_000_000_000)
    assert memory_metrics(CARD)["memory/share"] == 0.9  # no warning, which would be an error
    card.hold(1_000_000_000, 9_100_000_000)
    with pytest.warns(RuntimeWarning, match="training takes 91% of the memory of cuda:0"):
        memory_metrics(CARD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory_metrics(CARD)


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo", "grpo"])
def test_log_and_screen_tell_the_same(verb, tmp_path, monkeypatch):
    told = iter(range(1, 100))
    figures: list[float] = []

    def metrics(device: torch.device) -> dict[str, float]:
        figures.append(next(told))
        return {"memory_gb": figures[-1], "memory/allocated_gb": figures[-1] / 2, "memory/share": 0.5}

    monkeypatch.setattr("unmask.training.trainer.memory_metrics", metrics)
    shown: dict[str, float] = {}
    progress = SimpleNamespace(update=lambda fraction, **metrics: shown.update(metrics))
    make(verb, tmp_path, max_steps=1, log_memory_usage=True, progress=progress).train()
    last = MetricsLog(tmp_path / "training_logs.json").read()[-1]
    assert (
        last["memory_gb"] == shown["memory_gb"] == figures[-1]
        and last["memory/allocated_gb"] == figures[-1] / 2
    )
    assert last["memory/share"] == 0.5


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_knows_the_unit_of_the_system(system, unit, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(memory, "largest_peak_taken", 0)
    monkeypatch.setattr(
        resource,
        "getrusage",
        lambda who: SimpleNamespace(ru_maxrss=5_000 if who == resource.RUSAGE_SELF else 0),
    )
    assert peak_memory_bytes() == 5_000 * unit


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's own account in /proc")
def test_peak_memory_agrees_with_the_kernel():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    high_water_mark = int(status["VmHWM"].split()[0]) * 1024
    # At least this program's peak; a little of the program that started it may be included.
    assert 0.8 * high_water_mark < peak_memory_bytes() < 100 * high_water_mark


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_peak_that_cannot_be_begun_anew_is_not_told(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    assert take_peak_memory() is not None
    monkeypatch.setattr(Path, "write_text", refuse)
    assert take_peak_memory() is None
