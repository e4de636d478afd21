"""What is refused before the application sees it, and what all answers carry. Pure ASGI; none is skipped."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from time import perf_counter
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unmask.redaction import shown_line
from unmask.serving.errors import error_response
from unmask.serving.limits import RequestLimits
from unmask.serving.metrics import COUNTED, OTHER, RequestMetrics

logger = logging.getLogger(__name__)
DRAINED, DRAIN_SECONDS = 16, 2.0
"""The times its limit, and the seconds, that a body is still read when it is too large."""
CLOSE = {"Connection": "close"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class CountRequests:
    """ASGI: counts the answers of an application, and how long they take, but for those that another process
    has counted."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, started = 499, perf_counter()  # until an answer begins: the client is gone

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            if not scope.get(COUNTED):
                route = getattr(scope.get("route"), "path", None) or OTHER
                self.metrics.requests.labels(route, str(status)).inc()
                self.metrics.request_seconds.labels(route).observe(perf_counter() - started)


class SecurityHeaders:
    """Answers carry the headers that keep browsers from running or embedding what they should not, and
    answers of the API are not kept."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                if scope["path"].startswith("/v1"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        await self.app(scope, receive, secured)


class SameOrigin:
    """Refuses what the pages of other sites send by a browser, which can reach addresses that others cannot.

    Args:
        allowed: origins of other sites that may.
        loopback: whether the server is for this machine only: a name that resolves to it is then refused (DNS
            rebinding).
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = (), *, loopback: bool = False):
        self.app, self.allowed, self.loopback = app, allowed, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if self.loopback and _split(f"//{host}").hostname not in LOOPBACK:
                what = (
                    "this server answers only to the names of this machine. Start it with an API key for "
                    "others"
                )
                return await error_response(what, 403)(scope, receive, send)
            if origin is not None and origin not in self.allowed and _split(origin).netloc != host:
                what = "a page of another site may not use this server. Name its origin with --allow-origin"
                return await error_response(what, 403)(scope, receive, send)
        await self.app(scope, receive, send)


class ApiKeys:
    """Demands one of the keys, as a bearer token; browsers may send it as a password, for which they ask.

    Args:
        keys: none: nothing is demanded.
        open_paths: paths for which no key is demanded here.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]):
        self.app, self.keys, self.open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.keys and scope["path"] not in self.open_paths:
            given = given_key(Headers(scope=scope).get("authorization", ""))
            matches = [keys_match(given, key) for key in self.keys]  # all are compared, whichever it is
            if not any(matches):
                challenge = "Bearer" if scope["path"].startswith("/v1") else 'Basic realm="unmask"'
                what, fields = "the API key is wrong or missing", {"WWW-Authenticate": challenge}
                return await error_response(what, 401, code="invalid_api_key", **fields)(scope, receive, send)
            if len(self.keys) > 1:
                scope.setdefault("state", {})["owner"] = f"key {matches.index(True)}"
        await self.app(scope, receive, send)


class BodyLimits:
    """Reads the body of a request before the application is called: within its limits of size and time, so
    that slow clients hold no more than a connection.

    Args:
        log: whether the log gets a line for each request, with its body.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, *, log: bool = False):
        self.app, self.limits, self.log = app, limits, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        parts = request.stream()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                body = await self._read(request.headers.get("content-length", "0"), parts)
        except ClientDisconnect:
            return
        except TimeoutError:
            what = f"the body did not arrive within {self.limits.body_seconds:g} seconds"
            return await error_response(what, 408, **CLOSE)(scope, receive, send)
        except BodyTooLargeError:
            await self._drain(parts)
            what = f"the body has more than {self.limits.body_bytes:,} bytes"
            return await error_response(what, 413, **CLOSE)(scope, receive, send)
        if self.log:
            shown = shown_line(scope["path"]), shown_line(body.decode(errors="replace"))
            logger.info("%s %s %s", scope["method"], *shown)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, read, send)

    async def _read(self, length: str, parts: AsyncIterator[bytes]) -> bytes:
        """The body, of a length that the client announces."""
        if length.isdecimal() and int(length) > self.limits.body_bytes:
            raise BodyTooLargeError
        body = bytearray()
        async for part in parts:
            body += part
            if len(body) > self.limits.body_bytes:
                raise BodyTooLargeError
        return bytes(body)

    async def _drain(self, parts: AsyncIterator[bytes]) -> None:
        """Read some of the rest of a body: a client that still sends when the connection is closed would not
        see the answer."""
        left = DRAINED * self.limits.body_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DRAIN_SECONDS):
                async for part in parts:
                    left -= len(part)
                    if left <= 0:
                        return


class BodyTooLargeError(Exception):
    """A body that is not read to its end."""


def given_key(authorization: str) -> str:
    """The key in an Authorization header: the bearer token, or the password; empty: none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return rest.strip() if scheme.lower() == "bearer" else ""


def keys_match(given: str, key: str) -> bool:
    """Whether a key is right, in a time that depends neither on where it differs nor on the length of the
    right one."""
    one, other = (hashlib.sha256(each.encode(errors="surrogateescape")).digest() for each in (given, key))
    return hmac.compare_digest(one, other)


def _split(url: str) -> SplitResult:
    """The parts of a URL; of what is none, empty ones."""
    try:
        return urlsplit(url)
    except ValueError:  # such as of [
        return urlsplit("")
