"""Rows have every token once, mark the right tokens as learnt, and have no false EOS."""

from __future__ import annotations

import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.models.configurations import tiny_lm
from unmask.data.characters import character_tokenizer
from unmask.data.rows import Collator, Column, iter_text_rows, pad_rows, separate_documents
from unmask.diffusion.log_probs import view_log_probs
from unmask.diffusion.views import Views
from unmask.errors import DataError

TOKENIZER = character_tokenizer(string.ascii_lowercase)
BOS, EOS, PAD = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
WITHOUT_BOS = character_tokenizer(string.ascii_lowercase)
WITHOUT_BOS.bos_token = None

words = st.text(string.ascii_lowercase, min_size=1, max_size=9)
texts = st.lists(words | st.just(""), min_size=1, max_size=8).filter(any)
lengths = st.integers(2, 25)


def ids_of(text: str, tokenizer=TOKENIZER) -> list[int]:
    body = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [BOS, *body, EOS] if tokenizer.bos_token_id is not None else [*body, EOS]


@given(texts, st.integers(3, 25), st.sampled_from([TOKENIZER, WITHOUT_BOS]))
def test_packing_concatenates_documents(texts, max_length, tokenizer):
    stream, numbers = [], []
    for number, text in enumerate(filter(None, texts)):
        stream += ids_of(text, tokenizer)
        numbers += [number] * (len(stream) - len(numbers))
    if len(stream) % max_length == 1:  # a last row of one token would have nothing to learn
        stream.pop()
    rows = list(iter_text_rows(tokenizer, texts, max_length))
    cuts = range(0, len(stream), max_length)
    assert [row["input_ids"] for row in rows] == [stream[start : start + max_length] for start in cuts]
    for start, row in zip(cuts, rows, strict=True):
        assert row["documents"] == [
            number - numbers[start] + 1 for number in numbers[start : start + len(row["input_ids"])]
        ]


@given(texts, lengths, st.booleans(), st.sampled_from([TOKENIZER, WITHOUT_BOS]))
def test_every_token_is_learnt_except_the_first_of_rows_and_documents(texts, max_length, packed, tokenizer):
    rows = list(iter_text_rows(tokenizer, texts, max_length, packed=packed))
    assert [row["sample_id"] for row in rows] == sorted({row["sample_id"] for row in rows})
    for row in rows:
        assert {len(row[name]) for name in ("input_ids", "documents", "maskable")} == {len(row["input_ids"])}
        assert len(row["input_ids"]) <= max_length
        documents = row["documents"]
        bodies = [token != BOS for token in row["input_ids"]]
        if tokenizer.bos_token_id is None:
            bodies = [at > 0 and documents[at] == documents[at - 1] for at in range(len(documents))]
        assert row["maskable"] == [False, *bodies[1:]]
        assert any(row["maskable"])
        assert row["documents"][0] == 1 and PAD not in row["input_ids"]


@given(texts, lengths, st.sampled_from([TOKENIZER, WITHOUT_BOS]))
def test_an_unpacked_row_is_a_document_without_eos_if_cut(texts, max_length, tokenizer):
    rows = list(iter_text_rows(tokenizer, texts, max_length, packed=False))
    for row, text in zip(rows, filter(None, texts), strict=True):
        whole = ids_of(text, tokenizer)
        assert row["input_ids"] == whole[:max_length]
        assert (EOS in row["input_ids"]) == (len(whole) <= max_length)
        assert set(row["documents"]) == {1}


PATTERNS = [
    ("causal", None, {}),
    ("bidirectional", None, {}),
    ("block_causal", 3, {}),
    ("block_causal", 3, {"causal_context": True}),
]


@pytest.mark.parametrize(("attention", "block_size", "more"), PATTERNS)
@pytest.mark.parametrize("bos", [True, False])
def test_packed_documents_have_the_log_probs_of_single_ones_with_a_logit_shift(
    attention, block_size, more, bos
):
    lm = tiny_lm("llama", attention, block_size, shift=True, **more)
    if not bos:
        lm.tokenizer.bos_token = None

    def scores(texts):
        """Log-probabilities of all trained tokens, all hidden; with a causal context also those of the clean
        half."""
        (row,) = iter_text_rows(lm.tokenizer, texts, 64)
        ids, documents, maskable = (
            torch.tensor([row[name]]) for name in ("input_ids", "documents", "maskable")
        )
        views = Views(maskable[:, None], maskable[:, None], maskable[:, None].float())
        views = views.with_causal(maskable, 1.0) if more else views
        with torch.no_grad():
            return view_log_probs(lm, ids, documents, views)[0], maskable[0]

    packed, learnt = scores(["abc", "defgh", "ij"])
    moved, _ = scores(["lki", "defgh", "ij"])
    second = len("abc") + bos + 1
    assert torch.equal(packed[:, second:], moved[:, second:]) and not torch.equal(packed, moved)
    alone = [scores([text]) for text in ("abc", "defgh", "ij")]
    torch.testing.assert_close(
        packed, torch.cat([log_prob_MT for log_prob_MT, _ in alone], 1), rtol=0, atol=1e-12
    )
    assert torch.equal(learnt, torch.cat([maskable for _, maskable in alone]))


def test_text_with_the_mask_token_is_refused_if_it_becomes_a_token():
    tokenizer = character_tokenizer(string.ascii_lowercase)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.parse_special_tokens = True
    with raises(DataError, where="eval_dataset, row 2"):
        list(iter_text_rows(tokenizer, ["a", "b", "c<|mask|>d"], 8, where="eval_dataset"))


def test_the_error_for_a_null_text_names_the_row():
    with raises(DataError, where="train_dataset, row 1"):
        list(Column([{"text": "a"}, {"text": None}], "text", "train_dataset"))


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
@pytest.mark.parametrize("packed", [True, False])
def test_no_text_is_an_error(texts, packed):
    with raises(DataError, where="train_dataset"):
        list(iter_text_rows(TOKENIZER, texts, 8, packed=packed))


def test_a_column_of_rows():
    assert list(Column([{"text": "a", "x": 1}, {"text": "b"}], "text", "train_dataset")) == ["a", "b"]
    with raises(DataError, where="eval_dataset, row 1"):
        list(Column([{"text": "a"}, {"words": "b"}], "text", "eval_dataset"))


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5).filter(any))
def test_padding(rows):
    padded_BT = pad_rows(rows, 0)
    assert padded_BT.shape == (len(rows), max(map(len, rows)))
    assert [[value for value in row if value] for row in padded_BT.tolist()] == rows
    for row, padded_T in zip(rows, padded_BT, strict=True):
        assert padded_T[: len(row)].tolist() == row


@given(texts, lengths)
def test_padding_is_document_zero(texts, max_length):
    rows = list(iter_text_rows(TOKENIZER, texts, max_length, packed=False))
    batch = Collator(PAD)(rows)
    shape = (len(rows), max(len(row["input_ids"]) for row in rows))
    kinds = {"input_ids": torch.long, "documents": torch.long, "maskable": torch.bool}
    assert {name: batch[name].dtype for name in kinds} == kinds
    assert all(batch[name].shape == shape for name in kinds)
    assert batch["sample_id"].tolist() == [row["sample_id"] for row in rows]
    padding_BT = batch["documents"] == 0
    assert (~padding_BT).sum(1).tolist() == [len(row["input_ids"]) for row in rows]
    assert (batch["input_ids"][padding_BT] == PAD).all() and not batch["maskable"][padding_BT].any()
    assert batch["input_ids"][~padding_BT].tolist() == [token for row in rows for token in row["input_ids"]]


@given(texts, lengths, st.booleans())
def test_batches_mark_rows_that_are_all_one_document_without_padding(texts, max_length, packed):
    rows = list(iter_text_rows(TOKENIZER, texts, max_length, packed=packed))
    for size in (1, 2, len(rows)):
        batch = Collator(PAD)(rows[:size])
        assert batch["one_document"] is bool((batch["documents"] == 1).all())
        apart_BT = separate_documents(batch)
        assert apart_BT is None if batch["one_document"] else apart_BT is batch["documents"]
        assert "one_document" not in Collator(PAD, marking=False)(rows[:size])
