"""Learning from the causal model that a conversion starts from: its predictions (distillation) and its hidden states (alignment).

Shapes: B batch, M views, T tokens, N scored tokens, M tokens scored in any view, K the teacher's most probable tokens, D hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.diffusion.log_probs import forward_inputs
from unmask.diffusion.views import Views
from unmask.models.attention import Layout, runs
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks import head

SMALLEST = 1e-9  # probability of the rest of a vocabulary


class Lesson(NamedTuple):
    """What a student has to learn, at the scored tokens of views, row-major.

    Attributes:
        log_prob_N: of the real tokens, by the student.
        taught_N: whether the teacher's prediction is what the student has to learn; else it is the real token.
        divergence_N: forward KL from the teacher's prediction to the student's, in nats.
        distance_N: 1 - cosine between their hidden states that predict the token.
    """

    log_prob_N: Tensor
    taught_N: Tensor
    divergence_N: Tensor
    distance_N: Tensor


def learn(lm: DiffusionLM, teacher: DiffusionLM, ids_BT: Tensor, document_BT: Tensor | None, views: Views, *, top_k: int) -> Lesson:
    """Compare a model that sees noised text with the causal teacher, which sees all that stands before each token.

    Where nothing later is shown in a token's own block (or document), the gradient of the forward KL is in expectation over
    text from the teacher that of the cross-entropy, with far less variance: the teacher's predictions, averaged over the hidden
    tokens before, are the distribution of the token given what is shown. Where a later token is shown, which the teacher does
    not see, they are not, and the student has to learn from the real token.

    Args:
        lm: the student.
        teacher: a causal model with the same vocabulary, frozen.
        ids_BT: the clean tokens.
        document_BT: packed documents are numbered, padding is 0; None: every row is one document.
        views: what is hidden and scored.
        top_k: how many of the teacher's most probable tokens are told apart; the others count as one.
    """
    target_BMT = views.target_BMT
    wanted_BT = target_BMT.any(1)
    log_p_MK, top_MK, taught_MD = predictions(teacher, ids_BT, document_BT, wanted_BT, top_k)
    number_BT = (wanted_BT.flatten().cumsum(0) - 1).view_as(wanted_BT)
    of_N = number_BT[:, None].expand_as(target_BMT)[target_BMT]
    target_N = ids_BT[:, None].expand_as(target_BMT)[target_BMT]
    inputs = forward_inputs(lm, ids_BT, document_BT, views.hidden_BMT, target_BMT)
    with lm.capturing() as seen:
        log_q = lm.log_probs(inputs, torch.cat([target_N[:, None], top_MK[of_N]], 1))
    divergence_N = forward_kl(log_p_MK[of_N], log_q[:, 1:])
    taught_N = ~later_shown(lm, views, document_BT)[target_BMT]
    return Lesson(log_q[:, 0], taught_N, divergence_N, 1 - F.cosine_similarity(seen[0].float(), taught_MD[of_N].float(), dim=-1))


def later_shown(lm: DiffusionLM, views: Views, document_BT: Tensor | None) -> Tensor:
    """Where [B, M, T] a later token of the same block, or of the same document in a bidirectional model, is not hidden."""
    document_BT = torch.ones_like(views.hidden_BMT[:, 0], dtype=torch.long) if document_BT is None else document_BT
    run_BMT = runs(Layout.of(document_BT), lm.attention, lm.block_size)[:, None].expand_as(views.hidden_BMT)
    shown_BMT = (~views.hidden_BMT).long()
    in_run_BMT = torch.zeros_like(shown_BMT).scatter_add_(2, run_BMT, shown_BMT)
    return in_run_BMT.cumsum(2).gather(2, run_BMT) > shown_BMT.cumsum(2)


@torch.no_grad()
def predictions(
    teacher: DiffusionLM, ids_BT: Tensor, document_BT: Tensor | None, rows_BT: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's log-probabilities [M, K] of its most probable tokens, these tokens [M, K], and its hidden states [M, D]."""
    log_probs, tokens = [], []
    at_once = max(1, head.LOGITS_AT_ONCE // (ids_BT.shape[1] * teacher.config.vocab_size))
    with teacher.capturing() as seen:
        for first in range(0, len(ids_BT), at_once):
            at = slice(first, first + at_once)
            part_BT = None if document_BT is None else document_BT[at]
            logits_MV = teacher.forward(teacher.single(ids_BT[at], part_BT, rows_BT[at]))
            top = logits_MV.log_softmax(-1).topk(min(top_k, logits_MV.shape[1] - 1), dim=-1)  # without the mask token
            log_probs.append(top.values)
            tokens.append(top.indices)
    return torch.cat(log_probs), torch.cat(tokens), torch.cat(seen)


def forward_kl(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """KL(p || q) [N] over K tokens and the rest as one. Never more than the KL over all of them."""
    rest_p_N, rest_q_N = ((1 - log_NK.exp().sum(1)).clamp_min(SMALLEST) for log_NK in (log_p_NK, log_q_NK))
    told_apart_N = (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(1)
    return told_apart_N + rest_p_N * (rest_p_N.log() - rest_q_N.log())
