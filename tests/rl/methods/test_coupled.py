"""coupled-GRPO has three views: one hides all tokens, the other two are complementary.

Shapes: B completions, T positions, N listed masks, L tokens of the completion.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.enumeration import LENGTH, PROMPT, Listed, tables_of
from tests.rl.methods.rollouts import plan, usual, whole
from unmask.rl.methods import get_method


def test_the_second_and_third_view_are_complements_within_the_completion():
    for pattern in (("bidirectional",), ("block_causal", 3)):
        _, rollout = usual(*pattern)
        all_BT, first_BT, second_BT = plan("coupled-grpo", rollout).target_BMT.unbind(1)
        assert torch.equal(all_BT, rollout.completion_BT)
        assert torch.equal(first_BT ^ second_BT, rollout.completion_BT) and not (first_BT & second_BT).any()


def test_the_share_is_uniform_and_the_views_weigh_its_inverse():
    count, length = 1000, 400
    views = plan("coupled-grpo", whole(torch.zeros(count, length, dtype=torch.long)))
    all_B, first_B, second_B = views.weight_BMT.amax(2).unbind(1)
    assert (all_B == 0.5).all() and torch.equal(views.weight_BMT > 0, views.target_BMT)
    rate_B = 0.5 / first_B
    torch.testing.assert_close(second_B, 0.5 / (1 - rate_B))
    assert rate_B.min() > 0.2 and rate_B.max() < 0.8 and rate_B.min() < 0.21 and rate_B.max() > 0.79
    assert abs(rate_B.mean() - 0.5) < 5 * 0.6 / 12**0.5 / count**0.5
    hidden_B = views.target_BMT[:, 1].float().mean(1)
    assert ((hidden_B - rate_B).abs() < 5 * 0.5 / length**0.5).all()
    chance_BT = views.target_BMT[:, 1, :8].float() - rate_B[:, None]
    assert torch.corrcoef(chance_BT.T).fill_diagonal_(0).abs().max() < 5 / count**0.5  # tokens independently


@pytest.mark.parametrize("time", [0.0, 0.3, 0.9])
def test_the_mean_over_all_masks_of_a_tokens_value_does_not_depend_on_its_chance_to_be_hidden(time):
    """Half of its log-probability with all hidden, and of its mean in either view that hides it. This is no
    log-probability: a token's weights are 1.5 in the mean, as published."""
    groups, [(positions, table)] = tables_of("bidirectional")
    rate = 0.2 + 0.6 * time
    sets = torch.tensor(list(itertools.product([False, True], repeat=LENGTH)))
    noise_NT = torch.zeros(len(sets), PROMPT + LENGTH, dtype=torch.float64)
    noise_NT[:, PROMPT:] = torch.where(sets, 0.0, 1 - 2.0**-53)
    draw = Listed(torch.full((len(sets),), time, dtype=torch.float64), noise_NT)
    views = get_method("coupled-grpo")().plan(whole(groups.expand(len(sets), -1)), draw)
    number_BM = (views.hidden_BMT[..., positions] * 2 ** torch.arange(LENGTH)).sum(-1)
    value_NL = (views.weight_BMT[..., positions].double() * table[number_BM]).sum(1)
    size_N1 = sets.sum(1, keepdim=True)
    mean_L = (rate**size_N1 * (1 - rate) ** (LENGTH - size_N1) * value_NL).sum(0)

    for token in range(LENGTH):
        expected = table[-1, token] / 2
        for chance in (rate, 1 - rate):  # of the others, given that this one is hidden
            for others in itertools.product([False, True], repeat=LENGTH - 1):
                hidden = [*others[:token], True, *others[token:]]
                number = sum(1 << i for i, is_hidden in enumerate(hidden) if is_hidden)
                expected += (
                    chance ** sum(others)
                    * (1 - chance) ** (LENGTH - 1 - sum(others))
                    * table[number, token]
                    / 2
                )
        assert mean_L[token].item() == pytest.approx(expected.item(), rel=1e-6)
