"""Programs and tests: what passes between candidate and tester, what each outcome means, how many at a
time."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import require_sandbox
from unmask.sandbox import pool as pools
from unmask.sandbox.isolation import Host, SandboxLimits
from unmask.sandbox.outcome import Outcome
from unmask.sandbox.pool import PythonTests, SandboxPool, python_job

DOUBLE = "def f(x):\n    return 2 * x\n"
STOPS = "def f(x): raise StopIteration"


def outcome_of(pool: SandboxPool, program: str, asserts: str, setup: str = "", **names: str) -> Outcome:
    return pool.run([python_job(program, PythonTests(asserts, names or {"f": "f"}, setup))])[0]


@pytest.mark.parametrize(
    ("program", "asserts", "expected"),
    [
        (DOUBLE, "assert f(1) == 2\nassert f(2) == 4", Outcome("ok", 2, 2)),
        (DOUBLE, "assert f(1) == 2\nassert f(2) == 5\nassert f(3) == 6", Outcome("wrong", 2, 3, "AssertionError: ")),
        (DOUBLE, "for n in range(5):\n    assert f(n) == 2 * n, n", Outcome("ok", 5, 5)),
        (DOUBLE, "assert True, 'always'\nassert f(1) == 2", Outcome("ok", 1, 1)),
        (DOUBLE, "f(1)", Outcome("wrong")),
        (DOUBLE, "assert f(1) == 2\nif f(2) == 4:\n    assert False, 'never'", Outcome("wrong", 1, 2, "AssertionError: never")),
        (DOUBLE, "assert f(1) == 2\nf('x') + 1\nassert f(2) == 4", Outcome("wrong", 1, 2, 'TypeError: can only concatenate str (not "int") to str')),
        ("def f(x): raise ValueError('no')", "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'", Outcome("ok", 1, 1)),
        ("def f(*a, **k): return [a, k]", "assert f(1, (2,), key={3: {4}}) == [(1, (2,)), {'key': {3: {4}}}]", Outcome("ok", 1, 1)),
        ("def g(x): return x", "assert f(1) == 1", Outcome("wrong", 0, 1, "NameError: name 'f' is not defined")),
        ("def f(x) return x", "assert f(1) == 1", Outcome("malformed", 0, 0, "SyntaxError: expected ':' (candidate.py, line 1)")),
        (STOPS, "assert all(map(lambda x: f(x) == 2 * x, range(5)))", Outcome("wrong", 0, 1, "CandidateError: StopIteration: ")),
        (STOPS, "for n in map(f, [1]):\n    assert n == 2\nassert 1 + 1 == 2", Outcome("wrong", 0, 1, "CandidateError: StopIteration: ")),
        (STOPS, "for n in iter(lambda: f(1), 0):\n    assert n == 2", Outcome("wrong", 0, 1, "CandidateError: StopIteration: ")),
        ("1 / 0", "assert f(1) == 1", Outcome("wrong", 0, 0, "ZeroDivisionError: division by zero")),
        (DOUBLE, "assert f(1) ==", Outcome("verifier_error", detail="the tests are broken: SyntaxError: invalid syntax (tests.py, line 1)")),
    ],
)  # fmt: skip
def test_what_comes_of_a_program(pool, program, asserts, expected):
    found = outcome_of(pool, program, asserts)
    assert (found.status, found.passed, found.total) == (expected.status, expected.passed, expected.total)
    assert found.detail == expected.detail


def test_a_program_may_pickle_its_classes_and_postpone_annotations(pool):
    program = """
from __future__ import annotations
import copy, dataclasses, pickle
@dataclasses.dataclass
class Number:
    value: int
def f(x): return copy.deepcopy(pickle.loads(pickle.dumps(Number(x)))).value
"""
    assert outcome_of(pool, program, "assert f(3) == 3") == Outcome("ok", 1, 1)


def test_objects_of_a_candidate_can_be_made_used_and_handed_back(pool):
    program = """
class Node:
    def __init__(self, value): self.value, self.left, self.right = value, None, None
def total(node): return node.value + sum(total(n) for n in (node.left, node.right) if n)
def pairs(node): yield node.value; yield node
"""
    asserts = """
root = Node(1)
root.left = Node(2)
root.left.right = Node(4)
assert total(root) == 7
assert root.left.value == 2
assert total(list(pairs(root))[1]) == 7
"""
    names = {"Node": "Node", "total": "total", "pairs": "pairs"}
    assert outcome_of(pool, program, asserts, **names) == Outcome("ok", 3, 3)
    assert outcome_of(pool, program, "assert Node(1) == Node(1)", **names).status == "wrong"
    assert outcome_of(pool, program, "assert Node(1)", **names).status == "wrong"


def test_what_the_tests_need_beside_the_candidate_is_never_the_candidates(pool):
    program = "def f(x): return 7\ndef helper(x): return 7\nimport sys as math"
    assert outcome_of(pool, program, "assert f(1) == helper(1)", "def helper(x): return x").status == "wrong"
    assert outcome_of(pool, program, "assert f(4) == math.sqrt(4)", "import math").status == "wrong"


def test_broken_setup_is_no_fault_of_the_program(pool):
    assert outcome_of(pool, DOUBLE, "assert f(1) == 2", "1 / 0").status == "verifier_error"


def test_time_is_the_programs_own():
    require_sandbox()
    with contextlib.closing(SandboxPool(1, SandboxLimits(seconds=0.5))) as hurried:
        assert outcome_of(hurried, "def f(x):\n    while True: pass", "assert f(1) == 2").status == "timeout"


def test_the_results_of_a_tester_have_one_outcome():
    assert pools.outcome_of({"exceeded": "2 s of sleep"}) == Outcome(
        "timeout", detail="not done within 2 s of sleep"
    )
    assert pools.outcome_of({}).status == "wrong"
    found = {"passed": 2, "total": 2, "complete": False, "detail": "x"}
    assert pools.outcome_of(found) == Outcome("wrong", 2, 3, "x")
    assert pools.outcome_of(found | {"complete": True}).status == "ok"


def test_a_sandbox_that_does_not_start_blames_nobody(pool, monkeypatch):
    broken = SandboxPool(1)
    try:
        monkeypatch.setattr(Host, "command", lambda *_: ["/bin/false"])
        assert outcome_of(broken, DOUBLE, "assert f(1) == 2").status == "verifier_error"
    finally:
        broken.close()


@settings(max_examples=5)
@given(st.integers(0, 10**9))
def test_outcomes_come_in_the_order_of_the_programs(pool, seed):
    numbers = [(seed * k) % 97 for k in range(12)]
    jobs = [
        python_job(
            f"def f(x): return {n}", PythonTests(f"assert f(0) == {n if k % 3 else n + 1}", {"f": "f"})
        )
        for k, n in enumerate(numbers)
    ]
    assert [found.status for found in pool.run(jobs)] == ["ok" if k % 3 else "wrong" for k in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_many_honest_programs_at_once_all_pass(count, pool):
    program = "import math, collections\ndef f(x):\n    return sum(math.isqrt(k) for k in range(x))\n"
    expected = sum(int(k**0.5) for k in range(5000))
    found = pool.run([python_job(program, PythonTests(f"assert f(5000) == {expected}", {"f": "f"}))] * count)
    assert [one for one in found if one != Outcome("ok", 1, 1)] == []
