"""DiffusionLM: which row predicts which token, logits for the targets only, and blocks that agree with
inference."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import RobertaConfig, RobertaForCausalLM

from tests.errors import raises
from tests.helpers import partly_slow
from tests.models.configurations import (
    ALPHABET,
    CONFIGURATIONS,
    NAMES,
    SIZES,
    VOCABULARY,
    WINDOW,
    random_ids,
    tiny_lm,
)
from unmask.data.characters import character_tokenizer
from unmask.errors import ModelError
from unmask.models.attention import PATTERNS
from unmask.models.load import make_diffusion, with_pattern
from unmask.models.model_state import disable_dropout, evaluating, fingerprint

BLOCK = 3
BLOCKS = {"causal": None, "block_causal": BLOCK, "bidirectional": None}
# Norms compute in float32 even in a float64 model: equal inputs of another shape differ by its rounding.
CLOSE = {"rtol": 0, "atol": 5e-6}


def some(shape, seed=1, share=0.5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.fixture(autouse=True)
def no_gradients(request):
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_rows_asked_for_are_computed_and_they_are_the_same(name, shift):
    lm = tiny_lm(name, "bidirectional", shift=shift)
    computed = []
    lm.model.get_output_embeddings().register_forward_hook(
        lambda head, args, out: computed.append(out.shape[:-1].numel())
    )
    ids, rows = random_ids(3, 7), some((3, 7))
    rows[:, 0] = False  # the first token has no predecessor
    chosen = lm.logits(ids, rows_BT=rows)
    everything = lm.logits(ids)
    assert computed == [int(rows.sum()), 21]
    torch.testing.assert_close(chosen, everything[rows], rtol=0, atol=1e-12)
    assert lm.logits(ids, rows_BT=torch.zeros_like(rows)).shape == (0, VOCABULARY + 1)
    assert computed[-1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_row_i_predicts_token_i(name):
    lm = tiny_lm(name, "bidirectional")
    ids = random_ids(2, 6)
    plain = lm.logits(ids)
    shifted = with_pattern(lm, "bidirectional", logit_shift=True).logits(ids)
    assert torch.equal(shifted[:, 1:], plain[:, :-1])
    assert plain.shape == (2, 6, VOCABULARY + 1) and plain.dtype == torch.float64
    assert (plain[..., lm.mask_token_id] == -torch.inf).all() and plain[
        ..., : lm.mask_token_id
    ].isfinite().all()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_padding_and_packing_change_nothing(name, pattern):
    lm = tiny_lm(name, pattern, BLOCKS[pattern])
    short, long = random_ids(1, 5, seed=1), random_ids(1, 8, seed=2)
    expected_short, expected_long = lm.logits(short)[0, 1:], lm.logits(long)[0, 1:]
    padding = torch.zeros(1, 3, dtype=torch.long)
    right = lm.logits(
        torch.cat([torch.cat([short, padding], 1), long]), torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    )
    left = lm.logits(
        torch.cat([torch.cat([padding, short], 1), long]), torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    )
    packed = lm.logits(torch.cat([short, long], 1), torch.tensor([[1] * 5 + [2] * 8]))
    for short_rows, long_rows in (
        (right[0, 1:5], right[1, 1:]),
        (left[0, 4:], left[1, 1:]),
        (packed[0, 1:5], packed[0, 6:]),
    ):
        torch.testing.assert_close(short_rows, expected_short, **CLOSE)
        torch.testing.assert_close(long_rows, expected_long, **CLOSE)


def block_by_block(lm, noisy, clean, documents):
    """As in inference, every block is predicted from the clean blocks before it and its own noised tokens."""
    size, (batch, length) = lm.block_size or 1, clean.shape
    logits = torch.zeros(batch, length, lm.mask_token_id + 1, dtype=torch.float64)
    for row in range(batch):
        padding = 0 if documents is None else int((documents[row] == 0).sum())
        for start in range(padding, length, size):
            stop = min(start + size, length)
            seen = torch.cat([clean[row, padding:start], noisy[row, start:stop]])
            logits[row, start:stop] = lm.logits(seen[None])[0, start - padding :]
    return logits


def noised_logits(lm, hidden_BT, clean_BT, documents_BT, rows_BT):
    """The logits of one noised copy, computed together with the clean tokens."""
    return lm.forward(lm.stacked_inputs(clean_BT, hidden_BT[:, None], documents_BT, rows_BT[:, None]))


@partly_slow("padding", [0, 2], 1, ids=["whole", "left padding"])
@pytest.mark.parametrize(
    ("pattern", "shift"), [("causal", False), ("block_causal", False), ("block_causal", True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_noised_beside_clean_is_inference_block_by_block(name, pattern, shift, padding):
    lm = tiny_lm(name, pattern, BLOCKS[pattern], shift=shift)
    clean = random_ids(2, 10)
    hidden = some(clean.shape)
    noisy = torch.where(hidden, lm.mask_token_id, clean)
    rows = some(clean.shape, seed=2)
    documents = torch.tensor([[0] * padding + [1] * (10 - padding), [1] * 10]) if padding else None
    rows[0, :padding] = False
    rows[0, padding] = rows[1, 0] = not shift  # with a shift, nothing predicts a first token
    expected = block_by_block(lm, noisy, clean, documents)
    torch.testing.assert_close(noised_logits(lm, hidden, clean, documents, rows), expected[rows], **CLOSE)


def test_noised_beside_clean_in_one_block_is_the_noised_row_alone():
    lm = tiny_lm("llama", "bidirectional")
    clean, rows = random_ids(2, 6), torch.ones(2, 6, dtype=torch.bool)
    hidden = some(clean.shape)
    noisy = torch.where(hidden, lm.mask_token_id, clean)
    torch.testing.assert_close(
        noised_logits(lm, hidden, clean, None, rows), lm.logits(noisy).flatten(0, 1), **CLOSE
    )


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_one_with_a_shift_are_the_causal_model(name):
    lm = tiny_lm(name, "block_causal", 1, shift=True)
    ids = random_ids(2, WINDOW)  # causal models keep their windows: rows no longer than the window have none
    expected = lm.as_causal().logits(ids)
    assert torch.equal(lm.logits(ids), expected)
    rows = torch.ones_like(ids, dtype=torch.bool)
    rows[:, 0] = False
    torch.testing.assert_close(
        noised_logits(lm, torch.ones_like(rows), ids, None, rows), expected[rows], **CLOSE
    )


def test_without_a_shift_blocks_of_one_read_a_mask_token_instead():
    lm = tiny_lm("llama", "block_causal", 1)
    ids = random_ids(2, WINDOW)
    rows = torch.ones_like(ids, dtype=torch.bool)
    rows[:, 0] = False
    assert (
        noised_logits(lm, torch.ones_like(rows), ids, None, rows) - lm.as_causal().logits(ids)[rows]
    ).abs()[:, :-1].max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_float32_at_least(dtype):
    lm = tiny_lm("llama", dtype=dtype)
    assert lm.logits(random_ids(1, 3)).dtype == torch.float32


def test_a_row_longer_than_the_context_is_an_error():
    lm = tiny_lm("gpt2")
    lm.logits(random_ids(1, 64))
    with raises(ModelError, where="input_ids"):
        lm.logits(random_ids(1, 65))


def test_the_context_of_robertas_kind_begins_after_the_padding_token():
    model = RobertaForCausalLM(RobertaConfig(**SIZES, is_decoder=True)).eval()
    lm = make_diffusion(model, character_tokenizer(ALPHABET), attention="bidirectional")
    assert lm.context_length == 63
    lm.logits(random_ids(1, 63))
    with raises(ModelError, where="input_ids"):
        lm.logits(random_ids(1, 64))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_documents_that_each_fit_the_context_may_share_a_longer_row(pattern):
    """Also beside as much padding: positions are trained on, and there are 64 of them."""
    lm = tiny_lm("gpt2", pattern, BLOCKS[pattern])
    parts, padding = [random_ids(1, 64, seed=seed) for seed in (1, 2)], torch.zeros(1, 128, dtype=torch.long)
    packed = torch.cat([torch.cat(parts, 1), torch.cat([parts[0][:, :5], padding[:, 5:]], 1)])
    documents = torch.tensor([[1] * 64 + [2] * 64, [1] * 5 + [0] * 123])
    logits = lm.logits(packed, documents)
    for number, part in enumerate(parts):
        torch.testing.assert_close(
            logits[0, 64 * number + 1 : 64 * (number + 1)], lm.logits(part)[0, 1:], **CLOSE
        )
    torch.testing.assert_close(logits[1, 1:5], lm.logits(parts[0][:, :5])[0, 1:], **CLOSE)


def test_gradients_of_chosen_rows_are_those_of_all_rows():
    lm = tiny_lm("gpt2", "bidirectional")
    ids, rows = random_ids(2, 6), some((2, 6))
    gradients = []
    for chosen in (lambda: lm.logits(ids, rows_BT=rows), lambda: lm.logits(ids)[rows]):
        lm.model.zero_grad()
        chosen()[:, : lm.mask_token_id].square().sum().backward()
        gradients.append([weight.grad for weight in lm.model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


DROPOUT = {
    "gpt2": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "phi": {"attention_dropout": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "phi3": {"attention_dropout": 0.5, "resid_pdrop": 0.5},
}


@pytest.mark.parametrize("name", NAMES)
def test_disabling_dropout_makes_training_mode_evaluation(name, monkeypatch):
    config = copy.deepcopy(CONFIGURATIONS[name])
    for key, rate in DROPOUT.get(name, {"attention_dropout": 0.5}).items():
        assert hasattr(config, key)
        setattr(config, key, rate)
    monkeypatch.setitem(CONFIGURATIONS, name, config)
    lm = tiny_lm(name, "bidirectional")
    ids = random_ids(1, 6)
    expected = lm.logits(ids)
    lm.model.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(lm.logits(ids), expected)
    disable_dropout(lm.model)
    assert lm.model.training and torch.equal(lm.logits(ids), expected)


def test_evaluating_gives_the_mode_back():
    lm = tiny_lm("llama")
    for training in (True, False):
        lm.model.train(training)
        with evaluating(lm):
            assert not lm.model.training
        assert lm.model.training is training


def test_a_frozen_copy_stays_as_it_was_and_chooses_its_own_rows():
    lm = tiny_lm("llama", "bidirectional")
    ids, rows = random_ids(2, 5), some((2, 5))
    before = lm.logits(ids, rows_BT=rows)
    lm.model.train()
    frozen = lm.frozen_copy()
    assert lm.model.training and not frozen.model.training
    assert all(w.requires_grad for w in lm.model.parameters()) and not any(
        w.requires_grad for w in frozen.model.parameters()
    )
    for weight in lm.model.parameters():
        weight.mul_(1.5)
    assert torch.equal(frozen.logits(ids, rows_BT=rows), before)
    assert not torch.equal(lm.logits(ids, rows_BT=rows), before)
    torch.testing.assert_close(lm.logits(ids, rows_BT=rows), lm.logits(ids)[rows], rtol=0, atol=1e-12)
    assert frozen.settings == lm.settings


class Wrapper(nn.Module):
    """A wrapper as in distributed training."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **keywords):
        return self.module(**keywords)


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        lambda model: get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])),
        lambda model: get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        ),
    ],
    ids=["module", "adapters", "adapters and a head of their own"],
)
# PEFT asks transformers by the old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_rows_are_chosen_inside_any_wrapper(wrap):
    lm = tiny_lm("llama", "bidirectional")
    ids, rows = random_ids(2, 5), some((2, 5))
    expected = lm.logits(ids)
    bound = lm.bind(wrap(lm.model))
    torch.testing.assert_close(bound.logits(ids), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(bound.logits(ids, rows_BT=rows), expected[rows], rtol=0, atol=1e-12)
    torch.testing.assert_close(
        bound.frozen_copy().logits(ids, rows_BT=rows), expected[rows], rtol=0, atol=1e-12
    )


def test_a_model_that_does_not_know_the_rows_is_not_believed():
    lm, stranger = tiny_lm("llama", "bidirectional"), tiny_lm("llama", "bidirectional")
    with pytest.raises(AssertionError, match="output head"):
        lm.bind(stranger.model).logits(random_ids(2, 5), rows_BT=some((2, 5)))


def test_reading_a_model_as_causal_again_gives_the_model_it_was():
    lm = tiny_lm("qwen3")
    ids = random_ids(2, 6)
    expected = lm.logits(ids)
    converted = with_pattern(lm, "bidirectional")
    assert not converted.logit_shift and not torch.equal(converted.logits(ids), expected)
    assert torch.equal(converted.as_causal().logits(ids), expected)
    assert converted.attention == "bidirectional"


def test_a_fingerprint_tells_weights_apart():
    lm = tiny_lm("gpt2")
    assert fingerprint(lm.model) == fingerprint(copy.deepcopy(lm.model))
    changed = copy.deepcopy(lm.model)
    next(changed.parameters()).flatten()[3] += 1e-12
    assert fingerprint(changed) != fingerprint(lm.model)
    assert fingerprint(tiny_lm("gpt2", dtype=torch.bfloat16).model) != fingerprint(lm.model)


def test_it_tells_what_it_is():
    lm = tiny_lm("gpt_neox", "block_causal", 4)
    assert repr(lm) == "DiffusionLM(GPTNeoXForCausalLM, block_causal, block_size=4, logit_shift=False)"
    assert (lm.context_length, lm.pad_token_id, lm.eos_token_id, lm.mask_token_id) == (64, 0, 2, VOCABULARY)
    assert str(lm.device) == "cpu"
