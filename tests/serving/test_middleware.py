"""The middlewares, each before a small application: what passes, and what is refused with which words."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unmask.serving.limits import RequestLimits
from unmask.serving.middleware import ApiKeys, BodyLimits, SameOrigin, SecurityHeaders, given_key, keys_match

SMALL = RequestLimits(body_bytes=10, body_seconds=0.05)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body, and with the owner in a header."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    owner = scope.get("state", {}).get("owner", "")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"owner", owner.encode())]})
    await send({"type": "http.response.body", "body": body})


def call(
    app: ASGIApp, *parts: bytes | float | None, path: str = "/v1/x", headers: Mapping[str, str] | None = None
) -> Answer | None:
    """The answer of an application to a body in parts; a number: seconds to wait, None: the client goes.
    None: no answer."""
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    sent: list[Message] = []
    arriving: Iterable[Any] = iter(parts or (b"",))
    left = len(parts or (b"",))

    async def receive() -> Message:
        nonlocal left
        for part in arriving:
            left -= 1
            if isinstance(part, float):
                await asyncio.sleep(part)
            elif part is None:
                return {"type": "http.disconnect"}
            else:
                return {"type": "http.request", "body": part, "more_body": left > 0}
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    if not sent:
        return None
    return Answer(
        sent[0]["status"],
        {n.decode(): v.decode() for n, v in sent[0]["headers"]},
        b"".join(m["body"] for m in sent[1:]),
    )


def answer(app: ASGIApp, *parts: bytes | float | None, **request: Any) -> Answer:
    found = call(app, *parts, **request)
    assert found is not None
    return found


def test_a_body_within_the_limits_arrives_whole() -> None:
    assert answer(BodyLimits(echo, SMALL), b"01234", b"", b"56789").body == b"0123456789"
    assert answer(BodyLimits(echo, SMALL)).body == b""


@pytest.mark.parametrize(
    "headers, parts",
    [({"Content-Length": "11"}, ()), ({}, (b"01234567890",)), ({}, (b"0123456789", b"0", b"1"))],
)
def test_a_larger_body_is_refused_whether_it_says_so_or_comes_in_chunks(
    headers: dict[str, str], parts: tuple[bytes, ...]
) -> None:
    refused = answer(BodyLimits(echo, SMALL), *parts, headers=headers)
    assert (refused.status, refused.message) == (413, "the body has more than 10 bytes")
    assert refused.headers["connection"] == "close"


@pytest.mark.parametrize("more", [True, False])
def test_of_a_body_that_is_too_large_little_more_is_read(more: bool) -> None:
    read = 0

    async def receive() -> Message:
        nonlocal read
        read += 10
        return {"type": "http.request", "body": b"0123456789", "more_body": more}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"400000000")]}
    asyncio.run(BodyLimits(echo, SMALL)(scope, receive, send))
    assert sent[0]["status"] == 413 and read == (160 if more else 10)


def test_a_body_that_comes_too_slowly_is_refused() -> None:
    refused = answer(BodyLimits(echo, SMALL), b"0", 5.0, b"1")
    assert (refused.status, refused.message) == (408, "the body did not arrive within 0.05 seconds")


def test_nobody_is_answered_who_has_gone() -> None:
    assert call(BodyLimits(echo, SMALL), b"0", None) is None


def test_prompts_are_logged_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer(BodyLimits(echo, SMALL), b"secret")
    assert "secret" not in caplog.text
    answer(BodyLimits(echo, SMALL, log=True), b"sec\x1bret", path="/v1/completions")
    assert "POST /v1/completions sec" in caplog.text and "\x1b" not in caplog.text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x85", "\u2028", "\x0b"])
def test_no_line_end_of_a_client_begins_a_line_of_the_log(end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    forged = f"{end}2026-01-01 00:00:00,000 POST /v1/completions forged"
    answer(BodyLimits(echo, RequestLimits(), log=True), forged.encode(), path=f"/v1/x{forged}")
    [record] = caplog.records
    assert len(record.getMessage().splitlines()) == 1 and record.getMessage().count("forged") == 2


def test_a_body_of_the_largest_size_is_logged_in_a_time_that_its_length_bounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    begin = time.process_time()
    answer(BodyLimits(echo, RequestLimits(), log=True), b";a:" * 2**18)
    assert time.process_time() - begin < 5


KEYED = ApiKeys(echo, ["one", "other"], {"/health"})


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize(
    "header, owner", [("Bearer one", "key 0"), ("bearer other", "key 1"), (basic("one"), "key 0")]
)
def test_each_key_is_an_owner(header: str, owner: str) -> None:
    assert answer(KEYED, headers={"Authorization": header}).headers["owner"] == owner


@pytest.mark.parametrize(
    "header",
    ["", "one", "Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "Basic \u00e9", basic("on")],
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/", "/index.html", "/healthy", "/health/", "/openapi.json"]
)
def test_without_the_key_everything_but_health_is_refused(header: str, path: str) -> None:
    refused = answer(KEYED, path=path, headers={"Authorization": header} if header else {})
    assert (refused.status, refused.message) == (401, "the API key is wrong or missing")
    assert refused.headers["www-authenticate"] == (
        "Bearer" if path.startswith("/v1") else 'Basic realm="unmask"'
    )
    assert json.loads(refused.body)["error"]["code"] == "invalid_api_key"


def test_health_is_open_and_a_server_without_keys_demands_none() -> None:
    assert answer(KEYED, path="/health").status == 200
    assert answer(ApiKeys(echo, [], set())).status == 200


def test_keys_are_compared_whole() -> None:
    assert (
        keys_match("k", "k")
        and not keys_match("", "k")
        and not keys_match("k", "kk")
        and not keys_match("\udcff", "k")
    )
    assert given_key("Bearer  k ") == "k" and given_key("Digest k") == ""


HOST = {"Host": "localhost:8000"}


@pytest.mark.parametrize(
    "headers, status",
    [
        (HOST, 200),
        (HOST | {"Origin": "http://localhost:8000"}, 200),
        (HOST | {"Origin": "https://app.example"}, 200),
        (HOST | {"Origin": "http://localhost:8001"}, 403),
        (HOST | {"Origin": "https://evil.example"}, 403),
        (HOST | {"Origin": "null"}, 403),
        (HOST | {"Origin": "http://["}, 403),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "["}, 403),
        ({}, 403),
    ],
)
def test_pages_of_other_sites_are_refused_and_names_that_lead_here(
    headers: dict[str, str], status: int
) -> None:
    guarded = SameOrigin(echo, ["https://app.example"], loopback=True)
    assert answer(guarded, headers=headers).status == status


def test_a_server_with_a_key_may_have_any_name() -> None:
    assert answer(SameOrigin(echo), headers={"Host": "gpu.example"}).status == 200
    refused = answer(SameOrigin(echo), headers={"Host": "gpu.example", "Origin": "http://evil.example"})
    assert (
        refused.message
        == "a page of another site may not use this server. Name its origin with --allow-origin"
    )


def test_answers_have_the_headers_that_protect_browsers() -> None:
    headers = answer(SecurityHeaders(echo)).headers
    assert (
        "default-src 'self'" in headers["content-security-policy"]
        and "unsafe" not in headers["content-security-policy"]
    )
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert "cache-control" not in answer(SecurityHeaders(echo), path="/index.html").headers
