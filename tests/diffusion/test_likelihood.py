"""Bounds and exact likelihoods compared with sums over all masks, orders and completions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests import enumeration
from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.tiny import KINDS, TOY_VOCABULARY, toy_lm
from unmask.diffusion.likelihood import any_order, elbo, exact_log_likelihood
from unmask.diffusion.views import MaskRNG, exact_views
from unmask.errors import GenerationError

PROMPT, LENGTH = 2, 4
TOTAL = PROMPT + LENGTH
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def batch(rows=4, length=LENGTH):
    ids = torch.stack([enumeration.random_row(PROMPT + length, seed) for seed in range(rows)])
    return ids, (torch.arange(PROMPT + length) >= PROMPT).expand(rows, -1)


def tables(lm, row):
    return [
        enumeration.conditionals(lm, row, positions) for positions in enumeration.groups(lm, PROMPT, len(row))
    ]


@kinds
def test_the_exact_likelihood_is_the_mean_over_all_orders(kind):
    lm = toy_lm(kind)
    ids, maskable = batch()
    expected = [sum(enumeration.any_order(table) for table in tables(lm, row)) for row in ids]
    assert exact_log_likelihood(lm, ids, None, maskable).tolist() == pytest.approx(expected, abs=1e-12)
    assert exact_log_likelihood(lm, ids, None, maskable, chunk=3).tolist() == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.slow
@partly_slow("kind", [*KINDS, "causal"], 0, 1, 5)
def test_the_probabilities_of_all_completions_sum_to_1(kind):
    lm = toy_lm(attention=("causal", None, True)) if kind == "causal" else toy_lm(kind)
    length = 3
    completions = torch.tensor(list(itertools.product(range(TOY_VOCABULARY), repeat=length)))
    ids = torch.cat([enumeration.random_row(PROMPT).expand(len(completions), -1), completions], 1)
    maskable = (torch.arange(PROMPT + length) >= PROMPT).expand_as(ids)
    likelihoods = exact_log_likelihood(lm, ids, None, maskable)
    assert likelihoods.exp().sum().item() == pytest.approx(1, abs=1e-12)


@kinds
def test_the_bound_lies_below_the_exact_likelihood(kind):
    lm = toy_lm(kind)
    ids, maskable = batch(12)
    exact = exact_log_likelihood(lm, ids, None, maskable)
    bound = torch.tensor(
        [sum(enumeration.lower_bound(table) for table in tables(lm, row)) for row in ids], dtype=torch.float64
    )
    if kind == "causal without a shift":  # one order only: no gap
        torch.testing.assert_close(bound, exact, rtol=0, atol=1e-12)
    else:
        assert (bound < exact - 1e-4).all()


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 8])
@kinds
def test_the_estimate_averages_to_the_bound(kind, samples):
    lm = toy_lm(kind)
    ids, maskable = batch(1)
    number = 200
    estimate = elbo(
        lm,
        ids.expand(number, -1),
        None,
        maskable.expand(number, -1),
        MaskRNG(0, torch.arange(number)),
        samples=samples,
    ).value_B
    exact, error = (
        sum(enumeration.lower_bound(table) for table in tables(lm, ids[0])),
        estimate.std().item() / math.sqrt(number),
    )
    assert error < 0.05 * abs(exact)
    # weights are float32
    assert estimate.mean().item() == pytest.approx(exact, abs=5 * error + 1e-6 * abs(exact))


def test_chunks_do_not_change_the_estimate():
    lm = toy_lm()
    ids, maskable = batch()
    draw = MaskRNG(0, torch.arange(4))
    whole = elbo(lm, ids, None, maskable, draw, samples=5).value_B
    torch.testing.assert_close(
        elbo(lm, ids, None, maskable, draw, samples=5, chunk=3).value_B, whole, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", [*KINDS, "causal"])
def test_padding_changes_no_likelihood(kind):
    lm = toy_lm(attention=("causal", None, True)) if kind == "causal" else toy_lm(kind)
    ids, maskable = batch(2)
    expected = exact_log_likelihood(lm, ids, None, maskable)
    none = torch.zeros(1, 3, dtype=torch.long)
    padded = torch.stack([torch.cat([none[0], ids[0]]), torch.cat([ids[1], none[0]])])
    real = torch.tensor([[0] * 3 + [1] * TOTAL, [1] * TOTAL + [0] * 3])
    inside = torch.stack([torch.cat([none[0].bool(), maskable[0]]), torch.cat([maskable[1], none[0].bool()])])
    torch.testing.assert_close(exact_log_likelihood(lm, padded, real, inside), expected, rtol=0, atol=1e-12)


def test_tokens_with_others_between_them_are_revealed_in_any_order_too():
    lm = toy_lm()
    row, positions = enumeration.random_row(TOTAL), [0, 2, 5]
    maskable = torch.zeros(1, TOTAL, dtype=torch.bool)
    maskable[0, positions] = True
    expected = enumeration.any_order(enumeration.conditionals(lm, row, positions))
    assert exact_log_likelihood(lm, row[None], None, maskable).item() == pytest.approx(expected, abs=1e-12)


def test_nothing_to_predict_is_certain():
    lm = toy_lm()
    ids, maskable = batch()
    nothing = torch.zeros_like(maskable)
    assert exact_log_likelihood(lm, ids, None, nothing).tolist() == [0] * 4
    nothing_estimated = elbo(lm, ids, None, nothing, MaskRNG(0, torch.arange(4)), samples=3)
    assert (
        nothing_estimated.value_B.tolist() == [0] * 4
        and nothing_estimated.standard_error_B.tolist() == [0] * 4
    )


@torch.enable_grad()
def test_the_mean_over_orders_and_its_gradient_are_those_of_all_orders_listed():
    """For groups of several sizes, some not contiguous, and a row without groups."""
    group_BT = torch.tensor([[-1, 0, 0, 1, 1, 1, 2], [0, -1, 3, 0, 3, 0, -1], [-1] * 7])
    log_prob_BMT = -torch.rand(
        3, 2**3 - 1, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    log_prob_BMT.requires_grad_()
    expected = []
    for row, group_T in zip(log_prob_BMT, group_BT, strict=True):
        total = row.new_zeros(())
        for group in group_T[group_T >= 0].unique():
            members = (group_T == group).nonzero()[:, 0].tolist()
            orders = []
            for order in itertools.permutations(range(len(members))):
                shown = [sum(1 << bit for bit in order[:place]) for place in range(len(order))]
                orders.append(sum(row[view, members[bit]] for view, bit in zip(shown, order, strict=True)))
            total = total + torch.stack(orders).logsumexp(0) - math.log(len(orders))
        expected.append(total)
    weights_B = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    found_B = any_order(group_BT, log_prob_BMT)
    torch.testing.assert_close(found_B, torch.stack(expected), rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad((weights_B * part).sum(), log_prob_BMT)[0]
        for part in (found_B, torch.stack(expected))
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)
    views = exact_views(group_BT, 3)
    assert torch.equal(gradients[0] != 0, views.target_BMT) and torch.equal(
        views.target_BMT, views.hidden_BMT
    )


def test_too_many_orders_are_refused():
    ids, maskable = batch(1, length=13)
    with raises(GenerationError, where="estimator='exact'"):
        exact_log_likelihood(toy_lm(), ids, None, maskable)
    exact_log_likelihood(toy_lm("blocks of three"), ids, None, maskable)  # each block on its own


@each_once("samples, kind", [5, 9, 21], ["bidirectional", "blocks of three with a shift"])
def test_the_standard_error_is_that_of_repeated_estimates(kind, samples):
    """Its square averages to the variance of the estimate, which is unbiased for an even number of pairs."""
    lm, number = toy_lm(kind), 1500 // samples * 4
    ids, maskable = batch(1)
    found = elbo(
        lm,
        ids.expand(number, -1),
        None,
        maskable.expand(number, -1),
        MaskRNG(0, torch.arange(number)),
        samples=samples,
    )
    assert found.difference_BP.shape == (number, (samples - 1) // 4)
    squared_B = found.standard_error_B**2
    error = math.hypot(
        squared_B.std().item(), found.value_B.sub(found.value_B.mean()).square().std().item()
    ) / math.sqrt(number)
    assert squared_B.mean().item() == pytest.approx(found.value_B.var().item(), abs=4 * error)
    assert error < 0.2 * squared_B.mean()


def test_an_error_that_the_views_do_not_tell_is_not_known():
    lm = toy_lm()
    ids, maskable = batch(1)
    for samples in (1, 2, 3, 4):
        assert (
            elbo(lm, ids, None, maskable, MaskRNG(0, torch.tensor([1])), samples=samples)
            .standard_error_B.isnan()
            .all()
        )
    one = torch.arange(TOTAL)[None] == PROMPT
    assert elbo(lm, ids, None, one, MaskRNG(0, torch.tensor([1])), samples=3).standard_error_B.tolist() == [
        0
    ]  # a single token: no mask is drawn


def seen_masks(lm, monkeypatch, prompt, length, samples=9, **options):
    """What the estimate hides of a completion [M, L]."""
    masks = []

    def record(lm, ids_BT, attention_mask_BT, views, **options):
        masks.append(views.hidden_BMT[0, :, prompt:])
        return torch.zeros(views.hidden_BMT.shape, dtype=torch.float64)

    monkeypatch.setattr("unmask.diffusion.likelihood.view_log_probs", record)
    ids = enumeration.random_row(prompt + length, seed=prompt + length)[None]
    maskable = (torch.arange(prompt + length) >= prompt)[None]
    elbo(lm, ids, None, maskable, MaskRNG(3, torch.tensor([7])), samples=samples, **options)
    return masks[0]


def test_masks_are_those_of_the_key_whatever_is_before_them(monkeypatch):
    lm = toy_lm()
    assert torch.equal(seen_masks(lm, monkeypatch, 2, 6), seen_masks(lm, monkeypatch, 5, 6))


@pytest.mark.parametrize(
    ("options", "first", "last", "apart"),
    [({}, 5, 5, (1, 0)), ({"shared": 3}, 3, 8, (3, 3)), ({"shared": 0}, 0, 11, (0, 0))],
)
def test_completions_of_different_lengths_share_both_ends_of_their_masks(
    options, first, last, apart, monkeypatch
):
    lm = toy_lm()
    longer, shorter = (
        seen_masks(lm, monkeypatch, 2, length, samples=201, **options)[1:] for length in (12, 11)
    )
    ends = [longer[:, :first] == shorter[:, :first], longer[:, -last:] == shorter[:, -last:]]
    assert torch.cat(ends, 1).float().mean(0).min() > 0.8  # half of them would be equal by chance
    one, other = (masks[:, begin : begin + 5] for masks, begin in zip((longer, shorter), apart, strict=True))
    assert (one == other).float().mean() < 0.7
