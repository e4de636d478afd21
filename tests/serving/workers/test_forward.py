"""Requests through a server to its workers: answers, streams and refusals are those of a single server, and
what is lost is said."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

import unmask
from tests.helpers import partly_slow
from tests.serving.openai.asking import chunks_of
from tests.serving.servers import connect, http_get, http_post, read_all, served
from tests.serving.workers.local import LocalPool, serving_locally
from tests.tiny import cached_chat_lm, chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.serving.app import AppSettings
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import Scheduler
from unmask.serving.workers.forward import OWNER, whole_events
from unmask.serving.workers.pool import client_of

PATTERN = ("block_causal", 4)
CONFIG = SamplerConfig(max_new_tokens=12, temperature=1.0, seed=3)
FIELDS = {"model": "tiny", "max_tokens": 12, "temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalPool]:
    """Two workers, which tests leave as they were."""
    with serving_locally([chat_lm(*PATTERN), chat_lm(*PATTERN)], batch_size=2) as local:
        yield local


def complete(
    url: str, prompt: Any = "abc", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return http_post(f"{url}/v1/completions", json={**FIELDS, "prompt": prompt, **fields}, headers=headers)


def head_of(method: str, path: str, body: bytes) -> bytes:
    """The head of a request as it is sent."""
    fields = [
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", ""]).encode()


def until(condition: Any) -> None:
    while not condition():
        time.sleep(0.001)


def test_many_clients_get_what_each_would_get_alone_from_all_workers(pair: LocalPool) -> None:
    prompts = [f"{letter} cat" for letter in "abcdefgh"] * 2
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: complete(pair.url, prompt), prompts))
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [
        unmask.generate(cached_chat_lm(*PATTERN), [prompt], CONFIG).texts[0] for prompt in prompts
    ]
    assert all(worker.value("unmask_forward_passes_total", model="tiny") > 0 for worker in pair.workers)
    assert pair.pool.in_flight == 0


@pytest.mark.parametrize("kind", ["text", "frames"])
def test_streams_are_those_of_a_single_server(kind: str, pair: LocalPool) -> None:
    def stream(url: str) -> list[Any]:
        chunks = chunks_of(
            complete(url, stream=True, diffusion={"stream": kind}, stream_options={"include_usage": True})
        )
        return [
            {name: value for name, value in chunk.items() if name not in ("id", "created")}
            for chunk in chunks
        ]

    with served(chat_lm(*PATTERN)) as alone:
        assert stream(pair.url) == stream(alone)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a", "best_of": 3}),
        ("/v1/completions", {"model": "other", "prompt": "a"}),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "diffusion": {"version": "2"}}),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}),
        ("/v1/chat/completions", b"{"),
    ],
)
def test_refusals_are_those_of_a_single_server(path: str, body: Any, pair: LocalPool) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with served(chat_lm(*PATTERN)) as alone:
        mine, other = (
            http_post(f"{url}{path}", content=content, headers=headers) for url in (pair.url, alone)
        )
    assert mine.status_code >= 400 and (mine.status_code, mine.json()) == (other.status_code, other.json())
    assert sorted(mine.headers) == sorted(other.headers)


def test_what_is_read_is_that_of_a_single_server(pair: LocalPool) -> None:
    with served(chat_lm(*PATTERN)) as alone:
        for path in ("/v1/models", "/v1/models/tiny", "/openapi.json"):
            mine, other = (
                json.loads(http_get(f"{url}{path}", timeout=120).text, object_hook=without_time)
                for url in (pair.url, alone)
            )
            assert mine == other


def without_time(value: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if name != "created"}


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/weights",
        "/v1/../weights",
        "/v1/../metrics",
        "/v1/%2e%2e/weights",
        "//weights",
        "/health",
    ],
)
def test_no_client_gets_where_the_server_asks_its_workers(path: str, pair: LocalPool) -> None:
    body = b'{"model": "tiny", "path": "/", "given": "/", "roots": ["/"], "version": "1"}'
    with connect(pair.url) as client:
        client.sendall(head_of("PUT", path, body) + body)
        assert read_all(client).split()[1] in (b"404", b"405")


def test_a_request_that_has_an_owner_is_a_clients_on_any_path(pair: LocalPool) -> None:
    body = {"model": "tiny", "path": "/none", "given": "none", "roots": ["/"], "version": "1"}

    async def ask(**headers: str) -> httpx.Response:
        async with client_of(pair.workers[0].path) as worker:
            return await worker.put("/weights", json=body, headers=headers)

    assert asyncio.run(ask(**{OWNER: "somebody"})).status_code in (404, 405)
    assert asyncio.run(ask()).json()["where"] == "path"


def test_workers_learn_whose_a_request_is_from_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    owners, submit = [], Scheduler.submit
    monkeypatch.setattr(
        Scheduler,
        "submit",
        lambda self, *args, **named: (owners.append(named["owner"]), submit(self, *args, **named))[1],
    )
    settings = AppSettings(api_keys=("one", "two"), loopback=False)
    with serving_locally([chat_lm()], settings) as local:
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}", "X-Unmask-Owner": "somebody"}
            assert complete(local.url, headers=headers).status_code == 200
        assert complete(local.url).status_code == 401 and http_get(f"{local.url}/metrics").status_code == 401
    assert owners == ["key 0", "key 1"]


def test_a_full_queue_is_a_429_with_the_time_to_wait(stalled: threading.Semaphore) -> None:
    with (
        serving_locally([chat_lm()], AppSettings(RequestLimits(n=8)), batch_size=1, queue_size=8) as local,
        ThreadPoolExecutor(3) as clients,
    ):
        waiting = [clients.submit(complete, local.url, n=8) for _ in range(3)]
        until(lambda: any(each.done() for each in waiting))
        refused = next(each for each in waiting if each.done()).result()
        stalled.release(1000)
        assert {each.result().status_code for each in waiting} == {200, 429}
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_request_goes_to_the_worker_that_has_fewest(stalled: threading.Semaphore) -> None:
    with (
        serving_locally([chat_lm(), chat_lm(), chat_lm()]) as local,
        ThreadPoolExecutor(6) as clients,
    ):
        answers = []
        for number in range(6):
            answers.append(clients.submit(complete, local.url, stop=None))
            until(lambda number=number: local.pool.in_flight == number + 1)
        assert [worker.in_flight for worker in local.pool.workers] == [2, 2, 2]
        stalled.release(1000)
        assert {answer.result().status_code for answer in answers} == {200}
        until(lambda: local.pool.in_flight == 0)


@partly_slow("stream", [False, True], 1)
def test_a_client_that_leaves_frees_its_slots(stream: bool, stalled: threading.Semaphore) -> None:
    body = json.dumps({**FIELDS, "prompt": "a", "stream": stream, "n": 2}).encode()
    with serving_locally([chat_lm()], batch_size=2) as local:
        [worker] = local.workers
        with connect(local.url) as client:
            client.sendall(head_of("POST", "/v1/completions", body) + body)
            until(lambda: worker.value("unmask_running_sequences") == 2)
        until(lambda: local.pool.in_flight == 0 and not worker.connections)
        stalled.release(2)  # the step that was under way, and no other one is made
        until(lambda: worker.value("unmask_running_sequences") == 0)
        assert worker.value("unmask_forward_passes_total", model="tiny") <= 2
        assert 'route="/v1/completions",status="499"' in http_get(f"{local.url}/metrics").text or stream


def test_a_worker_that_is_lost_before_its_answer_is_a_502_and_others_go_on(
    stalled: threading.Semaphore,
) -> None:
    with serving_locally([chat_lm(), chat_lm()]) as local, ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(complete, local.url)
        until(lambda: any(worker.value("unmask_running_sequences") for worker in local.workers))
        next(worker for worker in local.workers if worker.value("unmask_running_sequences")).lose()
        lost = waiting.result()
        assert (lost.status_code, lost.json()["error"]["type"]) == (502, "server_error")
        assert lost.json()["error"]["message"] == "the worker that computed this answer ended. Send it again."
        stalled.release(1000)
        assert [complete(local.url).status_code for _ in range(4)] == [200] * 4  # of the one that is left
        answers = [
            line
            for line in http_get(f"{local.url}/metrics").text.splitlines()
            if line.startswith("unmask_requests_total")
        ]
        assert [line for line in answers if 'status="502"' in line] == [
            'unmask_requests_total{route="other",status="502"} 1.0'
        ], answers


def test_a_worker_that_is_lost_in_a_stream_is_its_last_event(stalled: threading.Semaphore) -> None:
    with serving_locally([chat_lm()]) as local:
        body = {**FIELDS, "prompt": "abc", "stream": True, "diffusion": {"stream": "frames"}}
        stalled.release(2)
        with httpx.stream("POST", f"{local.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            begun = [next(lines), next(lines)]
            local.workers[0].lose()
            *more, last = lines
        assert all(json.loads(line.removeprefix("data: "))["choices"] for line in [*begun, *more])
        assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith(
            "the worker that computed this answer ended"
        )
        none_left = complete(local.url)
        assert (none_left.status_code, none_left.headers["retry-after"]) == (503, "5")
        assert none_left.json()["error"]["message"] == "no worker is ready. Try again in 5 seconds."
        local.pool.start_seconds = 40.2  # that of a large model
        assert complete(local.url).headers["retry-after"] == "41"
        stalled.release(1000)


def test_of_a_stream_whole_events_are_passed_on_at_once_and_no_half_one() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b"data: 1\n\n", b"data: 2\n", b"\ndata: 3\n\ndata", b": 4\n\n", b"data: 5"):
            yield part

    async def read() -> list[bytes]:
        return [events async for events in whole_events(httpx.Response(200, content=parts()))]

    assert asyncio.run(read()) == [b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n", b"data: 4\n\n"]


def test_health_says_how_many_workers_live(pair: LocalPool) -> None:
    def health() -> tuple[int, dict[str, Any]]:
        answer = http_get(f"{pair.url}/health")
        return answer.status_code, answer.json()

    first, second = pair.pool.workers
    try:
        assert health() == (200, {"status": "ok", "workers": 2, "live": 2})
        first.live = False
        assert health() == (200, {"status": "degraded", "workers": 2, "live": 1})
        second.live = False
        assert health() == (503, {"status": "failing", "workers": 2, "live": 0})
    finally:
        first.live = second.live = True


def test_metrics_are_the_sum_and_gauges_have_their_worker() -> None:
    with serving_locally([chat_lm(), chat_lm()]) as local:
        assert [complete(local.url).status_code for _ in range(4)] == [200] * 4
        assert http_post(f"{local.url}/v1/completions", content=b"x" * 2_000_000).status_code == 413
        lines = http_get(f"{local.url}/metrics").text.splitlines()
        passes = sum(worker.value("unmask_forward_passes_total", model="tiny") for worker in local.workers)
    assert sorted(line for line in lines if line.startswith("unmask_requests_total")) == [
        'unmask_requests_total{route="/v1/completions",status="200"} 4.0',  # two of each worker
        'unmask_requests_total{route="other",status="413"} 1.0',  # of the server itself
    ]
    assert 'unmask_request_seconds_count{route="/v1/completions"} 4.0' in lines
    assert f'unmask_forward_passes_total{{model="tiny"}} {passes}' in lines and passes > 4
    assert (
        'unmask_running_sequences{worker="0"} 0.0' in lines
        and 'unmask_running_sequences{worker="1"} 0.0' in lines
    )
    assert "unmask_workers 2.0" in lines and "unmask_worker_deaths_total 0.0" in lines
    assert not any("_created" in line for line in lines)


def test_a_server_that_ends_refuses_what_comes_and_says_what_it_cuts_off(
    stalled: threading.Semaphore,
) -> None:
    with serving_locally([chat_lm(), chat_lm()]) as local, ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(complete, local.url)
        until(
            lambda: (
                local.pool.in_flight
                and any(worker.value("unmask_running_sequences") for worker in local.workers)
            )
        )
        local.pool.stopping = True
        late = complete(local.url)
        assert (late.status_code, late.json()["error"]["message"]) == (
            503,
            "the server is ending. Send it again, to another one or later.",
        )
        for worker in local.workers:
            worker.lose()
        message = "the server ended before this request was finished. Send it again."
        assert (waiting.result().status_code, waiting.result().json()["error"]["message"]) == (503, message)
        stalled.release(1000)
