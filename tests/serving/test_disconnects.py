"""Clients that leave at any moment of their requests, over sockets: afterwards nothing of them is held."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

import unmask
from tests.helpers import resident_memory
from tests.serving.servers import Stall, connect, http_post, posted, scheduler_of, serving
from tests.tiny import cached_chat_lm, chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.serving.openai.answers import EventStream, Reply
from unmask.serving.queues import Turn
from unmask.serving.server import GracefulServer
from unmask.serving.submission import Events, QueueEntry, Submission

AT_ONCE = 20
GROWTH = 6 * 2**20  # bytes
LONG = {"max_tokens": 100, "temperature": 1.0}
FRAMES = {"diffusion": {"stream": "frames"}}
REQUESTS = {
    "a whole answer": posted("completions", prompt="ab", **LONG),
    "a stream": posted("completions", prompt="ab", **LONG, stream=True, n=2),
    "frames": posted(
        "chat/completions", messages=[{"role": "user", "content": "ab"}], **LONG, stream=True, **FRAMES
    ),
    "a search": posted("infill", text="abcdefgh<gap>ijklmnop<gap>q", max_gap=64, stream=True),
    "a search for a suffix": posted("fim/completions", prompt="abcdefgh", suffix="ijklmnop", max_tokens=64),
}
RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing the connection resets it."""


@pytest.fixture(autouse=True)
def _only_new_objects(quick: None) -> None:
    """Objects of imported modules are not looked at again and again; `quick` unfreezes them."""
    gc.collect()
    gc.freeze()


async def leave(url: str, draw: random.Random) -> None:
    """Begin a request and leave, before it is sent, before its answer begins, or within it."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    request = REQUESTS[draw.choice([*REQUESTS])]
    if draw.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    match draw.choice(["half", "whole", "whole", "within", "within"]):
        case "half":
            writer.write(request[: draw.randrange(len(request))])
        case "whole":
            writer.write(request)
            await asyncio.sleep(draw.choice([0, 0.01, 0.1]))
        case "within":
            writer.write(request)
            await reader.read(draw.choice([1, 300, 3000]))
    writer.close()


def held(server: GracefulServer) -> dict[str, int]:
    """What a server, and the process of the tests, hold of requests and connections."""
    gc.collect()
    value, objects = scheduler_of(server).metrics.registry.get_sample_value, gc.get_objects()
    ours = (Submission, Events, QueueEntry, Reply, EventStream, Turn)
    return {
        "running": int(value("unmask_running_sequences") or 0),
        "waiting": int(value("unmask_queue_length") or 0),
        "connections": len(server.server_state.connections),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": sum(isinstance(each, ours) for each in objects),
        "tasks": sum(isinstance(each, asyncio.Task) and not each.done() for each in objects),
    }


def soon(condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true, which is waited for no longer than it takes a server that is busy."""
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("rounds, growth", [(2, None), pytest.param(50, GROWTH, marks=pytest.mark.nightly)])
def test_of_clients_that_leave_nothing_is_held(rounds: int, growth: int | None) -> None:
    """Two run at once, so that most of them wait in the queue. Memory goes up and down, and once in a while
    the allocator takes some 10 MB for good: what is held grows from the first third of the rounds to the
    second, and again to the last."""
    draw, memory = random.Random(0), list[int]()

    async def all_leave(url: str) -> None:
        await asyncio.gather(*(leave(url, draw) for _ in range(AT_ONCE)))

    with serving(chat_lm(), batch_size=2) as (url, server):

        def ask() -> None:
            found = http_post(
                f"{url}/v1/completions", json={"model": "tiny", "prompt": "ab", "max_tokens": 5, "seed": 1}
            ).json()
            expected = unmask.generate(
                cached_chat_lm(), ["ab"], SamplerConfig(max_new_tokens=5, seed=1)
            ).texts
            assert [choice["text"] for choice in found["choices"]] == expected

        ask()
        assert soon(lambda: not server.server_state.connections)
        before = held(server)
        for _ in range(rounds):
            asyncio.run(all_leave(url))
            assert soon(lambda: held(server) == before), (held(server), before)
            memory.append(resident_memory())
        if growth is not None:
            least = [min(memory[third * rounds // 3 : (third + 1) * rounds // 3]) for third in range(3)]
            assert min(least[1] - least[0], least[2] - least[1]) < growth
        ask()


@pytest.mark.parametrize("what", ["a whole answer", "a stream", "frames"])
def test_a_slot_is_free_after_the_step_in_which_its_client_leaves(what: str, stalled: Stall) -> None:
    with serving(chat_lm(), batch_size=2) as (url, server), connect(url) as client:
        value: Any = scheduler_of(server).metrics.registry.get_sample_value
        client.sendall(REQUESTS[what])
        assert soon(lambda: stalled.begun == 1)
        if what != "a whole answer":
            stalled.release()
            assert client.recv(15) == b"HTTP/1.1 200 OK" and soon(lambda: stalled.begun == 2)
        client.close()
        assert soon(lambda: not scheduler_of(server).open_submissions)
        assert value("unmask_running_sequences") > 0
        stalled.release()  # the step that was under way
        assert soon(lambda: value("unmask_running_sequences") == 0)
