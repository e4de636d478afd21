"""Learning from the causal model that a conversion starts from: its predictions (distillation) and its hidden
states (alignment).

Shapes: B batch, M masks (views), T tokens, N target tokens of all views, U positions that are a target in any
view, V vocabulary, K the teacher's most probable tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.diffusion.log_probs import forward_inputs, noise_groups
from unmask.diffusion.views import Views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks.head import Reduction
from unmask.models.kernels.log_softmax import at_least_float32
from unmask.tensor_checks import check_tensors

MIN_REST_PROBABILITY = 1e-9
"""Lower bound of the total probability of the tokens outside the top K."""
TokenDivergence = Callable[[Tensor, Tensor], Tensor]
"""Compares predictions, in nats [N], by the teacher's and the student's log-probabilities [N, K] of the same
tokens."""


class TeacherComparison(NamedTuple):
    """The student compared with the teacher, at the target tokens of views in row-major order."""

    log_prob_N: Tensor  # the student's log-probability of the real token, in nats
    taught_N: Tensor  # whether the target is the teacher's prediction; otherwise it is the real token
    divergence_N: Tensor  # between the teacher's prediction and the student's, in nats
    distance_N: Tensor  # 1 - cosine between their hidden states that predict the token


def compare(
    lm: DiffusionLM,
    teacher: DiffusionLM,
    ids_BT: Tensor,
    document_BT: Tensor | None,
    views: Views,
    *,
    top_k: int,
    divergence: TokenDivergence | None = None,
    everywhere: bool = False,
) -> TeacherComparison:
    """Compare a model that sees noised text with the causal teacher, which sees all tokens before each token.

    Where no later token of the same block (or document) is visible, the forward KL has in expectation over
    the teacher's text the same gradient as the cross-entropy, with far less variance: averaged over the
    hidden tokens before a token, the teacher's prediction is its distribution given the visible tokens. The
    teacher sees no later tokens; where one is visible, the student learns from the real token.

    Args:
        lm, teacher: the student, and a frozen causal model with the same vocabulary.
        ids_BT: the clean tokens.
        document_BT: packed documents are numbered, padding is 0; None: every row is one document.
        views: the hidden tokens and the targets.
        top_k: the number of the teacher's most probable tokens that are compared one by one; 0: all, whose
            log-probabilities [N, V] are held at once.
        divergence: what is measured on these tokens; None: `forward_kl`, in which the others count as one.
        everywhere: whether the teacher's prediction is the target also where a later token is visible.
    """
    check_tensors(ids_BT=ids_BT, document_BT=document_BT, **views.tensors)
    target_BMT = views.target_BMT
    any_target_BT = target_BMT.any(1)
    log_p_UK, top_UK, teacher_UD = predictions(teacher, ids_BT, document_BT, any_target_BT, top_k)
    index_BT = (any_target_BT.flatten().cumsum(0) - 1).view_as(any_target_BT)
    index_N, target_N = (each_BT[:, None].expand_as(target_BMT)[target_BMT] for each_BT in (index_BT, ids_BT))
    inputs = forward_inputs(lm, ids_BT, document_BT, views.hidden_BMT, target_BMT)
    with lm.capturing() as student:
        # column 0: the real token
        log_q_NK = lm.log_probs(inputs, torch.cat([target_N[:, None], top_UK[index_N]], 1))
    divergence_N = (divergence or forward_kl)(log_p_UK[index_N], log_q_NK[:, 1:])
    distance_N = 1 - F.cosine_similarity(student[0].float(), teacher_UD[index_N].float(), dim=-1)
    taught_BMT = ~later_visible(lm, views, document_BT) | everywhere
    return TeacherComparison(log_q_NK[:, 0], taught_BMT[target_BMT], divergence_N, distance_N)


def distillation_loss(
    found: TeacherComparison, views: Views, *, distillation: float, alignment: float = 0.0
) -> Tensor:
    """The weighted loss of the targets, summed, in nats, to be divided by the maskable tokens of the whole
    batch.

    Args:
        found: the comparison on these views.
        distillation: the weight of the forward KL against the cross-entropy, from 0 to 1, where the teacher's
            prediction is the target; elsewhere the cross-entropy has weight 1.
        alignment: the weight of the distance between hidden states.
    """
    check_tensors(**views.tensors)
    weight_N, kl_weight_N = views.weight_BMT[views.target_BMT], distillation * found.taught_N.float()
    check_tensors(weight_N=weight_N, **found._asdict())
    loss = (weight_N * ((1 - kl_weight_N) * -found.log_prob_N + kl_weight_N * found.divergence_N)).sum()
    return loss + alignment * found.distance_N.sum()


def later_visible(lm: DiffusionLM, views: Views, document_BT: Tensor | None) -> Tensor:
    """Where [B, M, T] a later token of the same block, or of the same document in a bidirectional model, is
    not hidden."""
    everywhere_BT = torch.ones_like(views.hidden_BMT[:, 0])
    segment_BMT = noise_groups(lm, everywhere_BT, document_BT)[:, None].expand_as(views.hidden_BMT)
    shown_BMT = (~views.hidden_BMT).long()
    in_segment_BMT = torch.zeros_like(shown_BMT).scatter_add_(2, segment_BMT, shown_BMT)
    return in_segment_BMT.cumsum(2).gather(2, segment_BMT) > shown_BMT.cumsum(2)


@torch.no_grad()
def predictions(
    teacher: DiffusionLM, ids_BT: Tensor, document_BT: Tensor | None, target_BT: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's log-probabilities [U, K] of its most probable tokens, the tokens [U, K], and its hidden
    states [U, D]."""
    inputs = teacher.noised_inputs(ids_BT, document_BT, target_BT)
    with teacher.capturing() as hidden_states:
        log_p_UK, token_UK = teacher.reduced(inputs, Reduction(most_probable, setting=top_k))
    return log_p_UK, token_UK, hidden_states[0]


def most_probable(logits_NV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the most probable tokens (0: of all), and the tokens, [N, K] each; the mask
    token is never among them."""
    most = logits_NV.shape[1] - 1
    top = at_least_float32(logits_NV).log_softmax(-1).topk(min(top_k or most, most), dim=-1)
    return top.values, top.indices


def forward_kl(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """KL(p || q) [N] in nats, over K tokens and one token for the rest: a lower bound of the KL over the
    vocabulary."""
    top_N = generalized_divergence(log_p_NK, log_q_NK)
    rest_p_N, rest_q_N = (
        (1 - log_NK.exp().sum(1)).clamp_min(MIN_REST_PROBABILITY) for log_NK in (log_p_NK, log_q_NK)
    )
    return top_N + rest_p_N * (rest_p_N.log() - rest_q_N.log())


def generalized_divergence(
    log_p_NK: Tensor, log_q_NK: Tensor, *, beta: float = 0.0, reverse_kl_weight: float = 0.0
) -> Tensor:
    """The divergence [N] in nats of p, the teacher, and q, the student, summed over these K tokens alone:
    nothing is renormalized, and there is no rest (OPDLM, 2606.06712).

    Args:
        beta: 0: KL(p || q). 1: KL(q || p). Between them: the generalized Jensen-Shannon divergence beta KL(p
            || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q (Agarwal et al. 2024, "On-policy
            distillation of language models").
        reverse_kl_weight: w in (1 - w) KL(p || q) + w KL(q || p), for a beta of 0.
    """
    check_tensors(log_p_NK=log_p_NK, log_q_NK=log_q_NK)
    possible_NK = log_p_NK > -torch.inf  # forbidden tokens have no probability in either
    log_p_NK, log_q_NK = (torch.where(possible_NK, log_NK, 0.0) for log_NK in (log_p_NK, log_q_NK))
    p_NK, q_NK = log_p_NK.exp(), log_q_NK.exp()
    if 0 < beta < 1:
        log_m_NK = (beta * p_NK + (1 - beta) * q_NK).log()
        forward_NK, reverse_NK = p_NK * (log_p_NK - log_m_NK), q_NK * (log_q_NK - log_m_NK)
        return (beta * forward_NK + (1 - beta) * reverse_NK).sum(1)
    reverse = beta or reverse_kl_weight
    forward_NK, reverse_NK = p_NK * (log_p_NK - log_q_NK), q_NK * (log_q_NK - log_p_NK)
    return ((1 - reverse) * forward_NK + reverse * reverse_NK).sum(1)
