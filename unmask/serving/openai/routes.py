"""The routes of OpenAI's API, and those beside it for filling gaps and editing."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import Response

from unmask.generation.remote.protocol import model_facts
from unmask.serving.limits import Limits
from unmask.serving.openai.answers import CHAT, EDIT, INFILL, TEXT, Reply
from unmask.serving.openai.chat import call_reader, plan_chat, plan_edit
from unmask.serving.openai.disconnect import DisconnectedError, EventStream, while_connected
from unmask.serving.openai.errors import ErrorAnswer, NotFoundError, OpenAIRoute
from unmask.serving.openai.json_text import to_json
from unmask.serving.openai.models import ModelCard, ModelList, check_model, model_card
from unmask.serving.openai.objects import ChatCompletion, EditCompletion, Infill, TextCompletion
from unmask.serving.openai.plans import Plan, plan_completion, plan_infill
from unmask.serving.openai.progress import Progress
from unmask.serving.openai.requests import ChatRequest, CompletionRequest, EditRequest, FimRequest, InfillRequest, SamplingRequest
from unmask.serving.openai.writers import ChatWriter, EditWriter, InfillWriter, TextWriter
from unmask.serving.service import Event, Service

CLIENT_GONE = 499
"""The status of an answer that nobody waits for."""
NOT_SERVED = (
    *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals", "files", "fine_tuning", "images"),
    *("moderations", "realtime", "responses", "threads", "uploads", "vector_stores", "videos"),
)
"""Routes of OpenAI's that this server does not have."""
STATUSES: dict[int | str, str] = {400: "The request is not valid", 404: "There is no such model", 409: "The weights have another name"}
STATUSES |= {429: "Too many requests wait", 503: "The server is ending", 504: "The time is over", "default": "Any other error"}
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer, "description": what} for status, what in STATUSES.items()}
Answering = Callable[[], Coroutine[Any, Any, Reply]]


def make_router(service: Service, limits: Limits) -> APIRouter:
    """The routes of a service. The owner of a request, who takes turns with others, is `request.state.owner` where a middleware sets it,
    else the client's address."""
    router = APIRouter(prefix="/v1", route_class=OpenAIRoute)
    _add_models(router, service)
    _add_chat(router, service, limits)
    _add_texts(router, service, limits)
    for name in NOT_SERVED:
        for path in (f"/{name}", f"/{name}/{{rest:path}}"):
            router.add_api_route(path, _not_served, methods=["GET", "POST", "DELETE"], response_model=None, include_in_schema=False)
    return router


def _add_models(router: APIRouter, service: Service) -> None:
    created, facts = int(time.time()), model_facts(service.lm)  # which hash the vocabulary

    @router.get("/models")
    async def list_models() -> ModelList:
        """The model of this server."""
        return {"object": "list", "data": [model_card(service, created, facts)]}

    @router.get("/models/{model:path}", responses={status: ERRORS[status] for status in (404, "default")})
    async def retrieve_model(model: str) -> ModelCard:
        """A model."""
        check_model(service, model)
        return model_card(service, created, facts)


def _add_chat(router: APIRouter, service: Service, limits: Limits) -> None:
    @router.post("/chat/completions", responses=_answers(ChatCompletion), response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer messages, by text or calls of tools."""

        async def begin() -> Reply:
            plan, written = await plan_chat(service, body, limits)

            def writer(progress: Progress) -> TextWriter:
                return ChatWriter(progress, call_reader(body, written), logprobs=body.logprobs)

            return Reply(service, body, plan, CHAT, writer)

        return await _answer(service, body, limits, request, begin)

    @router.post("/edit/completions", responses=_answers(EditCompletion), response_model=None)
    async def edit_completions(body: EditRequest, request: Request) -> Response:
        """Write a region of a file again."""

        async def begin() -> Reply:
            return Reply(service, body, await plan_edit(service, body, limits), EDIT, EditWriter)

        return await _answer(service, body, limits, request, begin)


def _add_texts(router: APIRouter, service: Service, limits: Limits) -> None:
    @router.post("/completions", responses=_answers(TextCompletion), response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts, or with a suffix write what stands between."""

        async def begin() -> Reply:
            plan = await plan_completion(service, body, limits)
            return Reply(service, body, plan, TEXT, lambda progress: TextWriter(progress, logprobs=body.logprobs is not None))

        return await _answer(service, body, limits, request, begin)

    @router.post("/fim/completions", responses=_answers(TextCompletion), response_model=None)
    async def fim_completions(body: FimRequest, request: Request) -> Response:
        """Write what stands between a prompt and a suffix."""

        async def begin() -> Reply:
            return Reply(service, body, await plan_completion(service, body, limits), TEXT, TextWriter)

        return await _answer(service, body, limits, request, begin)

    @router.post("/infill", responses=_answers(Infill), response_model=None)
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill the gaps of a text."""

        async def begin() -> Reply:
            return Reply(service, body, await plan_infill(service, body, limits), INFILL, InfillWriter)

        return await _answer(service, body, limits, request, begin)


async def _answer(service: Service, body: SamplingRequest, limits: Limits, request: Request, begin: Answering) -> Response:
    """The answer to a request, whole or as a stream; the work ends if the client disconnects. A stream begins with its first event, so that
    a refusal has its status."""
    check_model(service, body.model)
    owner = getattr(request.state, "owner", None) or (request.client.host if request.client else "")

    async def whole() -> str:
        reply = await begin()
        async with aclosing(_submit(service, body, limits, reply.plan, owner)) as events:
            return to_json(await reply.whole(events))

    async def stream() -> EventStream:
        reply = await begin()
        events = _submit(service, body, limits, reply.plan, owner)
        return EventStream(reply.chunks(_from(await anext(events), events)))

    try:
        if body.stream:
            return await while_connected(request.receive, stream())
        return Response(await while_connected(request.receive, whole()), media_type="application/json")
    except DisconnectedError:
        return Response(status_code=CLIENT_GONE)


async def _submit(service: Service, body: SamplingRequest, limits: Limits, plan: Plan, owner: str) -> AsyncGenerator[Event, None]:
    """The events of a plan."""
    asked = body.diffusion
    timeout = limits.timeout if asked.timeout is None else min(asked.timeout, limits.timeout)
    events = service.submit(plan.work, owner=owner, priority=asked.priority, timeout=timeout, version=asked.version)
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def _from(first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The first event, and those that follow it."""
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _answers(answer: Any) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, for its schema."""
    stream = {"text/event-stream": {"schema": {"type": "string", "description": "With `stream`: chunks, then [DONE]"}}}
    return {200: {"model": answer, "content": stream}, **ERRORS}


async def _not_served(request: Request) -> NoReturn:
    remedy = "It generates text: see /v1/models and docs/serving.md"
    raise NotFoundError(f"{request.url.path} is not served", remedy=remedy)
