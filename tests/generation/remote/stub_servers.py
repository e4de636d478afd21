"""Servers to test clients with: a faulty one, a fake vLLM and a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers import shared_path
from tests.tiny import build_causal
from unmask.errors import GenerationError
from unmask.generation.remote.vllm_client import RemoteLM
from unmask.models.diffusion_lm import DiffusionLM

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]

FOR_ROLLOUTS = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
"""The options of a vLLM that samples for reinforcement learning (docs/generation.md has the whole
command)."""
FOR_ADAPTERS = ["--enable-lora", "--max-lora-rank", "8"]
FOR_WEIGHTS_IN_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
FOR_ADAPTERS_IN_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
MODULE = "vllm.entrypoints.openai.api_server"

POLL_SECONDS = 0.01
"""How often a server looks whether it is to end."""
VLLM_PYTHON = os.environ.get("UNMASK_VLLM_PYTHON")  # read before a test forgets such variables


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server with chosen answers: faults that vLLM does not show on demand."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(
                *((200, {"data": [{"id": "m"}]}) if self.path == "/v1/models" else answer(self.path, {}))
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            self.reply(*answer(self.path, body))

        def reply(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/event-stream" if data.startswith(b"data: ") else "application/json"
            )
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[POLL_SECONDS])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def echo(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Completes every prompt with its last token id."""
    return 200, {"choices": [{"token_ids": body["prompt"][-1:], "logprobs": {"token_logprobs": [-0.5]}}]}


class FakeVLLM:
    """Answers the requests of a backend as vLLM does. Every completion is its prompt's last token twice, and
    EOS."""

    def __init__(self, lm: DiffusionLM, *, processed: bool):
        self.lm, self.processed = lm, processed
        self.version, self.adapter = "default", ""
        self.asked: list[tuple[str, Any]] = []
        self.restarts = 0  # still to come, each after a completion

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((path, body))
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/v1/load_lora_adapter":
            self.adapter = body["lora_name"]
        if path != "/v1/completions":
            return 200, "Success"
        if str(self.lm.mask_token_id) not in body["logit_bias"] or body["model"] not in ("m", self.adapter):
            return 404, {}
        if allowed := body["allowed_token_ids"]:
            return 200, self.completion(allowed, [0.0 if self.processed else -2.0])
        if self.restarts:
            self.restarts, self.version, self.adapter = self.restarts - 1, "default", ""
        return 200, self.completion([body["prompt"][-1]] * 2 + [self.lm.eos_token_id], [-0.5, -0.25, -1.0])

    @staticmethod
    def completion(tokens: list[int], log_probs: list[float]) -> dict[str, Any]:
        return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": log_probs}}]}

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def write_model(path: Path, seed: int) -> None:
    """A Llama with random weights and the tokenizer of stories260K, whose own model has heads too narrow for
    vLLM on a CPU."""
    tokenizer = AutoTokenizer.from_pretrained(shared_path("models", "stories260K"))
    sizes = {"width": 64, "intermediate_size": 96, "context": 256, "initializer_range": 0.3}
    model, _ = build_causal("llama", tokenizer, seed=seed, ids=(), **sizes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


class Server:
    """A real vLLM; UNMASK_VLLM_PYTHON is the Python of an environment that has it."""

    def __init__(self, model: Path, log: Path, options: Sequence[str] = (), **environment: str):
        self.python = VLLM_PYTHON
        if not self.python:
            pytest.skip("UNMASK_VLLM_PYTHON is not set")
        self.model, self.log, self.options, self.environment, self.port = (
            model,
            log,
            options,
            environment,
            free_port(),
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        settings = {
            **FOR_WEIGHTS_IN_ENVIRONMENT,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            **self.environment,
        }
        options = [
            "--model",
            str(self.model),
            "--port",
            str(self.port),
            "--max-model-len",
            "256",
            "--enforce-eager",
            "--dtype",
            "float32",
        ]
        options += (
            ["--weight-transfer-config", '{"backend": "nccl"}'] if torch.cuda.device_count() > 1 else []
        )
        with self.log.open("a") as out:
            command = [str(self.python), "-m", MODULE, *options, *self.options]
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=out, stderr=out, start_new_session=True
            )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        self.start()
        try:
            RemoteLM(self.url, str(self.model), patience=300).close()
        except GenerationError:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
