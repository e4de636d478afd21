"""The routes of OpenAI's API, and those beside it for filling gaps and editing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from unmask.generation.remote.protocol import model_facts
from unmask.serving.errors import OpenAIRoute, documented
from unmask.serving.limits import Limits
from unmask.serving.model_service import ModelService
from unmask.serving.openai.answers import CHAT, EDIT, INFILL, TEXT, Reply
from unmask.serving.openai.chat import call_reader, plan_chat, plan_edit
from unmask.serving.openai.disconnect import HEARTBEAT, DisconnectedError, EventStream, while_connected
from unmask.serving.openai.editor_requests import EditRequest, FimRequest
from unmask.serving.openai.json_text import to_json
from unmask.serving.openai.models import ModelCard, ModelList, find_model, model_card
from unmask.serving.openai.objects import (
    ChatCompletion,
    EditCompletion,
    FimCompletion,
    Infill,
    TextCompletion,
)
from unmask.serving.openai.plans import Context, plan_completion, plan_infill
from unmask.serving.openai.requests import ChatRequest, CompletionRequest, InfillRequest, SamplingRequest
from unmask.serving.openai.writers import ChatWriter, EditWriter, FimWriter, InfillWriter, TextWriter
from unmask.serving.service import ReplacedError, time_limit_error
from unmask.serving.submission import Events

CLIENT_GONE = 499
"""The status of an answer that nobody waits for."""
Asked = TypeVar("Asked", bound=SamplingRequest)
Answering = Callable[[Context, Asked], Coroutine[Any, Any, Reply]]

router = APIRouter(prefix="/v1", route_class=OpenAIRoute)


@dataclass(frozen=True)
class Models:
    """The models of an application. The owner of a request, who takes turns with others, is
    `request.state.owner` where a middleware sets it, else the client's address.

    Attributes:
        services: of models, by their names.
        facts: of each model, for clients that must share it.
        created: when they were loaded, in seconds since 1970.
    """

    services: Mapping[str, ModelService]
    limits: Limits
    facts: Mapping[str, dict[str, Any]]
    created: int


def add_routes(app: FastAPI, services: Mapping[str, ModelService], limits: Limits) -> None:
    """Add the routes of models, by their names."""
    facts = {name: model_facts(service.lm) for name, service in services.items()}  # which hash the vocabulary
    app.state.models = Models(services, limits, facts, int(time.time()))
    app.router.routes.extend(router.routes)  # `include_router` makes each of them again


def _models(request: Request) -> Models:
    """Those of the application that has the request."""
    models: Models = request.app.state.models
    return models


def _answers(answer: Any) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, for its schema."""
    stream = {"text/event-stream": {"schema": {"description": "With `stream`: chunks, then [DONE]"}}}
    return {200: {"model": answer, "content": stream}, **documented(400, 404, 409, 429, 503, 504)}


@router.get("/models", responses=documented())
async def list_models(request: Request) -> ModelList:
    """The models of this server."""
    models = _models(request)
    cards = [
        model_card(service, models.limits, models.created, models.facts[name])
        for name, service in models.services.items()
    ]
    return {"object": "list", "data": cards}


@router.get("/models/{model:path}", responses=documented(404))
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """A model."""
    models = _models(request)
    return model_card(find_model(models.services, model), models.limits, models.created, models.facts[model])


@router.post("/chat/completions", responses=_answers(ChatCompletion), response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer messages, by text or calls of tools."""
    return await _answer(body, request, _chat)


@router.post("/edit/completions", responses=_answers(EditCompletion), response_model=None)
async def edit_completions(body: EditRequest, request: Request) -> Response:
    """Write a region of a file again."""
    return await _answer(body, request, _edit)


@router.post("/completions", responses=_answers(TextCompletion), response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete prompts, or with a suffix write what stands between."""
    return await _answer(body, request, _completion)


@router.post("/fim/completions", responses=_answers(FimCompletion), response_model=None)
async def fim_completions(body: FimRequest, request: Request) -> Response:
    """Write what stands between a prompt and a suffix."""
    return await _answer(body, request, _fim)


@router.post("/infill", responses=_answers(Infill), response_model=None)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill the gaps of a text."""
    return await _answer(body, request, _infill)


async def _chat(context: Context, body: ChatRequest) -> Reply:
    plan, written = await plan_chat(context, body)
    make_reader = None if written is None else partial(call_reader, body, written)
    return Reply(
        context.service,
        body,
        plan,
        CHAT,
        partial(ChatWriter, make_reader=make_reader, logprobs=body.logprobs),
    )


async def _edit(context: Context, body: EditRequest) -> Reply:
    return Reply(
        context.service, body, await plan_edit(context, body), EDIT, partial(EditWriter, content=body.content)
    )


async def _completion(context: Context, body: CompletionRequest) -> Reply:
    make_writer = partial(TextWriter, logprobs=body.logprobs is not None)
    plan = await plan_completion(context, body)
    # it writes the tokens of echoed prompts
    return await asyncio.to_thread(Reply, context.service, body, plan, TEXT, make_writer)


async def _fim(context: Context, body: FimRequest) -> Reply:
    return Reply(context.service, body, await plan_completion(context, body), TEXT, FimWriter)


async def _infill(context: Context, body: InfillRequest) -> Reply:
    return Reply(context.service, body, await plan_infill(context, body), INFILL, InfillWriter)


async def _answer(body: Asked, request: Request, make_reply: Answering[Asked]) -> Response:
    """The answer to a request, whole or as a stream; the work ends if the client disconnects."""
    models = _models(request)
    service = find_model(models.services, body.model)
    service.check_version(body.diffusion.version)
    owner = getattr(request.state, "owner", None) or (request.client.host if request.client else "")
    context = Context(service, models.limits, owner)
    try:
        if body.stream:
            return await while_connected(request.receive, _stream(context, body, make_reply))
        return Response(
            await while_connected(request.receive, _whole(context, body, make_reply)),
            media_type="application/json",
        )
    except DisconnectedError:
        return Response(status_code=CLIENT_GONE)


async def _begin(context: Context, body: Asked, make_reply: Answering[Asked]) -> tuple[Reply, Events]:
    """The reply to a request, and its events. The time limit covers both."""
    asked, since = body.diffusion, asyncio.get_running_loop().time()
    seconds = context.limits.timeout if asked.timeout is None else min(asked.timeout, context.limits.timeout)
    submit = partial(
        context.service.submit, owner=context.owner, priority=asked.priority, version=asked.version
    )
    try:
        async with asyncio.timeout_at(since + seconds):
            while True:
                reply = await make_reply(context, body)
                with suppress(ReplacedError):
                    return reply, submit(
                        reply.plan.work, timeout=seconds, since=since, weights=reply.plan.weights
                    )
    except TimeoutError:
        raise time_limit_error(seconds) from None


async def _whole(context: Context, body: Asked, make_reply: Answering[Asked]) -> str:
    reply, events = await _begin(context, body, make_reply)
    async with aclosing(events):
        return to_json(await reply.whole(events))


async def _stream(context: Context, body: Asked, make_reply: Answering[Asked]) -> EventStream:
    """The chunks of an answer. They begin with its first event, so that a refusal has its status, unless that
    takes long."""
    reply, events = await _begin(context, body, make_reply)
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(aclosing(events))
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT):
                await events.ready()
        closing.pop_all()
    return EventStream(reply.chunks(events))
