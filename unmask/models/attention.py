"""Attention patterns: causal, block-causal and bidirectional, with padding and packing, over stock Hugging Face models.

One attention function is registered with transformers under the name "unmask". The mask reaches it as an extra forward
keyword (`unmask_mask`), so no modelling code is copied and no model can fall back to its own mask unseen: without the
keyword the function raises.

Shapes: B batch, T tokens, Q queries, K keys, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from unmask.errors import ConfigError, ModelError

Pattern = Literal["causal", "block_causal", "bidirectional"]
PATTERNS = ("causal", "block_causal", "bidirectional")
ATTENTION_NAME = "unmask"


@dataclass(frozen=True)
class Layout:
    """Where every token stands: all that a mask and the position embeddings depend on.

    Attributes:
        document_BT: number of the document that a token belongs to; 0 is padding.
        position_BT: position within the document, from 0. The block grid is anchored here, so left padding moves nothing.
        noisy_BT: True for the noised copy in a clean-and-noised row `[x_t ; x_0]`; all False otherwise.
    """

    document_BT: Tensor
    position_BT: Tensor
    noisy_BT: Tensor

    @classmethod
    def of(cls, document_BT: Tensor) -> Layout:
        """The layout of rows whose documents are numbered from 1, with 0 for padding (an attention mask is the case of one)."""
        document_BT = document_BT.long()
        index_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        starts_BT = torch.ones_like(document_BT, dtype=torch.bool)
        starts_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        position_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        return cls(document_BT, position_BT, torch.zeros_like(starts_BT))

    @classmethod
    def full(cls, length: int, device: torch.device) -> Layout:
        """One row of one document without padding."""
        return cls.of(torch.ones(1, length, dtype=torch.long, device=device))

    def with_noised_copy(self) -> Layout:
        """The layout `[x_t ; x_0]`: a noised copy before the clean tokens, at the same positions."""
        return Layout(
            torch.cat([self.document_BT, self.document_BT], 1),
            torch.cat([self.position_BT, self.position_BT], 1),
            torch.cat([torch.ones_like(self.noisy_BT), self.noisy_BT], 1),
        )

    def last(self, count: int) -> Layout:
        """The layout of the last `count` tokens (the queries beside a key-value cache)."""
        return Layout(self.document_BT[:, -count:], self.position_BT[:, -count:], self.noisy_BT[:, -count:])


@dataclass(frozen=True)
class AttentionMask:
    """What each query may see.

    Attributes:
        allowed_BQK: boolean [B or 1, 1, Q, K]; True is visible.
        positions: of the queries and the keys, where the model's own sliding windows still hold (causal pattern only).
    """

    allowed_BQK: Tensor
    positions: tuple[Tensor, Tensor] | None
    _windowed: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def within(self, window: int | None) -> Tensor:
        """The boolean mask for a layer with this sliding window (None: no window)."""
        if window is None or self.positions is None:
            return self.allowed_BQK
        if window not in self._windowed:
            query_BQ, key_BK = self.positions
            near_BQK = query_BQ[:, :, None] - key_BK[:, None, :] < window
            self._windowed[window] = self.allowed_BQK & near_BQK[:, None]
        return self._windowed[window]


def blocks(layout: Layout, pattern: Pattern, block_size: int | None) -> Tensor:
    """The attention block of every token [B, T]: causal is block size 1, bidirectional one block for all."""
    if pattern == "bidirectional":
        return torch.zeros_like(layout.position_BT)
    return layout.position_BT // (block_size or 1)


def make_mask(pattern: Pattern, block_size: int | None, queries: Layout, keys: Layout) -> AttentionMask:
    """The mask of any pattern over padded, packed, cached or clean-and-noised rows.

    Clean tokens see the clean tokens of their own and earlier blocks; noised tokens see the noised tokens of their own
    block and the clean ones of earlier blocks; nobody sees another document or the padding (padding sees itself only,
    so that no row is empty).
    """
    query_BQ1, key_B1K = blocks(queries, pattern, block_size)[:, :, None], blocks(keys, pattern, block_size)[:, None, :]
    noisy_query_BQ1, noisy_key_B1K = queries.noisy_BT[:, :, None], keys.noisy_BT[:, None, :]
    same_kind_BQK = noisy_query_BQ1 == noisy_key_B1K
    earlier_clean_BQK = ~noisy_key_B1K & (key_B1K < query_BQ1)
    real_BQK = (queries.document_BT[:, :, None] == keys.document_BT[:, None, :]) & (keys.document_BT[:, None, :] > 0)
    count, total = queries.document_BT.shape[1], keys.document_BT.shape[1]
    itself_QK = torch.eye(total, dtype=torch.bool, device=real_BQK.device)[total - count :]
    allowed_BQK = real_BQK & (earlier_clean_BQK | (same_kind_BQK & (key_B1K == query_BQ1))) | itself_QK
    return AttentionMask(allowed_BQK[:, None], (queries.position_BT, keys.position_BT) if pattern == "causal" else None)


@lru_cache(maxsize=64)
def unpadded_mask(pattern: Pattern, block_size: int | None, length: int, noised_copy: bool, device: torch.device) -> AttentionMask:
    """The mask of rows without padding: depends on pattern, length and device alone, so it is made once."""
    layout = Layout.full(length, device)
    layout = layout.with_noised_copy() if noised_copy else layout
    return make_mask(pattern, block_size, layout, layout)


def mask_cache_stats() -> dict[str, float]:
    """Hits, misses, hit rate and number of the cached masks."""
    info = unpadded_mask.cache_info()
    asked = info.hits + info.misses
    return {"hits": info.hits, "misses": info.misses, "hit_rate": info.hits / asked if asked else 0.0, "size": info.currsize}


def clear_mask_cache() -> None:
    """Forget all cached masks and their statistics."""
    unpadded_mask.cache_clear()


def check_pattern(pattern: str, block_size: int | None) -> None:
    """Raise ConfigError unless the pattern exists and has a block size exactly when it needs one."""
    if pattern not in PATTERNS:
        raise ConfigError(f"unknown attention pattern {pattern!r}", where="attention", remedy=f"Use one of {', '.join(PATTERNS)}")
    if pattern == "block_causal" and (block_size is None or block_size < 1):
        raise ConfigError(
            f"block_causal attention with block_size {block_size!r}", where="block_size", remedy="Give a block size of at least 1"
        )
    if pattern != "block_causal" and block_size is not None:
        raise ConfigError(
            f"block_size {block_size} with {pattern} attention", where="block_size", remedy="Leave it out, or use attention='block_causal'"
        )


def unmask_attention(
    module: torch.nn.Module,
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    attention_mask: Tensor | None,
    *,
    unmask_mask: AttentionMask | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention under an explicit mask, with the calling convention of transformers.

    Returns:
        [B, Q, H, D] and no attention weights.

    Raises:
        ModelError: no mask was given, or the model asks for attention sinks or a position bias.
    """
    if unmask_mask is None:
        raise ModelError(
            "the model was called without a mask, and would attend in silence to what it must not see",
            where=type(module).__name__,
            remedy="Call it through unmask.DiffusionLM",
        )
    if s_aux is not None or position_bias is not None:
        raise ModelError("attention sinks and position biases are not supported", where=type(module).__name__, remedy="Use another model")
    allowed_BQK = unmask_mask.within(sliding_window)
    groups = query_BHQD.shape[1] // key_BHKD.shape[1]
    if softcap is None:
        out_BHQD = F.scaled_dot_product_attention(
            query_BHQD, key_BHKD, value_BHKD, attn_mask=allowed_BQK, dropout_p=dropout, scale=scaling, enable_gqa=groups > 1
        )
        return out_BHQD.transpose(1, 2).contiguous(), None
    key_BHKD, value_BHKD = key_BHKD.repeat_interleave(groups, 1), value_BHKD.repeat_interleave(groups, 1)
    scale = scaling if scaling is not None else query_BHQD.shape[-1] ** -0.5
    score_BHQK = softcap * torch.tanh(query_BHQD @ key_BHKD.transpose(-1, -2) * scale / softcap)
    weight_BHQK = score_BHQK.masked_fill(~allowed_BQK, -torch.inf).softmax(-1, dtype=torch.float32).to(query_BHQD.dtype)
    weight_BHQK = F.dropout(weight_BHQK, dropout)
    return (weight_BHQK @ value_BHKD).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, unmask_attention)
