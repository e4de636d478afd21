"""Attention patterns: causal, block-causal and bidirectional, with padding and packing, over stock Hugging
Face models.

One attention function is registered with transformers under the name "unmask". The mask reaches it as an
extra forward keyword (`unmask_mask`); without the keyword it raises, so that no model can silently use its
own mask. `make_diffusion` (load.py) switches a model to it. `make_mask` makes the mask, and
`DiffusionLM.run_model` passes it.

Shapes: B batch, T tokens, Q queries, K keys, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from unmask.config.run import AttentionName
from unmask.errors import ConfigError, ModelError
from unmask.models.kernels import cpu_tiles, flash, flex
from unmask.models.kernels.cpu_tiles import Tiles
from unmask.models.kernels.flash import DocumentSpans
from unmask.models.mask_cache import MaskCache
from unmask.models.recurrent import Recurrence, cache_name, recurrence

PATTERNS = get_args(AttentionName)
DEFAULT_BLOCK = 4  # of a conversion to block-causal attention
ATTENTION_NAME = "unmask"
MASKS_KEPT = 64
CELLS_KEPT = 2**26
"""Elements of all cached masks: 64 MB as booleans, and four times that where SDPA adds them in float32."""


LayerKeys = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""The keys and values that a layer reads, given those of its queries and its number."""


@dataclass(frozen=True)
class Layout:
    """The documents, positions and noised copies of tokens, on which masks and position embeddings depend."""

    document_BT: Tensor  # number of a token's document; 0 is padding
    # within the document, from 0; 0 for padding. Blocks are counted from here, so left padding changes
    # nothing.
    position_BT: Tensor
    # 0: clean. 1, 2, ...: a noised copy in `[x_t ; ... ; x_0]`, or the current block and its drafts
    copy_BT: Tensor
    # of canvas models, the position where the block of each token begins; None: all blocks are of one size
    start_BT: Tensor | None = None

    @classmethod
    def of(cls, document_BT: Tensor) -> Layout:
        """The layout of rows whose documents are numbered from 1, 0 for padding (an attention mask has one
        document)."""
        document_BT = document_BT.long()
        index_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        starts_BT = torch.ones_like(document_BT, dtype=torch.bool)
        starts_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        position_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        return cls(document_BT, position_BT.where(document_BT > 0, 0), torch.zeros_like(document_BT))

    def with_canvases(self, hidden_BT: Tensor, size: int) -> Layout:
        """The layout of rows in which canvases of this size begin at the first token of each document that
        may be hidden."""
        document_BT, position_BT, copy_BT = (
            each.expand_as(hidden_BT) for each in (self.document_BT, self.position_BT, self.copy_BT)
        )
        length = hidden_BT.shape[1]
        origin_BD = torch.full_like(position_BT, length)[:, :1].repeat(1, length + 1)
        origin_BD = origin_BD.scatter_reduce(1, document_BT, position_BT.where(hidden_BT, length), "amin")
        start_BT = position_BT - (position_BT - origin_BD.gather(1, document_BT)) % size
        return Layout(document_BT, position_BT, copy_BT, start_BT)

    @classmethod
    def full(cls, length: int, device: torch.device) -> Layout:
        """One row of one document without padding."""
        return cls.of(torch.ones(1, length, dtype=torch.long, device=device))

    def with_noised_copies(self, count: int = 1) -> Layout:
        """The layout `[x_t ; ... ; x_0]`: noised copies before the clean tokens, all at the same
        positions."""
        copies = [torch.full_like(self.copy_BT, number) for number in range(1, count + 1)]
        document_BT, position_BT = (
            numbers_BT.repeat(1, count + 1) for numbers_BT in (self.document_BT, self.position_BT)
        )
        start_BT = None if self.start_BT is None else self.start_BT.repeat(1, count + 1)
        return Layout(document_BT, position_BT, torch.cat([*copies, self.copy_BT], 1), start_BT)

    def recurrence(self, block_size: int | None, copies: int = 0) -> Recurrence:
        """How recurrent layers read rows that have this many noised copies."""
        return recurrence(self.document_BT, self.position_BT, self.copy_BT, block_size, copies)


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query attends to."""

    allowed_B1QK: Tensor  # boolean [B or 1, 1, Q, K]; True is visible
    # of queries and keys, if the model's sliding windows apply (causal pattern and canvas models only)
    positions: tuple[Tensor, Tensor] | None
    full: bool = False  # everything is known to be visible
    # for FlashAttention: those within which all tokens, or all earlier ones, are visible
    documents: DocumentSpans | None = None
    # for recurrent layers; None: each row is one text from its beginning, perhaps with padding after it
    recurrence: Recurrence | None = None
    _windowed: dict[int, AttentionMask] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[tuple[range, ...], AttentionMask] = field(default_factory=dict, repr=False, compare=False)
    _additive: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _moved: dict[torch.device, AttentionMask] = field(default_factory=dict, repr=False, compare=False)

    def within(self, window: int | None) -> AttentionMask:
        """The mask for a layer with this sliding window (None: no window)."""
        if window is None or self.positions is None:
            return self
        if window not in self._windowed:
            query_BQ, key_BK = self.positions
            near_BQK = query_BQ[:, :, None] - key_BK[:, None, :] < window
            self._windowed[window] = AttentionMask(self.allowed_B1QK & near_BQK[:, None], None)
        return self._windowed[window]

    def part(self, queries: range, *keys: range) -> AttentionMask:
        """The mask of some queries, over some keys in this order (none given: all)."""
        if (queries, *keys) not in self._parts:
            rows = slice(queries.start, queries.stop)

            def of_keys(each: Tensor) -> Tensor:
                return torch.cat([each[..., some.start : some.stop] for some in keys], -1) if keys else each

            positions = self.positions and (self.positions[0][:, rows], of_keys(self.positions[1]))
            mask = AttentionMask(of_keys(self.allowed_B1QK[:, :, rows]), positions)
            self._parts[(queries, *keys)] = mask
        return self._parts[(queries, *keys)]

    def to(self, device: torch.device | int | str, **_: Any) -> AttentionMask:
        """The mask on another device, copied once. Accelerate calls it between layers of a model split over
        devices."""
        device = torch.device(device)
        if device == self.allowed_B1QK.device:
            return self
        if device not in self._moved:
            positions = self.positions and (self.positions[0].to(device), self.positions[1].to(device))
            recurrence = self.recurrence and self.recurrence.to(device)
            self._moved[device] = AttentionMask(
                self.allowed_B1QK.to(device), positions, self.full, recurrence=recurrence
            )
        return self._moved[device]

    def annealed(self, visible_fraction: float, key: int) -> AttentionMask:
        """The mask in which each key after a query is also visible with this probability. `key` selects them,
        whatever the width."""
        keys = self.allowed_B1QK.shape[3]
        later, earlier = torch.tril_indices(keys, keys, -1)  # key by key, so that wider rows only add numbers
        visible_QK = torch.ones(keys, keys, dtype=torch.bool)
        visible_QK[earlier, later] = (
            torch.rand(len(later), generator=torch.Generator().manual_seed(key)) < visible_fraction
        )
        return AttentionMask(self.allowed_B1QK & visible_QK.to(self.allowed_B1QK.device), None)

    # masks are cached, and a later training step saves these numbers for its gradient
    @torch.inference_mode(False)
    def additive(self, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add to the attention logits. All layers share it; SDPA would otherwise
        convert a boolean mask in each."""
        if dtype not in self._additive:
            self._additive[dtype] = torch.full_like(self.allowed_B1QK, -torch.inf, dtype=dtype).masked_fill_(
                self.allowed_B1QK, 0.0
            )
        return self._additive[dtype]

    @cached_property
    def block_mask(self) -> BlockMask:
        """The mask for FlexAttention."""
        return flex.block_mask(self.allowed_B1QK)

    @cached_property
    def coarse_tiles(self) -> Tiles | None:
        """The tiles of the mask that SDPA on a CPU computes, if some can be skipped: later blocks, other
        documents."""
        return cpu_tiles.visible(self.allowed_B1QK, cpu_tiles.COARSE)

    @cached_property
    def fine_tiles(self) -> Tiles | None:
        """The tiles for narrow heads."""
        return cpu_tiles.visible(self.allowed_B1QK, cpu_tiles.FINE)


def blocks(layout: Layout, pattern: AttentionName, block_size: int | None) -> Tensor:
    """The attention block of every token [B, T]: causal is block size 1, bidirectional one block for all."""
    if pattern == "bidirectional":
        return torch.zeros_like(layout.position_BT)
    return layout.position_BT // (block_size or 1) if layout.start_BT is None else layout.start_BT


def segments(layout: Layout, pattern: AttentionName, block_size: int | None) -> Tensor:
    """The number [B, T] of each token's segment, from 0: consecutive tokens of one document, copy and
    block."""
    keys = (layout.document_BT, layout.copy_BT, blocks(layout, pattern, block_size))
    changed_BT = torch.stack([key_BT[:, 1:] != key_BT[:, :-1] for key_BT in keys]).any(0)
    return F.pad(changed_BT.long().cumsum(1), (1, 0))


def stacked_rows(
    target_N: Tensor, layout: Layout, copies: int, block_size: int | None, *, logit_shift: bool
) -> Tensor:
    """The rows [N] of `[x_t ; ... ; x_0]`, as flat indices, that predict targets of its noised copies, flat
    indices into [B, M, T]. With a logit shift the last clean row before a block predicts its first token."""
    length = layout.position_BT.shape[1] // (copies + 1)
    batch_N, column_N = target_N // (copies * length), target_N % (copies * length)
    first_row_N = batch_N * (copies + 1) * length
    if not logit_shift:
        return first_row_N + column_N
    position_N = layout.position_BT[batch_N % len(layout.position_BT), column_N]
    before_N = (column_N % length - 1).clamp_min(0) + copies * length
    return first_row_N + torch.where(
        position_N % (block_size or 1) == 0, before_N, (column_N - 1).clamp_min(0)
    )


def make_mask(
    pattern: AttentionName,
    block_size: int | None,
    queries: Layout,
    keys: Layout,
    *,
    causal_context: bool = False,
    windows: bool = False,
) -> AttentionMask:
    """The mask of any pattern over padded, packed, cached or clean-and-noised rows.

    Clean tokens attend to the clean tokens of the same and earlier blocks (with `causal_context` only to
    earlier tokens); noised tokens to the noised tokens of the same copy and block and the clean ones of
    earlier blocks. No token attends to another document or to padding. Padding attends only to itself, so
    that no row is empty. `windows`: whether the model's sliding windows apply in a block-causal pattern.
    """
    query_BQ1, key_B1K = (
        blocks(queries, pattern, block_size)[:, :, None],
        blocks(keys, pattern, block_size)[:, None, :],
    )
    copy_BQ1, copy_B1K = queries.copy_BT[:, :, None], keys.copy_BT[:, None, :]
    together_BQK = (copy_BQ1 == copy_B1K) & (key_B1K == query_BQ1)
    if causal_context:
        together_BQK &= (copy_BQ1 > 0) | (keys.position_BT[:, None, :] <= queries.position_BT[:, :, None])
    earlier_clean_BQK = (copy_B1K == 0) & (key_B1K < query_BQ1)
    real_BQK = (queries.document_BT[:, :, None] == keys.document_BT[:, None, :]) & (
        keys.document_BT[:, None, :] > 0
    )
    count, total = queries.document_BT.shape[1], keys.document_BT.shape[1]
    itself_QK = torch.eye(total, dtype=torch.bool, device=real_BQK.device)[total - count :]
    allowed_BQK = real_BQK & (earlier_clean_BQK | together_BQK) | itself_QK
    positions = None
    if windows or pattern == "causal":
        ends_BT = queries.position_BT
        if queries.start_BT is not None:  # the window of a whole canvas ends with its first token
            ends_BT = torch.where(queries.copy_BT > 0, queries.start_BT, ends_BT)
        positions = (ends_BT, keys.position_BT)
    return AttentionMask(allowed_BQK[:, None], positions)


_unpadded: MaskCache[AttentionMask] = MaskCache(MASKS_KEPT, CELLS_KEPT)


def unpadded_mask(
    pattern: AttentionName,
    block_size: int | None,
    length: int,
    copies: int,
    device: torch.device,
    causal_context: bool = False,
    recurrent: bool = False,
) -> AttentionMask:
    """The mask of rows of one document without padding; cached, since it depends only on the arguments."""

    @torch.inference_mode(False)  # a later training step may save it for its gradient
    def make() -> AttentionMask:
        layout = Layout.full(length, device).with_noised_copies(copies)
        mask = make_mask(pattern, block_size, layout, layout, causal_context=causal_context)
        return replace(
            mask,
            full=pattern == "bidirectional" and copies == 0,
            recurrence=layout.recurrence(block_size, copies) if recurrent and copies else None,
        )

    return _unpadded.get(
        (pattern, block_size, length, copies, device, causal_context, recurrent),
        make,
        (length * (copies + 1)) ** 2,
    )


def mask_cache_stats() -> dict[str, float]:
    """Hits, misses, hit rate and number of cached masks."""
    hits, misses = _unpadded.hits, _unpadded.misses
    return {"hits": hits, "misses": misses, "hit_rate": hits / max(hits + misses, 1), "size": len(_unpadded)}


def clear_mask_cache() -> None:
    """Clear the cached masks and their statistics."""
    _unpadded.clear()


def check_pattern(pattern: str, block_size: int | None, causal_context: bool = False) -> None:
    """Raise ConfigError for an unknown pattern, or for a block size or causal context that the pattern does
    not have."""
    if pattern not in PATTERNS:
        raise ConfigError(
            f"unknown attention pattern {pattern!r}",
            where="attention",
            remedy=f"Use one of {', '.join(PATTERNS)}",
        )
    if pattern == "block_causal" and (block_size is None or block_size < 1):
        raise ConfigError(
            f"block_causal attention with block_size {block_size!r}",
            where="block_size",
            remedy="Give a block size of at least 1",
        )
    remedy = "Leave it out, or use attention='block_causal'"
    if pattern != "block_causal" and block_size is not None:
        raise ConfigError(
            f"block_size {block_size} with {pattern} attention", where="block_size", remedy=remedy
        )
    if causal_context and pattern != "block_causal":
        raise ConfigError(f"a causal context with {pattern} attention", where="causal_context", remedy=remedy)


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention module of every layer, found by its class name; of nested ones (BERT) the outer, which
    has the output projection."""
    named = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    inner = {part for module in named for part in module.modules() if part is not module}
    return [module for module in named if module not in inner]


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention modules that take the mask: not those of linear attention, which are recurrent."""
    return [module for module in attention_modules(model) if not cache_name(module)]


def unmask_attention(
    module: torch.nn.Module,
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    attention_mask: Tensor | None,
    *,
    unmask_mask: AttentionMask | None = None,
    unmask_keys: LayerKeys | None = None,
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
        ModelError: there is no mask, or the model has attention sinks or a position bias.
    """
    if unmask_mask is None:
        raise ModelError(
            "the model was called without a mask, and would attend to tokens that it must not see",
            where=type(module).__name__,
            remedy="Call it through unmask.DiffusionLM",
        )
    if s_aux is not None or position_bias is not None:
        raise ModelError(
            "attention sinks and position biases are not supported",
            where=type(module).__name__,
            remedy="Use another model",
        )
    if unmask_keys is not None:
        key_BHKD, value_BHKD = unmask_keys(key_BHKD, value_BHKD, cast(int, module.layer_idx))
    mask = unmask_mask.within(sliding_window)
    # to a compiler the length of a cache is not constant
    groups = getattr(module, "num_key_value_groups", None)
    groups = query_BHQD.shape[1] // key_BHKD.shape[1] if groups is None else groups
    if mask.documents is not None and flash.usable(query_BHQD) and dropout == 0 and softcap is None:
        return flash.attend(query_BHQD, key_BHKD, value_BHKD, mask.documents, scaling=scaling), None
    # without a mask SDPA has faster kernels
    if flex.usable(query_BHQD) and dropout == 0 and not (mask.full and softcap is None):
        out_BHQD = flex.attend(
            query_BHQD, key_BHKD, value_BHKD, mask.block_mask, scaling=scaling, softcap=softcap
        )
    elif softcap is None:
        out_BHQD = _sdpa(
            query_BHQD, key_BHKD, value_BHKD, mask, dropout_p=dropout, scale=scaling, enable_gqa=groups > 1
        )
    else:
        key_BHKD, value_BHKD = key_BHKD.repeat_interleave(groups, 1), value_BHKD.repeat_interleave(groups, 1)
        scale = scaling if scaling is not None else query_BHQD.shape[-1] ** -0.5
        logits_BHQK = softcap * torch.tanh(query_BHQD @ key_BHKD.transpose(-1, -2) * scale / softcap)
        weight_BHQK = (
            logits_BHQK.masked_fill(~mask.allowed_B1QK, -torch.inf)
            .softmax(-1, dtype=torch.float32)
            .to(query_BHQD.dtype)
        )
        out_BHQD = F.dropout(weight_BHQK, dropout) @ value_BHKD
    return out_BHQD.transpose(1, 2).contiguous(), None


def _sdpa(
    query_BHQD: Tensor, key_BHKD: Tensor, value_BHKD: Tensor, mask: AttentionMask, **options: Any
) -> Tensor:
    """SDPA, by tiles where that saves work; a compiled graph must not depend on where it does."""
    if mask.full:
        return F.scaled_dot_product_attention(query_BHQD, key_BHKD, value_BHKD, **options)
    if torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(
            query_BHQD, key_BHKD, value_BHKD, attn_mask=mask.allowed_B1QK, **options
        )
    tiles = mask.fine_tiles if query_BHQD.shape[-1] <= cpu_tiles.NARROW else mask.coarse_tiles
    if tiles is None:
        return F.scaled_dot_product_attention(
            query_BHQD, key_BHKD, value_BHKD, attn_mask=mask.additive(query_BHQD.dtype), **options
        )
    return cpu_tiles.attend(query_BHQD, key_BHKD, value_BHKD, tiles, **options)


AttentionInterface.register(ATTENTION_NAME, unmask_attention)


def hidden_fraction(
    hidden_BT: Tensor, layout: Layout, attention: AttentionName, block_size: int | None
) -> Tensor:
    """The fraction [B, T] of hidden tokens in each token's block or document; 0 at padding."""
    segment_BT = segments(layout, attention, block_size).expand_as(hidden_BT)
    real_BT = (layout.document_BT > 0).expand_as(hidden_BT).float()
    counts = [
        torch.zeros_like(real_BT).scatter_add_(1, segment_BT, kind_BT)
        for kind_BT in (hidden_BT * real_BT, real_BT)
    ]
    hidden_count_BT, count_BT = (count_BS.gather(1, segment_BT) for count_BS in counts)
    return hidden_count_BT / count_BT.clamp_min(1)
