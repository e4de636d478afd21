"""The routes of OpenAI's API, and those beside it for filling gaps and editing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from unmask.serving.connections import DisconnectedError, while_connected
from unmask.serving.errors import OpenAIRoute, documented
from unmask.serving.limits import RequestLimits
from unmask.serving.openai.answers import (
    CHAT,
    EDIT,
    FIM,
    HEARTBEAT,
    INFILL,
    TEXT,
    EventStream,
    Kind,
    Reply,
    to_json,
)
from unmask.serving.openai.models import ModelCard, ModelList, find_model, model_card
from unmask.serving.openai.objects import (
    ChatCompletion,
    EditCompletion,
    FimCompletion,
    Infill,
    TextCompletion,
)
from unmask.serving.openai.plans import (
    Context,
    RequestPlan,
    plan_chat,
    plan_completion,
    plan_edit,
    plan_infill,
)
from unmask.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    EditRequest,
    FimRequest,
    InfillRequest,
    SamplingRequest,
)
from unmask.serving.scheduler import Scheduler
from unmask.serving.submission import Events, ReplacedError, TimeLimitError

CLIENT_GONE = 499
"""The status of an answer that nobody waits for."""
Asked = TypeVar("Asked", bound=SamplingRequest)
Planning = Callable[[Context, Asked], Coroutine[Any, Any, RequestPlan]]

router = APIRouter(prefix="/v1", route_class=OpenAIRoute)


def add_routes(app: FastAPI, scheduler: Scheduler, limits: RequestLimits) -> None:
    """Add the routes of a scheduler's models. The owner of a request, who takes turns with others, is
    `request.state.owner` where a middleware sets it, else the client's address."""
    app.state.scheduler, app.state.limits = scheduler, limits
    app.router.routes.extend(router.routes)  # `include_router` makes each of them again


def _answers(answer: Any) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, for its schema."""
    stream = {"text/event-stream": {"schema": {"description": "With `stream`: chunks, then [DONE]"}}}
    return {200: {"model": answer, "content": stream}, **documented(400, 404, 409, 429, 503, 504)}


@router.get("/models", responses=documented())
async def list_models(request: Request) -> ModelList:
    """The models of this server."""
    state = request.app.state
    cards = [model_card(model, state.limits) for model in state.scheduler.models.values()]
    return {"object": "list", "data": cards}


@router.get("/models/{model:path}", responses=documented(404))
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """A model."""
    state = request.app.state
    return model_card(find_model(state.scheduler.models, model), state.limits)


@router.post("/chat/completions", responses=_answers(ChatCompletion), response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer messages, by text or calls of tools."""
    return await _answer(body, request, plan_chat, CHAT)


@router.post("/edit/completions", responses=_answers(EditCompletion), response_model=None)
async def edit_completions(body: EditRequest, request: Request) -> Response:
    """Write a region of a file again."""
    return await _answer(body, request, plan_edit, EDIT)


@router.post("/completions", responses=_answers(TextCompletion), response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete prompts, or with a suffix write what stands between."""
    return await _answer(body, request, plan_completion, TEXT)


@router.post("/fim/completions", responses=_answers(FimCompletion), response_model=None)
async def fim_completions(body: FimRequest, request: Request) -> Response:
    """Write what stands between a prompt and a suffix."""
    return await _answer(body, request, plan_completion, FIM)


@router.post("/infill", responses=_answers(Infill), response_model=None)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill the gaps of a text."""
    return await _answer(body, request, plan_infill, INFILL)


async def _answer(body: Asked, request: Request, make_plan: Planning[Asked], kind: Kind) -> Response:
    """The answer to a request, whole or as a stream; the work ends if the client disconnects."""
    state = request.app.state
    model = find_model(state.scheduler.models, body.model)
    model.check_version(body.diffusion.version)
    owner = getattr(request.state, "owner", None) or (request.client.host if request.client else "")
    begin = partial(_begin, Context(state.scheduler, model, state.limits, owner), body, make_plan, kind)
    try:
        if body.stream:
            return await while_connected(request.receive, _stream(begin))
        content = await while_connected(request.receive, _whole(begin))
        return Response(content, media_type="application/json")
    except DisconnectedError:
        return Response(status_code=CLIENT_GONE)


async def _begin(
    context: Context, body: Asked, make_plan: Planning[Asked], kind: Kind
) -> tuple[Reply, Events]:
    """The reply to a request, and its events. The time limit covers both."""
    asked, since = body.diffusion, asyncio.get_running_loop().time()
    seconds = context.limits.timeout if asked.timeout is None else min(asked.timeout, context.limits.timeout)
    try:
        async with asyncio.timeout_at(since + seconds):
            while True:
                plan = await make_plan(context, body)
                # off the event loop: it writes the tokens of echoed prompts
                reply = await asyncio.to_thread(Reply, context, body, plan, kind)
                with suppress(ReplacedError):
                    return reply, context.scheduler.submit(
                        context.model.name,
                        plan.work,
                        owner=context.owner,
                        priority=asked.priority,
                        timeout=seconds,
                        since=since,
                        version=asked.version,
                        weights=plan.weights,
                    )
    except TimeoutError:
        raise TimeLimitError(seconds) from None


Begin = Callable[[], Coroutine[Any, Any, tuple[Reply, Events]]]


async def _whole(begin: Begin) -> str:
    reply, events = await begin()
    async with aclosing(events):
        return to_json(await reply.whole(events))


async def _stream(begin: Begin) -> EventStream:
    """The chunks of an answer. They begin with its first event, so that a refusal has its status, unless that
    takes long."""
    reply, events = await begin()
    try:
        async with asyncio.timeout(HEARTBEAT):
            await events.ready()
    except TimeoutError:
        pass
    except BaseException:  # also a cancellation, when the client has left: nothing else would end its work
        await events.aclose()
        raise
    return EventStream(reply.chunks(events))
