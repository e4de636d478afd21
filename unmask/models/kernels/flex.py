"""FlexAttention on a GPU: only the tiles of a sparse mask with visible entries are computed.

Shapes: B batch, Q queries, K keys, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

LEAST_QUERIES = 256  # shorter rows are a tile or two


def usable(query_BHQD: Tensor) -> bool:
    """Whether FlexAttention supports these queries: on a CPU it has no backward pass; its kernels need widths
    that are powers of 2."""
    queries, width = query_BHQD.shape[2:]
    return query_BHQD.is_cuda and queries >= LEAST_QUERIES and width >= 16 and width & (width - 1) == 0


def block_mask(allowed_B1QK: Tensor) -> BlockMask:
    """A boolean mask [B or 1, 1, Q, K], and its non-empty tiles of 128 x 128."""
    rows, _, queries, keys = allowed_B1QK.shape

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed_B1QK[batch if rows > 1 else 0, 0, query, key]

    return create_block_mask(
        visible, rows if rows > 1 else None, None, queries, keys, device=str(allowed_B1QK.device)
    )


def attend(
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    mask: BlockMask,
    *,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Scaled dot-product attention under the mask, [B, H, Q, D]; fewer key heads serve groups of query heads.

    `scaling` None is one over the root of D; `softcap` is a smooth bound of the attention logits' magnitude.
    """
    cap = None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap)
    grouped = query_BHQD.shape[1] != key_BHKD.shape[1]
    return compiled_kernel()(
        query_BHQD, key_BHKD, value_BHKD, score_mod=cap, block_mask=mask, scale=scaling, enable_gqa=grouped
    )


@cache
def compiled_kernel() -> Callable[..., Any]:
    """flex_attention as a fused kernel; uncompiled it would build the whole matrix of scores."""
    return torch.compile(flex_attention)
