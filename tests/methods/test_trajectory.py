"""Trajectory replay scores every token once, in the state in which it was drawn: the policy of the sampler, exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.conftest import every_pattern
from tests.methods.rollouts import PROMPTS, keys, one, rollout_of, stopping
from unmask.diffusion.score import score
from unmask.diffusion.views import Draw
from unmask.methods import get_method

PLAN = get_method("cj-grpo").plan


def plan(rollout, segments=None):
    return PLAN(rollout, Draw(0, keys(rollout)), SimpleNamespace(segments=segments))


@every_pattern
@pytest.mark.parametrize("logit_shift", [False, True])
@settings(max_examples=5)
@given(
    policy=st.sampled_from(["confidence", "margin", "entropy", "random"]),
    steps=st.none() | st.integers(1, 8),
    decoding_block=st.sampled_from([None, 1, 2, 4, 8]),
    stop_at_eos=st.booleans(),
    chunk=st.none() | st.integers(1, 5),
)
def test_scores_are_the_log_probs_of_the_sampler(attention, block_size, logit_shift, policy, steps, decoding_block, stop_at_eos, chunk):
    lm = stopping(attention, block_size, logit_shift)
    decoding_block = decoding_block if attention == "bidirectional" else None
    generation, rollout = rollout_of(lm, policy=policy, steps=steps, block_size=decoding_block, stop_at_eos=stop_at_eos)
    views = plan(rollout)
    assert views.count == max(generation.forward_passes)
    with torch.no_grad():
        log_prob_BVT = score(lm, rollout.ids_BT, rollout.documents_BT, views, chunk=chunk)
    log_prob_BT = (views.weight_BVT * log_prob_BVT).sum(1)
    for log_prob_T, completion_T, sampled in zip(log_prob_BT, rollout.completion_BT, generation.log_probs, strict=True):
        assert log_prob_T[completion_T].tolist() == pytest.approx(sampled, abs=1e-10)
        assert (log_prob_T[~completion_T] == 0).all()


@every_pattern
@pytest.mark.parametrize("segments", [None, 1, 2, 3, 100])
def test_each_completion_token_is_scored_once_where_it_is_hidden(attention, block_size, segments):
    generation, rollout = rollout_of(stopping(attention, block_size), block_size=2 if attention == "bidirectional" else None)
    steps = max(generation.forward_passes)
    views = plan(rollout, segments)
    assert views.count == min(segments or steps, steps)
    assert torch.equal(views.scored_BVT.sum(1), rollout.completion_BT.long())
    assert torch.equal(views.weight_BVT, views.scored_BVT.float())
    assert not (views.scored_BVT & ~views.hidden_BVT).any()
    assert not (views.hidden_BVT & (rollout.prompt_BT | (rollout.documents_BT == 0))[:, None]).any()
    assert not (views.hidden_BVT[:, 1:] & ~views.hidden_BVT[:, :-1]).any()  # what was once revealed stays so
    stayed_BT = rollout.beyond_BT & (rollout.steps_BT < 0)
    assert stayed_BT.any() and (views.hidden_BVT | ~stayed_BT[:, None]).all()
    if segments is None:
        step_V = torch.arange(steps)[None, :, None]
        assert torch.equal(views.scored_BVT, (rollout.steps_BT[:, None] == step_V) & rollout.completion_BT[:, None])


@every_pattern
@pytest.mark.parametrize("segments", [None, 2, 3, 5])
def test_the_views_of_a_completion_are_its_own(attention, block_size, segments):
    """Whatever else is in the batch: a short completion beside a long one is divided as it is alone."""
    generation, rollout = rollout_of(stopping(attention, block_size), block_size=2 if attention == "bidirectional" else None)
    assert len(set(generation.forward_passes)) > 1
    views = plan(rollout, segments)
    for row in range(len(PROMPTS)):
        alone = plan(one(rollout, row), segments)
        own_T = rollout.documents_BT[row] > 0

        def scored_states(views, index, own_T):
            hidden_VT, scored_VT = views.hidden_BVT[index][:, own_T].tolist(), views.scored_BVT[index][:, own_T].tolist()
            return [(hidden, scored) for hidden, scored in zip(hidden_VT, scored_VT, strict=True) if any(scored)]

        assert scored_states(views, row, own_T) == scored_states(alone, 0, own_T[own_T])


@every_pattern
def test_one_segment_is_diffu_grpo_without_prompt_masks(attention, block_size):
    for stop_at_eos in (False, True):
        _, rollout = rollout_of(stopping(attention, block_size), stop_at_eos=stop_at_eos)
        merged = plan(rollout, segments=1)
        config = SimpleNamespace(prompt_mask_rate=0.0)
        at_once = get_method("diffu-grpo").plan(rollout, Draw(0, keys(rollout)), config)
        for name in ("hidden_BVT", "scored_BVT", "weight_BVT"):
            assert torch.equal(getattr(merged, name), getattr(at_once, name))
