"""The model of the comparisons with published code: a formula, so that it can be reproduced.

E, W and H of sines; h_t = tanh(E[x_t] + W_t) + mean_j tanh(E[x_j] + W_j), logits 2 h H. Gradients are those
by H.

Shapes: B rows, M views, T positions, D hidden width, K vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.diffusion.views import Views

LENGTH, VOCABULARY, WIDTH, MASK = 9, 9, 4, 8


def wave(function: Any, rate: float, shift: float, *shape: int) -> Tensor:
    return function(rate * torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + shift).view(shape)


EMBEDDING_KD, PLACE_TD = (
    0.5 * wave(torch.sin, 1.0, 1.0, VOCABULARY, WIDTH),
    0.3 * wave(torch.cos, 0.7, 0.0, LENGTH, WIDTH),
)
HEAD_DK = wave(torch.sin, 1.3, 0.5, WIDTH, VOCABULARY)
OLD_DK, REFERENCE_DK = (
    HEAD_DK + 0.2 * wave(function, rate, 0.0, WIDTH, VOCABULARY)
    for function, rate in ((torch.cos, 1), (torch.sin, 2))
)


def scored(ids_BT: Tensor, head_DK: Tensor, views: Views) -> Tensor:
    """The log-probability of every token in every view [B, M, T]."""
    noisy_BMT = torch.where(views.hidden_BMT, MASK, ids_BT[:, None])
    state_BMTD = (EMBEDDING_KD[noisy_BMT] + PLACE_TD).tanh()
    log_prob_BMTK = (2 * (state_BMTD + state_BMTD.mean(2, keepdim=True)) @ head_DK).log_softmax(-1)
    target_BMT1 = ids_BT[:, None, :, None].expand(-1, views.count, -1, -1)
    return torch.where(views.target_BMT, log_prob_BMTK.gather(3, target_BMT1).squeeze(3), 0)
