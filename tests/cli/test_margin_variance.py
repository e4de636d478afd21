"""The variance of the margin by estimator and budget: its masks, its redraws, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import each_once, partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import PREFERENCES, make, moved, unmask
from unmask.cli.margin_variance import (
    COMPLEMENTARY,
    DEFAULT,
    ESTIMATORS,
    INDEPENDENT,
    as_table,
    drawn_margins,
    variances,
)
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import MaskRNG
from unmask.preference.trainer import DPOTrainer, PreferenceBatch

SHARED = "independent times, shared masks"


def trainer_of(folder: Path, *pattern: Any, rows: Any = None, **more: Any) -> DPOTrainer:
    """A policy that differs from its reference."""
    llama_lm(*pattern).save(folder / "reference")
    shape = {
        "reference": "frozen",
        "ref_model": str(folder / "reference"),
        "rows": rows or PREFERENCES[4:6],
    }
    return make("dpo", folder / "run", moved(llama_lm(*pattern)), **shape | more)


def copies(trainer: DPOTrainer, count: int) -> Any:
    """The first pair repeated, each time with other masks: the margins of one redraw are then that many
    redraws."""
    return trainer.data_collator([trainer.train_dataset[0]] * count) | {"sample_id": torch.arange(count)}


def drawn(trainer: DPOTrainer, name: str, views: int, count: int = 300) -> torch.Tensor:
    """This many draws of a pair's margin."""
    return drawn_margins(trainer, copies(trainer, count), ESTIMATORS[name], views, 1)[0]


@torch.no_grad()
@each_once("noise, name", ["masked", "uniform"], ESTIMATORS)
def test_every_plan_averages_to_the_same_bound(name, noise, tmp_path):
    """The bound is that of many views of the plan with the least variance."""
    lm = llama_lm().with_noise(noise)
    trainer = make("dpo", tmp_path, lm, rows=PREFERENCES[4:5], reference="frozen")
    rows, count = copies(trainer, 300), 300
    bounds = {}
    for plan, views in ((COMPLEMENTARY, 9 if noise == "masked" else 10), (name, 4)):
        group_BT = noise_groups(trainer.lm, rows["maskable"], rows["documents"])
        draw = MaskRNG(0, rows["sample_id"], 7)
        planned = ESTIMATORS[plan].draw_views(trainer.lm, rows["input_ids"], group_BT, draw, views)
        assert planned.count == views
        bounds[plan, views] = trainer.response_log_probs(trainer.lm, PreferenceBatch(rows, planned))[:count]
    many, few = bounds.values()
    error = ((few.var() + many.var()) / count).sqrt()
    assert (few.mean() - many.mean()).abs() < 4 * error < 0.25 * many.mean().abs()


def test_shared_masks_are_the_same_for_both_models_and_independent_ones_are_not(tmp_path):
    """A policy that is its own reference has no margin on shared masks."""
    trainer = make("dpo", tmp_path, rows=PREFERENCES[4:6], reference="frozen")
    for name, estimator in ESTIMATORS.items():
        margin_P = drawn(trainer, name, 2, 5)
        assert torch.equal(margin_P, torch.zeros_like(margin_P)) == estimator.shared, name
        assert estimator.shared == ("independent masks" not in name)


@pytest.mark.slow
def test_independent_draws_are_independent(tmp_path):
    """Their variance is proportional to one over their number, and no two redraws are equal."""
    trainer = trainer_of(tmp_path)
    one, four = (drawn(trainer, SHARED, views, 2400).var() for views in (1, 4))
    assert 2.5 < one / four < 6.5
    margin_RP = drawn_margins(
        trainer, trainer.data_collator(trainer.train_dataset), ESTIMATORS[INDEPENDENT], 3, 10
    )
    assert len(set(margin_RP[:, 0].tolist())) == 10


@pytest.mark.slow
def test_variances_fall_with_the_budget_and_with_better_plans(tmp_path):
    trainer = trainer_of(tmp_path, rows=[PREFERENCES[4]] * 150, per_device_train_batch_size=150)
    found, margin = variances(trainer, budgets=(1, 8), redraws=3)
    assert found.keys() == ESTIMATORS.keys() and margin != 0
    assert all(by_views[8] < by_views[1] for by_views in found.values())
    assert found[INDEPENDENT][8] > found[SHARED][8] > found[DEFAULT][8] > found[COMPLEMENTARY][8]
    head, rows = as_table({"variance": found})
    assert head == ["passes", "1", "8"] and [row[0] for row in rows] == list(ESTIMATORS)
    assert rows[0][1:] == [f"{found[INDEPENDENT][1]:.3g}", f"{found[INDEPENDENT][8]:.3g}"]
    assert rows[3][2] == f"{found[DEFAULT][8]:.3g} ({found[INDEPENDENT][8] / found[DEFAULT][8]:.1f} x less)"


def rows_file(folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PREFERENCES)))
    return path


@partly_slow(
    "pattern, exact", [(("bidirectional", None), None), (("block_causal", 2), 3), (("causal", None), 1)], 1
)
def test_the_command_prints_a_table_and_json_and_leaves_nothing(pattern, exact, tmp_path, monkeypatch):
    monkeypatch.setattr("unmask.cli.margin_variance.TABLE_REDRAWS", 2)
    monkeypatch.setattr("unmask.cli.margin_variance.BUDGETS", (1, 3))
    llama_lm(*pattern).save(tmp_path / "reference")
    moved(llama_lm(*pattern)).save(tmp_path / "policy")
    settings = [
        f"training.ref_model={tmp_path / 'reference'}",
        "data.max_rows=3",
        "training.use_cpu=true",
        "lora.r=2",
    ]
    command = [
        "dpo",
        "--measure-variance",
        "--model",
        tmp_path / "policy",
        "--data",
        rows_file(tmp_path),
        "--output",
        tmp_path / "out",
    ]
    result = unmask(*command, *settings)
    assert result.exit_code == 0, (result.output, result.exception)
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["pairs"] == 3 and not (tmp_path / "out").exists()
    found = measured["variance"]
    assert found.get("exact") == (None if exact is None else {str(exact): 0.0})
    names = set() if pattern[0] == "causal" else set(ESTIMATORS)
    assert found.keys() - {"exact"} == names and "variance of the margin" in " ".join(result.stdout.split())
    assert all(by_views.keys() == {"1", "3"} for name, by_views in found.items() if name in names)
    assert (measured["margin"] is None) == (not names)


@pytest.mark.parametrize(
    ("verb", "more", "words"),
    [
        ("dpo", [], ["training.ref_model", "every margin is 0"]),
        ("dpo", ["training.loss_type=kto"], ["training.loss_type", "kto has no pairs"]),
        ("dpo", ["training.loss_type=simpo"], ["training.loss_type", "simpo has no pairs"]),
        ("sft", [], ["--measure-variance", "sft has no preference margin"]),
    ],
)
def test_what_has_no_margin_is_refused(verb, more, words, tmp_path):
    result = unmask(
        verb,
        "--measure-variance",
        "--model",
        "m",
        "--data",
        rows_file(tmp_path),
        "--output",
        tmp_path / "out",
        *more,
    )
    assert result.exit_code == 2 and all(word in result.stderr for word in words), result.stderr
