"""Preference losses: values and gradients compared with explicit formulas and with TRL."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unmask.preference.losses import divergence_scores, dpo, hinge, ipo, kto, log_ratios, margins, simpo

nats = st.floats(-200, 200)
betas = st.floats(0.01, 5)
smoothings = st.floats(0, 0.49)


def slope(loss: Callable[[Tensor], Tensor], value: float) -> tuple[float, float]:
    """The value of a loss and its derivative."""
    at = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    out = loss(at)
    out.backward()
    return out.item(), at.grad.item()


@given(betas, smoothings)
def test_the_loss_is_log_2_if_the_policy_is_the_reference(beta, smoothing):
    loss, _ = slope(lambda margin: dpo(margin, beta=beta, label_smoothing=smoothing), 0.0)
    assert loss == pytest.approx(math.log(2), abs=1e-15)


@given(nats, betas)
def test_the_gradient_of_dpo_falls_with_the_margin(margin, beta):
    loss, gradient = slope(lambda at: dpo(at, beta=beta), margin)
    assert loss == pytest.approx(math.log1p(math.exp(-abs(beta * margin))) + max(0.0, -beta * margin))
    assert gradient == pytest.approx(-beta / (1 + math.exp(min(700.0, beta * margin))), abs=1e-12)


@pytest.mark.parametrize("loss", [dpo, partial(simpo, gamma=0.0)])
@given(nats, betas, smoothings)
def test_label_smoothing_is_an_expectation_over_wrong_labels(loss, margin, beta, smoothing):
    smoothed, right, wrong = (
        slope(lambda at: loss(sign * at, beta=beta, label_smoothing=share), margin)  # noqa: B023
        for sign, share in ((1, smoothing), (1, 0.0), (-1, 0.0))
    )
    expected = [(1 - smoothing) * one + smoothing * other for one, other in zip(right, wrong, strict=True)]
    assert smoothed == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(nats, betas)
def test_ipo_has_its_minimum_at_its_target_margin(margin, beta):
    assert slope(lambda at: ipo(at, beta=beta), 1 / (2 * beta)) == (0, 0)
    loss, gradient = slope(lambda at: ipo(at, beta=beta), margin)
    assert loss == pytest.approx((margin - 0.5 / beta) ** 2) and gradient == pytest.approx(
        2 * (margin - 0.5 / beta)
    )


@given(nats, betas)
def test_hinge_is_zero_from_a_margin_of_one_over_beta(margin, beta):
    loss, gradient = slope(lambda at: hinge(at, beta=beta), margin)
    assert loss == pytest.approx(max(0.0, 1 - beta * margin))
    assert gradient == (-beta if beta * margin < 1 else 0.0)


@given(nats, betas, st.floats(0, 3))
def test_simpo_is_dpo_with_a_target_margin(margin, beta, gamma):
    shifted = slope(lambda at: dpo(at - gamma / beta, beta=beta), margin)
    assert slope(lambda at: simpo(at, beta=beta, gamma=gamma), margin) == pytest.approx(
        shifted, rel=1e-9, abs=1e-12
    )


@given(nats, st.booleans(), st.floats(0, 50), betas)
def test_kto_moves_log_ratios_away_from_the_baseline(log_ratio, desirable, baseline, beta):
    def loss(at: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
        given = {"beta": beta, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
        return kto(at, torch.tensor([desirable]), torch.tensor(baseline, dtype=torch.float64), **given)[0]

    value, gradient = slope(loss, log_ratio)
    sign = 1 if desirable else -1
    probability = 1 / (1 + math.exp(min(700.0, -beta * sign * (log_ratio - baseline))))
    assert value == pytest.approx(1 - probability, abs=1e-12)
    assert gradient == pytest.approx(-sign * beta * probability * (1 - probability), abs=1e-12)
    weighted = slope(lambda at: loss(at, (3.0, 0.5)), log_ratio)
    assert weighted == pytest.approx([(3.0 if desirable else 0.5) * part for part in (value, gradient)])


@pytest.mark.parametrize(
    ("divergence", "alpha"),
    [
        ("forward_kl", 0.5),
        ("js_divergence", 0.5),
        *(("alpha_divergence", alpha) for alpha in (-1, 0.3, 1, 2)),
    ],
)
def test_scores_of_divergences_are_derivatives_by_the_ratio(divergence, alpha):
    """f'(t) of each divergence's f(t), whose expectation under the reference it is."""
    ratio = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    f = {
        "forward_kl": lambda t: t - 1 - t.log(),
        "js_divergence": lambda t: t * t.log() - (t + 1) * ((t + 1) / 2).log(),
        "alpha_divergence": lambda t: (
            t * t.log() - t + 1 if alpha == 1 else (t**alpha - alpha * t + alpha - 1) / (alpha * (alpha - 1))
        ),
    }[divergence]
    [expected] = torch.autograd.grad(f(ratio).sum(), ratio)
    found = divergence_scores(ratio.detach().log(), divergence, alpha=alpha)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for extreme in (-1e6, 1e6):
        assert divergence_scores(torch.tensor([extreme]), divergence, alpha=alpha).isfinite().all()


@pytest.mark.parametrize("margin", [-1e6, 1e6])
def test_extreme_margins_stay_finite(margin):
    assert slope(lambda at: dpo(at, beta=1.0), margin) == (max(0.0, -margin), -1.0 if margin < 0 else 0.0)
    for desirable in (True, False):
        loss, gradient = slope(
            lambda at, good=desirable: kto(at, torch.tensor([good]), torch.zeros(()), beta=1.0)[0], margin
        )
        assert loss == (0.0 if (margin > 0) == desirable else 1.0) and gradient == 0


# Against TRL: its methods, with log-probabilities instead of a model.

LENGTHS = torch.tensor([4, 2, 3, 5, 1, 3])  # of three chosen and three rejected completions
BETA = 0.3


def token_log_probs() -> tuple[Tensor, Tensor, Tensor]:
    """The mask of completions of these lengths after one prompt token, and their log-probabilities under
    policy and reference."""
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.arange(6) < LENGTHS[:, None]
    policy_BT, reference_BT = (
        -2 * torch.rand(6, 6, generator=generator, dtype=torch.float64) * mask_BT for _ in range(2)
    )
    return mask_BT, policy_BT.requires_grad_(), reference_BT


def with_trl(
    method: Callable[..., Any], inputs: dict[str, Any], log_prob_BT: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """The mean loss that a method of TRL's trainer computes, and its gradient."""
    blank_BT = torch.zeros_like(log_prob_BT)
    outputs = SimpleNamespace(
        log_probs=log_prob_BT, entropy=blank_BT, mean_logits=blank_BT, is_top1=blank_BT > 0
    )
    accelerator = SimpleNamespace(
        device="cpu", gather=lambda part: part, gather_for_metrics=lambda part: part
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, beta=BETA, aux_loss_enabled=False, precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1, **settings,
    )  # fmt: skip
    loss = method(trainer, lambda **_: outputs, inputs, return_outputs=False)
    return loss, torch.autograd.grad(loss, log_prob_BT)[0]


def check(
    ours: Callable[[Tensor, Tensor], Tensor],
    theirs: Callable[[Tensor], tuple[Tensor, Tensor]],
    log_prob_BT: Tensor,
) -> None:
    """Compare our loss, a function of the log-probability and length of each response, with TRL's; and their
    gradients."""
    loss = ours(log_prob_BT.sum(1), LENGTHS.double()).mean()
    [gradient] = torch.autograd.grad(loss, log_prob_BT)
    expected, slope_BT = theirs(log_prob_BT)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    mask_BT = torch.arange(6) < LENGTHS[:, None]
    torch.testing.assert_close(gradient * mask_BT, slope_BT * mask_BT, rtol=1e-10, atol=1e-14)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "loss", "normalized"),
    [
        ("sigmoid", dpo, False),
        ("sigmoid_norm", dpo, True),
        ("hinge", hinge, False),
        ("ipo", ipo, True),  # TRL has it only per token
    ],
)
def test_losses_of_pairs_are_those_of_trls_dpo_trainer(name, loss, normalized):
    trl = pytest.importorskip("trl", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt")
    mask_BT, policy_BT, reference_BT = token_log_probs()
    reference_B = reference_BT.sum(1)
    whole_BT = torch.cat([torch.zeros(6, 1), mask_BT], 1).long()  # with the prompt's token
    inputs = {
        "input_ids": whole_BT, "attention_mask": whole_BT, "completion_mask": whole_BT,
        "ref_chosen_logps": reference_B[:3], "ref_rejected_logps": reference_B[3:],
    }  # fmt: skip
    settings = {
        "loss_types": [name],
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "use_weighting": False,
    }
    check(
        lambda log_prob_B, length_B: loss(
            margins(log_ratios(log_prob_B, reference_B, length_B if normalized else None)), beta=BETA
        ),
        lambda log_prob_BT: with_trl(
            trl.DPOTrainer._compute_loss, inputs, log_prob_BT, f_divergence_type="reverse_kl", **settings
        ),
        policy_BT,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
@pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")
def test_losses_without_a_reference_are_those_of_trls_cpo_trainer(name, smoothing):
    cpo = pytest.importorskip(
        "trl.experimental.cpo", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt"
    )
    if smoothing and name in ("hinge", "ipo"):
        pytest.skip("TRL passes over label smoothing there; ours have none")
    _, policy_BT, _ = token_log_probs()
    losses = {
        "sigmoid": lambda at: dpo(at, beta=BETA, label_smoothing=smoothing),
        "hinge": lambda at: hinge(at, beta=BETA),
        "ipo": lambda at: ipo(at, beta=BETA),
        "simpo": lambda at: simpo(at, beta=BETA, gamma=0.7, label_smoothing=smoothing),
    }
    per_token = name in ("ipo", "simpo")
    settings = {
        "loss_type": name,
        "beta": BETA,
        "label_smoothing": smoothing,
        "simpo_gamma": 0.7,
        "alpha": 0.0,
    }
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **settings)

    def theirs(log_prob_BT: Tensor) -> tuple[Tensor, Tensor]:
        chosen_P, rejected_P = (log_prob_BT.sum(1) / (LENGTHS if per_token else 1)).chunk(2)
        loss = cpo.CPOTrainer.cpo_loss(trainer, chosen_P, rejected_P)[0].mean()
        return loss, torch.autograd.grad(loss, log_prob_BT)[0]

    none_B = torch.zeros(6, dtype=torch.float64)
    check(
        lambda log_prob_B, length_B: losses[name](
            margins(log_ratios(log_prob_B, none_B, length_B if per_token else None))
        ),
        theirs,
        policy_BT,
    )


@pytest.mark.parametrize("shift", [-5.0, 5.0])
def test_kto_is_that_of_trls_kto_trainer(shift):
    """Also if the estimate of the divergence is negative and is clamped to 0."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt")
    mask_BT, policy_BT, reference_BT = token_log_probs()
    reference_B, mismatched_B = reference_BT.sum(1), policy_BT.detach().sum(1).roll(1)
    desirable_B = torch.tensor([True, False, True, True, False, True])
    baseline = (mismatched_B - (reference_B - shift)).mean().clamp(min=0)
    assert (baseline > 0) == (shift > 0)
    whole_BT = torch.cat([torch.zeros(6, 1), mask_BT], 1).long()
    inputs = {
        "input_ids": whole_BT, "attention_mask": whole_BT, "completion_mask": whole_BT, "label": desirable_B,
        "ref_logps": reference_B, "ref_KL_logps": reference_B - shift,
    }  # fmt: skip
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.8}
    settings = {
        "loss_type": "kto",
        "calculate_KL": True,
        "_compute_kl_logps": lambda *_: mismatched_B,
        **weights,
    }
    check(
        lambda log_prob_B, _: kto(
            log_ratios(log_prob_B, reference_B), desirable_B, baseline, beta=BETA, **weights
        ),
        lambda log_prob_BT: with_trl(trl.KTOTrainer._compute_loss, inputs, log_prob_BT, **settings),
        policy_BT,
    )
