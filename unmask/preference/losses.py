"""Preference losses, from log-likelihoods (or bounds on them) of whole responses.

The gain of a response is its log-likelihood under the policy less that under the reference; of a loss without a reference it is the
log-likelihood itself. The margin of a pair is the gain of its chosen response less that of the rejected one. All are in nats, or in
nats per token where lengths are normalised.

Shapes: P pairs, B responses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossType = Literal["sigmoid", "ipo", "hinge", "simpo", "kto"]


def margins(gain_B: Tensor) -> Tensor:
    """Of pairs, all chosen responses before their rejected ones [P]: the gain of the chosen less that of the rejected."""
    chosen_P, rejected_P = gain_B.chunk(2)
    return chosen_P - rejected_P


def dpo(margin_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta * margin) (Rafailov et al. 2023, eq. 7), and with label smoothing its mean over labels that are wrong with this
    probability (cDPO, Mitchell 2023).

    With ELBO estimates on the same masks for policy and reference this is VRPO (Zhu et al. 2025, LLaDA 1.5, eq. 5).
    """
    return _smoothed(beta * margin_P, label_smoothing)


def ipo(margin_P: Tensor, *, beta: float) -> Tensor:
    """(margin - 1 / (2 beta)) ** 2 (Azar et al. 2023, eq. 17). Its authors' results are with margins per token."""
    return (margin_P - 1 / (2 * beta)) ** 2


def hinge(margin_P: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta * margin) (SLiC-HF, Zhao et al. 2023; RSO, Liu et al. 2024)."""
    return torch.relu(1 - beta * margin_P)


def simpo(margin_P: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta * margin - gamma), of margins per token and without a reference (Meng et al. 2024, eq. 6)."""
    return _smoothed(beta * margin_P - gamma, label_smoothing)


def kto(
    gain_B: Tensor, desirable_B: Tensor, baseline: Tensor, *, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """1 - sigmoid of beta times how far the gain is on the right side of a baseline (Ethayarajh et al. 2024, eq. 7 and 8).

    Args:
        gain_B: of each response.
        desirable_B: whether it is a desirable one; boolean.
        baseline: a scalar, at least 0 and without a gradient: an estimate of the divergence of the policy from the reference, the mean
            gain of responses to other prompts.
        beta: how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: of the loss of either kind.
    """
    ahead_B = torch.where(desirable_B, gain_B - baseline, baseline - gain_B)
    weight_B = torch.where(desirable_B, gain_B.new_tensor(desirable_weight), gain_B.new_tensor(undesirable_weight))
    return weight_B * (1 - torch.sigmoid(beta * ahead_B))


def _smoothed(logit_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(logit_P) - label_smoothing * F.logsigmoid(-logit_P)
