"""`unmask serve` in the process of the tests, over a socket or without one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
import uvicorn

import unmask
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.app import AppSettings, make_app
from unmask.serving.connections import ConnectionLimits
from unmask.serving.scheduler import Scheduler
from unmask.serving.server import GracefulServer, make_server, open_port
from unmask.variables import ADMIN_KEY

ADMIN = {"Authorization": "Bearer admin"}
http_get, http_post = (partial(function, verify=False, timeout=120) for function in (httpx.get, httpx.post))
"""Without certificates, which take longer to read than most answers take."""


class QuickClock:
    """asyncio for uvicorn, which looks ten times a second whether it has to end, and then waits for a tenth
    of a second."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = QuickClock()  # type: ignore[assignment]


@contextmanager
def running(lm: DiffusionLM, name: str = "tiny", **scheduling: Any) -> Iterator[Scheduler]:
    """A scheduler of this model, which nothing else may use meanwhile but through `between_steps`."""
    scheduler = Scheduler({name: lm}, **scheduling)
    scheduler.start()
    try:
        yield scheduler
    finally:
        asyncio.run(scheduler.stop(grace=0))


@contextmanager
def serving(
    lm: DiffusionLM,
    settings: AppSettings | None = None,
    *,
    name: str = "tiny",
    more: Mapping[str, DiffusionLM] | None = None,
    port: int = 0,
    connections: ConnectionLimits | None = None,
    keep_alive: int = 5,
    grace: float = 0.0,
    **scheduling: Any,
) -> Iterator[tuple[str, GracefulServer]]:
    """A server with this model, and perhaps more, and its address."""
    scheduler = Scheduler({name: lm, **(more or {})}, **scheduling)
    app = make_app(scheduler, settings or AppSettings())
    server = make_server(app, scheduler, connections=connections, grace=grace, keep_alive=keep_alive)
    with open_port("127.0.0.1", port) as listener, listening(server, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server


def scheduler_of(server: GracefulServer) -> Scheduler:
    """Of a server without workers."""
    assert isinstance(server.engine, Scheduler)
    return server.engine


@contextmanager
def listening(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    """Inside, the server accepts connections, in a thread."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:  # until then the port refuses connections
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def served(lm: DiffusionLM, settings: AppSettings | None = None, **options: Any) -> Iterator[str]:
    """The address of a server with this model."""
    with serving(lm, settings, **options) as (url, _):
        yield url


@contextmanager
def serving_rollouts(lm: DiffusionLM, folder: Path, *, port: int = 0) -> Iterator[str]:
    """A server for reinforcement learning: it takes weights from a folder, and the clients of this process
    have the admin key."""
    with (
        pytest.MonkeyPatch.context() as patch,
        served(lm, AppSettings(admin_key="admin", weights_from=(folder,)), port=port) as url,
    ):
        patch.setenv(ADMIN_KEY, "admin")
        yield url


def copied(lm: DiffusionLM, path: Path) -> DiffusionLM:
    """A copy of the model, loaded as a server loads it."""
    lm.save(path)
    return unmask.load(path, dtype=str(lm.log_prob_dtype).removeprefix("torch."))


def other_weights(lm: DiffusionLM) -> DiffusionLM:
    """The same model with other weights, as after further training."""
    trained, generator = lm.frozen_copy(), torch.Generator().manual_seed(7)
    for weight in trained.model.parameters():
        weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return trained


def message(answer: httpx.Response) -> str:
    """Of an error."""
    return str(answer.json()["error"]["message"])


def posted(path: str, **body: Any) -> bytes:
    """A request as it goes over a connection."""
    content = json.dumps({"model": "tiny", **body}).encode()
    fields = ["Host: localhost", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([f"POST /v1/{path} HTTP/1.1", *fields, "", ""]).encode() + content


def connect(url: str) -> socket.socket:
    """A bare connection to a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


class Stall(threading.Semaphore):
    """What steps of engines wait for. `begun`: how many have."""

    begun = 0
