"""Settings of preference optimization that have no effect or contradict one another are refused before
anything is loaded."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest

from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import QUICK, make, settings, unmask
from unmask.artifacts import MetricsLog
from unmask.cli.run import training_arguments
from unmask.config.layers import read_layers
from unmask.config.run import resolve
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError
from unmask.preference.config import DPOConfig


def config(folder: Any, **more: Any) -> DPOConfig:
    return DPOConfig(**settings(folder, **more))


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"loss_type": "dpo"}, "loss_type"),
        ({"reference": "copy"}, "reference"),
        ({"bound": "eubo"}, "bound"),
        ({"beta": 0}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"samples": 0}, "samples"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"loss_type": "kto", "loss_weights": [1.0]}, "loss_weights"),
        ({"simpo_gamma": 1.0}, "simpo_gamma"),
        ({"desirable_weight": 2.0}, "desirable_weight"),
        ({"loss_type": "simpo", "length_normalization": True}, "length_normalization"),
        ({"loss_type": "simpo", "reference": "frozen"}, "reference"),
        ({"loss_type": "simpo", "ref_model": "m"}, "ref_model"),
        ({"loss_type": "kto", "log_variance_steps": 5}, "log_variance_steps"),
        ({"loss_type": "kto", "judge": "judge.py:judge"}, "judge"),
        ({"complementary": True, "samples": 1}, "samples"),
        ({"reference": "adapter", "ref_model": "m"}, "ref_model"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"canvas_length": 0}, "canvas_length"),
        ({"beta": math.inf}, "beta"),
        ({"loss_type": "kto", "train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"loss_type": ["sigmoid", "dpo"]}, "loss_type"),
        ({"loss_type": []}, "loss_type"),
        ({"loss_type": ["sigmoid", "kto"]}, "loss_type"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights"),
        ({"loss_type": "sft", "reference": "frozen"}, "reference"),
        ({"loss_type": "simpo", "f_divergence_type": "forward_kl"}, "f_divergence_type"),
        (
            {"loss_type": ["sigmoid", "bco_pair"], "f_divergence_type": "js_divergence"},
            "f_divergence_type and loss_type",
        ),
        ({"f_divergence_type": "kl"}, "f_divergence_type"),
        ({"f_alpha_divergence_coef": 0.3}, "f_alpha_divergence_coef"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"reference": "frozen", "sync_ref_model": True, "ref_model": "m"}, "sync_ref_model"),
        ({"reference": "frozen", "ref_model_sync_steps": 2}, "ref_model_sync_steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(more, where, tmp_path):
    with raises(ConfigError, where=where):
        config(tmp_path, **more)


@pytest.mark.parametrize(
    ("pattern", "more", "exact"),
    [
        (("bidirectional",), {}, False),
        (("bidirectional",), {"bound": "exact"}, "bound"),
        (("block_causal", 4), {}, True),
        (("block_causal", 4), {"bound": "elbo"}, False),
        (("block_causal", 5), {}, False),
        (("block_causal", 5), {"bound": "exact"}, "bound"),
        (("causal",), {}, True),
        (("causal",), {"bound": "exact"}, True),
        (("causal",), {"bound": "elbo"}, "bound"),
        (("causal",), {"complementary": True}, "complementary"),
        (("causal",), {"samples": 4}, "samples"),
        (("block_causal", 4), {"log_variance_steps": 5}, "log_variance_steps"),
    ],
)
def test_the_attention_decides_whether_the_likelihood_is_exact(pattern, more, exact, tmp_path):
    with raises(ConfigError, where=exact) if isinstance(exact, str) else nullcontext():
        assert config(tmp_path, **more).exact(llama_lm(*pattern)) is exact


def test_reference_adapter_needs_adapters(tmp_path):
    with raises(ConfigError, where="reference and lora"):
        make("dpo", tmp_path, reference="adapter")


# Recipes.


def recipe(name: str) -> Any:
    return resolve(read_layers(recipes=[name], overrides=["model.path=m", "output_dir=out"]))


def test_the_recipe_for_llada_is_that_of_its_authors():
    made = recipe("dpo-llada-8b")
    args = training_arguments("dpo", made)
    assert (args.loss_type, args.beta, args.samples, args.complementary, args.learning_rate) == (
        "sigmoid",
        0.2,
        8,
        False,
        5e-7,
    )
    assert (
        args.per_device_train_batch_size * args.gradient_accumulation_steps == 64
        and args.num_train_epochs == 1
    )
    assert made.data.max_rows == 350_000


def test_the_recipe_for_a_small_gpu_trains_adapters_and_recomputes():
    made = recipe("dpo-rtx4080-16gb")
    args = training_arguments("dpo", made)
    assert made.lora is not None and made.model.dtype == "bfloat16" and made.model.device == "cuda"
    assert args.activation_checkpointing and args.bf16


def test_the_tiny_recipe_trains(model, tmp_path):
    output = tmp_path / "out"
    result = unmask(
        "dpo", "--recipe", "dpo-tiny", "--model", model, "--task", "sudoku", "--output", output, *QUICK
    )
    assert result.exit_code == 0, (result.output, result.exception)
    lines = MetricsLog(output / "training_logs.json").read()
    assert {
        "loss",
        "margin",
        "accuracy",
        "chosen",
        "rejected",
        "tokens_per_second",
        "learning_rate",
    } <= lines[0].keys()
    assert parse_yaml((output / "config.yaml").read_text(), "config.yaml")["training"]["samples"] == 8
    # a line of at most 100 columns has no room for more
    assert "loss" in result.stderr and "accuracy" in result.stderr
