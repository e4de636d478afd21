"""Bodies that are nearly right: each is answered or refused, and the service still works."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest

import unmask
from tests.serving.models import model
from tests.serving.openai.asking import answer, app_of, idle, post
from unmask.config.run import SamplerConfig
from unmask.serving.openai.requests import DiffusionSettings
from unmask.serving.scheduler import Scheduler

PATTERNS = [("bidirectional", None), ("block_causal", 4), ("causal", None)]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
COMMON = {"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "seed": 1, "n": 1, "stop": ["x"], "logit_bias": {"5": -100}, "stream": False}
COMMON |= {
    "stream_options": {"include_usage": True},
    "user": "u",
    "diffusion": {"steps": 2, "policy": "entropy", "trace": True, "top_k": 3},
}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
BODIES = {
    "chat/completions": [
        COMMON | {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
        COMMON | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CALLED, {"role": "tool", "content": "1"}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": "required", "max_tokens": 80},
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 40,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": TOOL["function"]["parameters"]}},
        },
    ],
    "completions": [COMMON | {"prompt": "ab", "echo": True, "logprobs": 0}, COMMON | {"prompt": [[4, 5], [6]]}],
    "fim/completions": [COMMON | {"prompt": "ab", "suffix": "cd", "diffusion": {"length": "exact"}}],
    "edit/completions": [{"messages": [{"role": "user", "content": "<|code_to_edit|>a<|/code_to_edit|>"}], "max_tokens": 4}],
    "infill": [{"text": "ab<gap>cd", "max_gap": 3}, {"segments": ["a", "b", "c"], "lengths": [2, None], "max_gap": 2}],
}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2,
    10**6,
    2**63,
    10**40,
    0.0,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "é" * 50,
]
VALUES += [
    [],
    [[]],
    {},
    {"a": {}},
    [None],
    ["a", 1],
    "<gap>",
    "<s>",
    "</s>",
    "frames",
    [0],
    [10**30],
    {"type": "x"},
    "(" * 500,
    [[[[[]]]]] * 3,
]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, one in inside for each in places(one, (*path, key)))]


def mutated(draw: random.Random, body: dict[str, Any]) -> Any:
    """The body with one to three changes."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2, 3])):
        path = draw.choice([place for place in places(body) if place] or [("model",)])
        *above, last = path
        parent = body
        for key in above:
            parent = parent[key]
        match draw.choice(["replace", "replace", "remove", "add", "setting"]):
            case "replace":
                parent[last] = copy.deepcopy(draw.choice(VALUES))
            case "remove":
                del parent[last]
            case "add" if isinstance(parent, dict):
                parent[draw.choice(["x", "top_logprobs", "model", "diffusion", "stream", "response_format"])] = draw.choice(VALUES)
            case "setting" if isinstance(body.get("diffusion", {}), dict):
                body.setdefault("diffusion", {})[draw.choice([*DiffusionSettings.model_fields])] = copy.deepcopy(draw.choice(VALUES))
    return body


async def survive(draw: random.Random, schedulers: list[Scheduler], count: int) -> dict[int, int]:
    """How often each status was the answer to mutated bodies."""
    apps, statuses = [*map(app_of, schedulers)], dict[int, int]()
    for _ in range(count):
        path = draw.choice([*BODIES])
        body = mutated(draw, {"model": "tiny", **draw.choice(BODIES[path])})
        response = await post(draw.choice(apps), path, json.dumps(body).encode())
        assert response.status_code in (200, 400, 404, 409, 504), (path, body, response.text)
        if response.status_code != 200:
            assert {*response.json()["error"]} == {"message", "type", "param", "code"}
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
    return statuses


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_bodies_are_answered_or_refused(count, service):
    schedulers = [service(*pattern) for pattern in PATTERNS]
    statuses = asyncio.run(survive(random.Random(count), schedulers, count))
    assert statuses[200] > count / 20 and statuses[400] > count / 4
    for pattern, scheduler in zip(PATTERNS, schedulers, strict=True):
        assert idle(scheduler) and scheduler.healthy
        [choice] = answer(scheduler, "completions", prompt="ab", max_tokens=5, seed=1)["choices"]
        assert choice["text"] == unmask.generate(model(*pattern), ["ab"], SamplerConfig(max_new_tokens=5, seed=1)).texts[0]
