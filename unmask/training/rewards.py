"""Calling reward functions as TRL calls them."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from unmask.data.chat import is_conversational
from unmask.errors import ConfigError, TrainingError
from unmask.rewards.http import HttpJudge
from unmask.rewards.workers import Worker, load_function, told
from unmask.tasks import Reward, get_rewards
from unmask.training.reward_model import RewardModel

RewardFunction = Callable[..., Any]
CALL_SECONDS = 600.0
"""How long a reward function in a process of its own may take."""


class WorkerReward:
    """A reward function that runs in processes of its own, each judging a part of the completions.

    Args:
        target: `package.module:function` or `path/to/file.py:function`; it must judge every completion for itself.
        workers: processes; they are new interpreters, and start at once, so that what cannot be imported is told before training.
    """

    def __init__(self, target: str, workers: int):
        self.__name__ = target.rpartition(":")[2]
        self.workers = [Worker(target) for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers)
        list(self._threads.map(Worker.start, self.workers))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """What the function gives for each completion."""
        arguments = {"completions": completions, **columns}
        size = math.ceil(len(completions) / len(self.workers))
        parts = [{name: values[at : at + size] for name, values in arguments.items()} for at in range(0, len(completions), size)]
        calls = [self._threads.submit(worker.call, timeout=CALL_SECONDS, **part) for worker, part in zip(self.workers, parts, strict=False)]
        answers = [call.result() for call in calls]
        for answer, part in zip(answers, parts, strict=True):
            if len(answer) != len(part["completions"]):
                raise ValueError(f"returned {len(answer)} values for {len(part['completions'])} completions")
        return [value for answer in answers for value in answer]


def find_rewards(named: RewardFunction | str, workers: int = 0) -> list[RewardFunction]:
    """The reward functions that a name stands for.

    Args:
        named: a function, which is taken as it is; `task` or `task/shaping` (see `Task.rewards`); `package.module:function` or
            `path/to/file.py:function`; `model:PATH_OR_ID`, a sequence classifier; or the http(s) address of a judge.
        workers: processes for a function given by its path; 0: it runs in this one.

    Raises:
        ConfigError: there is no such thing.
    """
    if not isinstance(named, str):
        return [named]
    if named.startswith(("http://", "https://")):
        return [HttpJudge(named)]
    if named.startswith("model:"):
        return [RewardModel(named.removeprefix("model:"))]
    if ":" in named:
        return [WorkerReward(named, workers) if workers else load_function(named)]
    return list(get_rewards(named))


class Rewards:
    """The weighted sum of any number of reward functions.

    A function is called as `f(prompts=..., completions=..., completion_ids=..., <dataset columns>=...)` and returns, or is a
    coroutine that returns, a float or None for each completion; None means that it does not apply. A completion to which no
    function applies is unscored: NaN, never zero.

    Args:
        functions: callables, or names (see `find_rewards`).
        weights: one per function or name; None: all 1.
        workers: processes for each function that is named by its path.

    Attributes:
        statuses: how often each verdict's status came in the last call, by the name of the function; of those that give verdicts.
    """

    def __init__(
        self, functions: Sequence[RewardFunction | str] | RewardFunction | str, weights: Sequence[float] | None = None, workers: int = 0
    ):
        listed = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
        if not listed:
            raise ConfigError("no reward function", where="reward_funcs", remedy="Give at least one")
        given = list(weights) if weights is not None else [1.0] * len(listed)
        if len(given) != len(listed):
            what = f"{len(given)} weights for {len(listed)} functions"
            raise ConfigError(what, where="reward_weights", remedy="Give one weight per reward function")
        found = [(function, weight) for named, weight in zip(listed, given, strict=True) for function in find_rewards(named, workers)]
        self.functions, self.weights = [function for function, _ in found], [weight for _, weight in found]
        self.names = [f.name if isinstance(f, Reward) else getattr(f, "__name__", type(f).__name__) for f in self.functions]
        self.statuses: dict[str, Counter[str]] = {}

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
            values = self._judged(index, arguments)
            if inspect.isawaitable(values):
                with ThreadPoolExecutor(1) as thread:  # a notebook's own thread already runs an event loop
                    values = thread.submit(asyncio.run, _wait(values)).result()
        except Exception as error:  # user code
            raise TrainingError(f"raised {told(error)}", where=where, remedy="Mend it, or return None") from error
        if not isinstance(values, Sequence) or len(values) != count:
            what = f"returned {values!r:.60} for {count} completions"
            raise TrainingError(what, where=where, remedy="Return one float or None per completion")
        for row, value in enumerate(values):
            if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
                raise TrainingError(f"returned {value!r:.40}", where=f"{where}, completion {row}", remedy="Return a finite number, or None")
        return [math.nan if value is None else float(value) for value in values]

    def _judged(self, index: int, arguments: Mapping[str, Any]) -> Any:
        """What a function gives; of one that gives verdicts the values, with their statuses counted."""
        function = self.functions[index]
        if not isinstance(function, Reward):
            return function(**arguments)
        verdicts = function.verdicts(**arguments)
        self.statuses[self.names[index]] = Counter(verdict.status for verdict in verdicts)
        return [verdict.value for verdict in verdicts]


async def _wait(values: Any) -> Any:
    return await values
