"""Reward functions are called as TRL calls them; a completion without a reward is unscored, not zero."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import os
import signal
import socket
import sqlite3
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from unmask.errors import ConfigError, TrainingError, UnmaskError
from unmask.rewards.verdict import Verdict
from unmask.rl.config import GRPOConfig
from unmask.rl.weighted_rewards import Rewards, distinct
from unmask.tasks import Task, get_task

ROWS = [{"prompt": f"p{i}", "answer": str(i), "completion": "c"} for i in range(3)]
TEXTS = ["0", "x", "2"]
IDS = [[4, 2], [5, 2], [6, 7, 2]]


def right(prompts, completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def only_first(completions, **_):
    return [0.25] + [None] * (len(completions) - 1)


async def length(completion_ids, **_):
    return [len(ids) for ids in completion_ids]


class Late:
    """A callable object whose result is awaited."""

    def __call__(self, **columns):
        return length(**columns)


def values(rewards: Rewards) -> torch.Tensor:
    return rewards(ROWS, TEXTS, IDS).reward_BF


def assert_equal(tensor: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(tensor, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_functions_are_called_with_prompts_completions_ids_and_columns():
    seen = []
    assert_equal(
        values(Rewards(lambda **arguments: seen.append(arguments) or [1, 2, 3])), [[1.0], [2.0], [3.0]]
    )
    for name in ("log_extra", "log_metric"):
        assert callable(seen[0].pop(name))
    assert seen == [
        {
            "prompts": ["p0", "p1", "p2"],
            "completions": TEXTS,
            "completion_ids": IDS,
            "answer": ["0", "1", "2"],
        }
    ]


def test_a_function_may_edit_the_ids_it_is_given():
    ids = [list(one) for one in IDS]
    Rewards(lambda completion_ids, **_: [float(one.pop()) for one in completion_ids])(ROWS, TEXTS, ids)
    assert ids == IDS


def test_a_function_that_edits_its_arguments_changes_neither_the_data_nor_other_verdicts():
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": ["a"]}] * 3
    state, untouched = TrainerState(global_step=3, log_history=[{"loss": 1.0}]), copy.deepcopy(rows)

    def edits(prompts, completions, completion_ids, answer, trainer_state, **_):
        for parts in (prompts[0], completions[0], completion_ids[0], answer[0]):
            parts.clear()
        completions[1] = answer[1] = prompts[1] = "right"
        answer[2].append("b")
        prompts[2][0]["content"] = completions[2][0]["content"] = "changed"
        trainer_state.global_step, trainer_state.log_history[0]["loss"] = 99, 0.0
        if len(completions) == 3:
            raise ValueError  # so that it is called again for each completion
        return [1.0]

    def sees(prompts, completions, completion_ids, answer, trainer_state, **_):
        same = [
            p == untouched[0]["prompt"] and c == [{"role": "assistant", "content": "x"}]
            for p, c in zip(prompts, completions, strict=True)
        ]
        rest = (
            completion_ids == IDS
            and answer == [["a"]] * 3
            and trainer_state.global_step == 3
            and trainer_state.log_history == [{"loss": 1.0}]
        )
        return [float(each and rest) for each in same]

    for functions in ([edits, sees], [sees, edits], [edits, edits, sees]):
        result = Rewards(functions)(rows, ["x"] * 3, IDS, state)
        assert_equal(result.reward_BF[:, functions.index(sees)], [1.0] * 3)
    assert rows == untouched and state.global_step == 3 and state.log_history == [{"loss": 1.0}]


def test_a_task_that_edits_its_rows_does_not_edit_the_data(monkeypatch):
    class Edits(Task):
        name, fields, columns = "edits", ("answer",), ("answer",)

        def row(self, record, where):
            return {"prompt": "", "completion": "", "group": "", **record}

        def verify(self, completion, row):
            return Verdict(float(row["answer"].pop()), "ok")

    rows = [{"prompt": "p", "answer": [1.0]}] * 2
    assert_equal(Rewards(["edits", "edits"])(rows, ["a", "b"], [[1], [2]]).reward_BF, [[1.0, 1.0]] * 2)
    assert rows[0]["answer"] == [1.0]
    del Task.registered["edits"]


FORKS = """
import os, time
calls = 0
def forks(completions, **_):
    global calls
    calls += 1
    if calls == 1:
        child = os.fork()
        if child: os.waitpid(child, 0)
        return [1.0 if child else 99.0] * len(completions)
    return [2.0] * len(completions)
async def later(completions, **_): return forks(completions)
def slow(completions, **_):
    global calls
    calls += 1
    if calls == 1 and os.fork() == 0:
        time.sleep(0.2)
        return [99.0] * len(completions)
    time.sleep(0.4 * (calls > 1))
    return [float(calls)] * len(completions)
def raises(completions, **_):
    global calls
    calls += 1
    if calls == 1 and os.fork() == 0:
        raise ValueError
    return [float(calls)] * len(completions)
"""


@each_once("name, workers", ["forks", "later", "slow", "raises"], [0, 1])
def test_a_function_that_forks_answers_once(tmp_path, workers, name):
    (tmp_path / "forking.py").write_text(FORKS)
    rewards, own = Rewards(f"{tmp_path}/forking.py:{name}", workers=workers, seconds=20), os.getpid()
    for expected in (1.0, 2.0):
        assert_equal(rewards(ROWS, TEXTS, IDS).reward_BF, [[expected]] * 3)
    assert os.getpid() == own


def test_a_function_that_forks_in_the_main_thread_answers_once():
    def forks(**_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the main thread only
        children.append(os.fork())
        return [1.0] * 3

    children, rewards = [], Rewards(lambda **arguments: forks(**arguments))
    for _ in range(2):
        assert_equal(rewards(ROWS, TEXTS, IDS).reward_BF, [[1.0]] * 3)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [1, 1]


def test_messages_are_answered_with_messages():
    seen = {}
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}]
    Rewards(lambda **arguments: seen.update(arguments) or [0.0, 0.0])(rows, ["yes", "no"], [[4], [5]])
    assert seen["completions"] == [[{"role": "assistant", "content": "yes"}], "no"]
    assert seen["prompts"] == [row["prompt"] for row in rows]


def test_sync_async_and_objects_side_by_side():
    rewards = Rewards([right, only_first, length, Late()])
    nan = math.nan
    assert_equal(values(rewards), [[1.0, 0.25, 2.0, 2.0], [0.0, nan, 2.0, 2.0], [1.0, nan, 3.0, 3.0]])
    assert rewards.names == ["right", "only_first", "length", "Late"]


@given(st.lists(st.sampled_from(["f", "f_2", "f_3", "g"])))
def test_each_function_has_a_name_of_its_own(given_names):
    names = distinct(given_names)
    assert len(set(names)) == len(names) and all(
        name.startswith(given) for name, given in zip(names, given_names, strict=True)
    )
    once = list(dict.fromkeys(given_names))
    assert distinct(once) == once


def test_functions_of_one_name_are_told_apart(path):
    task = get_task("sudoku").generate("train", 1, seed=0)
    rewards = Rewards(["sudoku", "sudoku/partial", "sudoku/published", lambda **_: [1.0], lambda **_: 1 / 0])
    assert rewards.names == ["sudoku", "sudoku/partial", "sudoku/published", "<lambda>", "<lambda>_2"]
    result = rewards(task, [task[0]["completion"]], IDS[:1])
    assert result.failures["<lambda>"] == {} and result.failures["<lambda>_2"] == {"raised": 1}
    assert [result.statuses[name].total() for name in rewards.names[:3]] == [1, 1, 1]

    def few(completions, **_):
        return [1.0] * len(completions)

    for workers in (0, 1):
        again = Rewards([few, right, f"{path}:few"], workers=workers)
        assert again.names == ["few", "right", "few_2"]
        with raises(TrainingError, where="reward function few_2"):
            again(ROWS, TEXTS, IDS)


def test_totals_weigh_what_applies():
    nan = math.nan
    reward_BF = torch.tensor([[1.0, 0.5], [1.0, nan], [nan, 2.0], [nan, nan], [0.0, 0.0]])
    failed_BF = torch.zeros(5, 2).bool()
    assert_equal(
        Rewards([right, length], [2.0, -1.0]).total(reward_BF, failed_BF), [1.5, 2.0, -2.0, nan, 0.0]
    )
    assert_equal(Rewards([right, length]).total(reward_BF, failed_BF), [1.5, 1.0, 2.0, nan, 0.0])


@given(st.lists(st.tuples(st.floats(-1e12, 1e12), st.floats(allow_nan=False)), min_size=1, max_size=4))
def test_totals_are_far_from_the_largest_number(functions):
    rewards = Rewards(
        [lambda value=value, **_: [value] for _, value in functions], [weight for weight, _ in functions]
    )
    result = rewards(ROWS[:1], TEXTS[:1], IDS[:1])
    (total,) = result.total_B.tolist()
    refused = any(abs(value) > rewards.largest for _, value in functions)
    assert result.failed_BF.any() == refused and (refused or abs(total) <= 1.001e12)


def test_what_a_function_of_some_weight_failed_on_has_no_total():
    nan = math.nan
    reward_BF = torch.tensor([[1.0, nan], [nan, 1.0], [1.0, 1.0]])
    failed_BF = torch.tensor([[False, True], [True, False], [False, False]])
    assert_equal(Rewards([right, length]).total(reward_BF, failed_BF), [nan, nan, 2.0])
    assert_equal(Rewards([right, length], [1.0, 0.0]).total(reward_BF, failed_BF), [1.0, nan, 1.0])


def test_what_nothing_judges_is_unscored():
    rewards = Rewards(only_first)
    assert_equal(rewards(ROWS, TEXTS, IDS).total_B, [0.25, math.nan, math.nan])


@pytest.mark.parametrize("name", ["sudoku", "countdown"])
def test_tasks_are_named(name):
    rows = get_task(name).generate("train", 3, seed=0)
    rewards = Rewards([name, length], weights=[1.0, 0.0])
    assert rewards.names == [name, "length"]
    answers = [rows[0]["completion"], "", rows[2]["completion"]]
    assert_equal(rewards(rows, answers, IDS).total_B, [1.0, 0.0, 1.0])
    with raises(ConfigError, where="task"):
        Rewards(name[:-1])


def test_functions_and_weights_that_do_not_fit():
    for none in ([], ()):
        with raises(ConfigError, where="reward_funcs"):
            Rewards(none)
    for wrong in (None, 5, [5], [right, None], {"a": right}, b"sudoku"):
        with raises(ConfigError, where="reward_funcs"):
            Rewards(wrong)
    with raises(ConfigError, where="reward_weights"):
        Rewards([right, length], weights=[1.0])
    for weight in (math.inf, -math.inf, math.nan, 1e13, "1", None):
        with raises(ConfigError, where="reward_weights"):
            Rewards([right, length], weights=[1.0, weight])


@pytest.mark.parametrize("returned", [[1.0, 2.0], [], 0.5, None])
def test_a_wrong_return_value_names_the_function(returned):
    def wrong(**_):
        return returned

    for errors in ("unscored", "raise"):
        with raises(TrainingError, where="reward function wrong"):
            Rewards([right, wrong], errors=errors)(ROWS, TEXTS, IDS)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda completions, **_: ["a" for _ in completions], "reward function <lambda>, completion 0"),
        (lambda completions, **_: [1.0, float("nan")], "reward function <lambda>, completion 1"),
        (lambda completions, **_: 1 / 0, "reward function <lambda>"),
    ],
)
def test_a_reward_that_misbehaves_is_named_where_errors_are_asked_for(function, where):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    with raises(TrainingError, where=where):
        Rewards(function, errors="raise")(rows, ["x", "y"], [[1], [2]])


REWARDS = """
import os
def right(completions, answer, **_): return [float(t == a) if t != "?" else None for t, a in zip(completions, answer)]
def few(completions, **_): return []
def process(completions, **_): return [float(os.getpid())] * len(completions)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "custom.py").write_text(REWARDS)
    return str(tmp_path / "custom.py")


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_a_function_of_a_file_gives_the_same_in_any_number_of_processes(path, workers):
    rewards = Rewards([f"{path}:right"], workers=workers)
    assert rewards.names == ["right"]
    assert_equal(rewards(ROWS, ["0", "?", "x"], IDS).reward_BF, [[1.0], [math.nan], [0.0]])


def test_workers_are_other_processes_and_without_them_it_is_this_one(path):
    here, there = values(Rewards(f"{path}:process")), values(Rewards(f"{path}:process", workers=3))
    assert set(here.flatten().tolist()) == {float(torch.tensor(float(os.getpid())))}
    assert len(set(there.flatten().tolist())) == 3 and not set(there.flatten().tolist()) & set(
        here.flatten().tolist()
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_imported_is_told_before_training(path, workers):
    with raises(UnmaskError, where=f"{path}:absent"):
        Rewards(f"{path}:absent", workers=workers)


def test_a_named_shaping_is_several_functions_of_one_weight():
    rewards = Rewards(["gsm8k/published", right], weights=[0.5, 2.0])
    assert rewards.names == ["xml_count", "soft_format", "strict_format", "integer", "correctness", "right"]
    assert rewards.weights == [0.5] * 5 + [2.0]


def test_statuses_are_counted_and_what_could_not_be_judged_is_unscored(monkeypatch):
    class Odd(Task):
        name, fields, columns = "odd", ("answer",), ("answer",)

        def row(self, record, where):
            return {"prompt": "", "completion": "", "group": "", **record}

        def verify(self, completion, row):
            return {"0": Verdict(1.0, "ok"), "x": Verdict(None, "verifier_error")}.get(
                completion, Verdict(0.0, "timeout")
            )

    monkeypatch.setattr(Task, "registered", Task.registered)
    rewards = Rewards("odd")
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[1.0], [math.nan], [0.0]])
    assert result.failed_BF.tolist() == [[False], [True], [False]]
    assert result.statuses == {"odd": {"ok": 1, "verifier_error": 1, "timeout": 1}}
    del Task.registered["odd"]


def test_a_task_in_the_place_of_a_function_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "registered", dict(Task.registered))
    (tmp_path / "odd.py").write_text("from unmask.tasks import Task\nclass Odd(Task):\n    name = 'odd'")
    with raises(ConfigError, where=str(tmp_path / "odd.py:Odd")):
        Rewards(f"{tmp_path / 'odd.py'}:Odd")


def test_parts_of_a_wrong_length_are_refused(tmp_path):
    (tmp_path / "odd.py").write_text(
        "def odd(completions, **_): return [1.0] * (3 if completions[0] == '0' else 1)"
    )
    with raises(TrainingError, where="reward function odd"):
        Rewards(f"{tmp_path}/odd.py:odd", workers=2)([*ROWS, ROWS[0]], [*TEXTS, "3"], [*IDS, [1]])


def test_what_cannot_be_judged_is_unscored_in_every_shaping(monkeypatch):
    unable = Verdict(None, "verifier_error", "no worker")
    monkeypatch.setattr("unmask.tasks.math500.equivalent", lambda *_: unable)
    monkeypatch.setattr("unmask.tasks.math500.equivalent_all", lambda pairs: [unable for _ in pairs])
    text = ["\\boxed{1}"]
    rewards = Rewards(["math500", "math500/published"])
    result = rewards([ROWS[1]], text, IDS[:1])
    assert_equal(result.reward_BF, [[math.nan, 0.5, math.nan]])
    assert_equal(result.total_B, [math.nan])


def broken(completions, **_):
    """Raises on `x`."""
    if "x" in completions:
        raise KeyError("x")
    return [1.0] * len(completions)


def invalid(completions, **_):
    return ["a" if text == "x" else 1.0 for text in completions]


@pytest.fixture
def release():
    """Release functions that hang."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(("function", "kind"), [(broken, "raised"), (invalid, "invalid")])
def test_what_a_function_fails_on_is_unscored_as_a_whole_and_the_rest_is_not(function, kind):
    rewards = Rewards([function, right])
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[1.0, 1.0], [math.nan, 0.0], [1.0, 1.0]])
    assert result.failed_BF.tolist() == [[False, False], [True, False], [False, False]]
    assert_equal(result.total_B, [2.0, math.nan, 2.0])
    assert result.failures == {function.__name__: {kind: 1}, "right": {}}
    assert rewards(ROWS[:1], TEXTS[:1], IDS[:1]).failures == {function.__name__: {}, "right": {}}


HUGE = pytest.param(10**9999, id="huge")


@pytest.mark.parametrize(
    "value", ["a", math.nan, math.inf, -1e13, HUGE, [1.0], 1j, Decimal(1), torch.tensor([1.0]), object()]
)
def test_values_that_are_no_numbers_or_beyond_the_bound_are_failures(value):
    rewards = Rewards(lambda completions, **_: [value, 2.0, None])
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[math.nan], [2.0], [math.nan]])
    assert result.failed_BF.tolist() == [[True], [False], [False]]


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, np.float32, torch.tensor, torch.FloatTensor, lambda v: [Fraction(x) for x in v]],
)
def test_numbers_may_be_of_any_kind(kind):
    for whole in (kind([1.0, 2.0, 3.0]), list(kind([1.0, 2.0, 3.0]))):
        result = Rewards(lambda whole=whole, **_: whole)(ROWS, TEXTS, IDS)
        assert_equal(result.reward_BF, [[1.0], [2.0], [3.0]])


def test_a_function_of_this_process_is_given_up_on(release):
    rewards = Rewards([lambda **_: release.wait(60), right], seconds=0.2)
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[math.nan, 1.0], [math.nan, 0.0], [math.nan, 1.0]])
    assert result.failures == {"<lambda>": {"timeout": 3}, "right": {}}
    with raises(TrainingError, where="reward function <lambda>"):
        Rewards(lambda **_: release.wait(60), seconds=0.2, errors="raise")(ROWS, TEXTS, IDS)


def test_an_async_function_is_canceled():
    canceled = threading.Event()

    async def hangs(**_):
        try:
            await asyncio.sleep(60)
        finally:
            canceled.set()

    rewards = Rewards([hangs, length], seconds=0.3)
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[math.nan, 2.0], [math.nan, 2.0], [math.nan, 3.0]])
    assert canceled.wait(10) and result.failures["hangs"] == {"timeout": 3}


HANGS = """
import os, time
def odd(completions, **_):
    if "x" in completions: time.sleep(60)
    if "y" in completions: os._exit(3)
    return [1.0] * len(completions)
def state(trainer_state, timeout, **columns): return [trainer_state.global_step + len(columns)] * len(timeout)
"""


def test_of_processes_the_late_one_is_killed_and_only_its_part_is_unscored(tmp_path, caplog):
    (tmp_path / "hangs.py").write_text(HANGS)
    rewards = Rewards(f"{tmp_path}/hangs.py:odd", workers=2, seconds=0.5)
    processes = [worker.process for worker in rewards.functions[0].workers]
    rows = [{"prompt": "p"}] * 4
    result = rewards(rows, ["a", "b", "c", "x"], [[1]] * 4)
    assert processes[1].poll() is not None
    assert_equal(result.reward_BF[:, 0], [1.0, 1.0, math.nan, math.nan])
    assert result.failures == {"odd": {"timeout": 2}}
    rewards.seconds = 60  # enough to start a process again
    result = rewards(rows, ["y", "b", "c", "d"], [[1]] * 4)
    assert_equal(result.reward_BF[:, 0], [math.nan, 1.0, 1.0, 1.0])
    assert result.failures == {"odd": {"raised": 1}}
    assert [record.getMessage().split(". Where")[0] for record in caplog.records] == [
        "reward function odd, completion 2: gave no answer within 0.5 seconds",
        "reward function odd, completion 0: its process ended (exit code 3)",
    ]


def test_processes_get_the_attributes_of_the_state_and_columns_of_any_name(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    rewards = Rewards(f"{tmp_path}/hangs.py:state", workers=2)
    rows = [{"prompt": "p", "timeout": 1, "self": 2}] * 3
    # prompts, completions, completion_ids, self and the two ways to log
    assert_equal(rewards(rows, TEXTS, IDS, TrainerState(global_step=7)).reward_BF, [[13.0]] * 3)


def test_each_function_tells_once_of_each_kind_of_failure(caplog):
    def both(completions, **_):
        return invalid(completions) if len(completions) > 2 else broken(completions)

    def second(completions, **_):
        raise ValueError("line\nbreak")

    rewards = Rewards([both, second])
    for texts in (TEXTS, TEXTS, ["x", "y"], ["x", "y"]):
        rewards(ROWS[: len(texts)], texts, IDS[: len(texts)])
    told = [record.getMessage().split(". Where")[0] for record in caplog.records]
    assert told == [
        "reward function both, completion 1: returned 'a'",
        "reward function second: raised ValueError: line break",
        "reward function both, completion 0: raised KeyError: 'x'",
    ]
    assert {(record.name, record.levelname) for record in caplog.records} == {
        ("unmask.rl.weighted_rewards", "WARNING")
    }


def test_functions_that_wait_run_side_by_side(tmp_path):
    """Each waits for a file that another one writes: called one after another, in any order, they would time
    out."""

    async def first(**_):
        while not (tmp_path / "worker").exists():
            await asyncio.sleep(0.001)
        (tmp_path / "first").touch()
        return [1.0] * 3

    class Second:
        async def __call__(self, **_):
            while not (tmp_path / "here").exists():
                await asyncio.sleep(0.001)
            (tmp_path / "second").touch()
            return [2.0] * 3

    def here(**_):
        (tmp_path / "here").touch()
        while not (tmp_path / "first").exists():
            time.sleep(0.001)
        return [3.0] * 3

    waits = f"while not Path('{tmp_path}/second').exists(): time.sleep(0.001)"
    source = f"    {waits}\n    Path('{tmp_path}/worker').touch()\n    return [4.0] * len(_['prompts'])"
    (tmp_path / "slow.py").write_text(f"import time\nfrom pathlib import Path\ndef slow(**_):\n{source}\n")
    rewards = Rewards(
        [first, f"{tmp_path}/slow.py:slow", here, functools.partial(Second())], workers=2, seconds=20
    )
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[1.0, 4.0, 3.0, 2.0]] * 3)
    assert not any(result.failures.values())


def test_functions_of_this_process_run_one_after_another():
    running = threading.Lock()

    def alone(**_):
        assert running.acquire(blocking=False)
        time.sleep(0.01)
        running.release()
        return [1.0] * 3

    rewards = Rewards([alone, length, alone, alone])
    result = rewards(ROWS, TEXTS, IDS)
    assert not any(result.failures.values())


def test_async_functions_may_keep_what_belongs_to_a_loop():
    gate = asyncio.Semaphore(1)

    async def gated(**_):
        async with gate:
            await asyncio.sleep(0.01)
        return [1.0] * 3

    rewards = Rewards([gated, gated], seconds=20)
    for _ in range(2):
        assert_equal(values(rewards), [[1.0, 1.0]] * 3)


def test_what_works_in_the_main_thread_alone_is_called_there(caplog):
    """For example math-verify's `parse` (recognized by its message), asyncio and sqlite3."""

    def alarmed(**_):
        handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, handler)
        return [1.0] * 3

    def wrapped(**_):
        try:
            return alarmed()
        except ValueError as error:
            raise ValueError("not in threads") from error

    connection = sqlite3.connect(":memory:")

    def stored(**_):
        return [connection.execute("select 1.0").fetchone()[0]] * 3

    rewards = Rewards([alarmed, wrapped, stored])
    for _ in range(2):
        assert_equal(values(rewards), [[1.0, 1.0, 1.0]] * 3)
    connection.close()
    assert [record.args[0] for record in caplog.records] == ["alarmed", "wrapped", "stored"]


def test_trl_functions_are_given_the_state_and_ways_to_log():
    """`log_extra` and `log_metric` as TRL documents them."""
    state = TrainerState(global_step=3)

    def logs(completions, answer, trainer_state, log_extra=None, log_metric=None, **kwargs):
        scores = [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]
        log_extra("golden_answer", answer)
        log_extra("too few", [1])
        log_metric("accuracy", sum(scores) / len(scores))
        log_metric("step", trainer_state.global_step)
        return scores

    async def too(completions, trainer_state, log_metric, **kwargs):
        log_metric("step", trainer_state.global_step + 1)
        return [None] * len(completions)

    rewards = Rewards([logs, too])
    result = rewards(ROWS, TEXTS, IDS, state)
    assert_equal(result.reward_BF[:, 0], [1.0, 0.0, 1.0])
    assert not result.failed_BF.any()
    assert result.logged["accuracy"] == [pytest.approx(2 / 3)] and sorted(result.logged["step"]) == [3.0, 4.0]
    assert result.extras == {"golden_answer": ["0", "1", "2"]}
    result = rewards(ROWS[:1], TEXTS[:1], IDS[:1], state)
    assert result.extras == {"golden_answer": ["0"], "too few": [1]} and result.logged["accuracy"] == [1.0]


def test_columns_are_logged_once_though_a_function_logs_them_again():
    def logs(completions, answer, log_extra, **_):
        log_extra("seen", completions)
        return broken(completions)

    for functions in (logs, [logs, logs]):
        assert Rewards(functions)(ROWS, TEXTS, IDS).extras == {"seen": TEXTS}


UNFIT = """
def short(prompts, completions): return [0.0] * len(completions)
def elsewhere(missing, **_): return [0.0] * len(missing)
async def late(completions): return [0.0] * len(completions)
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("name", "what"),
    [("short", "unexpected keyword"), ("elsewhere", "missing"), ("late", "unexpected keyword")],
)
def test_a_function_that_does_not_take_its_arguments_is_an_error(tmp_path, workers, name, what):
    (tmp_path / "unfit.py").write_text(UNFIT)
    with raises(TrainingError, where=f"reward function {name}") as refused:
        Rewards(f"{tmp_path}/unfit.py:{name}", workers=workers)(ROWS, TEXTS, IDS)
    assert what in refused.value.what  # Python's words


def test_a_task_whose_columns_are_missing_is_an_error():
    with raises(TrainingError, where="reward function sudoku"):
        Rewards("sudoku")(ROWS, TEXTS, IDS)


LOGS = """
def logs(completions, log_extra, log_metric, **_):
    if "bad" in completions: raise ValueError
    log_extra("twice", [1] * len(completions))
    log_extra("seen", completions)
    log_extra("too few", [1][:len(completions) - 1])
    log_metric("words", sum(map(len, completions)))
    return [1.0] * len(completions)
async def later(completions, log_extra, log_metric, **_): return logs(completions, log_extra, log_metric)
"""


@partly_slow("workers", [0, 1, 2, 3], 0, 2)
@pytest.mark.parametrize("name", ["logs", "later"])
def test_functions_log_the_same_in_any_number_of_processes(tmp_path, workers, name):
    (tmp_path / "logs.py").write_text(LOGS)
    rewards = Rewards(f"{tmp_path}/logs.py:{name}", workers=workers)
    result = rewards(ROWS, TEXTS, IDS)
    assert_equal(result.reward_BF, [[1.0]] * 3)
    assert (
        result.extras["seen"] == TEXTS
        and result.extras["twice"] == [1, 1, 1]
        and "too few" not in result.extras
    )
    assert sum(result.logged["words"]) == 3 and len(result.logged["words"]) == max(1, workers)


@pytest.mark.parametrize("name", [3, "\ud800"])
@pytest.mark.parametrize("way", ["log_extra", "log_metric"])
def test_a_log_of_no_name_is_a_failure_of_its_function(way, name):
    rewards = Rewards(
        lambda **given: given[way](name, [1.0] * 3 if way == "log_extra" else 1.0), errors="raise"
    )
    with raises(TrainingError, where="reward function <lambda>"):
        rewards(ROWS, TEXTS, IDS)


def test_what_a_process_logs_stays_with_its_completions(tmp_path):
    (tmp_path / "logs.py").write_text(LOGS)
    rewards = Rewards(f"{tmp_path}/logs.py:logs", workers=2)
    result = rewards([ROWS[0]] * 4, ["a", "b", "bad", "d"], [[1]] * 4)
    assert result.failed_BF[:, 0].tolist() == [False, False, True, False]
    assert result.extras["seen"] == ["a", "b", None, None] and result.logged["words"] == [2.0, 1.0]


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_limits_and_errors_that_are_none(seconds, tmp_path):
    with raises(ConfigError, where="reward_timeout"):
        GRPOConfig(output_dir=str(tmp_path), reward_timeout=seconds)
    with raises(ConfigError, where="reward_errors"):
        GRPOConfig(output_dir=str(tmp_path), reward_errors="ignore")


def test_a_judge_over_http_that_does_not_answer_is_a_failure():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rewards = Rewards(f"http://127.0.0.1:{free.getsockname()[1]}/judge")
        result = rewards(ROWS, TEXTS, IDS, TrainerState())
    assert result.failed_BF.all() and result.failures == {"127.0.0.1": {"raised": 3}}
    assert_equal(result.total_B, [math.nan] * 3)


def test_rewards_are_computed_without_gradients_in_any_thread():
    weight = torch.nn.Parameter(torch.ones(3))
    rewards = Rewards(lambda **_: [float((2 * weight).requires_grad)] * 3)
    assert_equal(values(rewards), [[0.0]] * 3)


@pytest.mark.parametrize(
    ("prompt", "hinted"), [([{"role": "user", "content": "Hello"}], True), ("Hello", False)]
)
def test_a_function_for_texts_that_meets_messages_is_told_of_them(prompt, hinted, caplog):
    def short(completions, **columns):
        return [text.words for text in completions]

    Rewards(short)([{"prompt": prompt}], ["text"], [[1]])
    assert "raised" in caplog.text and ("a list of messages" in caplog.text) is hinted
