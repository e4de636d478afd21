"""All reward functions of a run, called with TRL's arguments, and the weighted sum of their values. A
function that fails or is late leaves its completions unscored (`reward_errors: raise` stops the run instead).
`reward_calls.py` calls each.

Shapes: B completions, F reward functions.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.config.user_code import current_folder_last, load_named, refuse_file_alone
from unmask.data.encoding import is_conversational
from unmask.errors import ConfigError, TrainingError, did_you_mean
from unmask.redaction import masked_text
from unmask.rewards.answers import NotANumber, describe_error, shown
from unmask.rewards.http import HttpReward
from unmask.rewards.logged import Log
from unmask.rewards.timeouts import CallArguments, LateError, in_thread
from unmask.rewards.verdict import Verdict
from unmask.rewards.workers import WorkerError
from unmask.rl.config import GRPOConfig, RewardErrors
from unmask.rl.reward_calls import LocalReward, WorkerReward
from unmask.rl.reward_model import RewardModel
from unmask.tasks import Reward, Task, get_rewards, get_task
from unmask.tasks.base import names_reward_model
from unmask.training.run.fingerprints import code_fingerprint, content_hash, source_fingerprint

RewardFunction = Callable[..., Any]
RewardFunctions: TypeAlias = (
    Sequence[RewardFunction | PreTrainedModel | str | Path] | RewardFunction | PreTrainedModel | str | Path
)
"""Functions, reward models, or names or paths, of which a single one needs no list."""
RewardTokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
"""The tokenizer of each reward model, beside None for each function; or of a single one."""
BoundCall = Callable[[CallArguments, float], list[Any]]
"""Returns, within this number of seconds, a value or an exception for each completion."""
FailureKind = Literal["raised", "timeout", "invalid"]
MAX_REWARD = 1e12
"""Bound of a weighted reward, so that the squares and sums of losses are finite in float32."""
MESSAGES_HINT = (
    ". The prompts are messages, so each completion is a list of messages: completions[0][0]['content'] is "
    "the first one's text"
)
logger = logging.getLogger(__name__)


def reward_functions_named(
    named: RewardFunction | PreTrainedModel | str,
    workers: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[RewardFunction | WorkerReward]:
    """The reward functions of a name.

    Args:
        named: a function, which is returned as it is; `task` or `task/shaping` (see `Task.rewards`);
            `package.module:function` or `path/to/file.py:function`; a sequence classifier, or its path or id,
            which `model:` may precede; or the http(s) address of a reward server.
        workers: processes for a function given by its path; 0: this process runs it.
        tokenizer: of a sequence classifier; None: its own.

    Raises:
        ConfigError: it is not a function, or no function has this name.
    """
    if isinstance(named, nn.Module):
        return [RewardModel(named, tokenizer)]
    if callable(named):
        return [named]
    if not isinstance(named, str):
        raise ConfigError(
            f"{shown(named)} is not a reward function",
            where="reward_funcs",
            remedy="Give a function, or the name of one: a task, package.module:function, ...",
        )
    if named.startswith(("http://", "https://")):
        return [HttpReward(named)]
    if named.startswith("model:"):
        return [RewardModel(named.removeprefix("model:"), tokenizer)]
    if ":" in named:
        return [WorkerReward(named, workers) if workers else _load_function(named)]
    if names_reward_model(named):
        return [RewardModel(named, tokenizer)]
    refuse_file_alone(named, lambda value: callable(value) and not isinstance(value, type), "function")
    return list(get_rewards(named))


def _load_function(target: str) -> RewardFunction:
    """The function that `target` names. Raises ConfigError as `load_named`; for a task, it says how to name
    its reward functions."""
    found = load_named(
        target,
        lambda each: callable(each) and (not isinstance(each, type) or issubclass(each, Task)),
        "a function",
    )
    if isinstance(found, type):
        name = getattr(found, "name", "NAME")
        remedy = f"Name it with --task {target}: its rewards are the default, and rewards=[{name}] names them"
        raise ConfigError("is a task, not a function", where=target, remedy=remedy)
    return found


def as_list(functions: RewardFunctions | None) -> list[RewardFunction | PreTrainedModel | str]:
    """The functions, models or names as a list. A path is a name."""
    if functions is None:
        return []
    several = isinstance(functions, Sequence) and not isinstance(functions, str)
    each_one: Any = functions if several else [functions]
    return [str(each) if isinstance(each, Path) else each for each in each_one]


def distinct(names: Iterable[str]) -> list[str]:
    """Unique names: a repeated one gets a number appended."""
    unique: list[str] = []
    for name in names:
        numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        unique.append(next(each for each in numbered if each not in unique))
    return unique


def is_async(function: RewardFunction) -> bool:
    """Whether a function returns a coroutine: an async function, an object with an async `__call__`, or a
    partial of either."""
    function = _without_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class RewardResult:
    """What the reward functions returned for the completions of one call.

    Attributes:
        reward_BF: their values, without weights; NaN where a function does not apply, or failed.
        failed_BF: where a function failed; boolean.
        total_B: the weighted sums; NaN: unscored.
        statuses: by function, how often each status occurred, for functions that return verdicts.
        failures: by function, the completions on which it `raised` (or returned a verdict without a value),
            was late (`timeout`) or returned no number (`invalid`).
        logged: by name, the numbers that functions passed to `log_metric`.
        extras: by name, the columns that they passed to `log_extra`, a value for each completion; the last
            one of each name.
    """

    reward_BF: Tensor
    failed_BF: Tensor
    total_B: Tensor
    statuses: dict[str, Counter[str]]
    failures: dict[str, Counter[str]]
    logged: dict[str, list[float]]
    extras: dict[str, list[Any]]


class Failure(NamedTuple):
    """Why a completion got no value from a function."""

    kind: FailureKind
    what: str
    remedy: str


class Rewards:
    """The weighted sum of reward functions. `GRPOTrainer` calls it; `LocalReward` and `WorkerReward`
    call the functions.

    A function is called as TRL calls it, `f(prompts=..., completions=..., completion_ids=..., <dataset
    columns>=..., trainer_state=..., log_extra=..., log_metric=...)`, must accept `**kwargs`, and returns, or
    is a coroutine that returns, a float or None for each completion; None means that it does not apply. A
    completion to which no function applies is unscored: NaN, never zero.

    A completion on which any function failed (it raised, was late, or returned something other than a finite
    number or None) is unscored as a whole: its sum would be on another scale than those of its group. When a
    call raises, the function is called again for each completion alone. A TrainingError that a function
    raises stops the run, as does a wrong number of values.

    Async functions, worker processes and HTTP rewards run in parallel; functions in this process one after
    another, each in a thread. A late thread cannot be stopped, and may run beside later calls; one that never
    yields to other threads (an endless regular expression) cannot be abandoned either. Worker processes
    (`workers`) are killed.

    Args:
        functions: callables, or names (see `reward_functions_named`).
        weights: one per function or name; None: all 1.
        workers: processes for each function named by its path.
        seconds: time limit of a function for all completions of a call.
        errors: "unscored", or "raise": a TrainingError at the first failure.
        tokenizers: of reward models; None: their own.

    Attributes:
        largest: a value beyond this is not accepted as a finite number.
        names: the names of the functions in logs and errors, unique: `reward`, `reward_2`.
    """

    def __init__(
        self,
        functions: RewardFunctions | None,
        weights: Sequence[float] | None = None,
        workers: int = 0,
        *,
        seconds: float = 600.0,
        errors: RewardErrors = "unscored",
        tokenizers: RewardTokenizers = None,
    ):
        named = as_list(functions)
        if not named:
            raise ConfigError("no reward function", where="reward_funcs", remedy="Give at least one")
        weights = [1.0] * len(named) if weights is None else list(weights)
        if len(weights) != len(named):
            raise ConfigError(
                f"{len(weights)} weights for {len(named)} functions",
                where="reward_weights",
                remedy="Give one weight per reward function",
            )
        for weight in weights:
            if not (isinstance(weight, numbers.Real) and abs(weight) <= MAX_REWARD):
                raise ConfigError(
                    f"{shown(weight)} is not valid",
                    where="reward_weights",
                    remedy=f"Give numbers of at most {MAX_REWARD:g}",
                )
        each = list(tokenizers) if isinstance(tokenizers, Sequence) else [tokenizers] * len(named)
        if len(each) != len(named) or (isinstance(tokenizers, PreTrainedTokenizerBase) and len(named) > 1):
            raise ConfigError(
                f"{len(each) if isinstance(tokenizers, Sequence) else 1} for {len(named)} reward functions",
                where="reward_processing_classes",
                remedy="Give one tokenizer per reward model, and None for each function",
            )
        self.functions: list[RewardFunction | WorkerReward] = []
        self.weights: list[float] = []
        for name, weight, tokenizer in zip(named, weights, each, strict=True):
            found = reward_functions_named(name, workers, tokenizer)
            if tokenizer is not None and not isinstance(found[0], RewardModel):
                raise ConfigError(
                    f"{shown(name)} is no reward model",
                    where="reward_processing_classes",
                    remedy="Give None in its place",
                )
            self.functions += found
            self.weights += [weight] * len(found)
        self.names = distinct(f.name if isinstance(f, Reward) else _name_of(f) for f in self.functions)
        self.seconds, self.errors = seconds, errors
        self.largest = MAX_REWARD / max(1.0, sum(map(abs, self.weights)))
        self._calls = [
            self._call_of(function, name) for function, name in zip(self.functions, self.names, strict=True)
        ]
        self._warned: set[tuple[str, str]] = set()

    def __call__(
        self,
        rows: Sequence[Mapping[str, Any]],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        state: Any = None,
    ) -> RewardResult:
        """Call the functions.

        Args:
            rows: dataset rows, one per completion; all have the same columns.
            texts, ids: the completions.
            state: the trainer's state; None: functions get none.

        Raises:
            TrainingError: see the class.
        """
        log = Log()
        arguments = {
            **{name: [row[name] for row in rows] for name in rows[0] if name not in ("completion", "prompt")},
            "prompts": [row["prompt"] for row in rows],
            "completions": [
                [{"role": "assistant", "content": text}] if is_conversational(row) else text
                for row, text in zip(rows, texts, strict=True)
            ],
            "completion_ids": [list(tokens) for tokens in ids],
            **({} if state is None else {"trainer_state": state}),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        answers_of = dict(zip(self.names, self._answers(arguments), strict=True))
        # copies, since an abandoned thread may still log
        logged = {name: list(values) for name, values in list(log.metrics.items())}
        extras = log.columns(len(rows))
        hint = MESSAGES_HINT if not all(isinstance(text, str) for text in arguments["completions"]) else ""
        reward_FB, failed_FB = [], []
        statuses: dict[str, Counter[str]] = {}
        kinds: dict[str, Counter[str]] = {}
        for name, answers in answers_of.items():
            values = list(map(self._value, answers))
            failures = {row: value for row, value in enumerate(values) if isinstance(value, Failure)}
            self._report(name, failures, len(rows), hint)
            reward_FB.append([math.nan if row in failures else value for row, value in enumerate(values)])
            failed_FB.append([row in failures for row in range(len(rows))])
            kinds[name] = Counter(failure.kind for failure in failures.values())
            if verdicts := [answer.status for answer in answers if isinstance(answer, Verdict)]:
                statuses[name] = Counter(verdicts)
        reward_BF, failed_BF = torch.tensor(reward_FB).T, torch.tensor(failed_FB).T
        total_B = self.total(reward_BF, failed_BF)
        return RewardResult(reward_BF, failed_BF, total_B, statuses, kinds, logged, extras)

    def total(self, reward_BF: Tensor, failed_BF: Tensor) -> Tensor:
        """The weighted sum [B] of the functions that apply; NaN where none does, or where one failed (unless
        its weight is 0)."""
        weight_F = torch.tensor(self.weights)
        unscored_B = reward_BF.isnan().all(1) | (failed_BF & (weight_F != 0)).any(1)
        return torch.where(unscored_B, torch.nan, (reward_BF.nan_to_num() * weight_F).sum(1))

    def _call_of(self, function: RewardFunction | WorkerReward, name: str) -> BoundCall:
        if isinstance(function, HttpReward):
            return function.ask
        alone = self.errors == "unscored"
        if isinstance(function, WorkerReward):
            return functools.partial(function.ask, name=name, alone=alone)
        return functools.partial(LocalReward(function, name).ask, alone=alone)

    def _answers(self, arguments: CallArguments) -> list[list[Any]]:
        """The answers of each function to each completion [F][B]."""
        calls = [functools.partial(call, arguments, self.seconds) for call in self._calls]
        parallel = {
            index: in_thread(calls[index])
            for index, function in enumerate(self.functions)
            if isinstance(function, WorkerReward | HttpReward) or is_async(function)
        }
        serial = {index: call() for index, call in enumerate(calls) if index not in parallel}
        return [
            parallel[index].result() if index in parallel else serial[index] for index in range(len(calls))
        ]

    def _value(self, answer: Any) -> float | Failure:
        """An answer as a number: NaN for None."""
        if isinstance(answer, Verdict):
            if answer.value is None:
                return Failure(
                    "raised",
                    f"could not be verified: {answer.status} {answer.detail}",
                    "See docs/sandbox.md, docs/tasks.md",
                )
            answer = answer.value
        if answer is None:
            return math.nan
        if isinstance(answer, LateError):
            return Failure(
                "timeout",
                f"gave no answer within {self.seconds:g} seconds",
                "Give it more, or let it answer sooner",
            )
        if isinstance(answer, BaseException):
            what = answer.what if isinstance(answer, WorkerError) else f"raised {describe_error(answer)}"
            return Failure("raised", what, "Fix the function, or let it return None")
        if isinstance(answer, float) and abs(answer) <= self.largest:  # not NaN
            return answer
        what = answer.shown if isinstance(answer, NotANumber) else f"{answer}"
        return Failure("invalid", f"returned {what}", f"Return a number of at most {self.largest:g}, or None")

    def _report(self, name: str, failures: Mapping[int, Failure], count: int, hint: str) -> None:
        """Warn of the first failure of each kind among `count` completions, or raise it. `hint`: what a
        function that raised may not expect."""
        for row, failure in failures.items():
            on_all = failure.kind != "invalid" and len(failures) == count
            where = f"reward function {name}" + ("" if on_all else f", completion {row}")
            more = hint if failure.kind == "raised" else ""
            if self.errors == "raise":
                raise TrainingError(failure.what, where=where, remedy=failure.remedy + more)
            if (name, failure.kind) not in self._warned:
                self._warned.add((name, failure.kind))
                what = masked_text(" ".join(failure.what.split()))
                logger.warning(
                    (
                        "%s: %.400s. Where it fails, completions are unscored; further such failures are "
                        "only counted%s"
                    ),
                    where,
                    what,
                    more,
                )


def make_rewards(
    reward_funcs: RewardFunctions | None, args: GRPOConfig, tokenizers: RewardTokenizers = None
) -> Rewards:
    """The reward functions of a run.

    Raises:
        ConfigError: `difficulty_reward` is none of them.
    """
    rewards = Rewards(
        reward_funcs,
        args.reward_weights,
        args.reward_workers,
        seconds=args.reward_timeout,
        errors=args.reward_errors,
        tokenizers=tokenizers,
    )
    if (name := args.difficulty_reward) is not None and name not in rewards.names:
        raise ConfigError(
            f"no reward function {name!r}",
            where="difficulty_reward",
            remedy=did_you_mean(name, rewards.names),
        )
    return rewards


def reward_identities(reward_funcs: RewardFunctions | None) -> list[dict[str, Any]]:
    """A name for each reward function, with a hash of its source; of a function or task in a file or module,
    of all of that file."""
    return [
        _identity_of_name(one) if isinstance(one, str) else _identity_of_function(one)
        for one in as_list(reward_funcs)
    ]


def _identity_of_name(name: str) -> dict[str, Any]:
    if name.startswith(("http://", "https://")):  # without a password
        address = urlsplit(name)
        return {"name": f"{address.hostname}:{address.port}{address.path}"}
    if name.startswith("model:") or (":" not in name and names_reward_model(name)):
        return {"name": name}
    target, colon, function = name.rpartition(":")
    if not colon:
        return {"name": name} | (code_fingerprint(get_task(name.partition("/")[0])) or {})
    with current_folder_last(target):
        found = None if target.endswith(".py") else importlib.util.find_spec(target)
    origin = target if found is None else found.origin
    return {"name": function} | (content_hash(Path(origin).read_text(encoding="utf-8")) if origin else {})


def _identity_of_function(function: RewardFunction) -> dict[str, Any]:
    if isinstance(function, nn.Module):
        return {"name": getattr(function, "name_or_path", "")}
    function = _without_partial(function)
    called_object = not (inspect.isfunction(function) or inspect.ismethod(function))
    source = source_fingerprint(type(function) if called_object else function)
    return {"name": _name_of(function)} | (source or {})


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _without_partial(function: RewardFunction) -> RewardFunction:
    while isinstance(function, functools.partial):
        function = function.func
    return function
