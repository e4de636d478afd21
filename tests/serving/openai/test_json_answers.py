"""Answers that have to be JSON: every one is, whatever the random model would rather write."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from tests.serving.openai.asking import app_of, chunks_of, post
from unmask.serving.scheduler import Scheduler

pytest.importorskip("outlines_core")
NAME = {"type": "string", "maxLength": 6}


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


SCHEMAS: list[tuple[dict[str, Any], int]] = [
    (
        {
            "type": "object",
            "properties": {"name": NAME, "age": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        },
        60,
    ),
    ({"type": "array", "items": {"enum": ["a", 1, None, True]}, "minItems": 1, "maxItems": 4}, 40),
    ({"anyOf": [{"type": "number"}, {"type": "null"}, {"const": "a b"}]}, 24),
    (
        {
            "type": "object",
            "properties": {"when": {"type": "string", "format": "date"}},
            "required": ["when"],
        },
        40,
    ),
    (
        {"$defs": {"n": NAME}, "type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2, "maxItems": 2},
        40,
    ),
    (closed({"a": closed({"b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}})}), 60),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"enum": ["x", "y"]}, {"type": "null"}],
            "items": False,
        },
        40,
    ),
    ({"type": "string", "pattern": "[a-f]{2,8}-[0-9]+"}, 24),
    ({"type": "array", "items": closed({"id": {"type": "string", "format": "uuid"}}), "maxItems": 2}, 120),
    (
        closed(
            {
                "k": {"const": 1},
                "v": {"anyOf": [NAME, {"type": "array", "items": {"type": "number"}, "maxItems": 2}]},
            }
        ),
        60,
    ),
]


async def check(schedulers: list[Scheduler], count: int, schemas: list[tuple[dict[str, Any], int]]) -> int:
    """Ask so many times for each schema, four answers each."""
    checked, apps = 0, [*map(app_of, schedulers)]
    for seed in range(count):
        for number, (schema, size) in enumerate(schemas):
            wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "a"}],
                "response_format": wanted,
                "max_tokens": size,
            }
            body |= {
                "n": 4,
                "temperature": 1.5,
                "seed": seed,
                "diffusion": {"threshold": 0.05} if (seed + number // 2) % 2 else {},
            }
            response = await post(apps[(seed + number) % 2], "chat/completions", body)
            assert response.status_code == 200, response.text
            for choice in response.json()["choices"]:
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
                checked += 1
    return checked


@pytest.mark.parametrize(
    ("count", "schemas"),
    [
        pytest.param(1, SCHEMAS[::2], id="20"),
        pytest.param(1, SCHEMAS, marks=pytest.mark.slow, id="40"),
        pytest.param(250, SCHEMAS, marks=pytest.mark.nightly, id="10,000"),
    ],
)
def test_every_answer_fits_its_schema(count, schemas, service):
    assert asyncio.run(check([service("block_causal", 4), service()], count, schemas)) == 4 * count * len(
        schemas
    )


async def ask_all(scheduler: Scheduler, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of the answers to requests that are sent together."""
    answers = await asyncio.gather(*(post(app_of(scheduler), "chat/completions", body) for body in bodies))
    texts = []
    for body, response in zip(bodies, answers, strict=True):
        choices = [
            chunk["choices"][0] for chunk in (chunks_of(response) if body["stream"] else [response.json()])
        ]
        texts.append(
            "".join(choice.get("delta", choice.get("message")).get("content") or "" for choice in choices)
        )
    return texts


def test_in_company_and_in_streams_answers_fit_and_are_those_of_each_alone(service):
    formats = [
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, size)
        for schema, size in SCHEMAS
    ]
    formats += [({"type": "json_object"}, 4), ({"type": "text"}, 20)]
    common = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": 1.5, "seed": 1}
    bodies = [
        common | {"response_format": wanted, "max_tokens": size, "stream": number % 2 == 0}
        for number, (wanted, size) in enumerate(formats)
    ]
    scheduler = service("block_causal", 4)
    texts = asyncio.run(ask_all(scheduler, bodies))
    for text, (schema, _) in zip(texts, [*SCHEMAS, ({"type": "object"}, 4)], strict=False):
        jsonschema.validate(json.loads(text), schema)
    assert texts == [asyncio.run(ask_all(scheduler, [body]))[0] for body in bodies]
