"""Stored log-probabilities of a reference are reused for the same model, tokenizer, rows and masks, and never
for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import PREFERENCES, batch, make
from unmask.errors import TrainingError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.preference import reference_log_probs
from unmask.preference.reference_log_probs import (
    CONTENT,
    REFERENCE_FILE,
    ReferenceTable,
    digests,
)
from unmask.training import per_view_backward

AGAIN = "the reference's log-probabilities are recomputed"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for every batch that the reference computes."""
    calls: list[int] = []

    def counting(*arguments: Any, **more: Any) -> torch.Tensor:
        calls.append(1)
        return original(*arguments, **more)

    original = per_view_backward.view_log_probs
    monkeypatch.setattr(per_view_backward, "view_log_probs", counting)
    return calls


def other() -> DiffusionLM:
    lm = llama_lm()
    with torch.no_grad():
        lm.model.model.norm.weight[0] += 1e-3
    return lm


def on_disk(folder: Path) -> torch.Tensor:
    with safe_open(folder / f"train_{REFERENCE_FILE}", "pt") as file:
        return file.get_tensor("scores")


def test_the_table_is_reused_for_the_same_content(tmp_path, computed):
    first = make("dpo", tmp_path)
    assert len(computed) == 2
    again = make("dpo", tmp_path)
    assert len(computed) == 2
    assert torch.equal(again.stored["train"].log_prob_EIS, first.stored["train"].log_prob_EIS)
    assert torch.equal(on_disk(tmp_path), first.stored["train"].log_prob_EIS)


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"lm": other}, "another model"),
        # it learns the rest of a block
        ({"lm": lambda: llama_lm("block_causal", 8)}, "another model and another data"),
        ({"lm": lambda: renamed()}, "another tokenizer"),
        ({"rows": PREFERENCES[:7]}, "another data"),
        ({"rows": [PREFERENCES[0] | {"rejected": "gg"}, *PREFERENCES[1:]]}, "another data"),
        ({"samples": 3}, "another settings"),
        ({"complementary": True}, "another settings"),
        ({"seed": 1}, "another settings"),
        ({"lm": other, "samples": 3}, "another model and another settings"),
    ],
)
def test_a_stale_table_is_an_error_or_recomputed(change, stale, tmp_path, computed):
    before = make("dpo", tmp_path).stored["train"].log_prob_EIS
    computed.clear()
    change = {"lm": llama_lm, **change}
    with raises(TrainingError, where=str(tmp_path / "train_reference_scores.safetensors")):
        make("dpo", tmp_path, **change | {"lm": change["lm"]()})
    assert not computed and torch.equal(on_disk(tmp_path), before)
    change["stale_reference"] = "replace"
    with pytest.warns(
        RuntimeWarning, match=f"train_{REFERENCE_FILE} holds log-probabilities of {stale}: {AGAIN}"
    ):
        trainer = make("dpo", tmp_path, **change | {"lm": change["lm"]()})
    assert len(computed) == 2
    after = trainer.stored["train"].log_prob_EIS
    assert torch.equal(on_disk(tmp_path), after)
    if "tokenizer" not in stale:
        assert not torch.equal(after, before)
    make("dpo", tmp_path, **change | {"lm": change["lm"]()})
    assert len(computed) == 2  # and kept


def test_the_table_of_a_longer_run_serves_a_shorter_one(tmp_path, computed):
    for steps, passes in ((2, 2), (4, 4), (2, 4), (4, 4)):
        make("dpo", tmp_path, max_steps=steps)
        assert len(computed) == passes


MANY = [PREFERENCES[number % 8] | {"prompt": "abcdefgh"[: 1 + number // 8]} for number in range(64)]


@partly_slow("verb", ["dpo", "kto"], 0)
@pytest.mark.parametrize(
    "more", [{"max_steps": 3}, {"max_steps": 19}, {"max_steps": 5, "gradient_accumulation_steps": 2}]
)
def test_only_the_rows_that_the_run_visits_are_scored(verb, more, tmp_path):
    trainer = make(verb, tmp_path, rows=MANY, **more)
    scored_EI = trainer.stored["train"].digest_EI != 0
    visited_EI = torch.zeros_like(scored_EI)
    look_up = ReferenceTable.look_up

    def looking(
        table: ReferenceTable, plan: int, sample_id_B: torch.Tensor, digest_B: torch.Tensor
    ) -> torch.Tensor:
        visited_EI[plan, sample_id_B.cpu()] = True
        return look_up(table, plan, sample_id_B, digest_B)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceTable, "look_up", looking)
        trainer.train()
    assert torch.equal(scored_EI, visited_EI)
    assert not scored_EI.all()


def test_a_kill_loses_only_the_part_that_was_being_scored(tmp_path, computed, monkeypatch):
    monkeypatch.setattr(reference_log_probs, "PART", 2)
    monkeypatch.setattr("unmask.preference.trainer.SAVE_SECONDS", 0.0)
    whole = make("dpo", tmp_path / "whole", rows=MANY, max_steps=16).stored["train"]
    batches = len(computed)
    computed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceTable, "write", dying(3))
        with pytest.raises(KeyboardInterrupt):
            make("dpo", tmp_path / "run", rows=MANY, max_steps=16)
    again = make("dpo", tmp_path / "run", rows=MANY, max_steps=16).stored["train"]
    assert torch.equal(again.log_prob_EIS, whole.log_prob_EIS) and torch.equal(
        again.digest_EI, whole.digest_EI
    )
    assert len(computed) == batches + 2  # the part that was not written


def dying(last: int) -> Any:
    """A `ReferenceTable.write` that is killed instead of writing this part."""
    write, count = ReferenceTable.write, iter(range(1, last + 1))

    def writing(table: ReferenceTable, *arguments: Any) -> None:
        if next(count) == last:
            raise KeyboardInterrupt
        write(table, *arguments)

    return writing


def renamed() -> DiffusionLM:
    """A model whose tokenizer has another name for a token that occurs in no row."""
    lm = llama_lm()
    lm.tokenizer.add_tokens(["unused"])
    return lm


def test_a_file_that_cannot_be_read_is_an_error_or_recomputed(tmp_path, computed):
    make("dpo", tmp_path)
    (tmp_path / f"train_{REFERENCE_FILE}").write_bytes(b"torn")
    with raises(TrainingError, where=str(tmp_path / "train_reference_scores.safetensors")):
        make("dpo", tmp_path)
    with pytest.warns(RuntimeWarning, match=f"cannot be read .*: {AGAIN}"):
        make("dpo", tmp_path, stale_reference="replace")
    assert len(computed) == 4


def test_no_flipped_bit_of_the_file_changes_the_table(tmp_path):
    table = ReferenceTable(torch.randn(1, 4, 2), torch.arange(4)[None])
    table.write(tmp_path / REFERENCE_FILE, {"data": "a"})
    whole, unnoticed = (tmp_path / REFERENCE_FILE).read_bytes(), 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (tmp_path / REFERENCE_FILE).write_bytes(damaged)
        try:
            found = ReferenceTable.read(tmp_path / REFERENCE_FILE, {"data": "a"}, replace=False)
        except TrainingError:
            continue
        assert (
            found is not None
            and found.log_prob_EIS.equal(table.log_prob_EIS)
            and found.digest_EI.equal(table.digest_EI)
        )
        unnoticed += 1
    assert unnoticed < len(CONTENT) < len(whole) / 30  # in the name of the hash


def test_other_masks_than_those_of_the_table_are_an_error(tmp_path):
    """As after a change of the code that plans views, which no setting reflects."""
    trainer = make("dpo", tmp_path)
    trainer.model.train()
    plan = trainer.plan
    assert trainer.with_reference(batch(trainer, 0, 1)).reference_N.shape == (4,)
    trainer.plan = lambda rows, draw: plan(rows, draw).select(slice(None), slice(0, 1))
    with raises(TrainingError, where="reference"):
        trainer.with_reference(batch(trainer, 0, 1))


def test_other_rows_than_those_of_the_table_are_an_error(tmp_path):
    trainer = make("dpo", tmp_path, eval_dataset=PREFERENCES[3:6])
    assert trainer.evaluate()["eval_accuracy"] == 0
    for part in (PREFERENCES[:3], PREFERENCES):  # known sample ids, and larger ones
        with raises(TrainingError, where="reference"):
            trainer.evaluate(part)
    along = make("dpo", tmp_path, eval_dataset=PREFERENCES[3:6], reference="frozen")
    assert along.evaluate(PREFERENCES)["eval_loss"] == pytest.approx(0.6931, abs=1e-4)


def test_digests_differ_by_row_and_masks_and_ignore_padding(tmp_path):
    trainer = make("dpo", tmp_path)
    trainer.model.train()

    def digest(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return digests(rows, trainer.plan(rows, trainer.draw(rows)))

    rows, wide = batch(trainer, 0, 1), batch(trainer, 0, 1, 6)
    before = digest(rows)
    assert len(set(before.tolist())) == 2
    assert wide["input_ids"].shape[1] > rows["input_ids"].shape[1]
    assert torch.equal(digest(wide)[:2], before)
    rows["input_ids"][0, 1] += 1
    assert digest(rows).ne(before).tolist() == [True, False]


def test_progress_is_shown_while_the_table_is_computed(tmp_path):
    class Recorder:
        shown: list[float | None] = []  # noqa: RUF012

        def update(self, fraction: float, **metrics: float | None) -> None:
            self.shown += [metrics[name] for name in metrics if name == "reference_scored"]

    make("dpo", tmp_path, progress=Recorder())
    assert Recorder.shown == [0.5, None]
