"""SPG's views hide tokens in blocks, and its two bounds enclose the likelihood.

Shapes: B completions, M views, T positions, S sets of hidden tokens, L tokens.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests import enumeration
from tests.generation.cases import every_pattern
from tests.rl.methods.rollouts import (
    LENGTH,
    assert_loss,
    config,
    keys,
    made_up,
    plan,
    rollout_of,
    stopping,
    usual,
    whole,
)
from tests.tiny import toy_lm
from unmask.diffusion.views import MaskRNG
from unmask.rl.methods.masking import Diffusion
from unmask.rl.methods.spg import lower_bound, upper_bound
from unmask.rl.updates import plan_views

# Views.


@every_pattern
@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_view_is_clean_before_its_block_and_hidden_behind(attention, block_size, samples):
    _, rollout = usual(attention, block_size)
    views = plan("spg", rollout, samples=samples, prompt_mask_rate=0.0)
    assert views.count == samples
    for row, block_T in enumerate(rollout.block_BT.tolist()):
        length = int(rollout.completion_BT[row].sum())
        blocks = [block_T[at] for at in rollout.completion_BT[row].nonzero().flatten().tolist()]
        chosen = []
        for scored_T, weight_T in zip(views.target_BMT[row], views.weight_BMT[row], strict=True):
            hidden = [bool(scored_T[at]) for at in rollout.completion_BT[row].nonzero().flatten().tolist()]
            assert 0 < sum(hidden) <= length
            chosen.append(blocks[hidden.index(True)])
            assert not any(h for h, block in zip(hidden, blocks, strict=True) if block < chosen[-1])
            assert all(h for h, block in zip(hidden, blocks, strict=True) if block > chosen[-1])
            torch.testing.assert_close(weight_T[scored_T], torch.full((sum(hidden),), 1 / sum(hidden)))
        # a block of its own as long as there is one
        assert len(set(chosen)) == min(samples, len(set(blocks)))


def test_blocks_and_numbers_of_hidden_tokens_are_uniform():
    count = 4000
    rollout = whole(torch.zeros(count, 12, dtype=torch.long))
    rollout = replace(rollout, block_BT=(torch.arange(12) // 4).expand(count, -1))
    target_BMT = plan("spg", rollout, prompt_mask_rate=0.0).target_BMT
    size_BMK = target_BMT.unflatten(2, (3, 4)).sum(3)
    chosen_BM = (size_BMK > 0).int().argmax(2)
    number_BM = size_BMK.gather(2, chosen_BM[:, :, None]).squeeze(2)
    for view in (0, 1):
        tally_KN = torch.zeros(3, 4)
        tally_KN.index_put_((chosen_BM[:, view], number_BM[:, view] - 1), torch.ones(count), accumulate=True)
        expected = count / 12
        assert ((tally_KN - expected).abs() < 5 * expected**0.5).all()
    within_B4 = target_BMT[:, 0].unflatten(1, (3, 4))[torch.arange(count), chosen_BM[:, 0]]
    assert (within_B4.float().mean(0) - 0.625).abs().max() < 5 * 0.5 / count**0.5  # which of them is chance


def test_the_prompt_and_finished_blocks_are_hidden_in_part_and_what_is_the_completions_is_scored():
    count, prompt = 4000, 5
    group_BT = torch.cat([torch.full((count, prompt), -1), torch.zeros(count, 12, dtype=torch.long)], 1)
    block_BT = torch.where(group_BT >= 0, (torch.arange(prompt + 12) - prompt) // 4, -1)
    rollout = replace(whole(group_BT), block_BT=block_BT)
    clean, noised = (plan("spg", rollout, samples=1, prompt_mask_rate=rate) for rate in (0.0, 0.15))
    chosen_B1 = torch.where(clean.target_BMT[:, 0], block_BT, 9).amin(1, keepdim=True)
    before_BT = block_BT < chosen_B1
    more_BT = (noised.hidden_BMT & ~clean.hidden_BMT)[:, 0]
    assert not (more_BT & ~before_BT).any() and not (clean.hidden_BMT & ~noised.hidden_BMT).any()
    for place in (slice(prompt), slice(prompt, None)):
        drawn = more_BT[:, place][before_BT[:, place]].float()
        assert (drawn.mean() - 0.15).abs() < 5 * (0.15 * 0.85 / len(drawn)) ** 0.5
    assert torch.equal(noised.target_BMT, noised.hidden_BMT & rollout.completion_BT[:, None])
    torch.testing.assert_close(noised.weight_BMT.sum(2), torch.ones(count, 1))


# Bounds, over all masks.


def all_masks(length):
    """Every set of hidden tokens [V, L], of each size as often as of any other: a view each."""
    sizes = math.lcm(*(math.comb(length, size) for size in range(1, length + 1)))
    sets = [chosen for size in range(1, length + 1) for chosen in itertools.combinations(range(length), size)]
    masks = [chosen for chosen in sets for _ in range(sizes // math.comb(length, len(chosen)))]
    return torch.tensor([[token in chosen for token in range(length)] for chosen in masks])


def upper_of(table_SL, beta):
    """The upper bound of a whole completion, over all masks."""
    length = table_SL.shape[1]
    target_ML = all_masks(length)
    log_prob_ML = table_SL[(target_ML * 2 ** torch.arange(length)).sum(1)]
    return length * upper_bound(log_prob_ML[None], target_ML[None], torch.tensor([[length]]), beta).item()


@pytest.fixture(scope="module")
def tables():
    """Conditionals of four tokens, of two models and several texts."""
    models = [toy_lm(kind) for kind in ("bidirectional", "bidirectional with a shift")]
    return [
        enumeration.conditionals(lm, enumeration.random_row(6, seed), range(2, 6))
        for lm in models
        for seed in range(6)
    ]


def test_over_all_masks_the_upper_bound_lies_above_the_lower_one_and_rises_with_beta(tables):
    for table in tables:
        bounds = [
            enumeration.lower_bound(table),
            *(upper_of(table, beta) for beta in (0.01, 0.5, 1.0, 1.5, 2.0, 4.0, 16.0)),
        ]
        assert all(high > low + 1e-6 for low, high in itertools.pairwise(bounds))
        assert bounds[1] == pytest.approx(bounds[0], rel=0.02)  # they meet as beta goes to 0


def test_the_upper_bound_is_one_for_beta_of_the_length_and_a_surrogate_for_the_published_15(tables):
    gaps = {
        beta: [upper_of(table, beta) - enumeration.any_order(table) for table in tables]
        for beta in (1.5, 4.0, 8.0)
    }
    assert min(gaps[4.0]) > 0 and min(gaps[8.0]) > 0
    assert min(gaps[1.5]) < -0.01  # it is no bound: it is below the likelihood


def test_the_lower_bound_lies_below_the_exact_likelihood(tables):
    assert all(enumeration.lower_bound(table) < enumeration.any_order(table) for table in tables)


# Losses.


def lower_by_hand(c):
    views = [
        sum(c.policy[view, token] for token in hidden) / len(hidden) for view, hidden in enumerate(c.hidden)
    ]
    return sum(views) / len(views)


def upper_by_hand(c, beta):
    values = []
    for token in c.tokens:
        seen = [
            (view, len(hidden) / len(c.tokens)) for view, hidden in enumerate(c.hidden) if token in hidden
        ]
        if seen:
            mean = sum((beta * c.policy[view, token]).exp() / share for view, share in seen) / len(c.hidden)
            values.append(mean.log() / beta)
    return sum(values) / len(values)


def sandwich(batch, args):
    total = 0.0
    for c in batch:
        value = lower_by_hand(c)
        if c.advantage < 0:
            value = args.eubo_share * upper_by_hand(c, args.eubo_beta) + (1 - args.eubo_share) * value
        total = total - len(c.tokens) * c.advantage * value
    return total / sum(len(c.tokens) for c in batch)


@pytest.mark.parametrize(
    "more", [{}, {"samples": 4, "eubo_beta": 1.0, "eubo_share": 1.0}, {"samples": 1}, {"eubo_share": 0.0}]
)
def test_the_loss_is_the_bound_on_the_safe_side(more):
    assert_loss("spg", sandwich, **more)


def test_the_sign_of_the_advantage_decides_which_bound_is_used():
    _, rollout = rollout_of(stopping("bidirectional"), block_size=2)
    views = plan("spg", rollout, samples=3)
    totals = {}
    for share in (0.0, 0.5, 1.0):
        args = config("spg", samples=3, eubo_share=share)
        for sign in (1, -1):
            scores, _ = made_up(rollout, views, args)
            scores = replace(scores, advantage_BT=sign * scores.advantage_BT.abs())
            totals[sign, share] = args.build_method().loss(scores).total.item()
    assert totals[1, 0.0] == totals[1, 0.5] == totals[1, 1.0] > 0
    assert totals[-1, 0.0] == pytest.approx(-totals[1, 0.0])
    assert abs(totals[-1, 1.0] - totals[-1, 0.0]) > 1e-3
    assert totals[-1, 0.5] == pytest.approx((totals[-1, 0.0] + totals[-1, 1.0]) / 2)


def test_tokens_that_no_view_hides_are_left_out_of_the_upper_bound():
    target_BMT = torch.tensor([[[True, False, False, True], [True, False, False, False]]])
    log_prob_BMT = torch.where(target_BMT, -torch.arange(1.0, 9.0).view(1, 2, 4), 0).double().requires_grad_()
    made = upper_bound(log_prob_BMT, target_BMT, torch.tensor([[4]]), 2.0)
    first = math.log((math.exp(-2) / 0.5 + math.exp(-10) / 0.25) / 2) / 2
    last = math.log(math.exp(-8) / 0.5 / 2) / 2
    assert made.item() == pytest.approx((first + last) / 2)
    made.backward()
    assert log_prob_BMT.grad.isfinite().all() and torch.equal(log_prob_BMT.grad != 0, target_BMT)
    nothing = upper_bound(log_prob_BMT.detach(), torch.zeros_like(target_BMT), torch.tensor([[LENGTH]]), 1.5)
    assert nothing.item() == 0


def test_views_that_hide_what_stands_behind_the_end_too_count_with_the_mean_over_the_completions_tokens():
    _, rollout = usual("bidirectional", stop_at_eos=False)
    args = config("spg", masking="diffusion", samples=8, after_eos="noise")
    views = plan_views(
        lambda canvas: Diffusion().plan(canvas, MaskRNG(0, keys(rollout)), args, 0.0), rollout, "noise"
    )
    scores, _ = made_up(rollout, views, args)
    assert not views.target_BMT.any(2).all()  # some hide nothing of a completion
    for row, bound in enumerate(lower_bound(scores).flatten().tolist()):
        parts = zip(scores.policy_BMT[row], views.target_BMT[row], strict=True)
        means = [log_prob_T[scored_T].mean().item() for log_prob_T, scored_T in parts if scored_T.any()]
        assert bound == pytest.approx(sum(means) / len(means))
