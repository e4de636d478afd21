"""New weights for all workers: all or none of them hold them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from tests.serving.servers import ADMIN, copied, http_post
from tests.serving.workers.local import LocalPool, serving_locally
from tests.tiny import float64_lm
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint
from unmask.serving.app import AppSettings
from unmask.serving.scheduler import ModelEngine
from unmask.serving.weights import Folder
from unmask.serving.workers import worker as worker_module
from unmask.serving.workers.pool import Pool, Worker
from unmask.serving.workers.weights import SharedWeights

PATTERN: dict[str, Any] = {"attention": "block_causal", "block_size": 3}


@pytest.fixture(autouse=True)
def one_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a model sets torch's default dtype for a moment, for all threads. Workers that are processes
    have one each."""
    lock, read = threading.Lock(), worker_module.read_weights

    def alone(model: ModelEngine, folder: Folder) -> Any:
        with lock:
            return read(model, folder)

    monkeypatch.setattr(worker_module, "read_weights", alone)


@pytest.fixture
def lms(tmp_path: Path) -> list[DiffusionLM]:
    """The models of two workers."""
    return [copied(float64_lm(**PATTERN), tmp_path / name) for name in ("first", "second")]


@pytest.fixture
def new(tmp_path: Path) -> DiffusionLM:
    """Other weights for them, which are in `weights/new`."""
    trained = float64_lm(**PATTERN).frozen_copy()
    for weight in trained.model.parameters():
        weight += torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view_as(weight)
    trained.save(tmp_path / "weights" / "new")
    return trained


@pytest.fixture
def local(lms: list[DiffusionLM], tmp_path: Path) -> Iterator[LocalPool]:
    """A server that takes weights from the folder `weights`."""
    (tmp_path / "weights").mkdir(exist_ok=True)
    with serving_locally(lms, AppSettings(admin_key="admin", weights_from=(tmp_path / "weights",))) as local:
        yield local


def send(local: LocalPool, path: str = "new", version: str = "2") -> httpx.Response:
    return http_post(
        f"{local.url}/v1/weights", json={"model": "tiny", "path": path, "version": version}, headers=ADMIN
    )


def complete(local: LocalPool, **diffusion: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "diffusion": diffusion}
    return http_post(f"{local.url}/v1/completions", json=body)


def versions(local: LocalPool) -> list[str | None]:
    return [worker.scheduler.models["tiny"].version for worker in local.workers]


def test_all_workers_take_them(local: LocalPool, lms: list[DiffusionLM], new: DiffusionLM) -> None:
    assert send(local).json() == {"version": "2", "workers": 2}
    assert [fingerprint(lm.model) for lm in lms] == [fingerprint(new.model)] * 2
    answers = [complete(local, version="2") for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["system_fingerprint"] for answer in answers} == {"2"}
    assert complete(local, version="1").status_code == 409


def test_the_admin_key_and_the_folders_are_checked_before_a_worker_is_asked(
    local: LocalPool, new: DiffusionLM
) -> None:
    assert (
        http_post(
            f"{local.url}/v1/weights", json={"model": "tiny", "path": "new", "version": "2"}
        ).status_code
        == 401
    )
    refused = send(local, "../first")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path")
    assert versions(local) == [None, None]


def test_if_one_refuses_none_takes_them(lms: list[DiffusionLM], new: DiffusionLM, tmp_path: Path) -> None:
    other = copied(float64_lm(attention="block_causal", block_size=4), tmp_path / "other")
    before = [fingerprint(lm.model) for lm in (lms[0], other)]
    with serving_locally(
        [lms[0], other], AppSettings(admin_key="admin", weights_from=(tmp_path / "weights",))
    ) as local:
        refused = send(local)
        assert (
            refused.status_code == 400 and "block_size is 3 and not 4" in refused.json()["error"]["message"]
        )
        assert refused.json()["error"]["param"] == "path" and str(tmp_path) not in refused.text
        assert [fingerprint(lm.model) for lm in (lms[0], other)] == before and versions(local) == [None, None]
        held = asyncio.run(local.pool.workers[0].ask("POST", "/weights", params={"model": "tiny"}))
        assert held is not None and held.status_code == 400  # it has forgotten what it had read
        assert local.pool.live == list(local.pool.workers) and complete(local).status_code == 200


def test_if_one_is_lost_while_it_reads_none_takes_them(
    local: LocalPool, new: DiffusionLM, lms: list[DiffusionLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = worker_module.read_weights

    def lost(model: ModelEngine, folder: Folder) -> Any:
        if model.lm is lms[1]:
            local.workers[1].lose()
        return read(model, folder)

    monkeypatch.setattr(worker_module, "read_weights", lost)
    answer = send(local)
    assert answer.status_code == 502
    assert (
        answer.json()["error"]["message"]
        == "worker 1 ended while it read them, and nothing has changed. Send it again."
    )
    assert versions(local) == [None, None]


def test_one_that_fails_to_take_them_ends_and_has_them_before_it_is_live_again(
    local: LocalPool, new: DiffusionLM, lms: list[DiffusionLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    put, second = worker_module.put_weights, local.pool.workers[1]
    second.end = lambda: ended.append(second)

    def failing(model: ModelEngine, weights: Any) -> None:
        if model.lm is lms[1]:
            raise RuntimeError("the device is gone")
        put(model, weights)

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "put_weights", failing)
        assert send(local).json() == {"version": "2", "workers": 1}
    assert ended == [second] and not second.live and versions(local) == ["2", None]
    assert complete(local, version="2").status_code == 200  # of the other one
    asyncio.run(local.weights.catch_up(second))  # as when its process is started again
    assert second.live and versions(local) == ["2", "2"]
    assert fingerprint(lms[1].model) == fingerprint(new.model)


def test_one_that_ends_as_soon_as_it_has_them_gets_no_requests(
    local: LocalPool, new: DiffusionLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = local.pool.workers[1]
    ask = second.ask

    async def last(method: str, path: str, **content: Any) -> httpx.Response | None:
        answer = await ask(method, path, **content)
        if method == "POST":
            await second.leave()  # as when its process has ended
        return answer

    monkeypatch.setattr(second, "ask", last)
    send(local)
    assert local.pool.live == [local.pool.workers[0]]
    assert [complete(local, version="2").status_code for _ in range(4)] == [200] * 4


class Asked:
    """Stands for the processes of a worker: what they were asked, and which of it has to wait."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch):
        self.worker, self.calls, self.waits = worker, list[str](), dict[str, asyncio.Event]()
        self.ended = list[int]()
        monkeypatch.setattr(worker, "ask", self.ask)
        worker.end = lambda: self.ended.append(worker.starts)
        self.start()
        worker.live = True

    def start(self) -> None:
        self.worker.join("a-socket")

    async def ask(self, method: str, path: str, **content: Any) -> httpx.Response | None:
        process = self.worker.starts
        call = f"{method} {content['json' if method == 'PUT' else 'params']['model']}"
        self.calls.append(f"{process} {call}")
        if call in self.waits and process == 1:
            await self.waits[call].wait()
        return httpx.Response(204) if process == self.worker.starts else None


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[SharedWeights, Asked, Asked]:
    """Two workers that stand for processes."""
    pool = Pool(2)
    return (
        SharedWeights(pool.workers),
        Asked(pool.workers[0], monkeypatch),
        Asked(pool.workers[1], monkeypatch),
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_other_models_and_workers_that_start_do_not_wait_until_weights_are_taken(
    two: tuple[SharedWeights, Asked, Asked], new: DiffusionLM, tmp_path: Path
) -> None:
    (weights, first, second), folder = two, Folder.find("new", (tmp_path / "weights",))

    async def run() -> None:
        first.waits["POST tiny"] = asyncio.Event()  # what it has begun takes long
        waiting = asyncio.create_task(weights.replace("tiny", folder, "2"))
        await until(lambda: "1 POST tiny" in first.calls)
        assert await weights.replace("other", folder, "3") == {"version": "3", "workers": 2}
        again = asyncio.create_task(weights.replace("tiny", folder, "4"))
        await second.worker.leave()
        second.start()
        await weights.catch_up(second.worker)
        assert second.worker.live and second.calls[-4:] == [
            "2 PUT tiny",
            "2 POST tiny",
            "2 PUT other",
            "2 POST other",
        ]
        assert not waiting.done() and not again.done()
        first.waits.pop("POST tiny").set()
        assert await waiting == {"version": "2", "workers": 2} and await again == {
            "version": "4",
            "workers": 2,
        }
        assert [call for call in first.calls if "tiny" in call] == ["1 PUT tiny", "1 POST tiny"] * 2

    asyncio.run(run())


def test_one_that_starts_while_weights_are_read_is_asked_by_nobody_before_it_has_caught_up(
    two: tuple[SharedWeights, Asked, Asked], new: DiffusionLM, tmp_path: Path
) -> None:
    """It would be live with the latest weights of one model, and the first ones of the others."""
    (weights, first, second), folder = two, Folder.find("new", (tmp_path / "weights",))

    async def run() -> None:
        first.waits["PUT tiny"] = asyncio.Event()
        await second.worker.leave()
        replacing = [asyncio.create_task(weights.replace("tiny", folder, "2"))]
        await until(lambda: first.calls)
        replacing.append(asyncio.create_task(weights.replace("other", folder, "3")))
        await asyncio.sleep(0)  # it waits for the first one
        second.start()
        catching_up = asyncio.create_task(weights.catch_up(second.worker))
        await asyncio.sleep(0)
        first.waits["PUT tiny"].set()
        assert await asyncio.gather(*replacing) == [
            {"version": "2", "workers": 1},
            {"version": "3", "workers": 1},
        ]
        await catching_up
        assert second.worker.live and second.calls == [
            "2 PUT tiny",
            "2 POST tiny",
            "2 PUT other",
            "2 POST other",
        ]

    asyncio.run(run())


def test_a_process_that_took_the_place_of_one_that_was_lost_is_not_ended_for_it(
    two: tuple[SharedWeights, Asked, Asked], new: DiffusionLM, tmp_path: Path
) -> None:
    (weights, first, second), folder = two, Folder.find("new", (tmp_path / "weights",))

    async def run() -> None:
        second.waits["POST tiny"] = asyncio.Event()
        replacing = asyncio.create_task(weights.replace("tiny", folder, "2"))
        await until(lambda: "1 POST tiny" in second.calls)
        await second.worker.leave()
        second.start()
        await weights.catch_up(second.worker)
        second.waits["POST tiny"].set()
        assert await replacing == {"version": "2", "workers": 1}
        assert second.worker.live and not second.ended and not first.ended

    asyncio.run(run())


def test_one_that_cannot_have_them_any_more_waits_for_the_next(
    local: LocalPool, new: DiffusionLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert send(local).status_code == 200
    second = local.pool.workers[1]
    second.live = False
    config = tmp_path / "weights" / "new" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"note": "others"}))
    asyncio.run(local.weights.catch_up(second))
    assert (
        not second.live
        and "worker 1 cannot have the weights '2', and waits for the next: their files have changed"
        in caplog.text
    )
    assert send(local, version="3").json() == {"version": "3", "workers": 2}
    assert second.live and versions(local) == ["3", "3"]
