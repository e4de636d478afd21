"""Workers that end, and what the fleet does about it, with processes that end when a test says so."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from unmask.serving.served_models import ServedModels
from unmask.serving.workers import fleet as fleet_module
from unmask.serving.workers.fleet import DELAYS, Fleet
from unmask.serving.workers.process import WorkerStartError, start_worker

SERVED = ServedModels("no/model", {}, "tiny")


class Process:
    """Listens nowhere, so that nobody who asks it gets an answer."""

    def __init__(self, folder: Path):
        self.socket, self.is_ended = str(folder / "none"), asyncio.Event()

    async def ended(self) -> str:
        await self.is_ended.wait()
        return "was ended by SIGKILL"

    def kill(self) -> None:
        self.is_ended.set()

    async def end(self) -> None:
        self.is_ended.set()


class Starts:
    """Stands for `start_worker`: the processes that it has started; `failing`: from which one on it
    cannot."""

    def __init__(self, folder: Path):
        self.folder, self.processes, self.failing = folder, list[Process](), 1000

    async def __call__(self, *_: Any) -> Process:
        if len(self.processes) >= self.failing:
            raise WorkerStartError("no model", where="no/model")
        self.processes.append(Process(self.folder))
        return self.processes[-1]


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts(tmp_path)
    monkeypatch.setattr(fleet_module, "start_worker", starts)
    monkeypatch.setattr(fleet_module, "DELAYS", (0.0,) * len(DELAYS))
    return starts


def run(count: int, test: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run a test of a fleet."""

    async def started() -> None:
        fleet = Fleet(SERVED, ["cpu"] * count)
        try:
            await fleet.start()
            async with asyncio.timeout(30):
                await test(fleet)
        finally:
            await fleet.stop(0)

    asyncio.run(started())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_one_that_ends_is_started_again(starts: Starts, caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet) -> None:
        first, second = fleet.pool.workers
        assert fleet.pool.live == [first, second]
        starts.processes[1].kill()
        await until(lambda: len(starts.processes) == 3 and second.live)
        assert (first.starts, second.starts, fleet.error) == (1, 2, None)
        assert fleet.metrics.registry.get_sample_value("unmask_worker_deaths_total") == 1

    run(2, test)
    assert "worker 1 was ended by SIGKILL, and is started again" in caplog.text
    assert all(process.is_ended.is_set() for process in starts.processes)


def test_after_several_quick_deaths_the_server_ends_with_one_error(starts: Starts) -> None:
    async def test(fleet: Fleet) -> None:
        ends: list[bool] = []
        fleet.on_end = lambda: ends.append(True)
        for number in range(len(DELAYS) + 1):
            await until(lambda number=number: len(starts.processes) == number + 1 and fleet.pool.live)
            starts.processes[-1].kill()
        await until(lambda: ends)
        assert ends == [True]
        assert str(fleet.error) == (
            "--workers: worker 0 has ended 6 times, each time soon after its start. The log above has "
            "the causes."
        )

    run(1, test)


def test_deaths_now_and_then_end_no_server(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "QUICK", 0.0)

    async def test(fleet: Fleet) -> None:
        for number in range(3 * len(DELAYS)):
            await until(lambda number=number: len(starts.processes) == number + 1 and fleet.pool.live)
            starts.processes[-1].kill()
        await until(lambda: fleet.pool.live)
        assert fleet.error is None

    run(1, test)


def test_one_that_cannot_start_again_ends_the_server_with_the_cause(starts: Starts) -> None:
    async def test(fleet: Fleet) -> None:
        starts.failing = 1
        starts.processes[0].kill()
        await until(lambda: fleet.error)
        assert str(fleet.error) == "no/model: no model"

    run(1, test)


def test_a_process_that_the_system_does_not_start_is_an_error_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with raises(WorkerStartError, where="--workers"):
        asyncio.run(start_worker(SERVED, "cpu", {}))


def test_if_one_cannot_start_the_others_end_and_there_is_one_error(starts: Starts) -> None:
    starts.failing = 1

    async def test(fleet: Fleet) -> None:
        raise AssertionError("it has started")

    with raises(WorkerStartError, where="no/model"):
        run(2, test)
    assert [process.is_ended.is_set() for process in starts.processes] == [True]


def test_one_that_does_not_answer_is_ended_and_started_again(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_EVERY", 0.01)

    async def test(fleet: Fleet) -> None:
        await until(lambda: len(starts.processes) == 2)

    run(1, test)
    assert "worker 0 does not answer" in caplog.text


def test_at_the_end_nothing_is_started_again(starts: Starts) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.pool.workers[0].in_flight = 1
        ending = asyncio.create_task(fleet.stop(grace=30))
        await until(lambda: fleet.pool.stopping)
        starts.processes[0].kill()
        await asyncio.sleep(0.05)
        assert not ending.done()
        fleet.pool.workers[0].in_flight = 0
        await ending
        assert len(starts.processes) == 1

    run(1, test)
