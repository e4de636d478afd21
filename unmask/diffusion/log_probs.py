"""Log-probabilities of the targets of views, computed only at the rows that predict them.

Shapes: B batch, M views, T tokens, N target rows, R rows of a pass (B * M).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from unmask.diffusion.views import Views
from unmask.models.attention import Layout, segments
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs

COPIES_AT_ONCE = 3
"""Noised copies per clean half. Each further copy saves less of the clean half's work, and the mask grows with their square."""


def view_log_probs(
    lm: DiffusionLM, ids_BT: Tensor, attention_mask_BT: Tensor | None, views: Views, *, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Log-probabilities [B, M, T] in nats, float32, of the targets; 0 elsewhere.

    Args:
        lm: a causal model reads one clean row (its conditionals do not depend on what is hidden), a block-causal one the layout
            `[x_t ; ... ; x_0]`, a bidirectional one the noised row.
        ids_BT: the clean tokens.
        attention_mask_BT: 1 is real, 0 padding; packed documents are numbered.
        views: the hidden tokens and the targets. A causal view needs a separate pass, unless the model's clean half is causal.
        temperature: the logits are divided by it.
        chunk: noised rows per forward pass; None: all at once. It changes the result only by rounding.
    """
    if views.causal and not (lm.causal_context and views.count > 1):
        noised, causal = views.split_causal()
        parts = [(lm, noised)] if noised.count else []
        parts.append((lm.as_causal(), replace(causal, causal=False)))
        return torch.cat([view_log_probs(m, ids_BT, attention_mask_BT, v, temperature=temperature, chunk=chunk) for m, v in parts], 1)
    batch, count, length = views.hidden_BMT.shape
    number_BMT = torch.arange(batch * count * length, device=ids_BT.device).view(batch, count, length)
    places, log_probs = [], []
    for rows, copies in passes(lm, batch, count - views.causal, chunk):
        target_BMT, clean_BT = views.target_BMT[rows, copies], ids_BT[rows]
        causal_target_BT = views.target_BMT[rows, -1] if views.causal and copies.start == 0 else None
        # With gradients no pass is left out, even for a loss of 0: all ranks must make the same passes.
        if not (target_BMT.any() or causal_target_BT is not None or torch.is_grad_enabled()):
            continue
        padding_BT = None if attention_mask_BT is None else attention_mask_BT[rows]
        inputs = forward_inputs(lm, clean_BT, padding_BT, views.hidden_BMT[rows, copies], target_BMT, causal_target_BT)
        target_N, place_N = clean_BT[:, None].expand_as(target_BMT)[target_BMT], number_BMT[rows, copies][target_BMT]
        if causal_target_BT is not None:
            target_N, place_N = (
                torch.cat([target_N, clean_BT[causal_target_BT]]),
                torch.cat([place_N, number_BMT[rows, -1][causal_target_BT]]),
            )
        log_probs.append(lm.log_probs(inputs, target_N, temperature))
        places.append(place_N)
    out_BMT = torch.zeros(batch, count, length, dtype=lm.log_prob_dtype, device=ids_BT.device)
    if not log_probs:
        return out_BMT
    return out_BMT.flatten().index_put((torch.cat(places),), torch.cat(log_probs)).view_as(out_BMT)


def forward_inputs(
    lm: DiffusionLM,
    clean_BT: Tensor,
    attention_mask_BT: Tensor | None,
    hidden_BMT: Tensor,
    target_BMT: Tensor,
    causal_target_BT: Tensor | None = None,
) -> ForwardInputs:
    """The inputs with which a model predicts the targets from the visible tokens (and, by blocks, the clean past)."""
    copies = hidden_BMT.shape[1]
    if not (lm.autoregressive or lm.attention == "bidirectional"):
        return lm.stacked_inputs(clean_BT, hidden_BMT, attention_mask_BT, target_BMT, causal_target_BT)
    hidden_RT, target_RT = hidden_BMT.flatten(0, 1), target_BMT.flatten(0, 1)
    clean_RT = clean_BT.repeat_interleave(copies, 0)
    padding_RT = None if attention_mask_BT is None else attention_mask_BT.repeat_interleave(copies, 0)
    if lm.autoregressive:
        return lm.noised_inputs(clean_RT, padding_RT, target_RT)
    return lm.noised_inputs(torch.where(hidden_RT, lm.mask_token_id, clean_RT), padding_RT, target_RT, hidden_RT)


def passes(lm: DiffusionLM, batch: int, count: int, chunk: int | None) -> Iterator[tuple[slice, slice]]:
    """The rows and copies of each forward pass: at most `chunk` noised rows together, and few copies per clean half."""
    chunk = chunk or batch * count
    copies = min(chunk, count, COPIES_AT_ONCE if lm.attention == "block_causal" else count)
    rows = max(1, chunk // max(copies, 1))
    for first in range(0, batch, rows):
        for copy in range(0, count, copies):
            yield slice(first, first + rows), slice(copy, min(copy + copies, count))


def noise_groups(lm: DiffusionLM, maskable_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """The segment [B, T] of each maskable token, -1 elsewhere: the tokens that are noised together."""
    document_BT = torch.ones_like(maskable_BT, dtype=torch.long) if attention_mask_BT is None else attention_mask_BT
    return torch.where(maskable_BT, segments(Layout.of(document_BT), lm.attention, lm.block_size), -1)


def weighted_cross_entropy(log_prob_BMT: Tensor, views: Views) -> Tensor:
    """-sum(weight * log p), to be divided by the maskable tokens of the whole batch; with the weights of the ELBO, its negative (Sahoo et
    al. 2024, MDLM)."""
    return -(views.weight_BMT * log_prob_BMT).sum()
