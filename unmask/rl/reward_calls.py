"""Where one reward function is called, in this process or in worker processes. `Rewards`
(`weighted_rewards.py`) calls them all, after `GRPOTrainer.sample` has sampled the
completions. Reward servers are asked by `HttpReward`."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from unmask.errors import ConfigError, DataError, TrainingError
from unmask.rewards.answers import answers_in, answers_of, describe_error, only_this_process
from unmask.rewards.logged import Log
from unmask.rewards.timeouts import (
    DEADLINE,
    EVENT_LOOP,
    CallArguments,
    check_signature,
    in_thread,
    limited,
    reward_values,
    select,
)
from unmask.rewards.workers import RewardWorker
from unmask.sandbox.isolation import SandboxError
from unmask.tasks import Reward

MAIN_THREAD_ERRORS = re.compile(
    "signal only works in main thread|There is no current event loop in thread|SQLite objects created "
    "in a thread"
)
"""Messages about functions that only work in the main thread."""
logger = logging.getLogger(__name__)


class WorkerReward:
    """A reward function that runs in worker processes. Each rewards a part of the completions, and is killed
    if it is late.

    Args:
        target: `package.module:function` or `path/to/file.py:function`; it must reward each completion
            independently.
        workers: processes. They are new interpreters and start at once, so that an import that fails does so
            before training.
    """

    def __init__(self, target: str, workers: int):
        self.__name__ = target.rpartition(":")[2]
        self.workers = [RewardWorker(target, "unmask.rewards.logged:served") for _ in range(workers)]
        for start in [in_thread(worker.start) for worker in self.workers]:
            start.result()

    def ask(self, arguments: CallArguments, seconds: float, *, name: str, alone: bool) -> list[Any]:
        """The value for each completion, or the exception in its place (`reward_values` in
        rewards/timeouts.py), in parallel. Workers get the attributes of the trainer's state; what they log is
        logged here, None for completions without an answer.

        Raises:
            TrainingError: the function does not accept these arguments.
        """
        sent = {key: value for key, value in arguments.items() if key not in ("log_extra", "log_metric")}
        if "trainer_state" in sent:
            # without a class that workers would import
            sent["trainer_state"] = SimpleNamespace(**vars(sent["trainer_state"]))
        count = len(sent["completions"])
        size = math.ceil(count / len(self.workers))
        calls, logs = [], []
        for worker, start in zip(self.workers, range(0, count, size), strict=False):
            logs.append(Log())
            call = functools.partial(self._call, worker, name, logs[-1])
            chunk = select(sent, slice(start, start + size))
            calls.append(
                in_thread(functools.partial(reward_values, call, chunk, seconds, name=name, alone=alone))
            )
        chunks = [call.result() for call in calls]
        columns = [log.columns(len(chunk)) for log, chunk in zip(logs, chunks, strict=True)]
        for column in dict.fromkeys(column for each in columns for column in each):
            values = [
                each.get(column, [None] * len(chunk)) for each, chunk in zip(columns, chunks, strict=True)
            ]
            arguments["log_extra"](column, itertools.chain(*values))
        for log in logs:
            for metric, logged in log.metrics.items():
                for value in logged:
                    arguments["log_metric"](metric, value)
        return [answer for chunk in chunks for answer in chunk]

    @staticmethod
    def _call(worker: RewardWorker, name: str, log: Log, arguments: CallArguments, seconds: float) -> Any:
        values, logged = worker.apply((name,), arguments, seconds)
        log.add(logged)
        return values


class LocalReward:
    """A reward function in this process: called in a thread, awaited if it is async.

    A function that only works in the main thread (because it uses signals, as math-verify does) is called
    there, without a time limit.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        self.function = function.verdicts if isinstance(function, Reward) else function
        # Errors that concern all completions of a task: missing columns, no sandbox.
        self.fatal: tuple[type[Exception], ...] = (
            (ConfigError, DataError, SandboxError) if isinstance(function, Reward) else ()
        )
        self.threaded = True

    def ask(self, arguments: CallArguments, seconds: float, *, alone: bool) -> list[Any]:
        """The value for each completion, or the exception in its place (`reward_values` in
        rewards/timeouts.py).

        Raises:
            TrainingError: the function does not accept these arguments, or its task cannot verify any
                completion.
        """
        check_signature(self.function, arguments, self.name)
        return reward_values(self._call, arguments, seconds, name=self.name, alone=alone)

    def _call(self, arguments: CallArguments, seconds: float) -> Any:
        end = time.monotonic() + seconds
        try:
            values = self._values(arguments, seconds)
        except self.fatal as error:
            raise TrainingError(
                f"raised {describe_error(error)}", where=f"reward function {self.name}"
            ) from error
        if not inspect.isawaitable(values):
            return values
        return EVENT_LOOP.run(answers_of(values), end - time.monotonic())

    def _values(self, arguments: CallArguments, seconds: float) -> Any:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # so that the verdicts until then are not late
        deadline = time.monotonic() + seconds - min(1.0, seconds / 10)
        work = functools.partial(self._without_grad, arguments, device, deadline)
        if self.threaded:
            try:
                return limited(in_thread(work), seconds)
            except Exception as error:  # user code
                if threading.current_thread() is not threading.main_thread() or not needs_main_thread(error):
                    raise
            self.threaded = False
            logger.warning(
                "reward function %s works in the main thread only: it is called there, without a time limit",
                self.name,
            )
        return work()

    @torch.no_grad()
    def _without_grad(self, arguments: CallArguments, device: int | None, deadline: float) -> Any:
        if device is not None:  # each thread has its own current device
            torch.cuda.set_device(device)
        token = DEADLINE.set(deadline)
        try:
            with only_this_process():
                values = self.function(**arguments)
                return values if inspect.isawaitable(values) else answers_in(values)
        finally:
            DEADLINE.reset(token)


def needs_main_thread(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, says that a function must be called in the main thread."""
    seen = set[int]()  # causes of user code may form a circle
    while error is not None and id(error) not in seen:
        if MAIN_THREAD_ERRORS.search(describe_error(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
