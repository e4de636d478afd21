"""Requests that are nearly right, and requests from the schema of the API: each is answered or refused, and
the service still works."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import unmask
from tests.helpers import resident_memory
from tests.serving.commands import command
from tests.serving.openai.asking import answer, app_of, idle, post
from tests.serving.servers import http_get, http_post, served
from tests.tiny import cached_chat_lm, chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.serving.app import AppSettings, make_app
from unmask.serving.limits import RequestLimits
from unmask.serving.openai.requests import DiffusionSettings
from unmask.serving.scheduler import Scheduler

ALLOWED = {200, 400, 404, 409, 504}
"""504: the time that a request gives itself is over."""
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
GROWTH = 50 * 2**20  # bytes of memory that requests may leave behind, however many
PATTERNS = [("bidirectional", None), ("block_causal", 4), ("causal", None)]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
COMMON = {
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 0.9,
    "seed": 1,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"5": -100},
    "stream": False,
}
COMMON |= {
    "stream_options": {"include_usage": True},
    "user": "u",
    "diffusion": {"steps": 2, "remasking": "entropy", "trace": True, "top_k": 3},
}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
BODIES = {
    "chat/completions": [
        COMMON | {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
        COMMON
        | {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                CALLED,
                {"role": "tool", "content": "1"},
            ]
        },
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 80,
        },
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 40,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": TOOL["function"]["parameters"]},
            },
        },
    ],
    "completions": [
        COMMON | {"prompt": "ab", "echo": True, "logprobs": 0},
        COMMON | {"prompt": [[4, 5], [6]]},
    ],
    "fim/completions": [COMMON | {"prompt": "ab", "suffix": "cd", "diffusion": {"length": "exact"}}],
    "edit/completions": [
        {"messages": [{"role": "user", "content": "<|code_to_edit|>a<|/code_to_edit|>"}], "max_tokens": 4}
    ],
    "infill": [
        {"text": "ab<gap>cd", "max_gap": 3},
        {"segments": ["a", "b", "c"], "lengths": [2, None], "max_gap": 2},
    ],
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
                parent[
                    draw.choice(["x", "top_logprobs", "model", "diffusion", "stream", "response_format"])
                ] = draw.choice(VALUES)
            case "setting" if isinstance(body.get("diffusion", {}), dict):
                body.setdefault("diffusion", {})[draw.choice([*DiffusionSettings.model_fields])] = (
                    copy.deepcopy(draw.choice(VALUES))
                )
    return body


def torn(draw: random.Random, content: bytes) -> bytes:
    """Bytes of which sometimes one is another one, or that end early or come twice."""
    at = draw.randrange(len(content))
    changed = content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    return draw.choice([*[content] * 17, content[:at], changed, content * 2])


async def survive(draw: random.Random, schedulers: list[Scheduler], count: int) -> Counter[int]:
    """How often each status was the answer to mutated bodies."""
    apps, statuses = [*map(app_of, schedulers)], Counter[int]()
    for _ in range(count):
        path = draw.choice([*BODIES])
        body = mutated(draw, {"model": "tiny", **draw.choice(BODIES[path])})
        response = await post(draw.choice(apps), path, torn(draw, json.dumps(body).encode()))
        assert response.status_code in ALLOWED, (path, body, response.text)
        if response.status_code != 200:
            assert {*response.json()["error"]} == {"message", "type", "param", "code"}
        statuses[response.status_code] += 1
    return statuses


@pytest.mark.parametrize(
    "count, growth",
    [
        (150, None),
        pytest.param(3000, None, marks=pytest.mark.slow),
        pytest.param(40_000, GROWTH, marks=pytest.mark.nightly),
    ],
)
def test_mutated_bodies_are_answered_or_refused(count, growth, service):
    schedulers, draw = [service(*pattern) for pattern in PATTERNS], random.Random(count)
    statuses = asyncio.run(survive(draw, schedulers, count // 10))
    before = resident_memory()
    statuses += asyncio.run(survive(draw, schedulers, count - count // 10))
    assert growth is None or resident_memory() - before < growth
    assert statuses[200] > count / 20 and statuses[400] > count / 4
    for pattern, scheduler in zip(PATTERNS, schedulers, strict=True):
        assert idle(scheduler) and scheduler.healthy
        [choice] = answer(scheduler, "completions", prompt="ab", max_tokens=5, seed=1)["choices"]
        assert (
            choice["text"]
            == unmask.generate(
                cached_chat_lm(*pattern), ["ab"], SamplerConfig(max_new_tokens=5, seed=1)
            ).texts[0]
        )


REPEATED = [
    ";a:",
    "(",
    "[",
    "[[:",
    "\\",
    "http://a:",
    "-eyJ",
    "\n",
    "<gap>",
    "<s>",
    "```\n",
    "<tool_call>{",
    '{"a":',
    "<|code_to_edit|>",
    "9",
    "a ",
    "😀",
]
UNNAMED: dict[str, list[tuple]] = {
    "chat/completions": [
        *(("diffusion", "constraint", name) for name in ("regex", "grammar", "json_schema")),
        *(("messages", 0, name) for name in ("name", "tool_call_id", "role")),
        *(
            ("tools", 0, "function", "parameters", "properties", "a", name)
            for name in ("pattern", "$ref", "format", "const", "type")
        ),
        *(("diffusion", "version"), ("tool_choice",), ("logit_bias",), ("response_format", "type"), ("x",)),
    ],
    "completions": [("suffix",), ("diffusion", "stream"), ("stop",), ("diffusion", "constraint", "choice")],
    "infill": [("gap_mark",), ("lengths",)],
}
"""Places of values that the bodies have not."""


def put(body: Any, path: tuple, value: Any) -> Any:
    """The body with a value at a place."""
    body = copy.deepcopy(body)
    at = body
    for key in path[:-1]:
        at = at[key] if isinstance(at, list) else at.setdefault(key, {})
    at[path[-1]] = value
    return body


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, count",
    [
        (30_000, 60),
        pytest.param(60_000, 400, marks=pytest.mark.slow),
        pytest.param(400_000, 4000, marks=pytest.mark.nightly),
    ],
)
def test_a_long_text_in_any_field_takes_a_time_that_its_length_bounds(size, count, service):
    """With a log of requests, which masks secrets. Where the time grew with the square of the length, 60,000
    took 10 seconds and more."""
    draw, app, slow = (
        random.Random(count),
        make_app(service(), AppSettings(RequestLimits(compile_seconds=3), log_requests=True)),
        {},
    )
    asked = []
    for route, body in (
        (route, {"model": "tiny", **body}) for route, bodies in BODIES.items() for body in bodies
    ):
        unnamed = [place for place in UNNAMED.get(route, []) if place[0] != "tools" or "tools" in body]
        asked += [
            (route, body, place, unit) for place in [*places(body), *unnamed] if place for unit in REPEATED
        ]
    for route, body, place, unit in draw.sample(asked, min(count, len(asked))):
        begin = time.process_time()
        response = asyncio.run(post(app, route, put(body, place, unit * (size // len(unit)))))
        assert response.status_code in {*ALLOWED, 413}, (route, place, unit, response.text[:500])
        if (seconds := time.process_time() - begin) > 0.1 + size / 40_000:
            slow[route, place, unit] = seconds
    assert not slow


def narrowed(schema: Any) -> Any:
    """The schema of an API for requests of which some are answered: they name the model, and numbers that may
    be large are small. `default` would allow every status."""
    if isinstance(schema, list):
        return [narrowed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    within = {
        name: narrowed(each) for name, each in schema.items() if name != "default" or "401" not in schema
    }
    if within.get("maximum") == 2**31:
        within["maximum"] = 8
    if "model" in within.get("properties", {}):
        within["properties"]["model"] = {"enum": ["tiny"]}
    return within


def send(url: str, count: int, seed: int) -> Counter[int]:
    """The statuses of so many requests to each operation of a server's schema that fit it, and of as many
    that do not. They are documented, and the answers fit the schema."""
    schema = schemathesis.openapi.from_dict(narrowed(http_get(f"{url}/openapi.json").json()))
    phases, statuses = [Phase.generate, Phase.shrink], Counter[int]()
    for operation in (found.ok() for found in schema.get_all_operations()):
        for mode in MODES if operation.body else MODES[:1]:  # any path is one

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=count,
                database=None,
                deadline=None,
                phases=phases,
                suppress_health_check=[*HealthCheck],
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                response = case.call(base_url=url)
                assert response.status_code in ALLOWED, response.text
                case.validate_response(response, checks=CHECKS)
                statuses[response.status_code] += 1

            ask()
    return statuses


def test_requests_from_the_schema_of_the_api_are_answered_as_it_says():
    """Over a socket."""
    limits = RequestLimits(max_tokens=8, steps=8, n=2, sequences=4, compile_seconds=1.0)
    with served(chat_lm(), AppSettings(limits)) as url:
        statuses = send(url, 15, 0)
        assert statuses[200] > 10 and statuses[400] > 100
        check_answer(url)


@pytest.mark.nightly
def test_ten_thousand_requests_from_the_schema_leave_nothing_behind(tmp_path):
    """In a server of its own, since the tests remember what they send. The first third fills what is kept of
    constraints, up to a bound."""
    chat_lm().save(tmp_path / "tiny")
    words = ["--dtype", "float64", "--max-tokens", 8, "--max-answers", 2, "--queue-size", 4]
    statuses, memory = Counter[int](), []
    with command(tmp_path / "tiny", *words, environment={"MALLOC_ARENA_MAX": "1"}) as (process, url):
        for seed in range(60):
            statuses += send(url, 15, seed)
            memory.append(resident_memory(process.pid))
        check_answer(url)
    assert statuses.total() > 10_000 and min(memory[40:]) - min(memory[20:40]) < GROWTH, memory


def check_answer(url: str) -> None:
    """That a server answers as before."""
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 5, "seed": 1}
    [choice] = http_post(f"{url}/v1/completions", json=body).json()["choices"]
    assert (
        choice["text"]
        == unmask.generate(cached_chat_lm(), ["ab"], SamplerConfig(max_new_tokens=5, seed=1)).texts[0]
    )
