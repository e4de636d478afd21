"""The attention patterns: which token attends to which, on every architecture, with padding, packing, caches
and checkpointing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.errors import raises
from tests.helpers import last_tokens, partly_slow
from tests.models.configurations import (
    LAYERS,
    NAMES,
    VOCABULARY,
    WINDOWS_OF_LAYERS,
    random_ids,
    tiny_lm,
    tiny_model,
)
from unmask.errors import ConfigError, ModelError
from unmask.models.attention import (
    PATTERNS,
    Layout,
    check_pattern,
    clear_mask_cache,
    make_mask,
    mask_cache_stats,
    unmask_attention,
    unpadded_mask,
)
from unmask.models.diffusion_lm import ForwardInputs
from unmask.models.model_state import disable_dropout

BLOCK = 3
BLOCKS = {"causal": None, "block_causal": BLOCK, "bidirectional": None}

DOCUMENTS = {
    "whole": [1] * 11,
    "left padding": [0] * 2 + [1] * 9,
    "right padding": [1] * 9 + [0] * 2,
    "packed": [0] + [1] * 4 + [2] * 5 + [3] + [0],
}

# From here to `reach`: the patterns by their definition, slowly.


def positions(documents):
    return [sum(d == document for d in documents[:i]) for i, document in enumerate(documents)]


def block_of(position, pattern):
    return 0 if pattern == "bidirectional" else position // (BLOCKS[pattern] or 1)


def sees(documents, pattern, i, j, context=False):
    """`context`: clean tokens are causal within their block, too."""
    if documents[i] == 0:
        return i == j
    place = positions(documents)
    own, other = block_of(place[i], pattern), block_of(place[j], pattern)
    return documents[i] == documents[j] and (other < own or (other == own and (j <= i or not context)))


def sees_with_copies(documents, pattern, i, j, context, copies):
    """The same for `[x_t ; ... ; x_0]`: the clean tokens come after this many noised copies."""
    (copy, i), (other_copy, j) = divmod(i, len(documents)), divmod(j, len(documents))
    place = positions(documents)
    own, other = block_of(place[i], pattern), block_of(place[j], pattern)
    if documents[i] == 0 or copy == other_copy == copies:
        return copy == other_copy and sees(documents, pattern, i, j, context)
    return documents[i] == documents[j] and (
        other == own if copy == other_copy else other_copy == copies and other < own
    )


def table(rule, size):
    return torch.tensor([[rule(i, j) for j in range(size)] for i in range(size)])


def reach(name, documents, pattern):
    """Whether row i of the last layer depends on token j, directly or through other tokens, in layers with
    these windows."""
    size = len(documents)
    seen = table(lambda i, j: sees(documents, pattern, i, j), size)
    layers = [seen] * LAYERS
    if pattern == "causal":
        distance = torch.arange(size)[:, None] - torch.arange(size)
        layers = [
            seen if window is None else seen & (distance < window)
            for window in WINDOWS_OF_LAYERS.get(name, [None] * LAYERS)
        ]
    return through(layers)


def through(layers):
    """Which tokens affect which through layers with these masks."""
    reached = torch.eye(len(layers[0]), dtype=torch.bool)
    for layer in layers:
        reached = (layer.float() @ reached.float()) > 0
    return reached


def changed_rows(ids_1T):
    """The row once per token; batch row j has another token j."""
    size = ids_1T.shape[1]
    ids = ids_1T.repeat(size, 1)
    return torch.where(torch.eye(size, dtype=torch.bool), torch.where(ids + 1 < VOCABULARY, ids + 1, 4), ids)


@partly_slow("documents", DOCUMENTS.values(), 1, 3, ids=DOCUMENTS.keys())
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_changes_exactly_when_it_may_see_what_changed(name, pattern, documents):
    lm = tiny_lm(name, pattern, BLOCKS[pattern], shift=False, dtype=torch.float32)
    size = len(documents)
    ids = random_ids(1, size)
    padding = None if all(documents) else torch.tensor([documents] * size)
    with torch.no_grad():
        before, after = lm.logits(ids.repeat(size, 1), padding), lm.logits(changed_rows(ids), padding)
    differs = (before != after).any(-1).T
    assert torch.equal(differs, reach(name, documents, pattern))


def test_layers_share_one_mask_for_their_gradients():
    lm, ids = tiny_lm("llama", "bidirectional", dtype=torch.float32), random_ids(2, 6)
    kept = set()

    def keep(tensor):
        if tensor.shape[1:] == (1, 6, 6):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lm.logits(ids, torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0]])).sum().backward()
    assert len(kept) == 1


def test_a_mask_made_without_gradients_serves_a_later_training_step():
    lm, ids, documents = (
        tiny_lm("llama", "causal", dtype=torch.float32),
        random_ids(2, 6),
        torch.ones(2, 6, dtype=torch.long),
    )
    with torch.inference_mode():
        expected = lm.logits(ids, documents)
    found = lm.logits(ids, documents)
    found.sum().backward()
    assert torch.equal(found, expected)


def test_windows_narrow_what_a_causal_model_sees_and_nothing_else():
    whole = DOCUMENTS["whole"]
    assert not reach("mistral", whole, "causal")[10, 0]
    assert reach("llama", whole, "causal")[10, 0] and reach("mistral", whole, "block_causal")[10, 0]
    allowed = unpadded_mask("block_causal", BLOCK, 11, 0, torch.device("cpu"))
    assert torch.equal(allowed.within(2).allowed_B1QK, allowed.allowed_B1QK)
    narrow = unpadded_mask("causal", None, 11, 0, torch.device("cpu"))
    assert (
        narrow.within(2).allowed_B1QK[0, 0].sum() == 21 and narrow.within(None).allowed_B1QK[0, 0].sum() == 66
    )


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.sampled_from(PATTERNS),
    st.booleans(),
    st.integers(1, 3),
)
def test_masks_follow_the_definition(lengths, pattern, context, copies):
    documents = (
        [0] * lengths[0]
        + [number for number, length in enumerate(lengths[1:], 1) for _ in range(length)]
        + [0] * lengths[-1]
    )
    documents = documents or [1]
    context &= pattern == "block_causal"
    layout = Layout.of(torch.tensor([documents]))
    size = len(documents)

    def made(queries, keys):
        return make_mask(pattern, BLOCKS[pattern], queries, keys, causal_context=context).allowed_B1QK[0, 0]

    expected = table(lambda i, j: sees(documents, pattern, i, j, context), size)
    assert torch.equal(made(layout, layout), expected)
    assert torch.equal(made(last_tokens(layout, 1), layout), expected[-1:])
    several = layout.with_noised_copies(copies)
    expected = table(
        lambda i, j: sees_with_copies(documents, pattern, i, j, context, copies), (copies + 1) * size
    )
    assert torch.equal(made(several, several), expected)


ARCHITECTURES = ["gpt2", "qwen3_windows", "phi", "gemma2", "smollm3", "gpt_neox"]


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_a_causal_context_only_blocks_in_work_are_read_in_both_directions(name, documents):
    lm = tiny_lm(name, "block_causal", BLOCK, shift=False, dtype=torch.float32, causal_context=True)
    size, place = len(documents), positions(documents)
    hidden = torch.tensor([[document > 0 and i in (4, 8) for i, document in enumerate(documents)]])
    work = {(documents[i], place[i] // BLOCK) for i in hidden[0].nonzero().flatten().tolist()}
    # 1: finished
    copy = [
        int((document, position // BLOCK) not in work)
        for document, position in zip(documents, place, strict=True)
    ]

    def rule(i, j):
        return sees_with_copies(documents, "block_causal", copy[i] * size + i, copy[j] * size + j, True, 1)

    ids = torch.where(hidden, lm.mask_token_id, random_ids(1, size))
    padding = None if all(documents) else torch.tensor([documents] * size)
    with torch.no_grad():
        before, after = (
            lm.logits(x, padding, hidden_BT=hidden.repeat(size, 1))
            for x in (ids.repeat(size, 1), changed_rows(ids))
        )
    assert torch.equal((before != after).any(-1).T, through([table(rule, size)] * LAYERS))


@pytest.mark.parametrize(
    "documents", [DOCUMENTS["left padding"], DOCUMENTS["packed"]], ids=["left padding", "packed"]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_a_causal_context_clean_tokens_behind_noised_copies_are_read_from_left_to_right(name, documents):
    lm = tiny_lm(name, "block_causal", BLOCK, dtype=torch.float32, causal_context=True)
    hidden, width = (
        torch.rand(1, 2, len(documents), generator=torch.Generator().manual_seed(0)) < 0.5,
        3 * len(documents),
    )
    inputs = lm.stacked_inputs(random_ids(1, len(documents)), hidden, torch.tensor([documents]), hidden)
    with torch.no_grad():
        before, after = (
            lm.forward(replace(inputs, ids_BT=ids, index_N=None))
            for ids in (inputs.ids_BT.repeat(width, 1), changed_rows(inputs.ids_BT))
        )
    expected = table(lambda i, j: sees_with_copies(documents, "block_causal", i, j, True, 2), width)
    assert torch.equal((before != after).any(-1).T, through([expected] * LAYERS))


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "qwen3_windows", "gemma2", "phi"])
def test_copies_that_share_clean_tokens_are_what_each_is_alone(name, shift, context):
    lm = tiny_lm(name, "block_causal", BLOCK, shift=shift, causal_context=context)
    generator, documents = (
        torch.Generator().manual_seed(0),
        torch.tensor([DOCUMENTS["packed"][:11], DOCUMENTS["left padding"]]),
    )
    clean, hidden = random_ids(2, 11), torch.rand(2, 3, 11, generator=generator) < 0.5
    together = torch.zeros(2, 3, 11, VOCABULARY + 1, dtype=torch.float64)
    with torch.no_grad():
        together[hidden] = lm.forward(lm.stacked_inputs(clean, hidden, documents, hidden))
        for copy in range(3):
            one = hidden[:, copy : copy + 1]
            alone = lm.forward(lm.stacked_inputs(clean, one, documents, one))
            torch.testing.assert_close(together[:, copy : copy + 1][one], alone, rtol=0, atol=5e-6)


def test_annealing_goes_from_the_past_alone_to_the_whole_pattern():
    whole = make_mask(
        "bidirectional",
        None,
        *[Layout.of(torch.tensor([DOCUMENTS["packed"][:11], DOCUMENTS["left padding"]]))] * 2,
    )
    past = whole.allowed_B1QK & torch.ones(11, 11, dtype=torch.bool).tril()
    shares = [whole.annealed(seen, 7).allowed_B1QK for seen in (0.0, 0.2, 0.6, 1.0)]
    assert torch.equal(shares[0], past) and torch.equal(shares[-1], whole.allowed_B1QK)
    for fewer, more in pairwise(shares):
        assert not (fewer & ~more).any() and fewer.sum() < more.sum()
    assert torch.equal(whole.annealed(0.2, 7).allowed_B1QK, shares[1]) and not torch.equal(
        whole.annealed(0.2, 8).allowed_B1QK, shares[1]
    )
    long = unpadded_mask("bidirectional", None, 200, 0, torch.device("cpu")).annealed(0.3, 0).allowed_B1QK
    assert (long.sum() - 200 * 201 / 2).item() == pytest.approx(0.3 * 200 * 199 / 2, rel=0.03)


def test_annealing_does_not_depend_on_the_padding_of_a_batch():
    narrow, wide = (
        unpadded_mask("bidirectional", None, size, 0, torch.device("cpu")).annealed(0.4, 3).allowed_B1QK
        for size in (9, 14)
    )
    assert torch.equal(wide[..., :9, :9], narrow)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_a_causal_model_is_the_stock_model(name, implementation):
    if name == "gemma2" and implementation == "sdpa":
        pytest.skip("transformers has no SDPA for soft-capped attention")
    # In float32: under padding, eager attention in float64 gives NaN (its two large negative numbers add up
    # to -inf).
    lm, stock = tiny_lm(name, dtype=torch.float32), tiny_model(name, implementation, torch.float32)
    ids = random_ids(2, 12)
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    with torch.no_grad():
        expected = stock(ids).logits[:, :-1]
        padded = stock(ids, attention_mask=padding, position_ids=(padding.cumsum(1) - 1).clamp_min(0)).logits[
            :, :-1
        ]
        whole, real = lm.logits(ids)[:, 1:, :VOCABULARY], lm.logits(ids, padding)[:, 1:, :VOCABULARY]
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(real[0], padded[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(real[1, 4:], padded[1, 4:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_model_with_a_cache_is_the_whole_pass(name):
    lm = tiny_lm(name, shift=False)
    ids, documents = random_ids(2, 9), torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    cache, pieces = DynamicCache(), []
    with torch.no_grad():
        for stop in range(1, 10):
            keys = Layout.of(documents[:, :stop])
            query = last_tokens(keys, 1)
            pieces.append(
                lm.forward(
                    ForwardInputs(ids[:, stop - 1 : stop], query, make_mask("causal", None, query, keys)),
                    cache,
                )
            )
        expected = lm.logits(ids, documents)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", NAMES)
def test_block_causal_with_a_cache_of_clean_blocks_is_the_whole_pass(name):
    lm = tiny_lm(name, "block_causal", BLOCK)
    clean, documents = random_ids(2, 9), torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    noisy = torch.where(
        torch.rand(clean.shape, generator=torch.Generator().manual_seed(1)) < 0.6, lm.mask_token_id, clean
    )
    cache = DynamicCache()
    for start in range(0, 9, BLOCK):
        stop = start + BLOCK
        keys = Layout.of(documents[:, :stop])
        queries = last_tokens(keys, BLOCK)
        mask = make_mask("block_causal", BLOCK, queries, keys)
        with torch.no_grad():
            block = lm.forward(ForwardInputs(noisy[:, start:stop], queries, mask), cache)
            cache.crop(start - stop)  # the noised block leaves; the clean one takes its place
            lm.forward(ForwardInputs(clean[:, start:stop], queries, mask), cache)
            expected = lm.logits(torch.cat([clean[:, :start], noisy[:, start:stop]], 1), documents[:, :stop])[
                :, start:
            ]
        torch.testing.assert_close(block, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing_changes_memory_and_not_gradients(name, pattern):
    ids, documents = random_ids(2, 8), torch.tensor([[0, 1, 1, 1, 1, 2, 2, 2], [1] * 8])

    def gradients(checkpointing):
        lm = tiny_lm(name, pattern, BLOCKS[pattern])
        lm.model.train()
        disable_dropout(lm.model)
        calls = Counter()
        for module in lm.model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(lambda *_: calls.update(["attention"]))
        if checkpointing:
            lm.model.activation_checkpointing_enable()
        lm.logits(ids, documents)[:, 1:].log_softmax(-1)[..., 4].sum().backward()
        return calls["attention"], {name: weight.grad for name, weight in lm.model.named_parameters()}

    calls, plain = gradients(False)
    calls_again, checkpointed = gradients(True)
    assert (calls, calls_again) == (LAYERS, 2 * LAYERS)
    assert any(gradient.abs().sum() > 0 for gradient in plain.values())
    for name_of_weight, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[name_of_weight]), name_of_weight


@pytest.mark.parametrize("name", NAMES)
def test_no_model_runs_without_a_mask(name):
    lm = tiny_lm(name)
    [attention] = {
        kind for module in lm.model.modules() if (kind := type(module).__name__).endswith("Attention")
    }
    with raises(ModelError, where=attention):
        lm.model(random_ids(1, 4))
    lm.logits(random_ids(1, 4))


@pytest.mark.parametrize("extra", ["s_aux", "position_bias"])
def test_what_the_attention_function_would_have_to_ignore_is_an_error(extra):
    heads = torch.zeros(1, 2, 3, 4)
    mask = unpadded_mask("causal", None, 3, 0, torch.device("cpu"))
    with raises(ModelError, where="Linear"):
        unmask_attention(
            torch.nn.Linear(1, 1), heads, heads, heads, None, unmask_mask=mask, **{extra: torch.zeros(2)}
        )


def test_a_soft_cap_that_never_bites_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, 2, 6, 8, dtype=torch.float64, generator=generator)
    mask = unpadded_mask("block_causal", 2, 6, 0, torch.device("cpu"))
    plain, _ = unmask_attention(None, query, key, value, None, unmask_mask=mask)
    capped, _ = unmask_attention(None, query, key, value, None, unmask_mask=mask, softcap=1e6)
    torch.testing.assert_close(capped, plain, rtol=0, atol=1e-6)  # its softmax is in float32
    biting, _ = unmask_attention(None, query, key, value, None, unmask_mask=mask, softcap=0.5)
    assert (biting - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("pattern", "block_size", "where"),
    [
        ("sideways", None, "attention"),
        ("block_causal", None, "block_size"),
        ("block_causal", 0, "block_size"),
        ("causal", 4, "block_size"),
        ("bidirectional", 4, "block_size"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(pattern, block_size, where):
    with raises(ConfigError, where=where):
        check_pattern(pattern, block_size)
    with raises(ConfigError, where=where):
        tiny_lm("llama", pattern, block_size)


def test_masks_are_made_once_per_pattern_and_length():
    lm = tiny_lm("llama", "block_causal", 2)
    clear_mask_cache()
    assert mask_cache_stats() == {"hits": 0, "misses": 0, "hit_rate": 0.0, "size": 0}
    for length in (5, 5, 6, 5):
        lm.logits(random_ids(2, length))
    assert mask_cache_stats() == {"hits": 2, "misses": 2, "hit_rate": 0.5, "size": 2}
    rows = torch.ones(2, 5, dtype=torch.bool)
    # twice the width: another mask
    lm.forward(lm.stacked_inputs(random_ids(2, 5), rows[:, None], None, rows[:, None]))
    lm.as_causal().logits(random_ids(2, 5))
    assert mask_cache_stats() == {"hits": 2, "misses": 4, "hit_rate": 1 / 3, "size": 4}
    # padding differs from batch to batch: not kept
    lm.logits(random_ids(2, 5), torch.tensor([[1] * 5, [0] + [1] * 4]))
    assert mask_cache_stats()["misses"] == 4
    clear_mask_cache()
    assert mask_cache_stats()["size"] == mask_cache_stats()["hits"] == 0


def test_positions_begin_anew_in_every_document():
    layout = Layout.of(torch.tensor([[0, 0, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]]))
    assert layout.position_BT.tolist() == [[0, 0, 0, 1, 2, 0, 1, 0], list(range(8))]
    assert not layout.copy_BT.any()
