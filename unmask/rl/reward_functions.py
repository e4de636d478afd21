"""Calling reward functions as TRL calls them, so that none of them can stop or hang a run.

Shapes: B completions, F reward functions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import numbers
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from unmask.data.chat import is_conversational
from unmask.errors import ConfigError, DataError, TrainingError, did_you_mean
from unmask.rewards.calls import EVENT_LOOP, Arguments, LateError, answers, check_signature, in_thread, limited, part, shown
from unmask.rewards.http import HttpJudge
from unmask.rewards.logged import Log
from unmask.rewards.verdict import Verdict
from unmask.rewards.workers import Worker, WorkerError, load_function, told
from unmask.rl.config import GRPOConfig
from unmask.rl.reward_model import RewardModel
from unmask.sandbox.isolation import SandboxError
from unmask.tasks import Reward, get_rewards

RewardFunction = Callable[..., Any]
Judge = Callable[[Arguments, float], list[Any]]
"""Gives an answer for each completion, or the exception that stands for it, within that many seconds."""
Errors = Literal["unscored", "raise"]
FailureKind = Literal["raised", "timeout", "invalid"]
MAX_SECONDS = 1e6
LARGEST = 1e12
"""Of a reward, weights and all: in float32 the squares and sums that losses make of it are then finite."""
THREAD = re.compile("signal only works in main thread|There is no current event loop in thread|SQLite objects created in a thread")
"""How messages begin that a function cannot be called in this thread."""
logger = logging.getLogger(__name__)


class WorkerReward:
    """A reward function that runs in processes of its own, each judging a part of the completions, and killed where it is late.

    Args:
        target: `package.module:function` or `path/to/file.py:function`; it must judge every completion for itself.
        workers: processes; they are new interpreters, and start at once, so that what cannot be imported is told before training.
    """

    def __init__(self, target: str, workers: int):
        self.__name__ = target.rpartition(":")[2]
        self.workers = [Worker(target, "unmask.rewards.logged:served") for _ in range(workers)]
        for start in [in_thread(worker.start) for worker in self.workers]:
            start.result()

    def ask(self, arguments: Arguments, seconds: float, *, name: str, alone: bool) -> list[Any]:
        """As `answers`, for each part; of the trainer's state with the attributes alone. A function that does not take these arguments:
        TrainingError. What it logs where it answers is logged here, None where it does not."""
        sent = {key: value for key, value in arguments.items() if key not in ("log_extra", "log_metric")}
        if "trainer_state" in sent:
            sent["trainer_state"] = SimpleNamespace(**vars(sent["trainer_state"]))  # so that no worker needs to import transformers
        count = len(sent["completions"])
        size = math.ceil(count / len(self.workers))
        calls, logs = [], []
        for worker, start in zip(self.workers, range(0, count, size), strict=False):
            logs.append(Log())
            call = functools.partial(self._call, worker, name, logs[-1])
            given = part(sent, slice(start, start + size))
            calls.append(in_thread(functools.partial(answers, call, given, seconds, name=name, alone=alone)))
        parts = [call.result() for call in calls]
        columns = [log.columns(len(found)) for log, found in zip(logs, parts, strict=True)]
        for column in dict.fromkeys(column for each in columns for column in each):
            values = [each.get(column, [None] * len(found)) for each, found in zip(columns, parts, strict=True)]
            arguments["log_extra"](column, itertools.chain(*values))
        for log in logs:
            for metric, logged in log.metrics.items():
                for value in logged:
                    arguments["log_metric"](metric, value)
        return [answer for found in parts for answer in found]

    @staticmethod
    def _call(worker: Worker, name: str, log: Log, arguments: Arguments, seconds: float) -> Any:
        values, logged = worker.apply((name,), arguments, seconds)
        log.add(logged)
        return values


class LocalReward:
    """A reward function in this process: called in a thread, awaited where it is async.

    Where it says that it works in the main thread alone (it uses signals, as math-verify does), it is called there, without a limit.
    """

    def __init__(self, function: RewardFunction, name: str):
        self.name = name
        self.function = function.verdicts if isinstance(function, Reward) else function
        # What stands in the way of any judgement of a task: columns that are missing, no sandbox.
        self.fatal: tuple[type[Exception], ...] = (ConfigError, DataError, SandboxError) if isinstance(function, Reward) else ()
        self.threaded = True

    def ask(self, arguments: Arguments, seconds: float, *, alone: bool) -> list[Any]:
        """As `answers`. A function that does not take these arguments, or a task that can judge nothing: TrainingError."""
        check_signature(self.function, arguments, self.name)
        return answers(self._call, arguments, seconds, name=self.name, alone=alone)

    def _call(self, arguments: Arguments, seconds: float) -> Any:
        end = time.monotonic() + seconds
        try:
            values = self._values(arguments, seconds)
        except self.fatal as error:
            raise TrainingError(f"raised {told(error)}", where=f"reward function {self.name}") from error
        return EVENT_LOOP.run(values, end - time.monotonic()) if inspect.isawaitable(values) else values

    def _values(self, arguments: Arguments, seconds: float) -> Any:
        work = functools.partial(self._without_grad, arguments, torch.cuda.current_device() if torch.cuda.is_initialized() else None)
        if self.threaded:
            try:
                return limited(in_thread(work), seconds)
            except Exception as error:  # user code
                if threading.current_thread() is not threading.main_thread() or not needs_main_thread(error):
                    raise
            self.threaded = False
            logger.warning("reward function %s works in the main thread alone: it is called there, without a time limit", self.name)
        return work()

    @torch.no_grad()
    def _without_grad(self, arguments: Arguments, device: int | None) -> Any:
        if device is not None:  # a thread has one of its own
            torch.cuda.set_device(device)
        return self.function(**arguments)


def needs_main_thread(error: BaseException | None) -> bool:
    """Whether an exception, or what caused it, comes of calling something in another thread than the main one."""
    return error is not None and (THREAD.match(str(error)) is not None or needs_main_thread(error.__cause__ or error.__context__))


def find_rewards(named: RewardFunction | str, workers: int = 0) -> list[RewardFunction | WorkerReward]:
    """The reward functions that a name stands for.

    Args:
        named: a function, which is taken as it is; `task` or `task/shaping` (see `Task.rewards`); `package.module:function` or
            `path/to/file.py:function`; `model:PATH_OR_ID`, a sequence classifier; or the http(s) address of a judge.
        workers: processes for a function given by its path; 0: it runs in this one.

    Raises:
        ConfigError: it is no function, or there is none of the name.
    """
    if callable(named):
        return [named]
    if not isinstance(named, str):
        remedy = "Give a function, or the name of one: a task, package.module:function, ..."
        raise ConfigError(f"{shown(named)} is no reward function", where="reward_funcs", remedy=remedy)
    if named.startswith(("http://", "https://")):
        return [HttpJudge(named)]
    if named.startswith("model:"):
        return [RewardModel(named.removeprefix("model:"))]
    if ":" in named:
        return [WorkerReward(named, workers) if workers else load_function(named)]
    return list(get_rewards(named))


def distinct(names: Iterable[str]) -> list[str]:
    """Names, with a number behind each further one of those that came before."""
    made: list[str] = []
    for name in names:
        numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        made.append(next(each for each in numbered if each not in made))
    return made


def is_async(function: RewardFunction) -> bool:
    """Whether calling a function gives a coroutine: an async function, an object with an async `__call__`, or a partial of either."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Scored(NamedTuple):
    """What the reward functions gave."""

    value_BF: Tensor
    """Not weighted yet; NaN where a function does not apply, or failed."""
    failed_BF: Tensor
    """Where a function failed; boolean."""


class Failure(NamedTuple):
    kind: FailureKind
    what: str
    remedy: str


class Rewards:
    """The weighted sum of any number of reward functions.

    A function is called as TRL calls it, `f(prompts=..., completions=..., completion_ids=..., <dataset columns>=..., trainer_state=...,
    log_extra=..., log_metric=...)`, must accept `**kwargs`, and returns, or is a coroutine that returns, a float or None for each
    completion; None means that it does not apply. A completion to which no function applies is unscored: NaN, never zero.

    One that any function failed on (which raised, was late, or returned something else than a finite number or None) is unscored as a
    whole: without a part its sum would be on another scale than those of its group. Where a call raises, the function is called again
    for each completion alone. A TrainingError that a function raises stops the run, as does a wrong number of values.

    Async functions, worker processes and judges over HTTP run side by side; functions in this process one after another, each in
    a thread. What is late there cannot be stopped: its thread goes on, and may run beside later calls; one that never gives way
    to other threads (a regular expression without end) cannot even be given up on. Processes of its own (`workers`) are killed.

    Args:
        functions: callables, or names (see `find_rewards`).
        weights: one per function or name; None: all 1.
        workers: processes for each function that is named by its path.
        seconds: that a function may take for all completions of a call.
        errors: unscored, or raise: a TrainingError for whatever fails.

    Attributes:
        largest: a value beyond this counts as no finite number.
        names: of the functions, by which all is told of them; a number is behind a further one of one name: `reward`, `reward_2`.
        statuses: how often each verdict's status came in the last call, by the name of the function; of those that give verdicts.
        failures: on how many completions of the last call each function `raised` (or gave a verdict without a value), was late
            (`timeout`) or gave no number (`invalid`), by its name. The first of each kind is logged.
        logged: by name, what functions passed to `log_metric` in the last call.
        extras: by name, the columns that they passed to `log_extra`, a value for each completion; of several of one name the last.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction | str] | RewardFunction | str,
        weights: Sequence[float] | None = None,
        workers: int = 0,
        *,
        seconds: float = 600.0,
        errors: Errors = "unscored",
    ):
        listed = list(functions) if isinstance(functions, Sequence) and not isinstance(functions, str) else [functions]
        if not listed:
            raise ConfigError("no reward function", where="reward_funcs", remedy="Give at least one")
        given = list(weights) if weights is not None else [1.0] * len(listed)
        if len(given) != len(listed):
            what = f"{len(given)} weights for {len(listed)} functions"
            raise ConfigError(what, where="reward_weights", remedy="Give one weight per reward function")
        for weight in given:
            if not (isinstance(weight, numbers.Real) and abs(weight) <= LARGEST):
                raise ConfigError(f"{shown(weight)} is refused", where="reward_weights", remedy=f"Give numbers of at most {LARGEST:g}")
        if not 0 < seconds <= MAX_SECONDS:
            raise ConfigError(
                f"{seconds} seconds for a reward", where="reward_timeout", remedy=f"Give more than 0, at most {MAX_SECONDS:.0f}"
            )
        if errors not in get_args(Errors):
            raise ConfigError(f"unknown {errors!r}", where="reward_errors", remedy=f"Use one of {', '.join(get_args(Errors))}")
        found = [(function, weight) for named, weight in zip(listed, given, strict=True) for function in find_rewards(named, workers)]
        self.functions, self.weights = [function for function, _ in found], [weight for _, weight in found]
        self.names = distinct(f.name if isinstance(f, Reward) else getattr(f, "__name__", type(f).__name__) for f in self.functions)
        self.seconds, self.errors = seconds, errors
        self.largest = LARGEST / max(1.0, sum(map(abs, self.weights)))
        self.statuses: dict[str, Counter[str]] = {}
        self.failures: dict[str, Counter[str]] = {}
        self.logged: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}
        self._judges = [self._judge(function, name) for function, name in zip(self.functions, self.names, strict=True)]
        self._told: set[tuple[str, str]] = set()

    def __call__(self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], ids: Sequence[Sequence[int]], state: Any = None) -> Scored:
        """What each function gives for each completion.

        Args:
            rows: of the dataset, one per completion; all have the same columns.
            texts, ids: the completions.
            state: the trainer's; None: functions get none.

        Raises:
            TrainingError: see the class.
        """
        log = Log()
        arguments = {
            **{name: [row[name] for row in rows] for name in rows[0] if name not in ("completion", "prompt")},
            "prompts": [row["prompt"] for row in rows],
            "completions": [
                [{"role": "assistant", "content": text}] if is_conversational(row) else text for row, text in zip(rows, texts, strict=True)
            ],
            "completion_ids": [list(tokens) for tokens in ids],  # the trainer's own stay, whatever functions do
            **({} if state is None else {"trainer_state": state}),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        answer_FB = self._answers(arguments)
        # Copies, as a thread that was given up on may still log.
        self.logged = {name: list(values) for name, values in list(log.metrics.items())}
        self.extras = log.columns(len(rows))
        self.statuses, self.failures = {}, {name: Counter() for name in self.names}
        read_FB = [[self._read(name, answer) for answer in answer_B] for name, answer_B in zip(self.names, answer_FB, strict=True)]
        for name, read_B in zip(self.names, read_FB, strict=True):
            self._report(name, read_B)
        failed_BF = torch.tensor([[isinstance(read, Failure) for read in read_B] for read_B in read_FB]).T
        value_BF = torch.tensor([[math.nan if isinstance(read, Failure) else read for read in read_B] for read_B in read_FB]).T
        return Scored(value_BF, failed_BF)

    def total(self, scored: Scored) -> Tensor:
        """The weighted sum [B] of the functions that apply; NaN where none does, or where one failed (unless its weight is 0)."""
        weight_F = torch.tensor(self.weights)
        total_B = (scored.value_BF.nan_to_num() * weight_F).sum(1)
        unscored_B = scored.value_BF.isnan().all(1) | (scored.failed_BF & (weight_F != 0)).any(1)
        return torch.where(unscored_B, torch.nan, total_B)

    def _judge(self, function: RewardFunction | WorkerReward, name: str) -> Judge:
        if isinstance(function, HttpJudge):
            return function.ask
        alone = self.errors == "unscored"
        if isinstance(function, WorkerReward):
            return functools.partial(function.ask, name=name, alone=alone)
        return functools.partial(LocalReward(function, name).ask, alone=alone)

    def _answers(self, arguments: Arguments) -> list[list[Any]]:
        """What each function answers to each completion [F][B]."""
        calls = [functools.partial(judge, arguments, self.seconds) for judge in self._judges]
        aside = {
            index: in_thread(calls[index])
            for index, function in enumerate(self.functions)
            if isinstance(function, WorkerReward | HttpJudge) or is_async(function)
        }
        here = {index: call() for index, call in enumerate(calls) if index not in aside}
        return [aside[index].result() if index in aside else here[index] for index in range(len(calls))]

    def _read(self, name: str, answer: Any) -> float | Failure:
        """An answer as a number: NaN for None."""
        if isinstance(answer, Verdict):
            self.statuses.setdefault(name, Counter())[answer.status] += 1
            if answer.value is None:
                return Failure("raised", f"could not judge: {answer.status} {answer.detail}", "See docs/sandbox.md, docs/tasks.md")
            answer = answer.value
        if answer is None:
            return math.nan
        if isinstance(answer, LateError):
            return Failure("timeout", f"gave no answer within {self.seconds:g} seconds", "Give it more, or let it answer sooner")
        if isinstance(answer, BaseException):
            what = answer.what if isinstance(answer, WorkerError) else f"raised {told(answer)}"
            return Failure("raised", what, "Mend it, or return None")
        real = isinstance(answer, numbers.Real)
        if real and abs(answer) <= self.largest:  # not NaN
            return float(answer)
        return Failure("invalid", f"returned {shown(answer)}", f"Return a number of at most {self.largest:g}, or None")

    def _report(self, name: str, read_B: Sequence[float | Failure]) -> None:
        """Count what a function failed on, and tell of the first one of each kind; or raise it."""
        failures = {row: read for row, read in enumerate(read_B) if isinstance(read, Failure)}
        for row, failure in failures.items():
            on_all = failure.kind != "invalid" and len(failures) == len(read_B)
            where = f"reward function {name}" + ("" if on_all else f", completion {row}")
            if self.errors == "raise":
                raise TrainingError(failure.what, where=where, remedy=failure.remedy)
            self.failures[name][failure.kind] += 1
            if (name, failure.kind) not in self._told:
                self._told.add((name, failure.kind))
                what = " ".join(failure.what.split())
                logger.warning("%s: %.400s. What it fails on is unscored; more of this kind is counted only", where, what)


def rewards_of(reward_funcs: Sequence[RewardFunction | str] | RewardFunction | str, args: GRPOConfig) -> Rewards:
    """The reward functions of a run.

    Raises:
        ConfigError: `difficulty_reward` is none of them.
    """
    rewards = Rewards(reward_funcs, args.reward_weights, args.reward_workers, seconds=args.reward_timeout, errors=args.reward_errors)
    if (name := args.difficulty_reward) is not None and name not in rewards.names:
        raise ConfigError(f"no reward function {name!r}", where="difficulty_reward", remedy=did_you_mean(name, rewards.names))
    return rewards
