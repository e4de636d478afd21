"""Learning from the causal model that a conversion starts from: its predictions (distillation) and its hidden states (alignment).

Shapes: B batch, V views, T tokens, N scored tokens, M tokens scored in any view, K the teacher's most probable tokens, D hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.diffusion.score import read
from unmask.diffusion.views import Views
from unmask.models.diffusion_lm import DiffusionLM

SMALLEST = 1e-9  # probability of the rest of a vocabulary


class Lesson(NamedTuple):
    """What a student has to learn, at the scored tokens of views, row-major.

    Attributes:
        log_prob_N: of the real tokens, by the student.
        divergence_N: forward KL from the teacher's prediction to the student's, in nats.
        distance_N: 1 - cosine between their hidden states that predict the token.
    """

    log_prob_N: Tensor
    divergence_N: Tensor
    distance_N: Tensor


def learn(lm: DiffusionLM, teacher: DiffusionLM, ids_BT: Tensor, document_BT: Tensor, views: Views, *, top_k: int) -> Lesson:
    """Compare a model that sees noised text with the causal teacher, which sees all that stands before each token.

    In expectation over text from the teacher, the forward KL is least where the student predicts what the teacher does on
    average over the hidden tokens: as the cross-entropy does, with far less variance.

    Args:
        lm: the student.
        teacher: a causal model with the same vocabulary, frozen.
        ids_BT: the clean tokens.
        document_BT: packed documents are numbered, padding is 0.
        views: what is hidden and scored.
        top_k: how many of the teacher's most probable tokens are told apart; the others count as one.
    """
    scored_BVT = views.scored_BVT
    wanted_BT = scored_BVT.any(1)
    log_p_MK, top_MK, taught_MD = predictions(teacher, ids_BT, document_BT, wanted_BT, top_k)
    number_BT = (wanted_BT.flatten().cumsum(0) - 1).view_as(wanted_BT)
    of_N = number_BT[:, None].expand_as(scored_BVT)[scored_BVT]
    target_N = ids_BT[:, None].expand_as(scored_BVT)[scored_BVT]
    reading = read(lm, ids_BT, document_BT, views.hidden_BVT, scored_BVT)
    with lm.capturing() as seen:
        log_q = lm.log_probs(reading, torch.cat([target_N[:, None], top_MK[of_N]], 1))
    divergence_N = forward_kl(log_p_MK[of_N], log_q[:, 1:])
    return Lesson(log_q[:, 0], divergence_N, 1 - F.cosine_similarity(seen[0].float(), taught_MD[of_N].float(), dim=-1))


@torch.no_grad()
def predictions(teacher: DiffusionLM, ids_BT: Tensor, document_BT: Tensor, rows_BT: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's log-probabilities [M, K] of its most probable tokens, these tokens [M, K], and its hidden states [M, D]."""
    log_probs, tokens = [], []
    with teacher.capturing() as seen:
        for ids_1T, document_1T, rows_1T in zip(ids_BT.split(1), document_BT.split(1), rows_BT.split(1), strict=True):  # a row at a time
            logits_MV = teacher.forward(teacher.single(ids_1T, document_1T, rows_1T))
            top = logits_MV.log_softmax(-1).topk(min(top_k, logits_MV.shape[1] - 1), dim=-1)  # without the mask token
            log_probs.append(top.values)
            tokens.append(top.indices)
    return torch.cat(log_probs), torch.cat(tokens), torch.cat(seen)


def forward_kl(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """KL(p || q) [N] over K tokens and the rest as one. Never more than the KL over all of them."""
    rest_p_N, rest_q_N = ((1 - log_NK.exp().sum(1)).clamp_min(SMALLEST) for log_NK in (log_p_NK, log_q_NK))
    told_apart_N = (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(1)
    return told_apart_N + rest_p_N * (rest_p_N.log() - rest_q_N.log())
