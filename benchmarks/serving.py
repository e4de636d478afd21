"""Many clients of `unmask serve` at once against one at a time: throughput, equal answers, what HTTP and
scheduling cost, first frames. And short answers, one after the other, on a connection that is kept.

    python -m benchmarks.serving [MODEL] --clients 32 --length 64 --batch 32

MODEL: a block-causal or other model; unset: a random block-causal Llama of --hidden and --layers. The server
is a process of its own.
What HTTP and scheduling cost is measured with 8 requests at once, and with 16 clients of 8 slots, which are
then always full: the time from the first request to the last answer beyond that of the engine's steps; the
same beyond the processor time of the engine's thread, in which it does not wait for other threads (on a CPU,
with one thread); and beyond `unmask.generate` on the same prompts, 8 at a time, which all begin in the same
step, as requests that come one after the other do not.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx2 as httpx
import psutil
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
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=context, initializer_range=0.2, **shape, **ids
    )
    torch.manual_seed(0)
    return make_diffusion(
        AutoModelForCausalLM.from_config(config), tokenizer, attention="block_causal", block_size=4
    )


@contextmanager
def serving(model: str, batch: int, threads: int) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server in a process of its own, and the process."""
    words = [
        sys.executable,
        "-m",
        "unmask",
        "serve",
        model,
        "--name",
        "model",
        "--port",
        "0",
        "--batch-size",
        str(batch),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield (
            next(line for line in process.stdout if "is served as" in line).split()[-1],
            psutil.Process(process.pid),
        )
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
        async with httpx.AsyncClient(
            base_url=self.url, timeout=600, limits=limits, trust_env=False
        ) as client:

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

    def kept(self, count: int) -> tuple[float, float]:
        """The median seconds of `GET /v1/models` and of an answer of one token, one after the other on a
        connection that is kept."""
        one_token = self._body("a", max_tokens=1)
        with httpx.Client(base_url=self.url, timeout=600, trust_env=False) as client:
            listing = _median_seconds(lambda: client.get("/v1/models"), count)
            return listing, _median_seconds(lambda: client.post("/v1/completions", json=one_token), count)

    async def _stream(self, client: httpx.AsyncClient, prompt: str) -> str:
        started, first, text = time.perf_counter(), 0.0, ""
        async with client.stream(
            "POST", "/v1/completions", json=self._body(prompt, stream=True, diffusion={"stream": "frames"})
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "frame" in chunk.get("diffusion", {}) and not first:
                        first = time.perf_counter() - started
                    text += "".join(choice["text"] or "" for choice in chunk["choices"])
        self.first_frames.append(first)
        return text


def _median_seconds(ask: Callable[[], httpx.Response], count: int) -> float:
    """Of so many answers after a first one."""
    seconds = []
    for _ in range(count + 1):
        started = time.perf_counter()
        ask().raise_for_status()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def measure(lm: unmask.DiffusionLM, model: str, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The rows of the table."""
    prompts = [
        "".join(ALPHABET[(i * 7 + j * j) % 26] for j in range(4 + i % 12))
        for i in range(options.clients * options.rounds)
    ]
    config = unmask.SamplerConfig(max_new_tokens=options.length, batch_size=8)
    solo = [unmask.generate(lm, [prompt], config).texts[0] for prompt in prompts]
    with serving(model, options.batch, options.threads) as (url, _):
        load = Load(url, options.length)
        load.run(prompts[:4], 1)  # warm
        one_texts, one = load.run(prompts, 1)
        many_texts, many = load.run(prompts, options.clients)
        stream_texts, _ = load.run(prompts, options.clients, stream=True)
    with serving(model, 8, options.threads) as (url, server):
        eight = Load(url, options.length)
        eight.run(prompts[:8], 8)
        kept = eight.kept(50)
        unmask.generate(lm, prompts[:8], config)
        costs = [
            [_cost(eight, server, *burst, lm, config) for _ in range(options.rounds)]
            for burst in ((prompts[:8], 8), (prompts, 16))
        ]
    equal = sum(
        texts == [solo[i]] * 3
        for i, texts in enumerate(map(list, zip(one_texts, many_texts, stream_texts, strict=True)))
    )
    first = statistics.quantiles(load.first_frames, n=100)
    return [
        (
            f"{options.clients} clients at once: requests per second, against one",
            f"{len(prompts) / many:.1f}, {one / many:.1f} x",
            BAR["throughput"],
        ),
        (
            "answers equal to the solo answer (one, at once, streamed)",
            f"{equal} of {len(prompts)}",
            BAR["equal"],
        ),
        ("HTTP and scheduling: 8 requests at once, and 8 slots always full", "", ""),
        ("  beyond the engine's steps", _medians(costs, lambda cost: cost.steps), BAR["share"]),
        (
            "  beyond the processor time of its thread",
            _medians(costs, lambda cost: cost.thread),
            BAR["share"],
        ),
        ("  beyond `unmask.generate`, where all begin at once", _medians(costs, lambda cost: cost.alone), ""),
        (
            "on a kept connection: /v1/models, and one token",
            " and ".join(f"{each * 1e3:.1f} ms" for each in kept),
            "",
        ),
        (
            "first frame under load, median and p99",
            f"{first[49] * 1e3:.0f} and {first[98] * 1e3:.0f} ms",
            BAR["first"],
        ),
    ]


class Cost(NamedTuple):
    """Fractions by which requests take longer than ..."""

    steps: float  # the steps of the engine
    thread: float  # the processor time of the engine's thread
    alone: float  # the same prompts without a server


def _medians(costs: Sequence[Sequence[Cost]], figure: Callable[[Cost], float]) -> str:
    return " and ".join(f"{statistics.median(map(figure, rounds)):.1%}" for rounds in costs)


def _cost(
    load: Load,
    server: psutil.Process,
    prompts: Sequence[str],
    clients: int,
    lm: unmask.DiffusionLM,
    config: unmask.SamplerConfig,
) -> Cost:
    def seconds() -> tuple[float, dict[int, float]]:
        """In the engine's steps so far, and the processor time of each thread."""
        figures = httpx.get(f"{load.url}/metrics", trust_env=False).text.splitlines()
        steps = next(line for line in figures if line.startswith("unmask_engine_seconds_total"))
        return float(steps.split()[-1]), {
            thread.id: thread.user_time + thread.system_time for thread in server.threads()
        }

    steps_before, before = seconds()
    _, wall = load.run(prompts, clients)
    steps, after = seconds()
    thread = max(after[number] - before[number] for number in before.keys() & after.keys())  # the engine's
    started = time.perf_counter()
    unmask.generate(lm, prompts, config)
    return Cost(
        wall / (steps - steps_before) - 1, wall / thread - 1, wall / (time.perf_counter() - started) - 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    for name, value in {
        "clients": 32,
        "rounds": 3,
        "length": 64,
        "batch": 32,
        "threads": 1,
        "hidden": 256,
        "layers": 6,
    }.items():
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
