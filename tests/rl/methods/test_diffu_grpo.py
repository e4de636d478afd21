"""diffu-GRPO hides the completion, what follows it, and some of the prompt; it scores the completion."""

from __future__ import annotations

import pytest
import torch

from tests.generation.cases import every_pattern
from tests.rl.methods.rollouts import PROMPTS, one, plan, rollout_of, stopping, usual
from unmask.diffusion.log_probs import view_log_probs
from unmask.rl.methods import Rollout


@every_pattern
@pytest.mark.parametrize("rate", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("name", ["diffu-grpo", "wd1"])
def test_the_completion_is_hidden_and_scored(name, attention, block_size, rate):
    _, rollout = usual(attention, block_size)
    assert rollout.beyond_BT.any()
    views = plan(name, rollout, prompt_mask_rate=rate)
    (hidden_BT,), (scored_BT,) = views.hidden_BMT.unbind(1), views.target_BMT.unbind(1)
    assert torch.equal(scored_BT, rollout.completion_BT) and torch.equal(
        views.weight_BMT, views.target_BMT.float()
    )
    real_BT = rollout.document_BT > 0
    assert torch.equal(hidden_BT & ~rollout.prompt_BT, real_BT & ~rollout.prompt_BT)
    hidden = int((hidden_BT & rollout.prompt_BT).sum())
    assert {0.0: hidden == 0, 0.15: True, 1.0: hidden == rollout.prompt_BT.sum()}[rate]


def prompts_only(count: int, length: int) -> Rollout:
    prompt_BT = torch.ones(count, length, dtype=torch.bool)
    nothing_BT = torch.zeros_like(prompt_BT)
    none_BT = -prompt_BT.long()
    return Rollout(prompt_BT.long(), prompt_BT.long(), prompt_BT, nothing_BT, none_BT, none_BT, none_BT)


def hidden(rollout, rate, key_B=None, **more) -> torch.Tensor:
    """What diffu-GRPO hides [B, T]."""
    return plan(
        "diffu-grpo", rollout, key_B, prompt_mask_rate=rate, num_iterations=2, **more
    ).hidden_BMT.squeeze(1)


def test_prompt_tokens_are_hidden_as_often_as_asked():
    count, length, rate = 40, 500, 0.15
    hidden_BT = hidden(prompts_only(count, length), rate)
    tokens = count * length
    assert abs(hidden_BT.sum() - rate * tokens) < 5 * (tokens * rate * (1 - rate)) ** 0.5
    assert len({tuple(row) for row in hidden_BT.tolist()}) == count


def test_masks_follow_from_seed_key_and_iteration_alone():
    _, rollout = usual("bidirectional")
    key_B = torch.tensor([10, 11, 10, 12, 13, 14])
    hidden_BT = hidden(rollout, 0.5, key_B)
    assert torch.equal(hidden_BT[0][:3], hidden_BT[2][:3])  # equal keys, wherever they stand
    for row in range(len(PROMPTS)):
        [alone_T] = hidden(one(rollout, row), 0.5, key_B[row : row + 1])
        assert torch.equal(alone_T, hidden_BT[row][rollout.document_BT[row] > 0])
    long = prompts_only(2, 60)
    drawn = {
        str(hidden(long, 0.5, seed=seed, iteration=iteration).tolist())
        for seed in (0, 1)
        for iteration in (0, 1)
    }
    assert len(drawn) == 4


def test_a_causal_model_is_scored_as_it_is():
    """Its conditionals do not depend on what is hidden: its log-probabilities are the sampler's."""
    lm = stopping()
    generation, rollout = rollout_of(lm)
    with torch.no_grad():
        log_prob_BT = view_log_probs(
            lm, rollout.ids_BT, rollout.document_BT, plan("diffu-grpo", rollout, prompt_mask_rate=0.5)
        )[:, 0]
    for log_prob_T, completion_T, sampled in zip(
        log_prob_BT, rollout.completion_BT, generation.log_probs, strict=True
    ):
        assert log_prob_T[completion_T].tolist() == pytest.approx(sampled, abs=1e-10)
