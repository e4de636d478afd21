"""A server that samples for reinforcement learning: `unmask serve`. Its client is `unmask.generation.remote.backends.ServerBackend`.

    POST /generate        a `GenerateRequest`; the answer has the fields of a `Generation`, with the tokens of `unmask.generate`
    POST /update_weights  an `UpdateRequest`: the weights in a folder replace the model's
    GET /health           the facts of the model that a client must share, and the name of its weights

A refusal is `{"error": ...}`, with status 401 for a wrong API key, 409 for weights that the server does not hold, 422 for anything else.
"""

from __future__ import annotations

import hmac
import os
import socket
from pathlib import Path
from threading import Lock
from typing import Any

from unmask.config.layers import API_KEY
from unmask.errors import ConfigError, ModelError, UnmaskError
from unmask.generation.remote.protocol import OTHER_WEIGHTS, GenerateRequest, UpdateRequest, differences, dump_generation, model_facts
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.redaction import shown

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response
except ImportError as missing:
    remedy = "Install it with pip install 'unmask[serve]'"
    raise ConfigError(f"{missing.name} is not installed", where="unmask serve", remedy=remedy) from missing


class OtherWeightsError(UnmaskError):
    """A request names weights that the server does not hold."""


class RolloutServer:
    """A model that serves one request at a time."""

    def __init__(self, lm: DiffusionLM):
        self.lm = lm
        self.version: str | None = None  # a client's name of its weights; None: the first ones
        self._lock = Lock()

    def generate(self, request: GenerateRequest) -> str:
        """The JSON of the completions."""
        with self._lock:
            if request.version not in (None, self.version):
                what = f"the weights are {self.version!r}, not {request.version!r}"
                raise OtherWeightsError(what, where="version", remedy="Send them with /update_weights")
            generation = generate(self.lm, request.prompts, request.config, request.keys)
        return dump_generation(generation)

    def update_weights(self, request: UpdateRequest) -> None:
        """Load the weights of a folder. ModelError if they are not those of a whole model like this one, whose weights then stay."""
        where, remedy = request.path, "Give a folder that DiffusionLM.save wrote from the same model"
        if not Path(where).is_dir():
            raise ModelError("no such folder on the server", where=where, remedy="Use a folder that both sides can read")
        with self._lock:  # loading too, as it changes torch's default dtype for all threads
            new = load(where, dtype=str(next(self.lm.model.parameters()).dtype).removeprefix("torch."))
            if differ := differences(model_facts(new), model_facts(self.lm)):
                raise ModelError(f"another model: {differ}", where=where, remedy=remedy)
            weights = new.model.state_dict()
            shapes, expected = ({name: tuple(w.shape) for name, w in state.items()} for state in (weights, self.lm.model.state_dict()))
            if differ := differences(shapes, expected) or differences(expected, shapes):
                raise ModelError(f"another architecture: {differ}"[:300], where=where, remedy=remedy)
            self.lm.model.load_state_dict(weights)
            self.version = request.version


def make_app(lm: DiffusionLM, api_key: str | None = None) -> FastAPI:
    """The server of a model. `api_key`: the bearer token that clients must send, if any."""
    server, app = RolloutServer(lm), FastAPI(title="Unmask")

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Response:
        header = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(header.encode(), f"Bearer {api_key}".encode()):
            return JSONResponse({"error": "the API key is wrong or missing"}, 401)
        return await call_next(request)

    @app.exception_handler(UnmaskError)
    async def refuse(request: Request, error: UnmaskError) -> Response:
        return JSONResponse({"error": str(error)}, OTHER_WEIGHTS if isinstance(error, OtherWeightsError) else 422)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"version": server.version, "model": model_facts(lm)}

    @app.post("/generate")
    def generate(body: dict[str, Any]) -> Response:
        return Response(server.generate(GenerateRequest(**body)), media_type="application/json")

    @app.post("/update_weights")
    def update_weights(body: dict[str, Any]) -> dict[str, Any]:
        server.update_weights(UpdateRequest(**body))
        return {"version": server.version}

    return app


def open_port(host: str, port: int) -> socket.socket:
    """A bound address, which accepts no connections until `run`; port 0: any free one. Raises ConfigError if it cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot be bound ({error})", where=f"{host}:{port}", remedy="Choose another --host or --port") from error
    return listener


def run(lm: DiffusionLM, listener: socket.socket) -> None:
    """Serve a model until interrupted; clients must send UNMASK_API_KEY if it is set."""
    host, port = listener.getsockname()[:2]
    print(f"{shown(str(lm))} is served at http://{host}:{port}", flush=True)
    app = make_app(lm, os.environ.get(API_KEY))
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none")).run(sockets=[listener])
