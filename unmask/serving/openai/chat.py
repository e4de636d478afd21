"""Chat: messages and tools rendered by the model's template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.data.encoding import encode_messages
from unmask.data.formats import call_arguments
from unmask.errors import GenerationError
from unmask.models.chat_template import without_start
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.errors import check_depth
from unmask.serving.limits import Limits
from unmask.serving.openai.editor_requests import EditRequest
from unmask.serving.openai.edits import edit_prompt
from unmask.serving.openai.plans import Context, Plan, check_answers, plan_prompts
from unmask.serving.openai.requests import ChatRequest, Message
from unmask.serving.openai.settings import (
    check_limit,
    edit_length,
    format_constraint,
    sampler_config,
    tokens_wanted,
)
from unmask.serving.openai.tools import (
    CallFormat,
    CallReader,
    call_constraint,
    call_format,
    check_renders_tools,
)


@dataclass(frozen=True)
class Prompt:
    """What the model reads, and what it may answer.

    Attributes:
        calls: how it writes calls; None: it may not call.
        constraint: what the answer has to match.
    """

    ids: list[int]
    calls: CallFormat | None
    constraint: ConstraintConfig | None


async def plan_chat(context: Context, body: ChatRequest) -> tuple[Plan, CallFormat | None]:
    """The answers to messages, and how the model writes calls, if it may.

    Raises:
        DataError: the model has no chat template, or it refuses the messages.
        GenerationError: `max_tokens` and `max_completion_tokens` differ, the answer has two constraints, or a
            limit is exceeded.
    """
    if body.top_logprobs and not body.logprobs:
        raise GenerationError(
            "has no effect without logprobs", where="top_logprobs", remedy="Set logprobs to true"
        )
    check_answers(context, 1, body)
    called = bool(body.tools) and body.tool_choice not in ("auto", "none")
    prompt = await context.make(partial(_prompt, context.lm, body, context.limits), compiles=called)
    try:
        config = sampler_config(
            context.lm, body, context.limits, constraint=prompt.constraint, top_log_probs=body.top_logprobs
        )
        return await plan_prompts(context, body, [prompt.ids], config), prompt.calls
    except GenerationError as error:
        where = error.where or ""
        if (
            prompt.constraint is None
            or body.diffusion.constraint is not None
            or not where.startswith("constraint")
        ):
            raise
        cause = "response_format" if body.response_format is not None else "tool_choice"
        raise error.moved(cause + where.removeprefix("constraint")) from None


async def plan_edit(context: Context, body: EditRequest) -> Plan:
    """The edited region of a file. Errors as of `plan_chat`, and GenerationError for a message without one
    region."""
    check_answers(context, 1, body)
    messages = edit_prompt(body.content, body.instruction)
    config, ids = await asyncio.to_thread(_edit_settings, context.lm, body, context.limits, messages)
    return await plan_prompts(context, body, [ids], config)


def _edit_settings(
    lm: DiffusionLM, body: EditRequest, limits: Limits, messages: list[dict[str, str]]
) -> tuple[SamplerConfig, list[int]]:
    """The settings of an edit, and the ids of its prompt."""
    ids = encode_messages(lm.tokenizer, messages)
    default = edit_length(lm, body, limits, len(ids)) if tokens_wanted(body) is None else None
    return sampler_config(lm, body, limits, default_tokens=default), ids


def call_reader(body: ChatRequest, written: CallFormat) -> CallReader:
    """What reads the calls of an answer."""
    return CallReader(
        written, {tool.function.name for tool in body.tools or []}, single=not body.parallel_tool_calls
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as one string, and the arguments of calls as objects."""
    rendered = []
    for message in messages:
        content = message.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        one: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": text,
        }
        one |= {
            key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None
        }
        if message.tool_calls:
            calls = [(call.id, call.function) for call in message.tool_calls]
            one["tool_calls"] = [
                {
                    "id": each,
                    "type": "function",
                    "function": {"name": called.name, "arguments": _arguments(called.arguments)},
                }
                for each, called in calls
            ]
        rendered.append(one)
    return rendered


def _prompt(lm: DiffusionLM, body: ChatRequest, limits: Limits) -> Prompt:
    constraint = format_constraint(body.response_format)
    messages = without_start(lm.tokenizer, template_messages(body.messages))
    if body.tool_choice == "none" or not body.tools:
        if body.tool_choice not in ("none", "auto"):
            raise GenerationError(
                "there are no tools", where="tool_choice", remedy="Give some, or leave it out"
            )
        return Prompt(encode_messages(lm.tokenizer, messages), None, constraint)
    if constraint is not None:
        what = "an answer that has to match it can call no tool"
        raise GenerationError(
            what, where="response_format", remedy="Leave it out, or set tool_choice to none"
        )
    schemas = [tool.model_dump(exclude_none=True) for tool in body.tools]
    check_limit(len(json.dumps(schemas)), limits.schema_bytes, "tools", "bytes")
    check_renders_tools(lm.tokenizer)
    written = call_format(lm.tokenizer)
    ids = encode_messages(lm.tokenizer, messages, schemas)
    return Prompt(ids, written, call_constraint(body, body.tools, written))


def _arguments(text: str) -> Any:
    """The arguments of a call, which are bounded."""
    value = call_arguments(text)
    check_depth(value, "messages.tool_calls.function.arguments")
    return value
