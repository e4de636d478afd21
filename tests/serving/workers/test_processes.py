"""`unmask serve --workers` as processes: their answers, their deaths, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import psutil
import pytest
import torch
from typer.testing import CliRunner

import unmask
from tests.serving.commands import command
from tests.serving.openai.asking import chunks_of
from tests.serving.servers import ADMIN, http_get, http_post
from tests.tiny import float64_lm
from unmask.cli import app
from unmask.config.sampler import SamplerConfig
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = pytest.mark.slow
PATTERN: dict[str, Any] = {"attention": "block_causal", "block_size": 4}
CONFIG = SamplerConfig(max_new_tokens=24, temperature=1.0, seed=3)
PROMPTS = ["abc", "f", "dd", "fedcba"] * 4


class Server(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    weights: Path

    def workers(self) -> list[psutil.Process]:
        """The processes of its workers."""
        return workers_of(self.process.pid)

    def health(self) -> dict[str, Any]:
        return dict(http_get(f"{self.url}/health").json())

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"model": "model", "prompt": prompt, "max_tokens": 24, "temperature": 1, "seed": 3, **fields}
        return http_post(f"{self.url}/v1/completions", json=body)


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes of workers that a process has started, and that have not ended."""

    def is_worker(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, if nobody has waited for it too
            return "unmask.serving.workers.worker" in process.cmdline()
        return False

    return [child for child in psutil.Process(pid).children() if is_worker(child)]


def until(condition: Callable[[], Any], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def expected(lm: DiffusionLM, prompt: str) -> str:
    """What the model answers by itself."""
    return unmask.generate(lm, [prompt], CONFIG).texts[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though perhaps nobody has waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two workers, which tests leave with two."""
    folder = tmp_path_factory.mktemp("workers")
    float64_lm(**PATTERN).save(folder / "model")
    (folder / "weights").mkdir()
    words = ["--dtype", "float64", "--workers", 2, "--batch-size", 2, "--weights-from", folder / "weights"]
    with command(
        folder / "model", *words, environment={"UNMASK_ADMIN_KEY": "admin", "TMPDIR": str(folder)}
    ) as (process, url):
        yield Server(process, url, folder / "weights")


def test_answers_are_those_of_the_model_alone_whole_and_in_frames(server: Server) -> None:
    lm = float64_lm(**PATTERN)
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(server.complete, PROMPTS))
        frames = list(
            clients.map(
                lambda prompt: server.complete(prompt, stream=True, diffusion={"stream": "frames"}),
                PROMPTS[:4],
            )
        )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [
        expected(lm, prompt) for prompt in PROMPTS
    ]
    for prompt, answer in zip(PROMPTS, frames, strict=False):
        chunks = chunks_of(answer)
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected(
            lm, prompt
        )
        assert any("frame" in chunk.get("diffusion", {}) for chunk in chunks)
    metrics = http_get(f"{server.url}/metrics").text
    assert 'unmask_running_sequences{worker="1"} 0.0' in metrics
    assert {line for line in metrics.splitlines() if line.startswith("unmask_sequences_total")} == {
        f'unmask_sequences_total{{model="model",outcome="finished"}} {len(PROMPTS) + 4}.0'
    }


def test_nobody_else_can_reach_a_worker(server: Server) -> None:
    sockets = list(server.weights.parent.glob("unmask-*/socket"))
    assert len(sockets) == 2
    assert {socket.parent.stat().st_mode & 0o777 for socket in sockets} == {0o700}


def test_a_worker_that_is_killed_under_load_is_replaced_and_others_go_on(server: Server) -> None:
    lm, (first, second) = float64_lm(**PATTERN), server.workers()
    with ThreadPoolExecutor(8) as clients:
        waiting = [clients.submit(server.complete, prompt, n=4) for prompt in PROMPTS]
        until(lambda: 'unmask_running_sequences{worker="0"} 2.0' in http_get(f"{server.url}/metrics").text)
        first.send_signal(signal.SIGKILL)
        answers = [each.result() for each in waiting]
    assert {answer.status_code for answer in answers} == {200, 502}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected(lm, prompt)
        else:
            assert (
                answer.json()["error"]["message"]
                == "the worker that computed this answer ended. Send it again."
            )
    assert server.complete("abc").json()["choices"][0]["text"] == expected(lm, "abc")
    until(lambda: server.health()["live"] == 2)
    replaced = {worker.pid for worker in server.workers()}
    assert second.pid in replaced and first.pid not in replaced and len(replaced) == 2
    assert len(list(server.weights.parent.glob("unmask-*"))) == 2  # the socket of the killed one is gone
    assert "unmask_worker_deaths_total 1.0" in http_get(f"{server.url}/metrics").text
    answers = [server.complete(prompt) for prompt in PROMPTS[:4]]  # of both
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [
        expected(lm, prompt) for prompt in PROMPTS[:4]
    ]


def test_weights_are_replaced_on_all_also_on_one_that_starts_later(server: Server) -> None:
    trained = float64_lm(**PATTERN).frozen_copy()
    for weight in trained.model.parameters():
        weight += torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view_as(weight)
    trained.save(server.weights / "new")
    answer = http_post(
        f"{server.url}/v1/weights", json={"model": "model", "path": "new", "version": "2"}, headers=ADMIN
    )
    assert answer.json() == {"version": "2", "workers": 2}
    server.workers()[0].send_signal(signal.SIGKILL)
    until(lambda: server.health()["live"] == 1)
    until(lambda: server.health()["live"] == 2)
    answers = [server.complete(prompt, diffusion={"version": "2"}) for prompt in PROMPTS[:8]]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [
        expected(trained, prompt) for prompt in PROMPTS[:8]
    ]


def test_sigterm_under_load_loses_no_accepted_answer_and_leaves_nothing(tmp_path: Path) -> None:
    lm = float64_lm(**PATTERN)
    lm.save(tmp_path / "model")
    words = ["--dtype", "float64", "--workers", 2, "--batch-size", 2]
    with command(tmp_path / "model", *words, environment={"TMPDIR": str(tmp_path)}) as (process, url):
        server = Server(process, url, tmp_path)
        pids = [worker.pid for worker in server.workers()]
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            waiting = [clients.submit(server.complete, prompt, n=2) for prompt in PROMPTS]
            until(lambda: 'unmask_running_sequences{worker="0"} 2.0' in http_get(f"{url}/metrics").text)
            process.send_signal(signal.SIGTERM)
            answers = [each.exception() or each.result() for each in waiting]
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert process.stdout is not None and "Traceback" not in process.stdout.read()
        assert all(is_gone(pid) for pid in pids) and not list(tmp_path.glob("unmask-*"))
    finished = [
        (prompt, answer)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
        if isinstance(answer, httpx.Response)
    ]
    assert sum(answer.status_code == 200 for _, answer in finished) >= 4
    for prompt, answer in finished:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected(lm, prompt)
        else:
            assert answer.status_code == 503 and "the server is ending" in answer.json()["error"]["message"]
    # those that came too late
    assert all(isinstance(answer, httpx.Response | httpx.ConnectError) for answer in answers)


def test_no_worker_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    float64_lm(**PATTERN).save(tmp_path / "model")
    with command(tmp_path / "model", "--workers", 2, environment={"TMPDIR": str(tmp_path)}) as (process, url):
        server = Server(process, url, tmp_path)
        pids = [worker.pid for worker in server.workers()]
        assert len(pids) == 2
        process.kill()
        process.wait(60)
        until(lambda: all(is_gone(pid) for pid in pids))
        until(lambda: not list(tmp_path.glob("unmask-*")))


def test_workers_that_cannot_start_are_one_clear_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    float64_lm(**PATTERN).save(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 5}))
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "model"), "--workers", "2", "--port", "0"])
    assert result.exit_code == 2 and result.stderr.count("error: ") == 1 and "model" in result.stderr
    assert "Traceback" not in result.stderr + capfd.readouterr().err
    assert not workers_of(os.getpid())
