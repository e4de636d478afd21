"""A worker: a process that serves a model on a Unix socket to the server that started it, by `python -m
unmask.serving.workers.worker`.

Its standard input is a socket to that server: the settings come from it, and it tells there that it is ready,
or why it is not. It ends when the other end is closed, so that it does not outlive the server however that
ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from unmask.errors import ConfigError, UnmaskError
from unmask.serving.app import HEALTH, METRICS, AppSettings, make_app
from unmask.serving.connections import ConnectionLimits
from unmask.serving.errors import error_of
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import ModelEngine, Scheduler
from unmask.serving.served_models import ServedModels, description
from unmask.serving.server import make_server
from unmask.serving.weights import Folder, put_weights, read_weights, replaceable
from unmask.serving.workers.forward import OWNER
from unmask.serving.workers.weights import WEIGHTS

UNLIMITED = ConnectionLimits(connections=2**31, write_seconds=86_400)
"""The server limits the connections of clients."""


class ToRead(BaseModel):
    """Weights to read."""

    model: str
    path: Path
    given: str
    roots: tuple[Path, ...]
    version: str


class WorkerApp:
    """ASGI: the application of a scheduler as clients know it, for the owner whom the server names; and what
    the server itself asks, in requests that have no owner. No request of a client gets there, whatever its
    path."""

    def __init__(self, scheduler: Scheduler, limits: RequestLimits):
        self.app, self.internal = make_app(scheduler, AppSettings(limits)), make_internal(scheduler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            owner = Headers(scope=scope).get(OWNER)
            if owner is None:
                return await self.internal(scope, receive, send)
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


def make_internal(scheduler: Scheduler) -> FastAPI:
    """What the server asks a worker about itself."""
    app, state = FastAPI(openapi_url=None), Prepared(scheduler)
    app.add_exception_handler(UnmaskError, _refused)

    @app.get(HEALTH)
    async def health() -> Response:
        return Response(status_code=200 if scheduler.healthy else 503)

    @app.get(METRICS)
    async def metrics() -> Response:
        return Response(scheduler.metrics.text())

    app.put(WEIGHTS, status_code=204)(state.read)
    app.post(WEIGHTS, status_code=204)(state.take)
    app.delete(WEIGHTS, status_code=204)(state.forget)
    return app


class Prepared:
    """Weights that a worker has read, by model, until the server says that it may take them."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self._read: dict[str, tuple[ModelEngine, Mapping[str, torch.Tensor], str]] = {}

    async def read(self, body: ToRead) -> None:
        """Read and check the weights of a folder, between two steps."""
        model, folder = replaceable(self.scheduler, body.model), Folder(body.path, body.given, body.roots)
        with folder.reading():
            weights = await self.scheduler.between_steps(partial(read_weights, model, folder))
        self._read[body.model] = model, weights, body.version

    async def take(self, model: str) -> None:
        """Serve those of this model, once what has begun is finished."""
        if model not in self._read:
            raise ConfigError("no weights were read")
        engine, weights, version = self._read.pop(model)
        await self.scheduler.replace_weights(model, partial(put_weights, engine, weights), version)

    async def forget(self, model: str) -> None:
        """Drop them."""
        self._read.pop(model, None)


async def _refused(_: Request, error: Exception) -> Response:
    """A refusal, of which the server makes the same error again."""
    assert isinstance(error, UnmaskError)
    return JSONResponse(described(error), error_of(error)[0])


def described(error: UnmaskError) -> dict[str, Any]:
    """The arguments of an error."""
    return {"what": error.what, "where": error.where, "remedy": error.remedy}


def serve(served: ServedModels, folder: str, server: TextIO) -> None:
    """Load the models and serve them on a socket in a folder, until a signal comes."""

    def tell(**message: Any) -> None:
        server.write(json.dumps(message) + "\n")
        server.flush()

    try:
        scheduler, path = served.make_scheduler(), os.path.join(folder, "socket")
        listener = bound(path)
    except UnmaskError as error:
        tell(error=described(error))
        return
    app, ready = (
        WorkerApp(scheduler, served.limits),
        partial(tell, socket=path, description=description(scheduler)),
    )
    with listener:
        make_server(app, scheduler, connections=UNLIMITED, grace=served.grace, on_start=ready).run(
            sockets=[listener]
        )


def bound(path: str) -> socket.socket:
    """A Unix socket. ConfigError if it cannot be made, such as for a path that is too long for one."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot hold a socket ({error})", where=path, remedy="Set TMPDIR to another folder"
        ) from error
    return listener


def end_with(server: socket.socket, folder: str) -> None:
    """Wait until the server closes its end, and end this process, with what it has started."""
    try:
        server.recv(1)
    finally:  # also when the connection is reset
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpid(), signal.SIGKILL)  # it is the first of its group


def main() -> None:
    """Run a worker."""
    server = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with server.makefile("rw", encoding="utf-8") as lines:
        if not (line := lines.readline()):  # the server has ended already
            return
        folder = tempfile.mkdtemp(prefix="unmask-")  # which nobody else may enter
        threading.Thread(target=end_with, args=(server, folder), name="unmask-leash", daemon=True).start()
        try:
            serve(ServedModels.from_json(line), folder, lines)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
