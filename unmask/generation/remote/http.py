"""Requests to a server that may be absent, slow, or die and restart."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import httpx2 as httpx

from unmask.errors import GenerationError

FULL = 429
BUSY = {FULL, 500, 502, 503, 504}  # 500: a dead engine answers this until it restarts


class RemoteError(GenerationError):
    """The server stayed unavailable, refused a request (with this status), or cannot get its weights.

    Attributes:
        completed: completions before the failure, by the index of the prompt: token ids and their
            log-probabilities.
    """

    def __init__(
        self, what: str, *, where: str | None = None, remedy: str | None = None, status: int | None = None
    ):
        super().__init__(what, where=where, remedy=remedy)
        self.status = status
        self.completed: dict[int, tuple[list[int], list[float]]] = {}


class HttpClient:
    """Exchanges JSON with one server.

    Args:
        kind: the expected server, for errors.
        timeout: seconds to wait for an answer.
        patience: seconds to wait for a server that does not accept requests, from the first failure on.
        api_key: sent with every request.
        queue_patience: seconds to wait for a server that has too many requests; None: `patience`.
    """

    def __init__(
        self,
        url: str,
        kind: str,
        *,
        timeout: float,
        patience: float,
        api_key: str | None = None,
        queue_patience: float | None = None,
    ):
        self.kind, self.patience = kind, patience
        self.queue_patience = patience if queue_patience is None else queue_patience
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(
            base_url=url.rstrip("/"),
            timeout=httpx.Timeout(timeout, connect=5.0),
            headers=headers,
            limits=limits,
        )

    def call(self, method: str, path: str, **content: Any) -> Any:
        """Send a request, and return the JSON of the answer; None if it is empty. Arguments and errors as in
        `send`."""
        text = self.send(method, path, **content)
        return self.read(text, json.loads) if text else None

    def send(self, method: str, path: str, **content: Any) -> str:
        """Send a request with the `content` arguments of httpx (`json=...`), and return the text of the
        answer. Retries while the server accepts no requests, for `patience` seconds from the first failure
        on, or `queue_patience` while too many wait. Raises RemoteError if it accepts none, does not answer,
        or refuses this one."""
        since: float | None = None  # the first failure
        while True:
            try:
                status, text = self.exchange(method, path, **content)
            except httpx.TransportError as error:
                if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
                    what, remedy = (
                        f"no answer within {self._client.timeout.read} seconds",
                        "Raise timeout, or check the server's log",
                    )
                    raise self.error(what, remedy) from error
                since = self._wait(since, error, self.patience)
            else:
                if 200 <= status < 300:
                    return text
                if status not in BUSY:
                    raise self.error(
                        f"{path} is refused ({status}): {text[:300]}", "Correct the request", status
                    )
                patience = self.queue_patience if status == FULL else self.patience
                since = self._wait(since, RuntimeError(f"{status}: {text[:300]}"), patience)

    def read(self, answer: Any, pick: Callable[[Any], Any]) -> Any:
        """The part of an answer that `pick` returns. Raises RemoteError if it is missing."""
        try:
            return pick(answer)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self.error(
                f"the answer lacks a field ({error!r}): {str(answer)[:200]}", f"Use {self.kind}"
            ) from error

    def error(self, what: str, remedy: str, status: int | None = None) -> RemoteError:
        """An error with the server's address."""
        return RemoteError(what, where=str(self._client.base_url), remedy=remedy, status=status)

    def close(self) -> None:
        """Close connections; the server keeps running."""
        self._client.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._client.is_closed

    def exchange(self, method: str, path: str, **content: Any) -> tuple[int, str]:
        """Status and text. The timeout bounds the whole exchange, while that of httpx bounds each read."""
        started, chunks = time.monotonic(), []
        with self._client.stream(method, path, **content) as response:
            for chunk in response.iter_bytes():
                chunks.append(chunk)
                if time.monotonic() - started > (self._client.timeout.read or math.inf):
                    raise httpx.ReadTimeout("the answer does not end")
        return response.status_code, b"".join(chunks).decode(errors="replace")

    def _wait(self, since: float | None, error: Exception, patience: float) -> float:
        since = time.monotonic() if since is None else since
        if time.monotonic() > since + patience:
            what = f"the server has accepted no requests for {patience:g} seconds ({error})"
            raise self.error(what, "Start it, or correct the address") from error
        time.sleep(0.5)
        return since
