"""Attention by tiles: the same numbers, and nothing computed for tiles in which nothing is visible."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.helpers import each_once, last_tokens
from tests.models.configurations import LAYERS, random_ids, tiny_lm
from unmask.models.attention import PATTERNS, Layout, make_mask, unmask_attention
from unmask.models.kernels import cpu_tiles
from unmask.models.kernels.cpu_tiles import Grain

WORTH = 0.7


@contextmanager
def tiles_of(size):
    """Set the size of tiles (None: the default), and count the pairs of query and key that reach SDPA."""
    computed, sdpa = [], F.scaled_dot_product_attention

    def counted(query, key, value, **options):
        computed.append(len(query) * query.shape[2] * key.shape[2])
        return sdpa(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        if size is not None:
            patch.setattr(cpu_tiles, "FINE", Grain(size, WORTH))
            patch.setattr(cpu_tiles, "COARSE", Grain(size, WORTH))
            patch.setattr(cpu_tiles, "LEAST_QUERIES", size + 1)
        patch.setattr(F, "scaled_dot_product_attention", counted)
        yield computed


def area(allowed_QK, tile):
    """The pairs of query and key in tiles in which anything is visible."""
    return sum(tile**2 for rows in allowed_QK.split(tile) for part in rows.split(tile, 1) if part.any())


def assert_equals_the_whole(mask, heads, scaling, side=None):
    """Check outputs and gradients; the number of computed pairs."""
    expected = F.scaled_dot_product_attention(
        *heads, attn_mask=mask.allowed_B1QK, enable_gqa=True, scale=scaling
    ).transpose(1, 2)
    with tiles_of(side) as computed:
        out, _ = unmask_attention(None, *heads, None, unmask_mask=mask, scaling=scaling)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        *(torch.autograd.grad((x * upstream).sum(), heads) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    return sum(computed)


def random_heads(queries, keys, width, value_width, rows=2):
    generator = torch.Generator().manual_seed(keys)
    shapes = [(rows, 4, queries, width), (rows, 2, keys, width), (rows, 2, keys, value_width)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes
    ]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=5),
    pattern=st.sampled_from(PATTERNS),
    block_size=st.integers(1, 6),
    context=st.booleans(),
    copies=st.integers(0, 2),
    window=st.sampled_from([None, 2, 5]),
    rows=st.integers(1, 2),
    cached=st.integers(0, 8),
    widths=st.tuples(st.sampled_from([4, 16, 20]), st.sampled_from([4, 20])),
    scaling=st.sampled_from([None, 0.3]),
)
def test_attention_by_tiles_is_attention_under_the_whole_mask(
    lengths, pattern, block_size, context, copies, window, rows, cached, widths, scaling
):
    documents = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)] or [1])
    layout = Layout.of(torch.stack([documents, documents.flip(0)][:rows])).with_noised_copies(copies)
    size, keys = block_size if pattern == "block_causal" else None, layout.copy_BT.shape[1]
    queries = max(1, keys - cached) if copies == 0 else keys
    context = context and pattern == "block_causal"
    mask = make_mask(pattern, size, last_tokens(layout, queries), layout, causal_context=context).within(
        window
    )
    computed = assert_equals_the_whole(mask, random_heads(queries, keys, *widths), scaling, side=4)
    needed = sum(area(allowed_QK, 4) for allowed_QK in mask.allowed_B1QK[:, 0])
    whole = queries <= 4 or needed > WORTH * rows * queries * keys
    assert computed == (2 * queries * keys if whole else 2 // rows * needed)


@each_once("packed, width", [False, True], [8, 64])
def test_the_tiles_in_use(width, packed):
    documents = (
        (1 + torch.arange(350)[None] // torch.tensor([[90], [170]]))
        if packed
        else torch.ones(1, 350, dtype=torch.long)
    )
    layout = Layout.of(documents).with_noised_copies(1)
    mask = make_mask("block_causal", 4, layout, layout)
    side = 32 if width == 8 else 64
    computed = assert_equals_the_whole(mask, random_heads(700, 700, width, width), None)
    assert (
        computed
        == 2 / len(documents) * sum(area(allowed_QK, side) for allowed_QK in mask.allowed_B1QK[:, 0])
        < 2 * 700**2
    )


def test_a_mask_first_used_in_inference_mode_serves_training_too():
    lm, ids = tiny_lm("llama", "block_causal", 4), random_ids(2, 64)
    with tiles_of(4):
        with torch.inference_mode():
            lm.logits(ids)
        lm.logits(ids)[..., :5].exp().sum().backward()


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
