"""The part of the server's protocol that the playground speaks, over one model, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from unmask.config.run import SamplerConfig
from unmask.errors import UnmaskError
from unmask.generation import requests as engine_requests
from unmask.generation.frames import Frame, watch
from unmask.generation.output import Generation
from unmask.models.diffusion_lm import DiffusionLM

NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "seed", "temperature": "temperature"}
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


class FakeServer:
    """Answers requests for frames.

    Attributes:
        pace: seconds before each frame.
        key: what requests have to give; None: nothing.
        requests: bodies that came.
        cancelled: requests whose client left before the end.
    """

    def __init__(self, lm: DiffusionLM, static: Path, *, pace: float = 0.0, key: str | None = None):
        self.lm, self.pace, self.key = lm, pace, key
        self.requests: list[dict[str, Any]] = []
        self.cancelled = 0
        self.app = FastAPI()
        self.app.middleware("http")(self._guard)
        self.app.get("/v1/models")(self._models)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/infill"):
            self.app.post(path)(self._answer)
        self.app.mount("/", StaticFiles(directory=static, html=True))

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """The address of the server while it runs in a thread."""
        server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                thread.join(0.01)
                assert thread.is_alive(), "the server did not start"
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

    async def _guard(self, request: Request, go_on: Any) -> Response:
        if request.url.path.startswith("/v1") and self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, "The API key is missing or wrong.")
        response: Response = await go_on(request)
        response.headers["content-security-policy"] = POLICY
        return response

    async def _models(self) -> dict[str, Any]:
        lm = self.lm
        facts = {
            "attention": lm.attention,
            "block_size": lm.block_size,
            "context_length": lm.context_length,
            "mask_token": lm.tokenizer.mask_token,
            "chat": bool(lm.tokenizer.chat_template),
            "causal": lm.autoregressive,
            "variable_length": False,
        }
        return {"object": "list", "data": [{"id": "reciting", "object": "model", "owned_by": "unmask", "diffusion": facts}]}

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        try:
            config, engine_request = self._parse(body)
        except UnmaskError as problem:
            return error(400, str(problem))
        return StreamingResponse(self._chunks(engine_request, config), media_type="text/event-stream")

    def _parse(self, body: dict[str, Any]) -> tuple[SamplerConfig, engine_requests.Request]:
        diffusion = {name: value for name, value in body["diffusion"].items() if name != "stream"}
        config = SamplerConfig(trace=True, **diffusion, **{NAMES[name]: value for name, value in body.items() if name in NAMES})
        if "text" in body:
            config = engine_requests.without_ends(self.lm, config)
            return config, engine_requests.make_infill_requests(self.lm, [body["text"]], config)[0]
        return config, engine_requests.make_requests(self.lm, [body.get("messages", body.get("prompt"))], config)[0]

    async def _chunks(self, request: engine_requests.Request, config: SamplerConfig) -> AsyncIterator[str]:
        start = request.start
        hidden = [None if hidden else self._text(token) for token, hidden in zip(request.ids, request.hidden, strict=True)]
        try:
            yield chunk({"canvas": {"tokens": hidden[start:]}})
            for item in watch(self.lm, request, config):
                await asyncio.sleep(self.pace)
                if isinstance(item, Generation):
                    yield chunk(self._end(item), finish_reason="length")
                else:
                    yield chunk({"frame": self._frame(item, start)})
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    def _frame(self, frame: Frame, start: int) -> dict[str, Any]:
        revealed = [
            {"position": position - start, "token": token, "text": self._text(token), "probability": math.exp(log_prob)}
            for position, token, log_prob in frame.revealed
        ]
        hidden = [position - start for position in frame.hidden]
        return {"step": frame.step, "revealed": revealed, "hidden": hidden, "committed": max(0, frame.num_final - start)}

    def _end(self, generation: Generation) -> dict[str, Any]:
        [passes], [text], [steps] = generation.forward_passes, generation.texts, generation.denoising_steps or [0]
        per_pass = len(generation.tokens[0]) / passes
        return {"denoising_steps": steps, "forward_passes": passes, "tokens_per_pass": per_pass, "text": text}

    def _text(self, token: int) -> str:
        return str(self.lm.tokenizer.decode([token]))


def chunk(diffusion: dict[str, Any], finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": {}, "finish_reason": finish_reason}
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice], 'diffusion': diffusion})}\n\n"


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}, status)
