"""Masks of unpadded rows are made once and reused in training, without changing a result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.convert.test_trainer import convert
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import batch, equal, make, ranks, weights
from unmask import clear_mask_cache, mask_cache_stats
from unmask.data.rows import Collator
from unmask.models import attention
from unmask.rl import trainer as grpo_trainer

LONG = [{"text": text} for text in ("abcabcdh", "ghghabab", "aabbccdd", "hgfedcba", "cafecafe", "deadbeef")]
OF_PAIRS = [{"prompt": row["text"][:3], "completion": row["text"][3:]} for row in LONG]
RAGGED = [{"text": row["text"][: 3 + number]} for number, row in enumerate(LONG)]
LABELLED = [row | {"label": number % 2 == 0} for number, row in enumerate(OF_PAIRS)]


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    clear_mask_cache()
    yield
    clear_mask_cache()


def trainer_of(case, folder):
    """A trainer whose rows have one length and one document."""
    if case == "convert by blocks":
        return convert(folder, rows=LONG, packing=False, attention="block_causal", block_size=4)
    if case == "convert":
        return convert(folder, rows=LONG, packing=False, distillation=0.5, attention_annealing=0.3)
    if case == "packed":
        return make("pretrain", folder, rows=[{"text": "abcdefgh" * 20}], packing=True, max_length=8)
    if case == "pretrain":
        return make("pretrain", folder, rows=LONG)
    if case == "sft by blocks":
        return make("sft", folder, llama_lm("block_causal", 4), OF_PAIRS, views=2)
    if case == "kto":
        return make("kto", folder, rows=LABELLED)
    if case == "grpo":
        return make("grpo", folder, rows=OF_PAIRS, num_iterations=2, beta=0.1, max_steps=4, reward=ranks)
    return make("sft", folder, rows=OF_PAIRS)


CASES = ["pretrain", "packed", "convert", "convert by blocks", "sft", "sft by blocks", "kto", "grpo"]


@pytest.mark.parametrize("case", CASES)
def test_training_finds_the_masks_of_unpadded_rows(case, tmp_path):
    trainer_of(case, tmp_path).train()
    stats = mask_cache_stats()
    assert stats["hits"] > 0 and stats["misses"] == stats["size"] > 0
    clear_mask_cache()
    assert mask_cache_stats() == {"hits": 0, "misses": 0, "hit_rate": 0.0, "size": 0}


@partly_slow("case", CASES, *range(0, len(CASES), 2))
def test_a_run_is_the_same_bit_for_bit_with_masks_made_in_each_step(case, tmp_path, monkeypatch):
    kept = trainer_of(case, tmp_path / "kept")
    kept.train()
    asked = mask_cache_stats()["hits"] + mask_cache_stats()["misses"]
    clear_mask_cache()
    collate = Collator.__call__
    monkeypatch.setattr(
        Collator, "__call__", lambda self, rows: collate(self, rows) | {"one_document": False}
    )
    sample = grpo_trainer.make_rollout
    monkeypatch.setattr(
        grpo_trainer,
        "make_rollout",
        lambda *given, **more: replace(sample(*given, **more), one_document=False),
    )
    made = trainer_of(case, tmp_path / "made")
    made.train()
    # sampling has no padding either
    assert mask_cache_stats()["hits"] + mask_cache_stats()["misses"] < (asked if case == "grpo" else 1)
    assert equal(weights(kept.lm), weights(made.lm))


@pytest.mark.parametrize(
    ("verb", "rows", "more"),
    [
        ("pretrain", RAGGED, {"per_device_train_batch_size": 6}),
        ("pretrain", LONG, {"packing": True, "max_length": 32}),
    ],
)
def test_masks_of_padded_and_packed_rows_are_not_kept(verb, rows, more, tmp_path):
    make(verb, tmp_path, rows=rows, **more).train()
    assert mask_cache_stats() == {"hits": 0, "misses": 0, "hit_rate": 0.0, "size": 0}


def test_processes_that_are_sent_their_batches_get_tensors_alone(tmp_path):
    trainer = make("sft", tmp_path, rows=OF_PAIRS, accelerator_config={"dispatch_batches": True})
    assert all(isinstance(value, torch.Tensor) for value in batch(trainer, 0, 1).values())
    trainer.train()
    assert mask_cache_stats()["misses"] == 0


@pytest.mark.parametrize("length", [200, 300])
@pytest.mark.parametrize(
    ("pattern", "block_size", "copies"),
    [("causal", None, 0), ("bidirectional", None, 0), ("block_causal", 4, 1)],
)
def test_losses_and_gradients_of_long_rows_are_the_same_bit_for_bit(pattern, block_size, copies, length):
    """Rows long enough for attention by tiles."""
    lm = llama_lm(pattern, block_size, max_position_embeddings=512)
    ids_BT = torch.randint(3, 9, (2, length), generator=torch.Generator().manual_seed(0))
    hidden_BT = torch.rand(ids_BT.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    found = []
    for document_BT in (None, torch.ones_like(ids_BT)):
        lm.model.zero_grad()
        if copies:
            inputs = lm.stacked_inputs(ids_BT, hidden_BT[:, None], document_BT, hidden_BT[:, None])
        else:
            inputs = lm.noised_inputs(ids_BT.masked_fill(hidden_BT, lm.mask_token_id), document_BT, hidden_BT)
        loss = -lm.log_probs(inputs, ids_BT[hidden_BT]).sum()
        loss.backward()
        found.append(
            {name: weight.grad for name, weight in lm.model.named_parameters()} | {"loss": loss.detach()}
        )
    assert equal(*found)


def test_the_masks_of_many_lengths_are_bounded():
    for length in range(900, 1000):
        attention.unpadded_mask("causal", None, length, 0, torch.device("meta"))
    assert 0 < mask_cache_stats()["size"] * 900**2 <= attention.CELLS_KEPT
    assert mask_cache_stats()["size"] <= attention.MASKS_KEPT
