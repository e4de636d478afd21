"""What may go wrong while weights are replaced, and what may not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.errors import raises
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, DataError
from unmask.generation.requests import make_requests
from unmask.serving import weights
from unmask.serving.app import AppSettings, make_app
from unmask.serving.scheduler import Scheduler
from unmask.serving.submission import OverloadedError, Work

CONFIG = SamplerConfig(max_new_tokens=8, stop_at_eos=False)


@pytest.mark.parametrize("kind", [ConfigError, DataError, RuntimeError, OSError])
def test_no_error_of_loading_names_the_servers_folders(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise kind(f"{tmp_path / 'new'} is broken")

    monkeypatch.setattr(weights, "load", fail)
    (tmp_path / "new").mkdir()

    async def run() -> httpx.Response:
        scheduler = Scheduler({"tiny": float64_lm()})
        scheduler.start()
        app = make_app(scheduler, AppSettings(admin_key="admin", weights_from=(tmp_path,)))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            headers = {"Authorization": "Bearer admin"}
            answer = await client.post(
                "/v1/weights", json={"model": "tiny", "path": "new", "version": "1"}, headers=headers
            )
        await scheduler.stop(0)
        return answer

    answer = asyncio.run(run())
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"] == "path"
        and str(tmp_path) not in answer.text
    )


def test_weights_that_nobody_waits_for_hold_up_nobody(stalled: threading.Semaphore) -> None:
    async def run() -> None:
        scheduler = Scheduler({"tiny": float64_lm()}, batch_size=2)
        scheduler.start()
        work = [
            Work(request, CONFIG, True)
            for request in make_requests(scheduler.models["tiny"].lm, ["abc", "f"], CONFIG)
        ]
        first = scheduler.submit("tiny", work[:1], owner="a")
        stalled.release()
        await anext(first)
        loading = asyncio.create_task(scheduler.replace_weights("tiny", lambda: None, "new"))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        second = scheduler.submit("tiny", work[1:], owner="b")
        stalled.release(3)
        await asyncio.wait_for(anext(second), 30)  # beside the first
        assert scheduler.models["tiny"].version is None
        stalled.release(1000)
        await scheduler.stop(0)

    asyncio.run(run())


def test_weights_have_a_place_though_as_many_functions_wait_as_may(stalled: threading.Semaphore) -> None:
    async def run() -> None:
        scheduler = Scheduler({"tiny": float64_lm()}, queue_size=1)
        scheduler.start()
        [request] = make_requests(scheduler.models["tiny"].lm, ["abc"], CONFIG)
        running = scheduler.submit("tiny", [Work(request, CONFIG)], owner="a")
        while not scheduler.metrics.registry.get_sample_value("unmask_running_sequences"):
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(scheduler.between_steps(lambda: "found"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await scheduler.between_steps(lambda: None)
        loading = asyncio.create_task(scheduler.replace_weights("tiny", lambda: None, "new"))
        await asyncio.sleep(0)
        stalled.release(1000)
        assert await waiting == "found"
        await loading
        assert scheduler.models["tiny"].version == "new" and [event.version async for event in running] == [
            None
        ]
        await scheduler.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize(
    "origin",
    ["*", "https://app.example/", "app.example", "https://App.example", "null", "https://app.example/x"],
)
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(origin: str) -> None:
    with raises(ConfigError, where="--allow-origin"):
        AppSettings(allow_origins=(origin,))


@pytest.mark.parametrize("origin", ["https://app.example", "http://localhost:5173", "http://[::1]:80"])
def test_origins_as_browsers_send_them_are_allowed(origin: str) -> None:
    assert AppSettings(allow_origins=(origin,)).allow_origins == (origin,)
