"""The expand and delete tokens: their place in tokenizer and embeddings, and where they are predicted."""

from __future__ import annotations

import pytest
import torch

import unmask
from tests.tiny import llama_lm
from unmask.diffusion.log_probs import forward_inputs
from unmask.models.hooks import head
from unmask.models.length_tokens import DELETE_TOKEN, EXPAND_TOKEN, add_length_tokens, predicting_lengths
from unmask.models.load import with_pattern


def logits(lm) -> torch.Tensor:
    return lm.logits(
        torch.tensor([[1, 4, lm.mask_token_id, 5]]), hidden_BT=torch.tensor([[False, False, True, False]])
    )


@pytest.mark.parametrize("tied", [True, False])
def test_both_tokens_are_added_after_the_others(tied):
    plain, lm = llama_lm(tie_word_embeddings=tied), add_length_tokens(llama_lm(tie_word_embeddings=tied))
    size = plain.config.vocab_size
    assert (lm.expand_token_id, lm.delete_token_id, lm.config.vocab_size) == (size, size + 1, size + 2)
    assert lm.tokenizer.convert_tokens_to_ids([EXPAND_TOKEN, DELETE_TOKEN]) == [size, size + 1]
    assert plain.expand_token_id is None and plain.delete_token_id is None
    outputs, inputs = lm.model.get_output_embeddings().weight, lm.model.get_input_embeddings().weight
    assert torch.equal(outputs[:size], plain.model.get_output_embeddings().weight)
    # an open position is first read as a hidden one
    assert torch.equal(inputs[size], inputs[lm.mask_token_id])
    assert torch.allclose(outputs[size + 1], outputs[:size].mean(0))


def test_they_change_no_prediction_of_other_tokens():
    plain, lm = llama_lm(), add_length_tokens(llama_lm())
    assert torch.equal(logits(lm)[..., : plain.config.vocab_size], logits(plain))
    assert (logits(lm)[..., plain.config.vocab_size :] == -torch.inf).all()
    both = [lm.expand_token_id, lm.delete_token_id]
    assert logits(predicting_lengths(lm))[..., both].isfinite().all()
    assert (logits(predicting_lengths(lm))[..., lm.mask_token_id] == -torch.inf).all()
    assert (logits(lm)[..., both] == -torch.inf).all()  # the copy alone predicts them


def test_log_probs_in_chunks_leave_them_out_too(monkeypatch):
    lm, ids_BT = add_length_tokens(llama_lm(dtype=torch.float64)), torch.tensor([[1, 4, 5, 6, 7]])
    hidden_B1T = torch.tensor([[[False, False, True, True, True]]])
    found = []
    for predicting in (lm, predicting_lengths(lm)):
        inputs = forward_inputs(predicting, ids_BT, None, hidden_B1T, hidden_B1T)
        for at_once in (head.LOGITS_AT_ONCE, 1):
            monkeypatch.setattr(head, "LOGITS_AT_ONCE", at_once)
            found.append(predicting.log_probs(inputs, torch.tensor([5, 6, 7])))
        monkeypatch.undo()
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[3])
    assert (found[0] > found[2]).all()


def test_tokens_that_are_there_are_kept(tmp_path):
    lm = add_length_tokens(llama_lm())
    assert add_length_tokens(lm) is lm and len(lm.tokenizer) == lm.config.vocab_size
    lm.save(tmp_path)
    loaded = unmask.load(tmp_path)
    assert (loaded.expand_token_id, loaded.delete_token_id) == (lm.expand_token_id, lm.delete_token_id)
    assert torch.equal(logits(loaded), logits(lm)) and loaded.settings == lm.settings
    assert "gaps of unknown length" in (tmp_path / "README.md").read_text()


def test_another_pattern_never_predicts_them_either():
    lm = add_length_tokens(llama_lm())
    for other in (with_pattern(lm, "block_causal", 2), lm.as_causal(), lm.bind(lm.model), lm.frozen_copy()):
        assert other.never_predicted == (lm.mask_token_id, lm.expand_token_id, lm.delete_token_id)


def test_in_users_texts_they_stay_text():
    lm = add_length_tokens(llama_lm())
    (canvas,) = unmask.infill(lm, [f"ab{EXPAND_TOKEN}<|mask|>c"]).tokens
    assert lm.expand_token_id not in canvas


@pytest.mark.parametrize("there", [["<|delete|>"], ["<|expand|>"], ["<|expand|>", "<|delete|>"]])
def test_rows_that_are_there_are_kept(there):
    lm = llama_lm()
    lm.tokenizer.add_tokens(there)
    lm.model.resize_token_embeddings(len(lm.tokenizer))
    numbers = lm.tokenizer.convert_tokens_to_ids(there)
    for table in (lm.model.get_input_embeddings(), lm.model.get_output_embeddings()):
        table.weight.data[numbers] = 7.0
    made = add_length_tokens(lm)
    for table in (made.model.get_input_embeddings(), made.model.get_output_embeddings()):
        assert (table.weight[numbers] == 7.0).all() and table.weight.isfinite().all()
        assert table.weight.shape[0] > max(made.expand_token_id, made.delete_token_id)
