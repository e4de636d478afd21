"""Errors and ends name what the client gave, and what cut an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.errors import raises
from tests.tiny import float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.errors import ConfigError
from unmask.serving.limits import RequestLimits
from unmask.serving.openai import plans
from unmask.serving.openai.plans import Context, plan_chat, plan_completion
from unmask.serving.openai.requests import ChatRequest, CompletionRequest
from unmask.serving.scheduler import Scheduler

HALF = {"type": "object", "properties": {"a": {"const": "\ud800"}}}


async def planned(lm: Any, plan: Any, body: Any) -> Any:
    scheduler = Scheduler({"tiny": lm})
    scheduler.start()
    try:
        return await plan(Context(scheduler, scheduler.models["tiny"], RequestLimits(), "a"), body)
    finally:
        await scheduler.stop(0)


def test_a_schema_that_is_no_json_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = float64_lm()
    monkeypatch.setattr(
        lm.tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": HALF}}
    body = ChatRequest.model_validate(
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "response_format": wanted}
    )
    with raises(ConfigError, where="response_format.json_schema.schema"):
        asyncio.run(planned(lm, plan_chat, body))


def test_a_schema_that_is_nested_too_deeply_is_not_half_a_character() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    with raises(ConfigError, where="json_schema"):
        ConstraintConfig(json_schema=schema)


@pytest.mark.parametrize("most", [1, 9])
def test_a_gap_of_the_longest_length_that_is_searched_may_be_cut(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MOST_SEARCHED", most)
    body = CompletionRequest(model="tiny", prompt="abcd", suffix="fedcba", max_tokens=20)
    [region] = asyncio.run(planned(float64_lm("phi", "bidirectional"), plan_completion, body)).regions
    assert region.fills == (region.stop - region.start < most) and (region.fills or most == 1)
