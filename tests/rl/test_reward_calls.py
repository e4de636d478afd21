"""A batch that runs out of time ends what it started, so that the next one is scored."""

from __future__ import annotations

import math
import time

import pytest

from tests.helpers import require_sandbox
from unmask.rewards import program, symbolic
from unmask.rewards.program import verify_programs
from unmask.rewards.verdict import OK
from unmask.rl.weighted_rewards import Rewards
from unmask.sandbox.pool import PythonTests, SandboxPool, python_job
from unmask.tasks import Reward

TESTS = PythonTests("assert f(1) == 2", {"f": "f"})
DOUBLE = "def f(x): return 2 * x"
HANGS = ["import time\ntime.sleep(600)", "while True: pass", "def f(x):\n    while True: pass"]


@pytest.fixture
def pool(monkeypatch):
    require_sandbox()
    pool = SandboxPool(2)
    monkeypatch.setattr(program, "shared_pool", lambda: pool)
    yield pool
    pool.close()


def totals(rewards: Rewards, texts: list[str]) -> list[float]:
    return rewards(
        [{"prompt": "", "completion": ""}] * len(texts), texts, [[0]] * len(texts)
    ).total_B.tolist()


def test_programs_that_hang_do_not_outlive_their_batch(pool):
    verify = Reward(
        "programs", (), lambda texts, rows: verify_programs(python_job(text, TESTS) for text in texts)
    )
    rewards = Rewards([verify], seconds=3.0)
    first = totals(rewards, [DOUBLE, *HANGS * 3, DOUBLE])
    assert first[0] == 1.0 and all(map(math.isnan, first[1:])), (
        "what was done in time counts; the rest is unscored"
    )
    assert totals(rewards, [DOUBLE] * 4) == [1.0] * 4


@pytest.mark.slow
def test_answers_that_hang_do_not_outlive_their_batch(monkeypatch):
    calls = []

    def slow(answer: str, reference: str):
        calls.append(answer)
        time.sleep(0.5 if answer == "hangs" else 0.0)
        return OK

    monkeypatch.setattr(symbolic, "equivalent", slow)
    verify = Reward(
        "mathematics", (), lambda texts, rows: symbolic.equivalent_all((text, "") for text in texts)
    )
    rewards = Rewards([verify], seconds=1.0)
    assert all(map(math.isnan, totals(rewards, ["hangs"] * 100)[20:]))
    begun = len(calls)
    time.sleep(1.2)
    assert len(calls) == begun < 100
    assert totals(rewards, ["1"] * 4) == [1.0] * 4
