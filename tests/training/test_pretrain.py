"""Pre-training is the next-token training of any causal model."""

from __future__ import annotations

import math

import pytest
import torch

from tests.training.conftest import batch, make, stock, tiny
from unmask.errors import DataError, ModelError


@pytest.mark.parametrize("texts", [["abcdef", "hgfeda", "aaabbb"], ["abcdefgh", "a", "cafe"]])
def test_the_loss_is_that_of_transformers_and_at_first_that_of_guessing(texts, tmp_path):
    trainer = make("pretrain", tmp_path, rows=[{"text": text} for text in texts])
    rows = batch(trainer, *range(len(texts)))
    model, tokenizer = stock()
    expected = model(
        input_ids=rows["input_ids"],
        attention_mask=rows["documents"],
        labels=torch.where(rows["documents"] > 0, rows["input_ids"], -100),
    ).loss.item()
    trainer.model.eval()
    assert trainer.compute_loss(trainer.model, rows).item() == pytest.approx(expected, abs=1e-5)
    assert expected == pytest.approx(math.log(len(tokenizer) - 1), abs=0.15)  # every token but <unk>


def test_packed_documents_are_learnt_as_if_alone(tmp_path):
    texts = [{"text": text} for text in ("abc", "hg", "cafe")]
    packed = make("pretrain", tmp_path, rows=texts, packing=True)
    apart = make("pretrain", tmp_path, rows=texts)
    assert len(packed.train_dataset) == 1 and len(apart.train_dataset) == 3
    with torch.no_grad():
        one, three = packed.compute_loss(packed.model, batch(packed, 0)), apart.compute_loss(apart.model, batch(apart, 0, 1, 2))
    assert one.item() == pytest.approx(three.item(), abs=1e-5)


def test_it_learns(tmp_path):
    trainer = make("pretrain", tmp_path, rows=[{"text": "abcdefgh"}] * 4, max_steps=30, text_column="text")
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] > 2 and losses[-1] < 0.5


def test_the_column_has_the_name_that_it_is_given(tmp_path):
    rows = [{"story": "abc"}, {"story": "hg"}]
    assert len(make("pretrain", tmp_path, rows=rows, text_column="story").train_dataset) == 2
    with pytest.raises(DataError, match=r"train_dataset, row 0: no column 'text'.*'story'"):
        make("pretrain", tmp_path, rows=rows)


@pytest.mark.parametrize("text", [None, 5])
def test_what_is_not_text_is_refused_with_its_row(text, tmp_path):
    with pytest.raises(DataError, match="train_dataset, row 1"):
        make("pretrain", tmp_path, rows=[{"text": "a"}, {"text": text}])


def test_only_causal_models_are_pretrained(tmp_path):
    for lm in (tiny(), tiny("block_causal", 4), tiny("causal", logit_shift=False)):
        with pytest.raises(ModelError, match=r"needs a causal model.*ConvertTrainer or SFTTrainer"):
            make("pretrain", tmp_path, lm)
