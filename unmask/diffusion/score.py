"""Scoring views: log-probabilities of the hidden tokens, computed only at the rows that are scored.

Shapes: B batch, V views, T tokens, N scored rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.diffusion.views import Views
from unmask.models.attention import Layout, blocks
from unmask.models.diffusion_lm import DiffusionLM


def score(
    lm: DiffusionLM, ids_BT: Tensor, attention_mask_BT: Tensor | None, views: Views, *, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Log-probabilities [B, V, T] in nats, float32, of the real tokens where scored; 0 elsewhere.

    Args:
        lm: a causal model is scored by one clean pass (its conditionals do not depend on what is hidden), a block-causal
            one in the layout `[x_t ; x_0]`, a bidirectional one on the noised row itself.
        ids_BT: the clean tokens.
        attention_mask_BT: 1 is real, 0 padding; packed documents are numbered.
        views: what is hidden and scored.
        temperature: the logits are divided by it.
        chunk: noised rows per forward pass; None: all at once. The result does not depend on it but for rounding.
    """
    batch, count, length = views.hidden_BVT.shape
    out_BVT = torch.zeros(batch, count, length, dtype=lm.score_dtype, device=ids_BT.device)
    row_R = torch.arange(batch * count, device=ids_BT.device) // count
    pieces, places = [], []
    for rows_R in torch.arange(batch * count, device=ids_BT.device).split(chunk or batch * count):
        scored_RT = views.scored_BVT.flatten(0, 1)[rows_R]
        # With gradients every pass is made: a loss of 0 has them too, and all ranks must make the same passes.
        if not (scored_RT.any() or torch.is_grad_enabled()):
            continue
        hidden_RT = views.hidden_BVT.flatten(0, 1)[rows_R]
        clean_RT = ids_BT[row_R[rows_R]]
        padding_RT = None if attention_mask_BT is None else attention_mask_BT[row_R[rows_R]]
        logits_NV = hidden_logits(lm, clean_RT, padding_RT, hidden_RT, scored_RT)
        pieces.append(token_log_probs(logits_NV, clean_RT[scored_RT], temperature))
        row_N, column_N = scored_RT.nonzero(as_tuple=True)
        places.append(rows_R[row_N] * length + column_N)
    if not pieces:
        return out_BVT
    return out_BVT.flatten().index_put((torch.cat(places),), torch.cat(pieces)).view_as(out_BVT)


def hidden_logits(lm: DiffusionLM, clean_BT: Tensor, attention_mask_BT: Tensor | None, hidden_BT: Tensor, rows_BT: Tensor) -> Tensor:
    """Logits [N, vocabulary] at the chosen rows, given the tokens that are not hidden (and, by blocks, the clean past)."""
    if lm.autoregressive:
        return lm.logits(clean_BT, attention_mask_BT, rows_BT)
    noisy_BT = torch.where(hidden_BT, lm.mask_token_id, clean_BT)
    if lm.attention == "bidirectional":
        return lm.logits(noisy_BT, attention_mask_BT, rows_BT)
    return lm.noised_logits(noisy_BT, clean_BT, attention_mask_BT, rows_BT)


def token_log_probs(logits_NV: Tensor, target_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the target ids, [N]."""
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    return logits_NV.gather(1, target_N[:, None]).squeeze(1) - logits_NV.logsumexp(1)


def noise_groups(lm: DiffusionLM, maskable_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """The group [B, T] of tokens that are noised together: a document, or one attention block of it; -1 not maskable."""
    document_BT = torch.ones_like(maskable_BT, dtype=torch.long) if attention_mask_BT is None else attention_mask_BT
    layout = Layout.of(document_BT)
    block_BT = blocks(layout, lm.attention, lm.block_size)
    starts_BT = torch.ones_like(maskable_BT)
    starts_BT[:, 1:] = (block_BT[:, 1:] != block_BT[:, :-1]) | (layout.document_BT[:, 1:] != layout.document_BT[:, :-1])
    return torch.where(maskable_BT, starts_BT.long().cumsum(1) - 1, -1)
