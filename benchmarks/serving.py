"""Many clients of `unmask serve` at once against one at a time: throughput, equal answers, what HTTP and scheduling cost, first frames.

    python -m benchmarks.serving [MODEL] --clients 32 --length 64 --batch 32

MODEL: a block-causal or other model; unset: a random block-causal Llama of --hidden and --layers. The server is a process of its own. Its
share of the time is what 8 requests at once, and all requests by 16 clients to 8 slots, take over HTTP beyond `unmask.generate` on the
same prompts, 8 at a time. The former includes that requests which come one after the other do not begin in the same step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import unmask
from benchmarks.harness import report
from unmask.data.characters import character_tokenizer
from unmask.models.load import make_diffusion

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,"
BAR = {"throughput": "at least 4 x", "equal": "all", "share": "at most 5%", "first": "in the table"}


def random_model(hidden: int, layers: int, context: int) -> unmask.DiffusionLM:
    """A block-causal Llama with random weights, over letters."""
    tokenizer = character_tokenizer(ALPHABET)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=context, initializer_range=0.2, **shape, **ids)
    torch.manual_seed(0)
    return make_diffusion(AutoModelForCausalLM.from_config(config), tokenizer, attention="block_causal", block_size=4)


@contextmanager
def serving(model: str, batch: int, threads: int) -> Iterator[str]:
    """The address of a server in a process of its own."""
    words = [sys.executable, "-m", "unmask", "serve", model, "--name", "model", "--port", "0", "--batch-size", str(batch)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield next(line for line in process.stdout if "is served as" in line).split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class Load:
    """Requests to a server, some at once."""

    def __init__(self, url: str, length: int):
        self.url, self.length = url, length
        self.first_frames: list[float] = []

    def run(self, prompts: Sequence[str], clients: int, *, stream: bool = False) -> tuple[list[str], float]:
        """The texts, and the seconds that all took."""
        return asyncio.run(self._run(prompts, clients, stream))

    async def _run(self, prompts: Sequence[str], clients: int, stream: bool) -> tuple[list[str], float]:
        places = asyncio.Semaphore(clients)
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits, trust_env=False) as client:

            async def ask(prompt: str) -> str:
                async with places:
                    return await (self._stream(client, prompt) if stream else self._ask(client, prompt))

            started = time.perf_counter()
            texts = await asyncio.gather(*map(ask, prompts))
            return list(texts), time.perf_counter() - started

    def _body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        return {"model": "model", "prompt": prompt, "max_tokens": self.length, "temperature": 0, **fields}

    async def _ask(self, client: httpx.AsyncClient, prompt: str) -> str:
        answer = await client.post("/v1/completions", json=self._body(prompt))
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    async def _stream(self, client: httpx.AsyncClient, prompt: str) -> str:
        started, first, text = time.perf_counter(), 0.0, ""
        async with client.stream("POST", "/v1/completions", json=self._body(prompt, stream=True, diffusion={"stream": "frames"})) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "frame" in chunk.get("diffusion", {}) and not first:
                        first = time.perf_counter() - started
                    text += "".join(choice["text"] or "" for choice in chunk["choices"])
        self.first_frames.append(first)
        return text


def measure(lm: unmask.DiffusionLM, model: str, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The rows of the table."""
    prompts = ["".join(ALPHABET[(i * 7 + j * j) % 26] for j in range(4 + i % 12)) for i in range(options.clients * options.rounds)]
    bursts = {8: prompts[:8], 16: prompts}
    config = unmask.SamplerConfig(max_new_tokens=options.length, batch_size=8)
    solo = [unmask.generate(lm, [prompt], config).texts[0] for prompt in prompts]
    with serving(model, options.batch, options.threads) as url:
        load = Load(url, options.length)
        load.run(prompts[:4], 1)  # warm
        one_texts, one = load.run(prompts, 1)
        many_texts, many = load.run(prompts, options.clients)
        stream_texts, _ = load.run(prompts, options.clients, stream=True)
    with serving(model, 8, options.threads) as url:
        eight = Load(url, options.length)
        eight.run(prompts[:8], 8)
        unmask.generate(lm, prompts[:8], config)
        shares = {clients: [_share(eight, some, clients, lm, config) for _ in range(options.rounds)] for clients, some in bursts.items()}
    equal = sum(texts == [solo[i]] * 3 for i, texts in enumerate(map(list, zip(one_texts, many_texts, stream_texts, strict=True))))
    first = statistics.quantiles(load.first_frames, n=100)
    return [
        (
            f"{options.clients} clients at once: requests per second, against one",
            f"{len(prompts) / many:.1f}, {one / many:.1f} x",
            BAR["throughput"],
        ),
        ("answers equal to the solo answer (one, at once, streamed)", f"{equal} of {len(prompts)}", BAR["equal"]),
        ("HTTP and scheduling, of the engine's time: 8 requests at once", f"{statistics.median(shares[8]):.1%}", BAR["share"]),
        ("the same with 8 slots that are always full", f"{statistics.median(shares[16]):.1%}", BAR["share"]),
        ("first frame under load, median and p99", f"{first[49] * 1e3:.0f} and {first[98] * 1e3:.0f} ms", BAR["first"]),
    ]


def _share(load: Load, prompts: Sequence[str], clients: int, lm: unmask.DiffusionLM, config: unmask.SamplerConfig) -> float:
    """What these take over HTTP beyond what they take in this process, as a fraction."""
    _, seconds = load.run(prompts, clients)
    started = time.perf_counter()
    unmask.generate(lm, prompts, config)
    return seconds / (time.perf_counter() - started) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    for name, value in {"clients": 32, "rounds": 3, "length": 64, "batch": 32, "threads": 1, "hidden": 256, "layers": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            random_model(options.hidden, options.layers, options.length + 32).save(folder)
        model = options.model or folder
        rows = measure(unmask.load(model), model, options)
    report("unmask serve", rows)


if __name__ == "__main__":
    main()
