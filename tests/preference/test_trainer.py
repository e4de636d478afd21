"""The loss of DPO begins at log 2 exactly, and training raises the margin, for every estimator of the
likelihood."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.diffusion_gemma import CANVAS, loaded
from tests.enumeration import any_order, conditionals, groups, lower_bound
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_lm, toy_lm
from tests.training.tiny_runs import PREFERENCES, batch, equal, make, moved, settings, weights
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError, DataError, TrainingError
from unmask.models.load import load
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer, PreferenceBatch

LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PREFERENCES
    for side in ("chosen", "rejected")
]

AB = [
    {"prompt": "ab"[: 1 + row % 2], "chosen": "abba"[row:] + "ab", "rejected": "ba" * (1 + row)}
    for row in range(4)
]


def first_line(folder: Path, **more: Any) -> dict[str, float]:
    trainer = make("dpo", folder, max_steps=1, **more)
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"canvas_length": 9},
        {"logprob_batch_size": 3},
        {"gradient_accumulation_steps": 2},
        {"complementary": True, "samples": 4},
        {"length_normalization": True},
        {"label_smoothing": 0.1},
        {"lm": ("block_causal", 4)},
        {"lm": ("block_causal", 4), "bound": "elbo"},
        {"lm": ("block_causal", 8)},
        {"lm": ("causal",)},
        {"noise": "uniform"},
        {"noise": "uniform", "complementary": True, "samples": 4},
        {"noise": "hybrid"},
        {"noise": "uniform", "lm": ("block_causal", 4)},
    ],
    ids=lambda config: "-".join(map(str, config.values())) or "plain",
)
@partly_slow("reference", ["stored", "frozen"], 0)
def test_the_first_loss_is_log_2(config, reference, tmp_path):
    config = dict(config)
    pattern, noise = config.pop("lm", ("bidirectional",)), config.pop("noise", "masked")
    lm = llama_lm(*pattern, attention_dropout=0.3).with_noise(noise, 0.2 if noise == "hybrid" else None)
    line = first_line(tmp_path, **config | {"lm": lm, "reference": reference})
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert line["margin"] == pytest.approx(0, abs=1e-4)


def test_at_the_first_step_of_every_epoch_policy_and_reference_share_their_masks(tmp_path):
    """With a learning rate of 0 the margin stays 0: the table has the masks of each epoch."""
    trainer = make("dpo", tmp_path, max_steps=6, learning_rate=0.0)
    trainer.train()
    scores = trainer.stored["train"].log_prob_EIS
    assert scores.shape == (3, 8, 2)
    assert len({tuple(epoch.flatten().tolist()) for epoch in scores}) == 3
    assert all(abs(line["margin"]) < 1e-4 for line in trainer.state.log_history if "margin" in line)


@pytest.mark.parametrize(("rows", "size", "pieces", "steps"), [(7, 4, 1, 3), (7, 2, 3, 2), (8, 4, 1, 4)])
def test_the_table_has_exactly_the_epochs_of_the_run_with_drop_last(rows, size, pieces, steps, tmp_path):
    shape = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": pieces,
        "dataloader_drop_last": True,
    }
    trainer = make("dpo", tmp_path, rows=PREFERENCES[:rows], max_steps=steps, learning_rate=0.0, **shape)
    trainer.train()
    assert len(trainer.stored["train"].log_prob_EIS) == math.ceil(trainer.state.epoch)
    assert all(abs(line["margin"]) < 1e-4 for line in trainer.state.log_history if "margin" in line)


def test_a_reused_plan_has_one_table(tmp_path):
    trainer = make("dpo", tmp_path, max_steps=6, learning_rate=0.0, plan_reused=True)
    seen: list[torch.Tensor] = []
    plan = trainer.plan
    trainer.plan = lambda batch, draw: (
        seen.append(batch["sample_id"] * 100 + draw.iteration) or plan(batch, draw)
    )
    trainer.train()
    assert trainer.stored["train"].log_prob_EIS.shape == (1, 8, 2)
    assert all(abs(line["margin"]) < 1e-4 for line in trainer.state.log_history if "margin" in line)
    assert len(seen) == 6 and all((ids % 100 == 0).all() for ids in seen)


def test_exact_likelihoods_have_one_table_for_all_epochs(tmp_path):
    trainer = make("dpo", tmp_path, llama_lm("block_causal", 2), max_steps=6, learning_rate=0.0)
    trainer.train()
    assert trainer.stored["train"].log_prob_EIS.shape == (1, 8, 2)
    assert all(abs(line["margin"]) < 1e-4 for line in trainer.state.log_history if "margin" in line)


# The reference: stored, a frozen copy, the base under the adapters.


def gradients(trainer: DPOTrainer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of four pairs and its gradients."""
    [rows] = trainer.prepared([batch(trainer, *range(4))])
    loss = trainer.training_step(trainer.model, rows, torch.tensor(4))
    return loss, {
        name: weight.grad.clone()
        for name, weight in trainer.model.named_parameters()
        if weight.grad is not None
    }


@partly_slow("loss_type", ["sigmoid", "kto", "ipo", "hinge"], 0)
@pytest.mark.parametrize(
    ("attention", "block_size", "more"),
    [
        ("bidirectional", None, {"samples": 3}),
        ("bidirectional", None, {"samples": 3, "complementary": True, "length_normalization": True}),
        ("block_causal", 2, {}),
        ("causal", None, {}),
    ],
)
def test_a_reference_stored_frozen_or_under_adapters_gives_the_same_loss_and_gradient(
    attention, block_size, more, loss_type, tmp_path
):
    made = []
    for reference in ("stored", "frozen", "adapter"):
        lm, config = llama_lm(attention, block_size, dtype=torch.float64), peft.LoraConfig(**LORA)
        trainer = make(
            "dpo",
            tmp_path / reference,
            lm,
            peft_config=config,
            reference=reference,
            loss_type=loss_type,
            max_steps=50,
            **more,
        )
        assert (trainer.reference is None) == (reference == "stored") == bool(trainer.stored)
        if trainer.reference is not None:
            assert (trainer.reference.lm.model is trainer.lm.model) == (reference == "adapter")
        moved(trainer.lm, 0.3, "lora")  # away from the reference
        made.append(gradients(trainer))
    for loss, slopes in made[1:]:
        torch.testing.assert_close(loss, made[0][0], rtol=1e-6, atol=1e-7)  # adapters are float32
        torch.testing.assert_close(slopes, made[0][1], rtol=1e-4, atol=1e-6)
    assert (
        all("lora" in name for name in made[0][1])
        and max(slope.abs().max() for slope in made[0][1].values()) > 1e-3
    )


def test_stored_and_frozen_references_train_the_same_weights(tmp_path):
    """The weights agree in float64 to the last digits."""
    ends = []
    for reference in ("stored", "frozen"):
        trainer = make(
            "dpo",
            tmp_path / reference,
            llama_lm(dtype=torch.float64),
            reference=reference,
            max_steps=5,
            optim="sgd",
        )
        trainer.train()
        ends.append(weights(trainer.lm))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)
    assert not equal(ends[0], weights(llama_lm(dtype=torch.float64)))


def test_another_model_can_be_the_reference(tmp_path):
    other = llama_lm()
    with torch.no_grad():
        other.model.model.norm.weight += 0.5
    other.save(tmp_path / "other")
    lines = [
        first_line(tmp_path / mode, reference=mode, ref_model=str(tmp_path / "other"))
        for mode in ("stored", "frozen")
    ]
    assert abs(lines[0]["margin"]) > 1e-2 and lines[0]["margin"] == pytest.approx(
        lines[1]["margin"], abs=1e-4
    )
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], abs=1e-5)


def test_simpo_has_no_reference(tmp_path):
    trainer = make(
        "dpo",
        tmp_path,
        loss_type="simpo",
        beta=2.0,
        max_steps=30,
        learning_rate=3e-3,
        eval_dataset=PREFERENCES,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert trainer.reference is None and not trainer.stored and not list(tmp_path.glob("*.safetensors"))
    assert after["eval_margin"] > before["eval_margin"] + 0.3 and after["eval_accuracy"] == 1
    assert after["eval_loss"] < before["eval_loss"]


# Estimators.


@pytest.mark.parametrize(
    ("attention", "block_size", "more", "count"),
    [
        ("bidirectional", None, {"samples": 5}, 5),
        ("bidirectional", None, {"samples": 5, "complementary": True}, 5),
        ("block_causal", 8, {"samples": 8}, 8),
        ("block_causal", 4, {}, 15),
        ("block_causal", 2, {}, 3),
        ("block_causal", 4, {"bound": "elbo", "samples": 8}, 8),
        ("causal", None, {}, 1),
    ],
)
def test_views_by_estimator(attention, block_size, more, count, tmp_path):
    trainer = make("dpo", tmp_path, llama_lm(attention, block_size), **more)
    rows = batch(trainer, *range(4))
    views = trainer.plan(rows, trainer.draw(rows))
    assert views.count == count
    assert torch.equal(views.target_BMT.any(1), rows["maskable"])
    if more.get("complementary"):
        assert torch.equal(views.hidden_BMT[:, 0], rows["maskable"])
        assert torch.equal(
            views.hidden_BMT[:, 1] ^ views.hidden_BMT[:, 3],
            rows["maskable"] & (rows["maskable"].sum(1) > 1)[:, None],
        )


def each_response(rows: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The ids of every chosen response with its prompt, then of every rejected one, and which tokens are
    trained."""
    places = [
        (row, rows["documents"][row] == side) for side in (1, 2) for row in range(len(rows["documents"]))
    ]
    return [(rows["input_ids"][row][part_T], rows["maskable"][row][part_T]) for row, part_T in places]


@torch.no_grad()
@pytest.mark.parametrize("shift", [False, True])
def test_the_likelihood_of_blocks_of_four_is_the_mean_over_all_orders(shift, tmp_path):
    lm = llama_lm("block_causal", 4, logit_shift=shift, dtype=torch.float64)
    trainer = make("dpo", tmp_path, lm)
    rows = batch(trainer, 0, 3, 5)
    found = trainer.response_log_probs(lm, trainer.with_reference(rows))
    for number, (ids_T, maskable_T) in enumerate(each_response(rows)):
        expected = sum(
            any_order(conditionals(lm, ids_T, part))
            for part in groups(lm, int(maskable_T.nonzero()[0]), len(ids_T))
        )
        assert found[number].item() == pytest.approx(expected, abs=1e-9)


@partly_slow("chunk", [1, 5, None], 1)
@partly_slow("loss_type", ["sigmoid", "kto"], 0)
@pytest.mark.parametrize(
    ("attention", "block_size", "more"),
    [
        ("bidirectional", None, {"samples": 5, "complementary": True, "loss_weights": [1.0, 0.5, 0.2]}),
        ("block_causal", 4, {}),
        ("block_causal", 4, {"samples": 3, "bound": "elbo"}),
    ],
)
def test_view_by_view_the_gradient_is_that_of_all_at_once(
    attention, block_size, more, loss_type, chunk, tmp_path
):
    if "loss_weights" in more and loss_type == "kto":
        more = {name: value for name, value in more.items() if name != "loss_weights"}
    elif "loss_weights" in more:
        loss_type = ["sigmoid", "sft", "bco_pair"]
    made = []
    for size in (chunk, 10**6):
        lm = toy_lm(attention=(attention, block_size, False))  # computes in float64 throughout
        trainer = make("dpo", tmp_path, lm, AB, loss_type=loss_type, logprob_batch_size=size, **more)
        moved(trainer.lm, 0.05)
        made.append(gradients(trainer))
    torch.testing.assert_close(made[0], made[1], rtol=1e-8, atol=1e-10)
    assert max(slope.abs().max() for slope in made[0][1].values()) > 1e-3


def test_the_estimate_of_the_margin_averages_to_that_of_the_elbo(tmp_path):
    """Over many redraws, with and without complementary pairs; the pairs have less variance."""
    other, pairs = moved(llama_lm(dtype=torch.float64)), PREFERENCES[:2]
    spread, means = {}, {}
    for complementary in (False, True):
        trainer = make(
            "dpo", tmp_path, other, rows=pairs, reference="frozen", samples=4, complementary=complementary
        )
        rows = trainer.data_collator([trainer.train_dataset[0]] * 200)
        drawn = []
        for iteration in (0, 1):
            views = trainer.plan(rows, MaskRNG(iteration, torch.arange(200)))
            drawn.append(trainer.response_log_probs(trainer.lm, PreferenceBatch(rows, views)))
        bound = torch.cat([part.view(2, -1) for part in drawn], 1)
        spread[complementary], means[complementary] = bound.std(1), bound.mean(1)
        for side, (ids_T, maskable_T) in enumerate(each_response(batch(trainer, 0))):
            parts = groups(trainer.lm, int(maskable_T.nonzero()[0]), len(ids_T))
            exact = sum(lower_bound(conditionals(trainer.lm, ids_T, part)) for part in parts)
            assert means[complementary][side].item() == pytest.approx(
                exact, abs=5 * bound[side].std().item() / 20
            )
    assert (spread[True] < spread[False]).all()


def test_the_variance_of_the_margin_is_logged_at_its_interval(tmp_path):
    lines = {}
    for mode in ("stored", "frozen"):
        trainer = make("dpo", tmp_path / mode, reference=mode, max_steps=4, log_variance_steps=2, samples=2)
        trainer.train()
        assert [line["step"] for line in trainer.state.log_history if "margin_variance" in line] == [2, 4]
        lines[mode] = [
            line["margin_variance"] for line in trainer.state.log_history if "margin_variance" in line
        ]
    assert lines["stored"] == pytest.approx(lines["frozen"], rel=1e-3) and min(lines["stored"]) > 1e-4
    trainer = make("dpo", tmp_path / "start", log_variance_steps=1)
    assert trainer.margin_variance() < 1e-8  # the policy is the reference


def test_a_reference_that_moves_is_resumed(tmp_path):
    shape = {
        "reference": "frozen",
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "beta": 1.0,
    }
    whole = make("dpo", tmp_path, **shape)
    whole.train()
    resumed = make("dpo", tmp_path, **shape)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in ((resumed.lm, whole.lm), (resumed.reference.lm, whole.reference.lm)):
        assert equal(weights(one), weights(other))
    assert not equal(weights(whole.reference.lm), weights(make("dpo", tmp_path / "start").lm))


def test_a_reference_cannot_follow_sharded_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(DPOTrainer, "shards_weights", True)
    with raises(ConfigError, where="sync_ref_model"):
        make("dpo", tmp_path, reference="frozen", sync_ref_model=True)


# Losses of the trainer.


def test_the_sft_term_is_the_bound_of_the_chosen_per_token(tmp_path):
    losses = []
    for alpha in (0.0, 0.7):
        losses_of = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, alpha]}
        trainer = make("dpo", tmp_path, llama_lm(dtype=torch.float64), **losses_of)
        rows = batch(trainer, 0, 2, 5)
        [prepared] = trainer.prepared([rows])
        losses.append(
            trainer.compute_loss(trainer.model.train(), prepared, num_items_in_batch=torch.tensor(3)).item()
        )
    bound_N = trainer.response_log_probs(trainer.lm, prepared)
    term = (
        sum(
            bound_N[number].item() / int(trained.sum())
            for number, (_, trained) in enumerate(each_response(rows)[:3])
        )
        / 3
    )
    assert losses[1] - losses[0] == pytest.approx(-0.7 * term, rel=1e-9) and losses[0] == pytest.approx(
        math.log(2)
    )


def test_evaluation_rows_without_stored_log_probs_are_refused(tmp_path):
    for held_out in (None, PREFERENCES[:4]):
        with raises(TrainingError, where="reference"):
            make("dpo", tmp_path, eval_dataset=held_out).evaluate(PREFERENCES[4:])


def test_a_model_is_evaluated_without_training_rows(tmp_path):
    args = DPOConfig(**settings(tmp_path, samples=2))
    assert DPOTrainer(llama_lm(), args=args, train_dataset=None, eval_dataset=PREFERENCES).evaluate()[
        "eval_loss"
    ] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize(
    "rows",
    [pytest.param(PREFERENCES, id="pairs", marks=pytest.mark.slow), pytest.param(LABELLED, id="labels")],
)
def test_kto_begins_at_one_half_and_separates_desirable_from_undesirable(rows, tmp_path):
    args = {
        "loss_type": "kto",
        "beta": 1.0,
        "rows": rows,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
    }
    trainer = make("dpo", tmp_path, max_steps=40, eval_dataset=rows, **args)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(0.5, abs=1e-6)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] < 0.3 and metrics["eval_margin"] > 1 and metrics["eval_kl"] >= 0
    assert metrics["eval_chosen"] > metrics["eval_rejected"]


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_accumulating_gradients_changes_nothing(loss_type, tmp_path):
    """Also with KTO, whose baseline is common to all micro-batches."""
    made = []
    for pieces in (1, 4):
        lm = llama_lm(dtype=torch.float64)
        config = {
            "per_device_train_batch_size": 8 // pieces,
            "gradient_accumulation_steps": pieces,
            "optim": "sgd",
            "learning_rate": 1.0,
        }
        trainer = make("dpo", tmp_path, lm, loss_type=loss_type, max_steps=2, **config)
        trainer.train()
        made.append(weights(lm))
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-11)
    assert not equal(made[0], weights(llama_lm(dtype=torch.float64)))


# Data and metrics.


@partly_slow("reference", ["stored", "frozen"], 0)
def test_the_size_of_evaluation_batches_changes_no_metric_of_kto(reference, tmp_path):
    """Its baseline is common to all held-out rows."""
    other, found = moved(llama_lm(dtype=torch.float64), 0.3), []
    other.save(tmp_path / "other")
    shape = {
        "loss_type": "kto",
        "reference": reference,
        "ref_model": str(tmp_path / "other"),
        "eval_dataset": LABELLED[:14],
    }
    for size in (1, 4, 14):
        trainer = make(
            "dpo",
            tmp_path / f"{size}",
            llama_lm(dtype=torch.float64),
            per_device_eval_batch_size=size,
            **shape,
        )
        metrics = trainer.evaluate()
        found.append(
            {
                name: metrics[f"eval_{name}"]
                for name in ("loss", "kl", "margin", "accuracy", "chosen", "rejected")
            }
        )
    assert found[0]["kl"] > 0.1
    for line in found[1:]:
        assert line == pytest.approx(found[0], rel=1e-6)


def test_chosen_and_rejected_have_different_masks(tmp_path):
    same = [{"prompt": "ab", "chosen": "abcdefgh", "rejected": "hgfedcba"}] * 4
    trainer = make("dpo", tmp_path, rows=same, samples=4)
    rows = batch(trainer, *range(4))
    hidden_BMT = trainer.plan(rows, trainer.draw(rows)).hidden_BMT
    masks = {
        str(hidden_BMT[row][:, rows["documents"][row] == side].tolist())
        for row in range(4)
        for side in (1, 2)
    }
    assert len(masks) == 8
    assert rows["input_ids"].equal(rows["input_ids"][:1].expand(4, -1))


def test_training_raises_the_margin_and_the_accuracy(tmp_path):
    trainer = make("dpo", tmp_path, max_steps=30, learning_rate=3e-3, beta=0.2, eval_dataset=PREFERENCES)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer.train()
    trainer.evaluate()
    line = trainer.state.log_history[-1]
    assert line["eval_margin"] > 2 and line["eval_accuracy"] == 1.0
    assert line["eval_chosen"] > line["eval_rejected"] and line["eval_loss"] < 0.5


@partly_slow("kind", ["uniform", "canvas"], 0)
def test_models_of_random_tokens_learn_preferences(kind, tmp_path):
    """A policy and its reference share times and noise, on the canvases of each answer."""
    lm = loaded(tmp_path / "model") if kind == "canvas" else llama_lm().with_noise("uniform")
    more = {"max_steps": 20, "learning_rate": 3e-3, "beta": 0.2, "samples": 4, "complementary": True}
    trainer = make("dpo", tmp_path / "run", lm, eval_dataset=PREFERENCES, max_length=64, **more)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    if kind == "canvas":
        row = trainer.train_dataset[0]
        learned = [
            sum(row["maskable"][at] for at, each in enumerate(row["documents"]) if each == n) for n in (1, 2)
        ]
        assert [length % CANVAS for length in learned] == [0, 0] and min(learned) > 0
    trainer.train()
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_margin"] > 1


def test_random_tokens_have_no_exact_likelihood(tmp_path):
    lm = llama_lm("block_causal", 4).with_noise("uniform")
    with raises(ConfigError, where="bound"):
        make("dpo", tmp_path, lm, bound="exact")
    with raises(ConfigError, where="samples"):
        make("dpo", tmp_path, lm, complementary=True, samples=3)


def test_chat_and_implicit_prompts_are_the_same_pairs(tmp_path):
    plain = [*make("dpo", tmp_path / "plain").train_dataset]
    user = [[{"role": "user", "content": row["prompt"]}] for row in PREFERENCES]
    sides = [
        {k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")} for row in PREFERENCES
    ]
    explicit = [{"prompt": prompt, **side} for prompt, side in zip(user, sides, strict=True)]
    implicit = [
        {k: prompt + turn for k, turn in side.items()} for prompt, side in zip(user, sides, strict=True)
    ]
    assert [*make("dpo", tmp_path / "explicit", rows=explicit).train_dataset] == plain
    assert [*make("dpo", tmp_path / "implicit", rows=implicit).train_dataset] == plain


def test_errors_name_rows_without_a_preference(tmp_path):
    for row, where in [
        ({"prompt": "a", "chosen": "ab", "rejected": "ab"}, "train_dataset, row 1, chosen, rejected"),
        ({"prompt": "a", "chosen": "b" * 40, "rejected": "b"}, "train_dataset, row 1"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "train_dataset, row 1"),
    ]:
        with raises(DataError, where=where):
            make("dpo", tmp_path, rows=[PREFERENCES[0], row])


# Switches.


def calls(trainer: DPOTrainer) -> list[bool]:
    """A list with an entry for every call of a layer's first projection: whether gradients are enabled."""
    seen: list[bool] = []
    layer = next(
        module for name, module in trainer.model.named_modules() if name.endswith("layers.0.self_attn.q_proj")
    )
    layer.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


def test_activation_checkpointing_runs_the_layers_again_and_changes_nothing(tmp_path):
    ends, counts = [], []
    for more in ({}, {"activation_checkpointing": True}):
        trainer = make(
            "dpo", tmp_path, llama_lm(), optim="sgd", max_steps=3, samples=2, logprob_batch_size=4, **more
        )
        seen = calls(trainer)
        trainer.train()
        counts.append(len(seen))
        ends.append(weights(trainer.lm))
    # two views without gradients, two with, and two recomputed
    assert counts == [3 * (2 + 2), 3 * (2 + 2 + 2)]
    assert equal(*ends)


def test_only_adapters_are_trained(tmp_path):
    lm = llama_lm()
    start = weights(lm)
    trainer = make(
        "dpo",
        tmp_path,
        lm,
        peft_config=peft.LoraConfig(**LORA),
        max_steps=30,
        learning_rate=3e-2,
        eval_dataset=PREFERENCES,
    )
    trainer.train()
    kept = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
        for name, weight in weights(trainer.lm).items()
    }
    assert all(torch.equal(kept[name], weight) for name, weight in start.items())
    assert trainer.evaluate()["eval_margin"] > 0.5


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra `cuda`)"
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@partly_slow("reference", ["stored", "adapter"], 1)
def test_adapters_on_weights_in_4_bits_are_trained(reference, tmp_path):
    llama_lm(hidden_size=64, intermediate_size=64).save(tmp_path / "model")
    lm = load(tmp_path / "model", quantization="4bit")
    shape = {"max_steps": 20, "learning_rate": 3e-2, "reference": reference, "eval_dataset": PREFERENCES}
    trainer = make("dpo", tmp_path / "run", lm, peft_config=peft.LoraConfig(**LORA), **shape)
    start = {name: weight for name, weight in weights(trainer.lm).items() if weight.dtype == torch.uint8}
    assert start and trainer.evaluate()["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    trainer.train()
    assert trainer.evaluate()["eval_margin"] > 0.5
    assert all(torch.equal(weights(trainer.lm)[name], weight) for name, weight in start.items())


def test_a_run_of_several_epochs_resumes_bit_for_bit(tmp_path):
    run = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "log_variance_steps": 1}
    straight, resumed = make("dpo", tmp_path, **run), make("dpo", tmp_path, **run)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert equal(weights(resumed.lm), weights(straight.lm))
