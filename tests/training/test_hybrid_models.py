"""Models with recurrent layers train as others do: every verb and method, checkpointing, and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

import unmask
from tests.errors import raises
from tests.helpers import partly_slow
from tests.models.configurations import tiny_lm
from tests.training.equal_runs import model
from tests.training.tiny_runs import TEXTS, equal, low_ids, make, settings, weights
from unmask.config.sampler import SamplerConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError
from unmask.rl.methods.base import METHODS
from unmask.training.hardware_checks import refuse_unsupported
from unmask.training.trainer import DiffusionTrainer

NAMES = ["qwen3_5_text", "granitemoehybrid", "lfm2"]
VERBS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "sft": {"packing": True},
    "dpo": {},
    "dpo by its bound": {"bound": "elbo", "samples": 2},
    "kto": {},
    "grpo": {"reward": low_ids, "beta": 0.04, "kl_to": "reference", "num_iterations": 2},
}
every_model = partly_slow("name", [*NAMES[:2], pytest.param(NAMES[2], marks=pytest.mark.nightly)], 0)


def by_turns(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within every group, of the mean a half: TraceRL drops easier and harder groups."""
    return [float(place % 2) for place in range(len(completions))]


def trainer(verb: str, name: str, folder: Path, **more: Any) -> DiffusionTrainer:
    verb_alone = verb.split()[0]
    return make(verb_alone, folder, model(name, verb_alone), **VERBS[verb] | more)


@every_model
@partly_slow("verb", VERBS, 0, 2, 5)
def test_a_resumed_run_is_the_same_run(verb, name, tmp_path):
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = (trainer(verb, name, tmp_path, **saving) for _ in range(2))
    start = weights(whole.lm)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal(weights(resumed.lm), weights(whole.lm)) and not equal(start, weights(whole.lm))


def test_experts_whose_weights_are_stored_one_by_one_are_resumed(tmp_path):
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = (trainer("pretrain", "granitemoehybrid", tmp_path, **saving) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal(weights(resumed.lm), weights(whole.lm))


@every_model
@partly_slow("verb", VERBS, 1, 3, 5)
def test_checkpointing_changes_nothing(verb, name, tmp_path):
    plain, checkpointed = (
        trainer(verb, name, tmp_path, optim="sgd", activation_checkpointing=on) for on in (False, True)
    )
    for each in (plain, checkpointed):
        each.train()
    assert equal(weights(checkpointed.lm), weights(plain.lm))


@pytest.mark.slow  # it is compiled for every layout
@pytest.mark.usefixtures("dynamo_as_it_was")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_trains_alike(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    plain, other = (trainer("sft", NAMES[0], tmp_path / str(len(more)), **more) for more in ({}, compiled))
    for each in (plain, other):
        each.train()
    torch.testing.assert_close(weights(other.lm), weights(plain.lm), rtol=0, atol=1e-5)


@partly_slow(
    "name", [NAMES[1], *(pytest.param(name, marks=pytest.mark.nightly) for name in (NAMES[0], NAMES[2]))]
)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_reinforcement_learning_trains_them(method, name, tmp_path):
    run = make(
        "grpo",
        tmp_path,
        model(name, "grpo"),
        method=method,
        reward=by_turns,
        epsilon=None,
        learning_rate=1e-3,
    )
    start = weights(run.lm)
    run.train()
    assert not equal(start, weights(run.lm))
    assert all(weight.isfinite().all() for weight in weights(run.lm).values())


@every_model
@partly_slow(
    "recipe",
    [
        {"block_size": 4},
        {"block_size": 4, "causal_context": True, "stages": [{"lm_loss": 0.1}]},
        {"block_size": 4, "distillation": 0.5, "alignment": 0.1},
        {"block_size": 4, "distillation": 1.0, "states": "sampler", "max_new_tokens": 6, "lmbda": 0.6},
        {"stages": [{"block_size": 1}, {"block_size": 2}, {"block_size": 4}]},
        {"block_size": 4, "time_embedding": True, "stages": [{"train": ["attention", "mask_token"]}, {}]},
    ],
    1,
    3,
    ids=["block", "causal context", "distilled", "on-policy", "growing", "stages"],
)
def test_every_recipe_converts_them(recipe, name, tmp_path):
    more = {"stages": [{}], "max_steps": 3, "attention": "block_causal"} | recipe
    args = ConvertConfig(**settings(tmp_path, max_length=32, packing=False, **more))
    rows = [{"prompt": row["text"]} for row in TEXTS] if args.states == "sampler" else TEXTS
    run = ConvertTrainer(model(name, "convert"), args, train_dataset=rows, eval_dataset=rows[:3])
    run.train()
    run.save_model(str(tmp_path / "model"))
    lines = run.state.log_history
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    found = unmask.load(tmp_path / "model")
    assert (found.attention, found.block_size) == ("block_causal", 4)
    config = SamplerConfig(max_new_tokens=8)
    assert unmask.generate(found, ["abc"], config).tokens == unmask.generate(run.lm, ["abc"], config).tokens


@every_model
def test_the_reference_of_adapters_is_the_model_without_them(name, tmp_path):
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    whole, adapted = (
        make("dpo", tmp_path / str(len(more)), model(name, "dpo"), max_steps=1, **more)
        for more in ({}, {"peft_config": adapters})
    )
    for run in (whole, adapted):
        run.train()
    first, other = (run.state.log_history[0] for run in (whole, adapted))
    assert other["loss"] == pytest.approx(first["loss"]) and abs(other["margin"]) < 1e-5


@every_model
def test_the_exact_likelihood_is_above_its_bound(name):
    lm = tiny_lm(name, "block_causal", 3, shift=True)
    exact, bound = (
        unmask.log_likelihood(lm, ["abc", "d"], ["efgha", "b"], estimator=estimator, samples=256)
        for estimator in ("exact", "elbo")
    )
    assert (bound <= exact + 0.02).all() and (exact - bound < 2).all()
    assert bound[1] == pytest.approx(float(exact[1]))  # one token


def test_zero_3_is_refused():
    args = SimpleNamespace(fsdp=None, deepspeed={"zero_optimization": {"stage": 3}})
    with raises(ConfigError, where="deepspeed"):
        refuse_unsupported(tiny_lm("lfm2", "block_causal", 3), args, adapters=False)


def test_fsdp_wraps_the_layers_that_there_are():
    lm = tiny_lm("qwen3_5_text", "block_causal", 3)
    assert lm.model._no_split_modules == {"Qwen3_5DecoderLayer"}
