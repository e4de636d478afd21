"""Answers that have to be JSON: every one is, whatever the random model would rather write."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from tests.serving.in_process import StepService, make_app, model
from tests.serving.openai.asking import post

pytest.importorskip("outlines_core")
NAME = {"type": "string", "maxLength": 6}
SCHEMAS: list[tuple[dict[str, Any], int]] = [
    ({"type": "object", "properties": {"name": NAME, "age": {"type": "integer"}}, "required": ["name"], "additionalProperties": False}, 60),
    ({"type": "array", "items": {"enum": ["a", 1, None, True]}, "minItems": 1, "maxItems": 4}, 40),
    ({"anyOf": [{"type": "number"}, {"type": "null"}, {"const": "a b"}]}, 24),
    ({"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"]}, 40),
    ({"$defs": {"n": NAME}, "type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2, "maxItems": 2}, 40),
]


async def check(count: int) -> int:
    """Ask so many times for each schema, four answers each."""
    checked, apps = 0, [make_app(StepService(model(*pattern))) for pattern in (("block_causal", 4), ("bidirectional", None))]
    for seed in range(count):
        for number, (schema, size) in enumerate(SCHEMAS):
            wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "response_format": wanted, "max_tokens": size}
            body |= {"n": 4, "temperature": 1.5, "seed": seed, "diffusion": {"threshold": 0.05} if seed % 2 else {}}
            response = await post(apps[(seed + number) % 2], "chat/completions", body)
            assert response.status_code == 200, response.text
            for choice in response.json()["choices"]:
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
                checked += 1
    return checked


@pytest.mark.parametrize(
    "count", [2, pytest.param(50, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.nightly)], ids=["few", "1,000", "10,000"]
)
def test_every_answer_fits_its_schema(count):
    assert asyncio.run(check(count)) == 4 * count * len(SCHEMAS)
