"""Keyed, counter-based random numbers (Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3").

Every random decision is a pure function of (seed, sequence key, step, position, stream, view). Masks and
samples are therefore the same in any batch, on any number of devices, and after a resume.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


class RngStream(IntEnum):
    """The purpose of a draw. Draws of different streams are independent."""

    TOKEN = 0
    ORDER = 1
    MASK = 2
    TIME = 3
    PROMPT = 4
    ROLLOUT = 5
    ORDER_NOISE = 6
    REVEAL_STEP = 7
    DRAFT = 8
    ACCEPT = 9
    REVISION = 10
    GAP = 11
    KIND = 12
    NOISE = 13
    LEVEL = 14
    CANVAS = 15
    CONDITION = 16
    STATE = 17


def sequence_key(ids: Iterable[int], repeat: int = 0) -> int:
    """A 63-bit key of a sequence: a hash of its ids and its repeat number."""
    text = ",".join(map(str, ids)) + f"#{repeat}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sequence_keys(sequences: Sequence[Sequence[int]]) -> list[int]:
    """One key per sequence; equal sequences differ by their repeat number, not by their place in the list."""
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for ids in map(tuple, sequences):
        keys.append(sequence_key(ids, seen[ids]))
        seen[ids] += 1
    return keys


def uniform(
    seed: int,
    key: Tensor,
    *,
    step: Tensor | int = 0,
    position: Tensor | int = 0,
    stream: RngStream,
    view: Tensor | int = 0,
) -> Tensor:
    """float64 numbers in [0, 1) with 53 random bits; the tensors broadcast against one another. `key`: int64,
    of `sequence_keys` or ids of samples; `step`, `position` and `view` are below 2**32."""
    mixed = key ^ _splitmix64(seed)
    words = [
        # no copy from the host
        word.to(key.device, torch.int64)
        if isinstance(word, Tensor)
        else torch.full((), word, device=key.device)
        for word in (position, step, int(stream), view)
    ]
    shape = torch.broadcast_shapes(mixed.shape, *(word.shape for word in words))
    # not expanded: the key's words stay small
    mixed = mixed.view([1] * (len(shape) - mixed.dim()) + [*mixed.shape])
    out = philox((mixed & WORD, (mixed >> 32) & WORD), [word.expand(shape) for word in words])
    return (((out[0] >> 5) << 26) | (out[1] >> 6)).double() * 2.0**-53


def philox(key: tuple[Tensor, Tensor], counter: Sequence[Tensor]) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold unsigned 32-bit words: 2 key words, 4 counter words of one
    shape -> 4 random words. The key words broadcast against the others, and have as many dimensions."""
    factor_2, weyl_R2 = _constants(counter[0].device)
    ones = [1] * counter[0].dim()
    factor_2, key_R2 = factor_2.view([2, *ones]), (torch.stack(key) + weyl_R2.view([ROUNDS, 2, *ones])) & WORD
    even_2, odd_2 = torch.stack([counter[0], counter[2]]), torch.stack([counter[1], counter[3]])
    for key_2 in key_R2.unbind():
        # int64 wraps around: its bits are those of the unsigned product
        product_2 = (even_2 * factor_2).flip(0)
        even_2, odd_2 = ((product_2 >> 32) & WORD) ^ odd_2 ^ key_2, product_2 & WORD
    return [even_2[0], odd_2[0], even_2[1], odd_2[1]]


@lru_cache
@torch.inference_mode(False)
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The factors of the two products, and what each round adds to the key [ROUNDS, 2]."""
    return torch.tensor(MULTIPLIERS, device=device), torch.tensor(WEYL, device=device) * torch.arange(
        ROUNDS, device=device
    )[:, None]


def _splitmix64(seed: int) -> int:
    """A bijective hash of the seed (Steele et al. 2014), as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    x = (seed + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
