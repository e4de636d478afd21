"""Calling reward functions as TRL calls them."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from unmask.data.chat import is_conversational
from unmask.errors import ConfigError, TrainingError
from unmask.tasks import get_task

RewardFunction = Callable[..., Any]


class Rewards:
    """The weighted sum of any number of reward functions.

    A function is called as `f(prompts=..., completions=..., completion_ids=..., <dataset columns>=...)` and returns, or is a
    coroutine that returns, a float or None for each completion; None means that it does not apply. A completion to which no
    function applies is unscored: NaN, never zero.

    Args:
        functions: callables, or names of built-in tasks.
        weights: one per function; None: all 1.
    """

    def __init__(self, functions: Sequence[RewardFunction | str] | RewardFunction | str, weights: Sequence[float] | None = None):
        listed = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
        if not listed:
            raise ConfigError("no reward function", where="reward_funcs", remedy="Give at least one")
        self.functions = [get_task(f).reward if isinstance(f, str) else f for f in listed]
        self.names = [f if isinstance(f, str) else getattr(f, "__name__", type(f).__name__) for f in listed]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.functions)
        if len(self.weights) != len(self.functions):
            what = f"{len(self.weights)} weights for {len(self.functions)} functions"
            raise ConfigError(what, where="reward_weights", remedy="Give one weight per reward function")

    def __call__(self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Tensor:
        """Rewards [B, functions], not weighted yet; NaN where a function does not apply."""
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("sample_id", "repeat", "completion", "prompt")}
        chat = is_conversational(rows[0])
        completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts)
        arguments = {"prompts": [row["prompt"] for row in rows], "completions": completions, "completion_ids": list(ids), **columns}
        return torch.tensor([self._call(i, arguments, len(rows)) for i in range(len(self.functions))]).T

    def total(self, reward_BF: Tensor) -> Tensor:
        """The weighted sum [B] of the functions that apply; NaN where none does."""
        total_B = (reward_BF.nan_to_num() * torch.tensor(self.weights)).sum(1)
        return torch.where(reward_BF.isnan().all(1), torch.nan, total_B)

    def _call(self, index: int, arguments: Mapping[str, Any], count: int) -> list[float]:
        where = f"reward function {self.names[index]}"
        try:
            values = self.functions[index](**arguments)
            if inspect.isawaitable(values):
                with ThreadPoolExecutor(1) as thread:  # a notebook's own thread already runs an event loop
                    values = thread.submit(asyncio.run, _wait(values)).result()
        except Exception as error:  # user code
            raise TrainingError(f"raised {type(error).__name__}: {error}", where=where, remedy="Mend it, or return None") from error
        if not isinstance(values, Sequence) or len(values) != count:
            what = f"returned {values!r:.60} for {count} completions"
            raise TrainingError(what, where=where, remedy="Return one float or None per completion")
        for row, value in enumerate(values):
            if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
                raise TrainingError(f"returned {value!r:.40}", where=f"{where}, completion {row}", remedy="Return a finite number, or None")
        return [math.nan if value is None else float(value) for value in values]


async def _wait(values: Any) -> Any:
    return await values
