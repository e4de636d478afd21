"""DPO starts at log 2 exactly, against stored scores of the model as given, and raises the margin."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.conftest import PREFERENCES, batch, make, tiny
from unmask.errors import DataError
from unmask.training import viewwise
from unmask.training.dpo import REFERENCE_FILE


def first_line(folder: Path, **more: Any) -> dict[str, float]:
    trainer = make("dpo", folder, max_steps=1, **more)
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize(
    "config",
    [{}, {"canvas_length": 9}, {"score_chunk": 3}, {"gradient_accumulation_steps": 2}, {"lm": ("block_causal", 4)}, {"lm": ("causal",)}],
    ids=lambda config: "-".join(map(str, config.values())) or "plain",
)
def test_the_first_loss_is_log_2(config, tmp_path):
    pattern = config.pop("lm", ("bidirectional",))
    line = first_line(tmp_path, lm=tiny(*pattern, attention_dropout=0.3), **config)
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert line["margin"] == pytest.approx(0, abs=1e-4)


def test_at_the_first_step_of_every_epoch_policy_and_reference_share_their_masks(tmp_path):
    """With a rate of 0 the margin stays 0: the stored scores are those of each epoch's own masks."""
    trainer = make("dpo", tmp_path, max_steps=6, learning_rate=0.0)
    trainer.train()
    assert trainer.reference["train"].shape == (3, 8, 2)
    assert len({tuple(epoch.flatten().tolist()) for epoch in trainer.reference["train"]}) == 3
    assert all(abs(line["margin"]) < 1e-4 for line in trainer.state.log_history if "margin" in line)


def test_the_stored_scores_are_those_of_a_frozen_copy_to_the_end_of_training(tmp_path):
    lm = tiny()
    frozen = lm.frozen_copy()
    trainer = make("dpo", tmp_path, lm, max_steps=2, eval_dataset=PREFERENCES[:3])
    stored = trainer.reference["train"]
    trainer.train()
    trainer.model.train()
    trainer.state.epoch = 0.0
    rows = batch(trainer, *range(8))
    with torch.no_grad():
        bounds, trained = (trainer._bounds(rows, trainer.score_views(lm, rows)).view(2, -1).T for lm in (frozen, trainer.lm))
    assert not torch.allclose(trained, stored[0], atol=1e-2)
    torch.testing.assert_close(stored[0], bounds, atol=1e-5, rtol=0)
    assert trainer.reference["eval"].shape == (1, 3, 2)
    assert abs(trainer.evaluate()["eval_loss"] - math.log(2)) > 1e-3


def test_scores_are_kept_for_the_same_weights_rows_and_masks_only(tmp_path, monkeypatch):
    scored: list[int] = []

    def counting(*arguments: Any, **more: Any) -> torch.Tensor:
        scored.append(1)
        return original(*arguments, **more)

    original = viewwise.score
    monkeypatch.setattr(viewwise, "score", counting)

    def passes(lm: Any = None, **more: Any) -> int:
        scored.clear()
        trainer = make("dpo", tmp_path, lm, **more)
        [kept] = load_file(tmp_path / f"train_{REFERENCE_FILE}").values()
        assert torch.equal(trainer.reference["train"], kept)
        return len(scored)

    other = tiny()
    with torch.no_grad():
        other.model.model.norm.weight[0] += 1e-3
    assert passes() == 2
    assert passes() == 0
    assert passes(other) == 2
    assert passes(other) == 0
    assert passes(other, samples=3) == 2
    assert passes(other, samples=3, seed=1) == 2
    assert passes(other, samples=3, seed=1, rows=PREFERENCES[:7]) == 2
    assert passes(other, samples=3, seed=1, rows=PREFERENCES[:7], max_steps=4) == 4  # an epoch more


def test_a_stale_or_foreign_file_is_replaced(tmp_path):
    first = make("dpo", tmp_path).reference["train"]
    trainer = make("dpo", tmp_path, tiny("block_causal", 4))
    assert not torch.equal(trainer.reference["train"], first)
    assert torch.equal(make("dpo", tmp_path).reference["train"], first)


def test_chosen_and_rejected_are_hidden_apart(tmp_path):
    same = [{"prompt": "ab", "chosen": "abcdefgh", "rejected": "hgfedcba"}] * 4
    trainer = make("dpo", tmp_path, rows=same, samples=4)
    rows = batch(trainer, *range(4))
    hidden_BVT = trainer.plan(rows, trainer.draw(rows)).hidden_BVT
    assert len({tuple(row.flatten().tolist()) for row in hidden_BVT}) == 8
    assert torch.equal(rows["pair"], torch.arange(4))
    assert rows["input_ids"][:4].equal(rows["input_ids"][:1].expand(4, -1))


def test_training_raises_the_margin_and_the_accuracy(tmp_path):
    trainer = make("dpo", tmp_path, max_steps=30, learning_rate=3e-3, eval_dataset=PREFERENCES)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer.train()
    trainer.evaluate()
    line = trainer.state.log_history[-1]
    assert line["eval_margin"] > 2 and line["eval_accuracy"] == 1.0
    assert line["eval_chosen"] > line["eval_rejected"] and line["eval_loss"] < 0.5


def test_chat_and_implicit_prompts_are_the_same_pairs(tmp_path):
    plain = make("dpo", tmp_path / "plain").train_dataset
    user = [[{"role": "user", "content": row["prompt"]}] for row in PREFERENCES]
    sides = [{k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")} for row in PREFERENCES]
    explicit = [{"prompt": prompt, **side} for prompt, side in zip(user, sides, strict=True)]
    implicit = [{k: prompt + turn for k, turn in side.items()} for prompt, side in zip(user, sides, strict=True)]
    assert make("dpo", tmp_path / "explicit", rows=explicit).train_dataset == plain
    assert make("dpo", tmp_path / "implicit", rows=implicit).train_dataset == plain


def test_rows_that_state_no_preference_are_named(tmp_path):
    for row, message in [
        ({"prompt": "a", "chosen": "ab", "rejected": "ab"}, "row 1, .*the same"),
        ({"prompt": "a", "chosen": "b" * 40, "rejected": "b"}, "row 1: 43 tokens, but a row holds 32"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "row 1: no value in column 'rejected'"),
    ]:
        with pytest.raises(DataError, match="train_dataset, " + message):
            make("dpo", tmp_path, rows=[PREFERENCES[0], row])
