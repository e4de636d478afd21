"""Rewards from a real server that sometimes fails."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import httpx2 as httpx
import pytest

from tests.errors import raises
from unmask.errors import ConfigError
from unmask.rewards.http import HttpReward
from unmask.rewards.timeouts import LateError


class Judge(BaseHTTPRequestHandler):
    """Rewards a completion by its length, fails at first on every second one, and always on `x`."""

    asked: ClassVar[list[dict]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["completion"] == "x" or (body["answer"] == "0" and self.asked.count(body) == 1):
            self.send_error(500)
            return
        answer = json.dumps(
            {"reward": None if body["completion"] == "" else len(body["completion"])}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_a_judge_over_http_is_asked_again_and_what_it_does_not_answer_is_unscored():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    judge = HttpReward(f"http://127.0.0.1:{server.server_port}/judge")
    try:
        assert judge(["p0", "p1", "p2"], ["ab", "x", ""], answer=["0", "1", "2"]) == [2.0, None, None]
    finally:
        server.shutdown()
        server.server_close()
    assert [body["prompt"] for body in Judge.asked if body["completion"] == "x"] == ["p1"] * 3
    assert judge(["p0"], ["ab"], answer=["0"]) == [None]  # nobody is there any more


@pytest.mark.parametrize("url", ["http://[::1", "http://host:abc/", "http://", "https:///path"])
def test_an_address_that_is_none_is_told_before_training(url):
    with raises(ConfigError, where=url):
        HttpReward(url)


class Slow(BaseHTTPRequestHandler):
    """Rewards at once, but hangs on `x`, breaks off on `y`, and trickles without end on `z`."""

    end: ClassVar[threading.Event] = threading.Event()

    def do_POST(self):
        completion = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["completion"]
        if completion == "y":
            return
        if completion == "x":
            self.end.wait(20)
        self.send_response(200)
        self.end_headers()
        while completion == "z" and not self.end.wait(0.02):
            self.wfile.write(b" ")
        self.wfile.write(b'{"reward": 1}')

    def log_message(self, *_):
        pass


def test_answers_that_came_in_time_are_kept():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    judge = HttpReward(f"http://127.0.0.1:{server.server_port}/judge")
    try:
        found = judge.ask(
            {"prompts": ["p"] * 5, "completions": [*"axyzb"], "trainer_state": object(), "log_extra": print},
            0.7,
        )
        assert not Slow.end.is_set()  # it did not wait for the answer that does not end
        assert [found[0], found[4]] == [1, 1]
        assert (
            isinstance(found[1], LateError)
            and isinstance(found[2], httpx.HTTPError)
            and isinstance(found[3], LateError)
        )
    finally:
        Slow.end.set()
        server.shutdown()
        server.server_close()


def _answer(size: int) -> bytes:
    return b'{"reward": 1, "why": "' + b"a" * size + b'"}'


class Large(BaseHTTPRequestHandler):
    """Answers with 2 MiB, packed, or without an end."""

    sent: ClassVar[dict[str, tuple[str, bytes]]] = {
        "small": ("identity", _answer(1000)),
        "large": ("identity", _answer(2**21)),
        "packed": ("gzip", gzip.compress(_answer(1000))),
        "a list": ("identity", b"[" * 10**5),
    }

    def do_POST(self):
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["completion"]
        assert self.headers["Accept-Encoding"] == "identity"
        self.send_response(200)
        packing, data = self.sent.get(name, ("identity", b" " * 2**16))
        self.send_header("Content-Encoding", packing)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client hangs up
            self.wfile.write(data)
            while name == "without end":
                self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_an_answer_has_at_most_a_mebibyte_and_is_not_packed():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Large)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    judge = HttpReward(f"http://127.0.0.1:{server.server_port}/judge", timeout=20)
    names = [*Large.sent, "without end"]
    try:
        found = dict(zip(names, judge.ask({"prompts": names, "completions": names}, 60), strict=True))
    finally:
        server.shutdown()
        server.server_close()
    assert found["small"] == 1 and str(found["packed"]) == "the answer is packed with gzip"
    for name in ("large", "without end"):
        assert str(found[name]) == "the answer has more than 1,048,576 bytes", name
    assert isinstance(found["a list"], RecursionError | ValueError)
