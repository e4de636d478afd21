"""Preference losses, computed from log-likelihoods (or bounds on them) of whole responses.

The log-ratio of a response is log pi(response) - log pi_ref(response); for a loss without a reference it is
log pi(response). The margin of a pair is the log-ratio of the chosen response minus that of the rejected one.
Both are in nats, or in nats per token if normalized.

Shapes: P pairs, N responses.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.errors import ConfigError
from unmask.tensor_checks import check_tensors

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "bco_pair", "sft", "simpo", "kto"]
"""The losses of `DPOTrainer`, which `_pair_loss` calls. After a change: `python scripts/list_settings.py`."""
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
LARGEST_EXPONENT = 80.0  # of float32 and bfloat16, as in TRL


def log_ratios(log_prob_N: Tensor, reference_N: Tensor, length_N: Tensor | None = None) -> Tensor:
    """The log-ratios [N] of responses, in nats; with their lengths in tokens, in nats per token.

    Args:
        log_prob_N: log-likelihoods (or bounds) under the policy.
        reference_N: the same under the reference, without gradients; zeros for a loss without one.
    """
    check_tensors(log_prob_N=log_prob_N, reference_N=reference_N, length_N=length_N)
    log_ratio_N = log_prob_N - reference_N
    return log_ratio_N if length_N is None else log_ratio_N / length_N


def divergence_scores(log_ratio_N: Tensor, divergence: FDivergence, *, alpha: float = 0.5) -> Tensor:
    """What takes the place of the log-ratios [N] of whole responses in f-DPO (Wang et al. 2024): f'(t) of the
    divergence, with t the ratio, without constants that a difference cancels. `alpha`: of alpha_divergence;
    at 1 it is the reverse KL, whose score is the log-ratio itself."""
    check_tensors(log_ratio_N=log_ratio_N)
    match divergence:
        case "reverse_kl":
            return log_ratio_N
        case "forward_kl":
            return 1 - (-log_ratio_N).clamp_max(LARGEST_EXPONENT).exp()
        case "js_divergence":
            return math.log(2) + F.logsigmoid(log_ratio_N)
        case "alpha_divergence":
            if abs(alpha - 1) < 1e-6:
                return log_ratio_N
            return ((alpha - 1) * log_ratio_N).clamp_max(LARGEST_EXPONENT).expm1() / (alpha - 1)
        case _:
            assert_never(divergence)


def margins(log_ratio_N: Tensor) -> Tensor:
    """The margins [P] of pairs, given the log-ratios of all chosen responses, then of all rejected ones.

    Raises:
        ConfigError: an odd number of responses.
    """
    check_tensors(log_ratio_N=log_ratio_N)
    chosen_P, rejected_P = _pairs(log_ratio_N)
    return chosen_P - rejected_P


def _pairs(log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
    if len(log_ratio_N) % 2:
        raise ConfigError(
            f"{len(log_ratio_N)} responses are no pairs",
            where="log_ratio_N",
            remedy="Give those of all chosen responses, then those of all rejected ones",
        )
    chosen_P, rejected_P = log_ratio_N.chunk(2)
    return chosen_P, rejected_P


def dpo(margin_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """`sigmoid`: -log sigmoid(beta * margin) (Rafailov et al. 2023, eq. 7). With label smoothing: its
    expectation if labels are wrong with this probability (cDPO, Mitchell 2023).

    With ELBO estimates on the same masks for policy and reference this is VRPO (Zhu et al. 2025, LLaDA 1.5,
    eq. 5).
    """
    check_tensors(margin_P=margin_P)
    return _smoothed(beta * margin_P, label_smoothing)


def ipo(margin_P: Tensor, *, beta: float) -> Tensor:
    """(margin - 1 / (2 beta)) ** 2 (Azar et al. 2023, eq. 17). The authors use margins per token."""
    check_tensors(margin_P=margin_P)
    return (margin_P - 1 / (2 * beta)) ** 2


def hinge(margin_P: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta * margin) (SLiC-HF, Zhao et al. 2023; RSO, Liu et al. 2024)."""
    check_tensors(margin_P=margin_P)
    return torch.relu(1 - beta * margin_P)


def bco_pair(log_ratio_N: Tensor, *, beta: float) -> Tensor:
    """-log sigmoid(beta * log-ratio) of the chosen response - log sigmoid(-beta * log-ratio) of the rejected
    one, of each pair [P]: BCO (Jung et al. 2024) without its shift, as in TRL: the quality loss of MPO (Wang
    et al. 2024).

    Raises:
        ConfigError: an odd number of responses.
    """
    check_tensors(log_ratio_N=log_ratio_N)
    chosen_P, rejected_P = _pairs(log_ratio_N)
    return -F.logsigmoid(beta * chosen_P) - F.logsigmoid(-beta * rejected_P)


def simpo(margin_P: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta * margin - gamma), with margins per token and no reference (Meng et al. 2024, eq.
    6)."""
    check_tensors(margin_P=margin_P)
    return _smoothed(beta * margin_P - gamma, label_smoothing)


def kto(
    log_ratio_N: Tensor,
    desirable_N: Tensor,
    baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """1 - sigmoid(beta * (log-ratio - baseline)) for desirable responses, 1 - sigmoid(beta * (baseline -
    log-ratio)) for undesirable ones (Ethayarajh et al. 2024, eq. 7 and 8), each with its weight.

    Args:
        log_ratio_N: the log-ratio of each response.
        desirable_N: whether each response is desirable.
        baseline: a scalar >= 0 without a gradient: an estimate of the KL divergence of the policy from the
            reference, the mean log-ratio of mismatched responses.
    """
    check_tensors(log_ratio_N=log_ratio_N, desirable_N=desirable_N, baseline=baseline)
    ahead_N = torch.where(desirable_N, log_ratio_N - baseline, baseline - log_ratio_N)
    weight_N = torch.where(
        desirable_N, log_ratio_N.new_tensor(desirable_weight), log_ratio_N.new_tensor(undesirable_weight)
    )
    return weight_N * (1 - torch.sigmoid(beta * ahead_N))


def _smoothed(logit_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(logit_P) - label_smoothing * F.logsigmoid(-logit_P)
