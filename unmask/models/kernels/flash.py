"""FlashAttention 2 (Dao 2023, torch's build) on a GPU in 16 bits: documents whose tokens attend to all
others, or to all before them.

Padding is removed and documents are concatenated, so that nothing masked is computed.

Shapes: B batch, T tokens, N tokens without padding, S documents, P = S + 1 bounds of documents, H heads, D
head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


class DocumentSpans(NamedTuple):
    """The positions of a batch's documents."""

    index_N: Tensor  # flat indices into [B * T] of the tokens without padding
    bounds_P: Tensor  # the start of each document among these, and the end of the last
    longest: int  # tokens of the longest document
    causal: bool  # whether tokens attend only to earlier ones


def documents(document_BT: Tensor, *, causal: bool) -> DocumentSpans:
    """The documents of tokens whose document numbers are `document_BT`, with 0 for padding."""
    row_BT = torch.arange(len(document_BT), device=document_BT.device)[:, None].expand_as(document_BT)
    index_N = document_BT.flatten().nonzero().squeeze(1)
    key_2N = torch.stack([row_BT.flatten(), document_BT.flatten()])[:, index_N]
    starts_S = (key_2N[:, 1:] != key_2N[:, :-1]).any(0).nonzero().squeeze(1) + 1
    bounds_P = torch.cat([starts_S.new_zeros(1), starts_S, starts_S.new_full((1,), len(index_N))])
    return DocumentSpans(index_N, bounds_P.int(), int(bounds_P.diff().max()), causal)


def usable(query_BHTD: Tensor) -> bool:
    """Whether the kernel supports these queries."""
    width = query_BHTD.shape[3]
    return (
        query_BHTD.is_cuda
        and _dtype(query_BHTD) in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
    )


def _dtype(query_BHTD: Tensor) -> torch.dtype:
    """The dtype of the computation: under autocast rotary embeddings stay in 32 bits."""
    kind = query_BHTD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_BHTD.dtype


def attend(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    documents: DocumentSpans,
    *,
    scaling: float | None,
) -> Tensor:
    """Scaled dot-product attention within the documents, [B, T, H, D], 0 at padding; fewer key heads serve
    groups of query heads."""
    batch, heads, length, width = query_BHTD.shape
    dtype, parts = _dtype(query_BHTD), (query_BHTD, key_BHTD, value_BHTD)
    query_NHD, key_NHD, value_NHD = (
        part.to(dtype).transpose(1, 2).flatten(0, 1)[documents.index_N] for part in parts
    )
    out_NHD: Any = varlen_attn(
        *(
            query_NHD,
            key_NHD,
            value_NHD,
            documents.bounds_P,
            documents.bounds_P,
            documents.longest,
            documents.longest,
        ),
        scale=scaling,
        window_size=(-1, 0 if documents.causal else -1),
        enable_gqa=heads != key_BHTD.shape[1],
    )
    return (
        out_NHD.new_zeros(batch * length, heads, width)
        .index_copy(0, documents.index_N, out_NHD)
        .unflatten(0, (batch, length))
    )
