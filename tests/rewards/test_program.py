"""How the outcome of a sandbox becomes a verdict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unmask.rewards.program import verdict_of
from unmask.sandbox.outcome import Outcome

counts = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)


@given(st.sampled_from(["wrong", "malformed", "timeout", "verifier_error"]), counts, st.text(max_size=5))
def test_the_value_is_the_share_of_tests_and_none_where_the_sandbox_failed(status, counts, detail):
    passed, total = counts
    verdict = verdict_of(Outcome(status, passed, total, detail))
    assert (verdict.status, verdict.detail, verdict.solved) == (status, detail, False)
    assert verdict.value == (None if status == "verifier_error" else passed / total if total else 0.0)


@given(st.integers(1, 9))
def test_every_test_passed_is_one(total):
    verdict = verdict_of(Outcome("ok", total, total))
    assert verdict.solved and verdict.value == 1.0
