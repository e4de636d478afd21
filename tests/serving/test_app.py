"""The application as clients find it: what is open, what is closed, and what no answer has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import unmask
from tests.errors import raises
from tests.serving.servers import connect, http_get, http_post, posted, served
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.generation.engine.engine import Engine
from unmask.serving import app as app_module
from unmask.serving.app import AppSettings
from unmask.serving.limits import RequestLimits

KEY = {"Authorization": "Bearer api"}


def complete(
    url: str, prompt: str = "abc", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    return http_post(f"{url}/v1/completions", json=body, headers=headers)


def metric(url: str, name: str) -> float:
    lines = http_get(f"{url}/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name))


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    """A server with the settings that it has by itself, which tests leave as it was."""
    with served(float64_lm(layers=1)) as url:
        yield url


def test_many_clients_get_what_each_would_get_alone() -> None:
    lm, prompts = (
        float64_lm(attention="block_causal", block_size=4, layers=1),
        ["abc", "f", "fedcba", "dd"] * 4,
    )
    with served(lm, batch_size=4) as url, ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda prompt: complete(url, prompt), prompts))
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert metric(url, 'unmask_requests_total{route="/v1/completions",status="200"}') == 16
        assert metric(url, 'unmask_sequences_total{model="tiny",outcome="finished"}') == 16
        assert metric(url, "unmask_queue_length") == metric(url, "unmask_running_sequences") == 0
        assert (
            0 < metric(url, 'unmask_tokens_total{model="tiny"}') <= 16 * 8
            and metric(url, 'unmask_forward_passes_total{model="tiny"}') > 8
        )
    assert texts == [
        unmask.generate(lm, [prompt], SamplerConfig(max_new_tokens=8)).texts[0] for prompt in prompts
    ]


def test_with_a_key_only_health_is_open() -> None:
    with served(float64_lm(), AppSettings(api_keys=("api",), loopback=False)) as url:
        closed = ["/v1/models", "/metrics", "/", "/openapi.json", "/docs", "/nothing"]
        assert {http_get(f"{url}{path}").status_code for path in closed} == {401}
        assert http_get(f"{url}/health").json() == {"status": "ok"}
        assert complete(url).status_code == 401 and complete(url, headers=KEY).status_code == 200
        assert http_get(f"{url}/metrics", headers=KEY).status_code == 200


def test_another_address_demands_a_key() -> None:
    with raises(ConfigError, where="--host"):
        AppSettings(loopback=False)


def test_a_body_of_more_than_a_mebibyte_is_refused(plain: str) -> None:
    refused = complete(plain, "a" * 1024 * 1024)
    assert (
        refused.status_code == 413
        and refused.json()["error"]["message"] == "the body has more than 1,048,576 bytes"
    )
    assert complete(plain).status_code == 200


def test_pages_of_other_sites_get_nothing_unless_they_are_named(plain: str) -> None:
    origin = {"Origin": "https://app.example"}
    assert complete(plain, headers=origin).status_code == 403
    assert http_get(f"{plain}/health", headers={"Host": "evil.example"}).status_code == 403
    with served(float64_lm(), AppSettings(allow_origins=("https://app.example",))) as url:
        allowed = complete(url, headers=origin)
        assert (
            allowed.status_code == 200
            and allowed.headers["access-control-allow-origin"] == "https://app.example"
        )
        assert complete(url, headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/metrics"])
def test_every_answer_protects_browsers_and_none_allows_other_sites(path: str, plain: str) -> None:
    headers = http_get(f"{plain}{path}").headers
    assert (
        headers["content-security-policy"].startswith("default-src 'self'")
        and headers["x-content-type-options"] == "nosniff"
    )
    assert "access-control-allow-origin" not in headers and "server" not in headers


def test_an_unknown_path_is_an_error_in_openais_shape_and_no_label_of_a_metric(plain: str) -> None:
    answer = http_get(f"{plain}/made/up")
    text = http_get(f"{plain}/metrics").text
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error"
    assert "/made/up" not in text and metric(plain, 'unmask_requests_total{route="other",status="404"}') >= 1


def test_the_playground_is_served_where_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "static"
    page.mkdir()
    (tmp_path / "secret").write_text("")
    monkeypatch.setattr(app_module, "PLAYGROUND", page)
    with served(float64_lm()) as url:
        assert http_get(url).status_code == 404
    (page / "index.html").write_text("<!doctype html>the playground")
    with served(float64_lm()) as url:
        assert "the playground" in http_get(url).text
        assert (
            http_get(f"{url}/%2e%2e/secret").status_code == 404
            and http_get(f"{url}/v1/models").status_code == 200
        )
        assert (
            http_post(f"{url}/v1/models", json={}).status_code == 405
            and http_post(f"{url}/v1/none", json={}).status_code == 404
        )


def test_a_failing_engine_is_a_500_without_its_cause_and_health_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Engine) -> None:
        raise RuntimeError("/home/secret ran out")

    with served(float64_lm()) as url:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", fail)
            failed = [complete(url) for _ in range(3)]
            health = http_get(f"{url}/health")
        assert {answer.status_code for answer in failed} == {500} and "secret" not in failed[0].text
        assert (health.status_code, health.json()) == (503, {"status": "failing", "failing": ["tiny"]})
        assert complete(url).status_code == 200 and http_get(f"{url}/health").json() == {"status": "ok"}


def test_a_failing_adapter_leaves_the_server_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, other = float64_lm(), float64_lm(layers=1)
    step = Engine.step

    def fail(self: Engine) -> Any:
        if self.lm is other:
            raise RuntimeError("broken")
        return step(self)

    monkeypatch.setattr(Engine, "step", fail)
    with served(lm, more={"other": other}) as url:
        body = {"model": "other", "prompt": "abc", "max_tokens": 4}
        assert {http_post(f"{url}/v1/completions", json=body).status_code for _ in range(3)} == {500}
        health = http_get(f"{url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "degraded", "failing": ["other"]})
        assert complete(url).status_code == 200


def test_a_limit_below_the_default_length_is_the_default() -> None:
    with served(float64_lm(attention="bidirectional"), AppSettings(RequestLimits(max_tokens=8))) as url:
        answer = http_post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert answer.status_code == 200 and len(answer.json()["choices"][0]["text"]) <= 8
        filled = http_post(f"{url}/v1/infill", json={"model": "tiny", "segments": ["a", "b"], "lengths": [3]})
        assert filled.status_code == 200 and len(filled.json()["choices"][0]["text"]) == 5


def test_a_full_queue_is_a_429_with_the_time_to_wait() -> None:
    with (
        served(float64_lm(), AppSettings(RequestLimits(n=8)), batch_size=1, queue_size=8) as url,
        ThreadPoolExecutor(12) as clients,
    ):
        answers = list(clients.map(lambda _: complete(url, n=8, temperature=1), range(12)))
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)


def test_a_client_that_leaves_frees_its_slots() -> None:
    with served(float64_lm(), batch_size=1) as url:
        for _ in range(20):
            with connect(url) as client:
                client.sendall(posted("completions", prompt="a", max_tokens=36, stream=True, n=8))
                assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert complete(url).status_code == 200
        assert metric(url, "unmask_queue_length") == metric(url, "unmask_running_sequences") == 0
        # of whole answers there would be twice as many
        assert metric(url, 'unmask_forward_passes_total{model="tiny"}') < 20 * 8 * 36 / 2


def test_what_is_not_finished_in_its_time_is_a_504_or_the_last_event_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed, step = threading.Semaphore(0), Engine.step

    def held(self: Engine) -> Any:
        assert allowed.acquire(timeout=30)
        return step(self)

    monkeypatch.setattr(Engine, "step", held)
    with served(float64_lm()) as url:
        for fields in ({}, {"stream": True}):
            late = complete(url, **fields, diffusion={"timeout": 0.05})
            error = late.json()["error"]
            assert (late.status_code, error["type"], error["param"]) == (
                504,
                "server_error",
                "diffusion.timeout",
            )
            assert "not finished within 0.05 seconds, waiting included" in error["message"]
            allowed.release()  # the step that was under way
        allowed.release(2)
        begun = complete(url, stream=True, diffusion={"timeout": 1})
        assert (
            begun.status_code == 200
            and "not finished within 1 seconds" in begun.text.strip().split("\n\n")[-1]
        )
        allowed.release(1000)
        assert complete(url).status_code == 200
    # of the server, whatever a request would like
    with served(float64_lm(), AppSettings(RequestLimits(timeout=0.001))) as url:
        assert (
            "not finished within 0.001 seconds"
            in complete(url, max_tokens=36, diffusion={"timeout": 60}).json()["error"]["message"]
        )
