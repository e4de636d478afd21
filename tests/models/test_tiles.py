"""Attention by tiles: the same numbers, and nothing computed where nobody sees anything."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.models.configurations import LAYERS, random_ids, tiny_lm
from unmask.models import tiles
from unmask.models.attention import PATTERNS, Layout, make_mask, unmask_attention
from unmask.models.tiles import WORTH_IT


@contextmanager
def tiles_of(size):
    """Tiles of another size; what reaches SDPA is counted, in pairs of query and key."""
    computed, sdpa = [], F.scaled_dot_product_attention

    def counted(query, key, value, **options):
        computed.append(len(query) * query.shape[2] * key.shape[2])
        return sdpa(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "side", lambda queries: size)
        patch.setattr(tiles, "LEAST_QUERIES", size + 1)
        patch.setattr(F, "scaled_dot_product_attention", counted)
        yield computed


def area(allowed_QK, tile):
    """Of the tiles in which anything is visible."""
    return sum(tile**2 for rows in allowed_QK.split(tile) for part in rows.split(tile, 1) if part.any())


@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=5),
    pattern=st.sampled_from(PATTERNS),
    block_size=st.integers(1, 6),
    context=st.booleans(),
    copies=st.integers(0, 2),
    window=st.sampled_from([None, 2, 5]),
    rows=st.integers(1, 2),
)
def test_attention_by_tiles_is_attention_under_the_whole_mask(lengths, pattern, block_size, context, copies, window, rows):
    documents = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)] or [1])
    layout = Layout.of(torch.stack([documents, documents.flip(0)][:rows])).with_noised_copies(copies)
    size = block_size if pattern == "block_causal" else None
    mask = make_mask(pattern, size, layout, layout, causal_context=context and pattern == "block_causal").within(window)
    allowed, width = mask.allowed_BQK, layout.copy_BT.shape[1]
    generator = torch.Generator().manual_seed(width)
    heads = [torch.randn(2, count, width, 4, dtype=torch.float64, generator=generator, requires_grad=True) for count in (4, 2, 2)]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=allowed, enable_gqa=True).transpose(1, 2)
    with tiles_of(4) as computed:
        out, _ = unmask_attention(None, *heads, None, unmask_mask=mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(*(torch.autograd.grad((x * upstream).sum(), heads) for x in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    needed = [area(allowed_QK, 4) for allowed_QK in allowed[:, 0]]
    whole = width <= 4 or sum(needed) / rows > WORTH_IT * (width + -width % 4) ** 2
    assert sum(computed) == (2 * width**2 if whole else 2 // rows * sum(needed))


def test_packed_documents_take_the_sum_of_their_squares_and_no_more():
    lm, lengths = tiny_lm("llama", "bidirectional"), [8, 4, 20, 12]
    documents = torch.tensor([[n for n, length in enumerate(lengths, 1) for _ in range(length)]])
    ids = random_ids(1, sum(lengths))
    with torch.no_grad():
        expected = lm.logits(ids, documents)
        with tiles_of(4) as computed:
            logits = lm.logits(ids, documents)
        assert sum(computed) == LAYERS * sum(length**2 for length in lengths) < LAYERS * ids.numel() ** 2 / 2
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-6)
        for other in (documents, documents.flip(1)):
            with tiles_of(4) as computed:
                both = lm.logits(ids.repeat(2, 1), torch.cat([documents, other]))
            assert sum(computed) == 2 * LAYERS * sum(length**2 for length in lengths)
            torch.testing.assert_close(both[:1], expected, rtol=0, atol=5e-6)
