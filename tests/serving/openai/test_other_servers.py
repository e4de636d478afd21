"""A client of this server, with another one in its place: answers as SGLang, LMDeploy and vLLM write them on
the wire, recorded from their protocols. (A real vLLM is in tests/generation/remote.)"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from tests.generation.remote.stub_servers import serving
from tests.serving.servers import served
from tests.tiny import chat_lm, float64_lm

WORDS = ["It ", "rains", "."]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
SEEN = [("It ", -0.5), ("rains", -1.25), (".", -0.25)]
CONTENT = [
    {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
    for token, value in SEEN
]
OF: dict[str, dict[str, dict[str, Any]]] = {
    "SGLang": {
        "head": {"id": "5f8c0b4b5d0c4e6f9a3c7d21b8f4e602", "created": 1764160000, "model": "runs/sdar"},
        "whole": {"metadata": {"weight_version": "default"}},
        "usage": {**USAGE, "prompt_tokens_details": None, "reasoning_tokens": 0},
        "message": {"reasoning_content": None, "tool_calls": None},
        "delta": {"reasoning_content": None, "tool_calls": None},
        "choice": {"matched_stop": 151645},
        "going on": {"matched_stop": None},
    },
    "LMDeploy": {
        "head": {"id": "1", "created": 1764160000, "model": "runs/sdar"},
        "whole": {},
        "usage": USAGE,
        "message": {"gen_tokens": None, "reasoning_content": None, "tool_calls": None},
        "delta": {"reasoning_content": None, "gen_tokens": None, "tool_calls": []},
        "choice": {},
        "going on": {},
    },
    "vLLM": {
        "head": {"id": "chatcmpl-7d3d1f1a", "created": 1764160000, "model": "runs/served"},
        "whole": {
            "service_tier": None,
            "system_fingerprint": None,
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        },
        "usage": {**USAGE, "prompt_tokens_details": None},
        "message": {
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        },
        "delta": {},
        "choice": {"stop_reason": None, "token_ids": None},
        "going on": {"stop_reason": None, "token_ids": None},
    },
}


def whole(name: str) -> dict[str, Any]:
    """An answer to messages."""
    of = OF[name]
    message = {"role": "assistant", "content": "".join(WORDS), **of["message"]}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": CONTENT},
        "finish_reason": "stop",
        **of["choice"],
    }
    return {
        **of["head"],
        "object": "chat.completion",
        "choices": [choice],
        "usage": of["usage"],
        **of["whole"],
    }


def chunks(name: str) -> list[dict[str, Any]]:
    """The same answer as a stream, with its usage."""
    of = OF[name]

    def chunk(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        more = of["choice"] if finish else of["going on"]
        return {
            "index": 0,
            "delta": {**of["delta"], **delta},
            "logprobs": None,
            "finish_reason": finish,
            **more,
        }

    deltas = [
        chunk({"role": "assistant", "content": ""}, None),
        *(chunk({"content": word}, None) for word in WORDS),
        chunk({}, "stop"),
    ]
    head = {**of["head"], "object": "chat.completion.chunk"}
    return [{**head, "choices": [delta]} for delta in deltas] + [
        {**head, "choices": [], "usage": of["usage"]}
    ]


def replaying(name: str, bodies: list[dict[str, Any]]) -> AbstractContextManager[str]:
    """The address of a server that answers as this one, and adds what it is asked."""

    def answer(_: str, body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        events = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks(name)) + "data: [DONE]\n\n"
        return 200, events.encode() if body.get("stream") else whole(name)

    return serving(answer)


def ask(url: str, model: str) -> dict[str, Any]:
    """What a client reads of an answer, whole and in a stream. It asks with OpenAI's fields alone."""
    fields: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Oslo?"}]}
    fields |= {"max_tokens": 12, "temperature": 0, "seed": 3}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**fields, logprobs=True)
        stream = list(
            client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        )
    [choice], parts = answer.choices, [part for each in stream for part in each.choices]
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    *_, last = stream
    assert last.usage is not None and last.usage.completion_tokens == answer.usage.completion_tokens
    return {
        "text": choice.message.content,
        "streamed": "".join(part.delta.content or "" for part in parts),
        "finish": (choice.finish_reason, parts[-1].finish_reason),
        "tokens": [(each.token, each.logprob) for each in choice.logprobs.content],
        "calls": [
            choice.message.tool_calls or [],
            [call for part in parts for call in part.delta.tool_calls or []],
        ],
        "total": answer.usage.total_tokens - answer.usage.prompt_tokens - answer.usage.completion_tokens,
    }


@pytest.mark.parametrize("name", [*OF])
def test_another_server_takes_its_place(name: str) -> None:
    bodies: list[dict[str, Any]] = []
    with replaying(name, bodies) as url:
        read = ask(url, OF[name]["head"]["model"])
    assert read == {
        "text": "It rains.",
        "streamed": "It rains.",
        "finish": ("stop", "stop"),
        "tokens": SEEN,
        "calls": [[], []],
        "total": 0,
    }
    assert [sorted(body) for body in bodies] == [
        ["logprobs", "max_tokens", "messages", "model", "seed", "temperature"],
        ["max_tokens", "messages", "model", "seed", "stream", "stream_options", "temperature"],
    ]


def test_the_same_client_reads_this_server() -> None:
    with served(chat_lm()) as url:
        read = ask(url, "tiny")
    assert (
        read["streamed"]
        == read["text"]
        == "".join(token for token, _ in read["tokens"] if token != float64_lm().tokenizer.eos_token)
    )
    assert read["finish"][0] == read["finish"][1] and read["calls"] == [[], []] and read["total"] == 0
