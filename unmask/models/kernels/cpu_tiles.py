"""Sparse attention on a CPU: only the tiles of the mask with visible entries are computed.

Shapes: B batch, R rows of a mask (1 where all rows of a batch share it), O rows of a batch that share a mask
(B or 1), H heads, Q queries, K keys, D head width, T tokens, S side of a tile, I and J tiles of queries and
of keys, G tiles of queries that see the same number N of tiles of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_QUERIES = 129  # shorter rows are a tile or two
NARROW = 16  # narrower heads are padded to this width: SDPA takes 1.3 times as long for 8 dimensions


class Grain(NamedTuple):
    """The side of a tile, and the visible fraction of a mask above which one dense call is faster.

    Smaller tiles waste less, in more and smaller calls.
    """

    side: int
    densest: float


FINE = Grain(32, 0.8)  # for narrow heads; measured with 8 dimensions
COARSE = Grain(64, 0.6)  # for others; measured with 64


@dataclass(frozen=True)
class Group:
    """Tiles of queries with equally many tiles of keys, anywhere in the batch: one call of SDPA."""

    query_G: Tensor
    key_GN: Tensor
    allowed_G1QK: Tensor


@dataclass(frozen=True)
class Tiles:
    """A mask of `rows` rows without its empty tiles, numbered row by row; `place_I` is the place of each tile
    of queries in the groups."""

    rows: int
    side: int
    groups: list[Group]
    place_I: Tensor


# masks are cached, and a later training step saves these indices for its gradient
@torch.inference_mode(False)
def visible(allowed_R1QK: Tensor, grain: Grain) -> Tiles | None:
    """The tiles of a boolean mask [R, 1, Q, K]; None where it is nearly full, short, or on a GPU (which has
    kernels for sparse masks)."""
    rows, _, queries, keys = allowed_R1QK.shape
    if allowed_R1QK.device.type != "cpu" or type(allowed_R1QK) is not Tensor or queries < LEAST_QUERIES:
        return None
    size = grain.side
    # padding has the mask of the last query
    at_Q = torch.arange(queries + -queries % size).clamp_max(queries - 1)
    tile_RIJSS = (
        F.pad(allowed_R1QK[:, 0, at_Q], (0, -keys % size))
        .unflatten(2, (-1, size))
        .unflatten(1, (-1, size))
        .transpose(2, 3)
    )
    seen_RIJ = tile_RIJSS.any(4).any(3)
    if seen_RIJ.sum() * size**2 > grain.densest * rows * queries * keys:
        return None
    row_RI = torch.arange(rows)[:, None].expand(seen_RIJ.shape[:2])
    tile_IJSS, seen_IJ, row_I = tile_RIJSS.flatten(0, 1), seen_RIJ.flatten(0, 1), row_RI.flatten()
    count_I, groups = seen_IJ.sum(1), []
    for count in count_I.unique():
        query_G = (count_I == count).nonzero().flatten()
        key_GN = seen_IJ[query_G].nonzero()[:, 1].view(len(query_G), -1)
        tile_GNSS = tile_IJSS[query_G[:, None], key_GN]
        key_GN = key_GN + row_I[query_G][:, None] * seen_RIJ.shape[2]
        groups.append(Group(query_G, key_GN, tile_GNSS.transpose(1, 2).flatten(2)[:, None]))
    return Tiles(rows, size, groups, torch.cat([group.query_G for group in groups]).argsort())


def attend(
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    mask: Tiles,
    *,
    scale: float | None,
    **options: Any,
) -> Tensor:
    """SDPA [B, H, Q, D] of the tiles, with its options."""
    rows, _, queries, width = query_BHQD.shape
    scale = width**-0.5 if scale is None else scale  # of the heads before padding
    outer = rows // mask.rows
    query_OISHD, key_OJSHD, value_OJSHD = (
        _cut(x_BHTD, mask.side, outer) for x_BHTD in (query_BHQD, key_BHKD, value_BHKD)
    )
    parts = []
    for group in mask.groups:
        query_GHSD = query_OISHD.index_select(1, group.query_G).flatten(0, 1).transpose(1, 2)
        seen = (x_OJSHD.index_select(1, group.key_GN.flatten()) for x_OJSHD in (key_OJSHD, value_OJSHD))
        key_GHKD, value_GHKD = (
            x_OJSHD.reshape(len(query_GHSD), -1, *x_OJSHD.shape[3:]).transpose(1, 2) for x_OJSHD in seen
        )
        allowed_G1QK = group.allowed_G1QK.repeat(outer, 1, 1, 1)
        out_GHSD = F.scaled_dot_product_attention(
            query_GHSD, key_GHKD, value_GHKD, attn_mask=allowed_G1QK, scale=scale, **options
        )
        parts.append(out_GHSD.transpose(1, 2).unflatten(0, (outer, -1)))
    out_OISHD = torch.cat(parts, 1).index_select(1, mask.place_I)
    out_BTHD = out_OISHD.reshape(rows, -1, *out_OISHD.shape[3:])
    return out_BTHD[:, :queries, :, : value_BHKD.shape[3]].transpose(1, 2)


def _cut(x_BHTD: Tensor, size: int, outer: int) -> Tensor:
    """Divide into tiles [O, tiles, S, H, D], row by row; without a copy where heads lie in memory as in
    transformers."""
    x_BTHD = x_BHTD.transpose(1, 2)
    padding = (0, max(0, NARROW - x_BTHD.shape[-1]), 0, 0, 0, -x_BTHD.shape[1] % size)
    x_BTHD = F.pad(x_BTHD, padding) if any(padding) else x_BTHD
    return x_BTHD.reshape(outer, -1, size, *x_BTHD.shape[2:])
