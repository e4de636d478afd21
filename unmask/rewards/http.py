"""A judge that answers over HTTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx

from unmask.errors import ConfigError

TRIES = 3
AT_ONCE = 16


class HttpJudge:
    """A reward function that asks a server.

    Each completion is a POST of `{"prompt": ..., "completion": ..., <dataset columns>}`, which is answered by `{"reward": number or
    null}`. A judge that does not answer so, after three tries, leaves the completion unscored.

    Args:
        url: of the judge.
        timeout: seconds to wait for an answer.

    Raises:
        ConfigError: the address is none.
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
        """The judge's reward for each completion; None where it gives none."""
        columns.pop("completion_ids", None)
        names = ("prompt", "completion", *columns)
        bodies = [dict(zip(names, values, strict=True)) for values in zip(prompts, completions, *columns.values(), strict=True)]
        with httpx.Client(timeout=self.timeout) as client, ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(lambda body: self._ask(client, body), bodies))

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> float | None:
        for _ in range(TRIES):
            try:
                answer = client.post(self.url, json=body)
                answer.raise_for_status()
                reward = answer.json()["reward"]
                return None if reward is None or not math.isfinite(reward) else float(reward)
            except (httpx.HTTPError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError):
                continue
        return None
