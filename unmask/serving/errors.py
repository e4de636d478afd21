"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. No answer names a path of the
server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException
from typing_extensions import TypedDict

from unmask.config.sampler import SamplerConfig
from unmask.errors import DataError, GenerationError, UnmaskError
from unmask.generation.remote.protocol import OPENAI_NAMES
from unmask.serving.submission import OverloadedError, ServiceError

PROTOCOL_FIELDS = ("keys", "version", "priority", "timeout", "length")
"""Fields of `diffusion` that are no settings of `SamplerConfig`."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
STATUSES = {
    400: "The request is not valid",
    401: "The key is wrong or missing",
    403: "The page, or the name of the server, is not allowed",
    404: "There is no such model",
    408: "The body took too long, or the reader is slower than the model",
    409: "The weights have another name",
    413: "The body is too large",
    429: "Too many requests wait",
    500: "The engine failed",
    503: "The server is ending",
    504: "The time is over",
}
COMMON_STATUSES = (401, 403, 408, 413, 500)
"""Errors that any request may have."""
UNREADABLE = "The request is not valid"
CODES = {404: "model_not_found", 429: "rate_limit_exceeded"}
ROUTES = {"unmask.infill": "/v1/infill", "unmask.fim_prompt": "/v1/fim/completions"}
"""Where the API has what remedies name in Python."""
ELSEWHERE = re.compile(r" with length='auto'| \((?=[^()]*--)[^()]*+\)")
"""What remedies say about Python and the command line alone."""
TEXT = re.compile(r"(?:^|(?P<linked> for ))(?:prompt|text)s?(?: (?P<index>\d+))?$")
"""The text of a request, in the location of an error."""
LONGEST_NAME = 256
"""Characters of the name of a field or of a model."""
LONGEST_MESSAGE = 2000
"""Characters of what an error says; texts of clients that it quotes are cut."""
OBJECTS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
"""Pydantic's errors of what is no object, in whose words Python's classes stand."""
DEEPEST = 64
"""Levels of arrays and objects in one field of a body."""


class ErrorDetail(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of an answer that is an error."""

    error: ErrorDetail


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for the schema of the API: these, and those of all routes."""
    # a model each takes milliseconds
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}}
    described: dict[int | str, dict[str, Any]] = {
        status: {"description": STATUSES[status], "content": content}
        for status in sorted({*statuses, *COMMON_STATUSES})
    }
    # without it FastAPI adds 422
    described["default"] = {"model": ErrorAnswer, "description": "Any other error"}
    return described


class NotFoundError(ServiceError):
    """A model or a route that the server does not have."""

    status = 404


class UnsupportedError(UnmaskError):
    """A field of OpenAI's that is not supported."""


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """An error as clients read it."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _cut(message), "type": kind, "param": param and _cut(param), "code": code}}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."


def error_response(
    message: str, status: int, param: str | None = None, code: str | None = None, **headers: str
) -> Response:
    """The answer of an error. Texts of clients that are no valid Unicode are escaped."""
    body = json.dumps(error_body(message, status, param, code))
    return Response(body, status, headers=headers, media_type="application/json")


def error_of(error: UnmaskError, body: Any = None) -> tuple[int, ErrorAnswer]:
    """The status and the body for an error of Unmask, in the terms of the API.

    Args:
        body: of the request, which says by which of several names a field was given.
    """
    status = error.status if isinstance(error, ServiceError) else 400
    given = body if isinstance(body, dict) else {}
    names = _names(given)
    where = _location(error.where or "", given, names)
    known = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    what, remedy = (known.sub(lambda name: names[name[0]], text) for text in (error.what, error.remedy or ""))
    of_text = isinstance(error, DataError)
    message = str(
        UnmaskError(what, where=None if of_text else where or None, remedy=ELSEWHERE.sub("", remedy) or None)
    )
    # a path, say
    param = (
        None
        if of_text and where.partition(".")[0] not in ("messages", "prompt", "tools")
        else where.split(" ")[0]
    )
    code = "unsupported_parameter" if isinstance(error, UnsupportedError) else CODES.get(status)
    return status, error_body(message, status, param or None, code)


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    """The names of the API, in this request, for what Python calls otherwise."""
    tokens = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    log_probs = "top_logprobs" if "messages" in body else "logprobs"
    return {"max_new_tokens": tokens, "top_log_probs": log_probs, **ROUTES}


def _location(where: str, body: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The field of a request that an error is about, and perhaps what is wrong in it, from where the error
    was raised."""
    field = next((name for name in ("messages", "segments", "text", "prompt") if name in body), None)
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int)

    def named(found: re.Match[str]) -> str:
        if found["index"] and many:
            return f"{found['linked'] or ''}{field} {int(found['index']) // (body.get('n') or 1)}"
        return "" if found["linked"] else field or found[0]

    where = TEXT.sub(named, where)
    first = re.split(r"[. ]", where, maxsplit=1)[0]
    if first in names:
        return names[first] + where.removeprefix(first)
    inner = first not in OPENAI_NAMES and (first in SamplerConfig.model_fields or first in PROTOCOL_FIELDS)
    return f"diffusion.{where}" if inner else where


def refusal(errors: Sequence[Mapping[str, Any]], body: Any) -> Response:
    """The answer to a body that the model of a request does not accept. Unknown fields are named first, since
    a misspelt one also leaves another one missing; then the most deeply nested error, since the alternatives
    of a field include single values."""
    first = min(
        errors, key=lambda one: (one["type"] not in ("unknown", "unsupported"), -len(_path(one, body)))
    )
    path, context, kind = _path(first, body), first.get("ctx", {}), first["type"]
    cause, code, separator = context.get("error"), None, ": "
    if kind == "json_invalid":
        return error_response(f"The body is not JSON: {cause}", 400)
    if body in (None, b""):
        return error_response("The body is empty. Send a JSON object", 400)
    # FastAPI reads no other body as JSON, as a page of another site could send it unasked
    if isinstance(body, bytes):
        what = "The body is not read, as nothing says that it is JSON"
        return error_response(f"{what}. Send it with the header Content-Type: application/json", 400)
    if not isinstance(body, dict):
        what = "The body is not a JSON object. Send an object with the fields of the request"
        return error_response(what, 400)
    if isinstance(cause, UnmaskError):  # raised by a config
        path += [cause.where] if cause.where else []
        message = f"{cause.what}. {cause.remedy or ''}".strip()
    elif kind in ("unknown", "extra_forbidden"):  # the latter of a nested config
        path += [context["param"]] if context else []
        name, code, separator = ".".join(path), "unknown_parameter", " "
        inner = name in SamplerConfig.model_fields
        message = "is not a known field" + f', but one of diffusion: "diffusion": {{"{name}": ...}}' * inner
    elif kind == "unsupported":
        path += [context["param"]]
        code, separator, message = "unsupported_parameter", " ", f"is not supported{context['why']}"
    elif kind == "missing":
        path, message = [*path, str(first["loc"][-1])], "is required"
    else:
        message = "should be an object" if kind in OBJECTS else str(first["msg"])
    param = ".".join(path) or None
    return error_response(f"{param or UNREADABLE}{separator}{message}", 400, param, code)


def _path(error: Mapping[str, Any], body: Any) -> list[str]:
    """The keys of an error's location that are in the body: a location also has the names of alternatives."""
    path = []
    for part in error["loc"][1:]:
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int) and part < len(body)
        ):
            body = body[part]
            path.append(str(part))
    return path


def add_error_handlers(app: FastAPI) -> None:
    """Give OpenAI's shape also to the errors of an application that are not of a route: unknown paths and
    methods."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        path = request.url.path
        # embeddings, images, ...
        if path.startswith("/v1/") and not isinstance(request.scope.get("route"), APIRoute):
            return error_response(
                f"{path} is not served. It generates text: see /v1/models and docs/serving.md", 404
            )
        more = (
            ". OpenAI's routes begin with /v1, which its clients take as a part of the address"
            if error.status_code == 404
            else ""
        )
        return error_response(
            f"{request.method} {path}: {error.detail}{more}", error.status_code, **dict(error.headers or {})
        )

    app.add_exception_handler(StarletteHTTPException, answer)


def check_depth(value: Any, where: str) -> None:
    """Raise GenerationError for arrays and objects nested deeper than `DEEPEST`: what reads them calls itself
    for each."""
    level = [value]
    for _ in range(DEEPEST + 1):
        objects = (each.values() for each in level if isinstance(each, dict))
        arrays = (each for each in level if isinstance(each, list))
        if not (level := list(chain.from_iterable(chain(objects, arrays)))):
            return
    raise _too_deep(where)


def _too_deep(where: str) -> GenerationError:
    what = f"is nested deeper than {DEEPEST} levels"
    return GenerationError(what, where=where, remedy="Write it flatter")


async def _checked_body(request: Request) -> Any:
    """The body. Raises GenerationError for one that is too deep, or has a name or a number that is too long.
    What is no JSON is None, and refused later."""
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    except ValueError:  # Python reads no integer of more digits
        what = "a number has too many digits"
        raise GenerationError(what, where="body", remedy="Write a shorter one") from None
    except RecursionError:
        raise _too_deep("body") from None
    for name, value in body.items() if isinstance(body, dict) else ():
        if max(len(name), len(value) if name == "model" and isinstance(value, str) else 0) > LONGEST_NAME:
            what = f"has more than {LONGEST_NAME} characters"
            where = name if name == "model" else f"{name[:20]}..."
            raise GenerationError(what, where=where, remedy="Give a shorter name")
        check_depth(value, name)
    return body


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's shape, and whose bodies are at most `DEEPEST` deep."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            body = None
            try:
                body = await _checked_body(request)
                return await handler(request)
            except RequestValidationError as error:
                return refusal(error.errors(), error.body)
            except StarletteHTTPException as error:
                what = "The body is not JSON in UTF-8" if error.status_code == 400 else str(error.detail)
                return error_response(what, error.status_code)
            except UnmaskError as error:
                status, content = error_of(error, body)
                headers = (
                    {"Retry-After": str(error.retry_after)} if isinstance(error, OverloadedError) else {}
                )
                return Response(json.dumps(content), status, headers=headers, media_type="application/json")

        return answer
