"""The client that waits for servers."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from tests.errors import raises
from unmask.generation.remote import http
from unmask.generation.remote.http import HttpClient, RemoteError


@pytest.mark.parametrize(("answers", "waited"), [(["full", "gone"], 30), (["gone", "full"], 300)])
def test_the_patience_is_that_with_the_present_failure_from_the_first_one_on(monkeypatch, answers, waited):
    """A queue that is full may take longer than a server that is gone, whichever came first."""
    clock = [0.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(http.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    client = HttpClient("http://127.0.0.1:9", "a server", timeout=1, patience=30, queue_patience=300)

    def exchange(*_, **__):
        if answers[clock[0] > 0] == "gone":
            raise httpx.ConnectError("refused")
        return 429, "full"

    monkeypatch.setattr(client, "exchange", exchange)
    try:
        with raises(RemoteError, where="http://127.0.0.1:9"):
            client.send("GET", "/health")
    finally:
        client.close()
    assert waited < clock[0] <= waited + 1
