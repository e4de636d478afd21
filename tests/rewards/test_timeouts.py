"""Calls end in time for any function, and failures are returned as values."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from tests.errors import raises
from unmask.errors import TrainingError
from unmask.rewards.answers import answers_in
from unmask.rewards.timeouts import EventLoop, LateError, in_thread, limited, reward_values

FOUR = {"completions": ["a", "b", "c", "d"], "state": "all", "numbers": [1, 2, 3, 4]}


def stop(loop):
    """Of an EventLoop, whose thread ends with the interpreter only."""
    loop.call_soon_threadsafe(loop.stop)
    while loop.is_running():
        time.sleep(0.001)
    loop.close()


def asked(function, *, seconds=60.0, alone=True):
    return reward_values(
        lambda arguments, seconds: answers_in(function(**arguments)), FOUR, seconds, name="f", alone=alone
    )


def test_what_is_late_is_given_up_on_and_what_raises_raises():
    end = threading.Event()
    with raises(LateError, where=None):
        limited(in_thread(end.wait), 0.01)
    end.set()
    with pytest.raises(TimeoutError, match="my own"):
        limited(in_thread(lambda: (_ for _ in ()).throw(TimeoutError("my own"))), 60)
    with pytest.raises(SystemExit):
        limited(in_thread(sys.exit), 60)
    assert limited(in_thread(lambda: 7), 60) == 7


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_interpreter():
    code = (
        "import time; from unmask.rewards.timeouts import *; in_thread(lambda: time.sleep(60)); "
        "EventLoop().run(asyncio.sleep(0), 60)"
    )
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=20, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_coroutines_share_one_loop_and_are_cancelled_when_late():
    loop, canceled = EventLoop(), threading.Event()

    async def where():
        return asyncio.get_running_loop()

    async def sleeps():
        try:
            await asyncio.sleep(60)
        finally:
            canceled.set()

    async def leaves():
        sys.exit("no")

    first = loop.run(where(), 60)
    with pytest.raises(LateError):
        loop.run(sleeps(), 0.05)
    assert canceled.wait(10)
    with pytest.raises(RuntimeError, match="SystemExit: no"):
        loop.run(leaves(), 60)
    assert loop.run(where(), 60) is first
    stop(first)


def test_a_loop_that_is_blocked_is_left(monkeypatch):
    monkeypatch.setattr("unmask.rewards.timeouts.PING_SECONDS", 0.05)
    loop, end = EventLoop(), threading.Event()

    async def blocks():
        end.wait()

    async def where():
        return asyncio.get_running_loop()

    first = loop.run(where(), 60)
    with pytest.raises(LateError):
        loop.run(blocks(), 0.05)
    second = loop.run(where(), 60)
    assert second is not first
    end.set()
    stop(first), stop(second)


def test_one_completion_does_not_take_the_others_with_it():
    calls = []

    def function(completions, numbers, state):
        calls.append((completions, numbers, state))
        if "c" in completions:
            raise KeyError("c")
        return numbers

    [a, b, c, d] = asked(function)
    assert [a, b, d] == [1, 2, 4] and isinstance(c, KeyError)
    assert calls[0] == (["a", "b", "c", "d"], [1, 2, 3, 4], "all")
    assert calls[1:] == [(["a"], [1], "all"), (["b"], [2], "all"), (["c"], [3], "all"), (["d"], [4], "all")]


def test_a_function_may_raise_for_all_at_once():
    calls = []

    def function(completions, **_):
        calls.append(completions)
        sys.exit("no")

    assert [type(answer) for answer in asked(function, alone=False)] == [SystemExit] * 4
    assert len(calls) == 1
    assert [type(answer) for answer in asked(function)] == [SystemExit] * 4


def test_what_raises_is_asked_again_in_the_time_that_is_left():
    def function(completions, **_):
        if len(completions) > 1:
            raise ValueError
        time.sleep(0.1)
        return [1.0]

    found = asked(function, seconds=0.15)
    assert found[0] == 1.0 and all(isinstance(answer, LateError) for answer in found[2:])


def test_what_is_late_is_not_asked_again():
    calls = []

    def function(completions, **_):
        calls.append(completions)
        raise LateError("late")

    assert all(isinstance(answer, LateError) for answer in asked(function)) and len(calls) == 1


@pytest.mark.parametrize("returned", [None, 0.5, [1.0] * 3, iter([1.0] * 4), {"a": 1.0}])
def test_a_wrong_number_of_values_is_an_error(returned):
    with raises(TrainingError, where="reward function f"):
        asked(lambda **_: returned)


def test_but_not_where_a_function_was_asked_for_a_single_one_only_as_it_raised():
    def function(completions, numbers, **_):
        if len(completions) > 1:
            raise KeyError("of all")
        return numbers if completions == ["b"] else 0.5

    found = asked(function)
    assert found[1] == 2 and all(isinstance(found[row], KeyError) for row in (0, 2, 3))


def test_a_training_error_ends_the_run():
    def function(**_):
        raise TrainingError("the disk is full")

    with raises(TrainingError, where=None):
        asked(function)
