"""A reward function that asks an HTTP server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import httpx2 as httpx

from unmask.errors import ConfigError
from unmask.rewards.calls import Arguments, LateError, in_thread

TRIES = 3
AT_ONCE = 16
SECONDS = 600.0
LATE = LateError("no answer in time")
NOT_SENT = ("completion_ids", "trainer_state", "log_extra", "log_metric")


class HttpReward:
    """A reward function that asks a server.

    Each completion is a POST of `{"prompt": ..., "completion": ..., <dataset columns>}`, which is answered by `{"reward": number or
    null}`. A completion without such an answer after three tries has no reward (None).

    Args:
        url: address of the server.
        timeout: seconds to wait for an answer.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, url: str, timeout: float = 60.0):
        try:
            self.__name__ = httpx.URL(url).host
        except httpx.InvalidURL as error:
            raise ConfigError(f"not an address: {error}", where=url, remedy="Give http://host:port/path") from error
        if not self.__name__:
            raise ConfigError("an address without a host", where=url, remedy="Give http://host:port/path")
        self.url, self.timeout = url, timeout

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The server's reward for each completion; None where it gives none or does not answer."""
        found = self.ask({"prompts": prompts, "completions": completions, **columns}, SECONDS)
        return [None if isinstance(answer, Exception) else answer for answer in found]

    def ask(self, arguments: Arguments, seconds: float) -> list[Any]:
        """The answer for each completion, or the exception in its place; LateError where none came within `seconds`."""
        columns = {name: values for name, values in arguments.items() if name not in ("prompts", "completions", *NOT_SENT)}
        names = ("prompt", "completion", *columns)
        columns_of_all = (arguments["prompts"], arguments["completions"], *columns.values())
        bodies = [dict(zip(names, values, strict=True)) for values in zip(*columns_of_all, strict=True)]
        found: list[Any] = [LATE] * len(bodies)
        end, left = time.monotonic() + seconds, iter(range(len(bodies)))

        def work() -> None:
            for row in left:
                found[row] = self._ask(client, bodies[row], end)

        with httpx.Client() as client:
            wait([in_thread(work) for _ in range(min(AT_ONCE, len(bodies)))], timeout=seconds)
            return list(found)

    def _ask(self, client: httpx.Client, body: dict[str, Any], end: float) -> Any:
        """The answer, or the exception of the last try."""
        failed: Exception = LATE
        for _ in range(TRIES):
            left = end - time.monotonic()
            if left <= 0:
                return LATE
            try:
                answer = client.post(self.url, json=body, timeout=min(self.timeout, left))
                answer.raise_for_status()
                return answer.json()["reward"]
            except (httpx.HTTPError, KeyError, RecursionError, TypeError, ValueError) as error:
                failed = error
        return failed
