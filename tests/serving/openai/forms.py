"""Answers of a form, JSON or calls of tools, by the official client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

pytest.importorskip("outlines_core")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
QUESTION = [{"role": "user", "content": "Is it raining in Oslo?"}]


def check_json(client: openai.OpenAI, **more: Any) -> None:
    """Chats answer with JSON, of a schema where one is given."""
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    asked = {"model": "tiny", "messages": QUESTION, "temperature": 1.0, **more}
    for seed in range(3):
        answer = client.chat.completions.create(**asked, max_tokens=64, seed=seed, response_format=wanted)
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"
    free = client.chat.completions.create(
        **asked, max_tokens=24, seed=1, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(free.choices[0].message.content), dict)


def check_tool_call(client: openai.OpenAI, choice: Any, *, stream: bool, **more: Any) -> None:
    """A chat calls a tool as it must, and continues after the result."""
    asked = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER, CLOCK], "tool_choice": choice, **more}
    asked |= {"max_tokens": 112, "temperature": 1.0, "seed": 4}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked)
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
    assert call.function.name in ("weather", "clock")
    schema = SCHEMA if call.function.name == "weather" else {"maxProperties": 0}
    jsonschema.validate(json.loads(call.function.arguments), schema)
    given = call.model_dump(exclude={"index": True, "function": {"parsed_arguments"}})
    sent_back = {"role": "assistant", "content": None, "tool_calls": [given]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    following = client.chat.completions.create(
        model="tiny", messages=[*QUESTION, sent_back, result], tools=[WEATHER], max_tokens=4, **more
    )
    assert following.choices[0].finish_reason in ("stop", "length")
