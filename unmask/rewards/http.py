"""Rewards from an HTTP server."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import httpx2 as httpx

from unmask.errors import ConfigError
from unmask.rewards.answers import answer_in
from unmask.rewards.timeouts import CallArguments, LateError, in_thread

TRIES = 3
MAX_CONCURRENT = 16
CALL_SECONDS = 600.0
LATE = LateError("no answer in time")
MAX_ANSWER = 2**20
"""Bytes of an answer at most."""
NOT_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class HttpReward:
    """A reward function that queries a server. ConfigError if the address is invalid.

    It sends a POST of `{"prompt": ..., "completion": ..., <dataset columns>}` for each completion, and
    expects `{"reward": number or null}`, of at most 1 MiB, within `timeout` seconds. After three failed tries
    a completion has no reward (None).
    """

    def __init__(self, url: str, timeout: float = 60.0):
        try:
            self.__name__ = httpx.URL(url).host
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"not an address: {error}", where=url, remedy="Give http://host:port/path"
            ) from error
        if not self.__name__:
            raise ConfigError("an address without a host", where=url, remedy="Give http://host:port/path")
        self.url, self.timeout = url, timeout

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """The reward of each completion; None if the server gives none or does not answer."""
        found = self.ask({"prompts": prompts, "completions": completions, **columns}, CALL_SECONDS)
        return [None if isinstance(answer, Exception) else answer for answer in found]

    def ask(self, arguments: CallArguments, seconds: float) -> list[Any]:
        """The answer for each completion, or the exception in its place: a LateError if none came within
        `seconds`."""
        columns = {"prompt": arguments["prompts"], "completion": arguments["completions"]}
        columns |= {name: values for name, values in arguments.items() if name not in NOT_COLUMNS}
        bodies = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        found: list[Any] = [LATE] * len(bodies)
        deadline, remaining = time.monotonic() + seconds, iter(range(len(bodies)))

        def work() -> None:
            for row in remaining:
                found[row] = self._ask(client, bodies[row], deadline)

        with httpx.Client() as client:
            wait([in_thread(work) for _ in range(min(MAX_CONCURRENT, len(bodies)))], timeout=seconds)
            return list(found)

    def _ask(self, client: httpx.Client, body: dict[str, Any], deadline: float) -> Any:
        """The answer, or the exception of the last try."""
        failure: Exception = LATE
        for _ in range(TRIES):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return LATE
            try:
                return answer_in(self._exchange(client, body, min(self.timeout, seconds))["reward"])
            except (httpx.HTTPError, KeyError, RecursionError, TypeError, ValueError) as error:
                failure = error
        return failure

    def _exchange(self, client: httpx.Client, body: dict[str, Any], seconds: float) -> Any:
        """The JSON of one answer. Raises ValueError if it is packed or too large, before all of it is
        read."""
        with client.stream(
            "POST", self.url, json=body, timeout=seconds, headers={"Accept-Encoding": "identity"}
        ) as answer:
            answer.raise_for_status()
            if (packing := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
                raise ValueError(f"the answer is packed with {packing}")
            found, deadline = bytearray(), time.monotonic() + seconds
            for part in answer.iter_raw():
                found += part
                if len(found) > MAX_ANSWER:
                    raise ValueError(f"the answer has more than {MAX_ANSWER:,} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer does not end")
        return json.loads(found)
