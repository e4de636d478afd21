"""Over real sockets: clients that are slow on purpose, idle, or too many, are cut off, and others are served
meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.helpers import each_once, partly_slow
from tests.serving.servers import connect, listening, read_all
from unmask.serving.connections import ConnectionLimits, LimitedConnection
from unmask.serving.limits import RequestLimits
from unmask.serving.middleware import BodyLimits
from unmask.serving.server import open_port

HEAD = b"POST /large HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
LIMITS = ConnectionLimits(connections=4, head_seconds=0.3, write_seconds=0.3)
LARGE = 64 * 1024 * 1024
BEGUN = threading.Event()  # an answer that is large


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with little; at /large with more than any buffer holds; at a number with as many bytes at
    once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    path = scope["path"].removeprefix("/")
    if path == "large":
        BEGUN.set()
        for _ in range(LARGE // 65536):
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
    elif path:
        await send({"type": "http.response.body", "body": bytes(int(path)), "more_body": True})
    await send({"type": "http.response.body", "body": b"done"})


@contextmanager
def serving(
    app: ASGIApp, limits: ConnectionLimits = LIMITS, buffer: int | None = None, host: str = "127.0.0.1"
) -> Iterator[tuple[str, uvicorn.Server]]:
    """`buffer`: the bytes that the system holds of an answer until its client reads them; None: as many as it
    likes."""
    http: Any = partial(LimitedConnection, limits=limits)
    server = uvicorn.Server(
        uvicorn.Config(app, http=http, lifespan="off", log_level="critical", timeout_keep_alive=1)
    )
    with open_port(host, 0) as listener:
        if buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        with listening(server, listener):
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{listener.getsockname()[1]}", server


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_short_answer_on_a_kept_connection_does_not_wait_for_an_acknowledgment(host: str) -> None:
    """With Nagle's algorithm, head and body being written apart, every answer but the first waits 40 ms."""
    seconds = []
    with (
        serving(application, ConnectionLimits(), host=host) as (url, server),
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        for _ in range(10):
            began = time.monotonic()
            assert client.get("/").text == "done"
            seconds.append(time.monotonic() - began)
        [connection] = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert min(seconds[1:]) < 0.03


@pytest.mark.parametrize("sent", [b"", b"G", HEAD])
def test_half_a_request_is_not_held(sent: bytes) -> None:
    with serving(application) as (url, server), connect(url) as slow:
        slow.sendall(sent)
        assert read_all(slow) == b""
        assert not server.server_state.connections


def test_bytes_now_and_then_do_not_make_a_head_last() -> None:
    with serving(application) as (url, _), connect(url) as slow:
        started = time.monotonic()
        with pytest.raises(OSError):
            while True:
                slow.sendall(b"G")
                time.sleep(0.02)
        assert time.monotonic() - started < 20


def test_a_second_request_on_a_connection_has_the_same_time() -> None:
    with serving(application) as (url, server), connect(url) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET / HT")
        read_all(slow)
        assert not server.server_state.connections


def test_an_idle_connection_is_closed() -> None:
    with serving(application) as (url, server), connect(url) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_all(idle)
        assert not server.server_state.connections


def test_who_does_not_read_its_answer_is_cut_off() -> None:
    with serving(application) as (url, server), connect(url) as deaf:
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert BEGUN.wait(60)
        while server.server_state.connections:
            time.sleep(0.01)
        assert len(read_all(deaf)) < LARGE
    with serving(application, ConnectionLimits(write_seconds=60)) as (url, _):  # but who reads gets all of it
        assert len(httpx.get(f"{url}/large").content) == LARGE + 4


@each_once("reads, path, size", [False, True], [("40000", 40_000), ("large", LARGE)])
def test_who_reads_a_byte_now_and_then_is_cut_off(path: str, size: int, reads: bool) -> None:
    """Also where the connection has all of the answer, so that the application has ended."""
    with serving(application, buffer=4096) as (url, server), socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        slow.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert slow.recv(1) == b"H"
        while server.server_state.connections:
            time.sleep(0.01)
            if reads:
                with contextlib.suppress(ConnectionResetError):
                    slow.recv(1)
        assert len(read_all(slow)) < size


def test_who_reads_fast_enough_gets_all_however_long_it_takes() -> None:
    limits = ConnectionLimits(write_seconds=0.5, write_bytes=2000)
    with serving(application, limits, buffer=4096) as (url, _), connect(url) as slow:
        slow.sendall(b"GET /1000000 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        began, got = time.monotonic(), b""
        while part := slow.recv(10_000):
            got += part
            time.sleep(0.01)
        assert (
            len(got) > 1_000_000
            and b"done" in got[-20:]
            and time.monotonic() - began > 2 * limits.write_seconds
        )


def test_more_connections_than_the_limit_are_told_to_come_back() -> None:
    with serving(application, ConnectionLimits(connections=4, head_seconds=30)) as (url, server):
        held = [connect(url) for _ in range(4)]
        while len(server.server_state.connections) < 4:
            time.sleep(0.01)
        with connect(url) as fifth:
            assert read_all(fifth).startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1")
        for connection in held:
            connection.close()
        while server.server_state.connections:
            time.sleep(0.01)
        assert httpx.get(url).status_code == 200


def test_a_body_that_stops_is_answered_and_its_connection_closed() -> None:
    app = BodyLimits(application, RequestLimits(body_seconds=0.2, body_bytes=1000))
    with serving(app) as (url, _), connect(url) as slow:
        slow.sendall(HEAD + b"\r\na")
        assert read_all(slow).startswith(b"HTTP/1.1 408 ")


def test_a_large_body_in_chunks_is_answered_before_its_end() -> None:
    app = BodyLimits(application, RequestLimits(body_bytes=1000))
    with serving(app) as (url, _), connect(url) as large:
        large.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            large.sendall(b"1f4\r\n" + b"x" * 500 + b"\r\n")
        assert b"413" in read_all(large).split(b"\r\n")[0]


def test_a_hundred_half_requests_keep_nobody_from_an_answer() -> None:
    async def attack(url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        for _, writer in held:
            writer.write(HEAD)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/")).status_code == 200
        for reader, writer in held:
            await reader.read()
            writer.close()

    with serving(application, ConnectionLimits(connections=200, head_seconds=0.5)) as (url, server):
        asyncio.run(attack(url))
        assert not server.server_state.connections


class Waiting:
    """An application that answers when it may, or ends when its client has gone."""

    def __init__(self) -> None:
        self.asked, self.begun, self.may, self.gone = (threading.Event() for _ in range(4))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.asked.set()
        answering, leaving = (
            asyncio.ensure_future(self._answer(scope["path"], send)),
            asyncio.ensure_future(receive()),
        )
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.gone.set()
        for task in (answering, leaving):
            task.cancel()

    async def _answer(self, path: str, send: Send) -> None:
        headers = [(b"content-length", b"7")] if path == "/whole" else []
        parts = [b"one", b"two!"]
        if path == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": parts.pop(0), "more_body": True})
            self.begun.set()
        await asyncio.to_thread(self.may.wait, 30)
        if path != "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@each_once("path, version", ["whole", "stream", "begun"], ["1.1", "1.0"])
def test_who_closes_its_half_of_a_connection_is_answered(path: str, version: str) -> None:
    app = Waiting()
    with serving(app, ConnectionLimits()) as (url, _), connect(url) as client:
        client.sendall(
            f"POST /{path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nab".encode()
        )
        if path == "begun":
            assert app.begun.wait(30)
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.25)  # in which it would be cut off
        app.may.set()
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, answer.read()) == (200, b"onetwo!")
        assert client.recv(1) == b""
        assert not app.gone.is_set()


def test_all_requests_before_half_a_close_are_answered() -> None:
    with serving(application) as (url, _), connect(url) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).count(b"done") == 3


@partly_slow("path", ["whole", "stream", "begun"], 1)
def test_who_closes_both_halves_has_gone_although_it_has_read_all(path: str) -> None:
    app = Waiting()
    with serving(app, ConnectionLimits()) as (url, _):
        with connect(url) as client:
            client.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert (app.begun if path == "begun" else app.asked).wait(30)
            if path == "begun":
                read = b""
                while not read.endswith(b"one\r\n"):
                    read += client.recv(65536)
        assert app.gone.wait(30)
        app.may.set()


def test_half_a_request_and_half_a_close_are_not_held() -> None:
    with (
        serving(BodyLimits(application, RequestLimits()), ConnectionLimits()) as (url, _),
        connect(url) as client,
    ):
        client.sendall(HEAD + b"\r\na")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
