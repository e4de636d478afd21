"""Pure functions of mode self-speculative: draft tokens from the denoising reading of a model, verify them by its causal reading.

A verified token has the distribution p of the causal reading, whatever the drafts are: a draft x, drawn from q, is kept with probability
min(1, p(x) / q(x)), else the token is drawn in proportion to (p - q)+ (Leviathan et al. 2023). At temperature 0 both are one-hot, so the
tokens are those of greedy decoding. The noise is keyed by (seed, key, position) alone: of a position's drafts one counts, the one whose
predecessors were kept.

Shapes: N positions, V vocabulary, K drafts, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.config.run import SamplerConfig
from unmask.diffusion.rng import Stream, uniform
from unmask.generation.policies import Decision, Given, best, decide, draw, keep_likely, penalise_and_ban, refuse_nan, weights
from unmask.models.attention import AttentionMask, Layout, hidden_fraction
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs

MOST_DRAFTS = 7  # unless `drafts` says otherwise: a pass has about (drafts + 1)(drafts + 2) queries


def num_drafts(lm: DiffusionLM, config: SamplerConfig) -> int:
    """The number K of tokens drafted ahead. A block of K + 1 masks predicts them: its first position is the causal reading's."""
    return config.drafts or min((lm.block_size or 1) - 1, MOST_DRAFTS)


def probabilities(logits_NV: Tensor, config: SamplerConfig, present_NV: Tensor | None) -> Tensor:
    """The distribution [N, V] that tokens are drawn from: after penalty, bans, temperature and filters; at temperature 0 one-hot.
    Raises GenerationError for NaN."""
    refuse_nan(logits_NV.amax(-1))
    logits_NV = penalise_and_ban(logits_NV, config, present_NV)
    if config.temperature == 0:
        return F.one_hot(best(logits_NV), logits_NV.shape[1]).to(logits_NV.dtype)
    weight_NV = weights(logits_NV, logits_NV.amax(-1, keepdim=True), config.temperature)
    weight_NV = keep_likely(weight_NV, config.top_k, config.top_p)
    return weight_NV / weight_NV.sum(-1, keepdim=True)


def draw_drafts(prob_NV: Tensor, config: SamplerConfig, key_N: Tensor, position_N: Tensor) -> Tensor:
    """A draft for each position."""
    return draw(prob_NV, uniform(config.seed, key_N, position=position_N, stream=Stream.DRAFT))


def verify(
    logits_NV: Tensor,
    drafted_NV: Tensor,
    draft_N: Tensor,
    config: SamplerConfig,
    key_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None = None,
) -> tuple[Decision, Tensor]:
    """The tokens of the causal reading, each if those before it are the drafts, and which of them are the drafts.

    Args:
        logits_NV: of the causal reading.
        drafted_NV: the distribution of each draft; zero where there is none.
        draft_N: any token where there is none.
    """
    prob_NV = probabilities(logits_NV, config, present_NV)
    chance_N, drafted_N = (each_NV.gather(1, draft_N[:, None]).squeeze(1).double() for each_NV in (prob_NV, drafted_NV))
    accept_N = uniform(config.seed, key_N, position=position_N, stream=Stream.ACCEPT)
    accepted_N = (accept_N * drafted_N < chance_N) & (drafted_N > 0)
    rest_NV = (prob_NV - drafted_NV).clamp_min(0)
    rest_NV = torch.where(rest_NV.sum(-1, keepdim=True) > 0, rest_NV, prob_NV)  # equal but for their last bits
    other_N = draw(rest_NV, uniform(config.seed, key_N, position=position_N, stream=Stream.TOKEN))
    token_N = torch.where(accepted_N, draft_N, other_N)
    drawn_from_NV = penalise_and_ban(logits_NV, config, present_NV) if config.trace else None
    given = Given(token_N, torch.zeros_like(accept_N), None, drawn_from_NV)
    return decide(logits_NV, config, key_N, torch.zeros_like(position_N), position_N, present_NV, given), accepted_N


def draft_inputs(lm: DiffusionLM, ids: list[int], num_masks: int) -> ForwardInputs:
    """The inputs of a pass over a clean text, read from left to right, and a block of masks after it. Such a block may begin anywhere, and
    is all hidden: in training, blocks begin at multiples of their size, but attention and rotary positions do not see that."""
    ids_1T = torch.tensor([[*ids, *[lm.mask_token_id] * num_masks]], device=lm.device)
    layout, index_T = Layout.full(ids_1T.shape[1], lm.device), torch.arange(ids_1T.shape[1], device=lm.device)
    hidden_1T = (index_T >= len(ids))[None]
    layout = Layout(layout.document_BT, layout.position_BT, hidden_1T.long())
    allowed_1TT = (index_T <= index_T[:, None])[None] | hidden_1T[:, :, None]
    mask = AttentionMask(allowed_1TT[:, None], (layout.position_BT, layout.position_BT))
    fraction_1T = hidden_fraction(hidden_1T, layout, lm.attention, lm.block_size) if lm.has_time_embedding else None
    return ForwardInputs(ids_1T, layout, mask, fraction_BT=fraction_1T)
