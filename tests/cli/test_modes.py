"""What each mode sets on which hardware, its precedence, and that it reaches the arguments of every verb."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import training_args

from tests.training.tiny_runs import make, unmask
from unmask.cli import modes
from unmask.cli.modes import hardware_here, mode_settings, with_mode
from unmask.cli.run import training_arguments
from unmask.cli.verbs import VERBS
from unmask.config.layers import MODES, Layers, read_layers, read_settings
from unmask.config.run import RunConfig, resolve
from unmask.config.yaml import parse_yaml

NAMES = ["speed", "memory", "balanced"]
GPU = {"gpu", "ampere"}
ON_CPU = {"bf16": False, "fp16": False, "dataloader_num_workers": 0, "dataloader_pin_memory": False}
EXPECTED: dict[tuple[str, str], dict[str, Any]] = {
    ("speed", "cpu"): ON_CPU
    | {"activation_checkpointing": False, "logprob_batch_size": 4096, "rollout_batch_size": 1024},
    ("memory", "cpu"): ON_CPU
    | {"activation_checkpointing": True, "logprob_batch_size": 1, "rollout_batch_size": 16},
    ("balanced", "cpu"): ON_CPU | {"logprob_batch_size": None, "rollout_batch_size": 256},
    ("speed", "gpu"): {
        **{
            "activation_checkpointing": False,
            "logprob_batch_size": 4096,
            "rollout_batch_size": 1024,
            "optim": "adamw_torch_fused",
        },
        **{"torch_compile": True, "dataloader_num_workers": 1, "bf16": True, "fp16": False, "tf32": True},
    },
    ("memory", "gpu"): {
        **{
            "activation_checkpointing": True,
            "logprob_batch_size": 1,
            "rollout_batch_size": 16,
            "optim": "adamw_bnb_8bit",
        },
        **{"dataloader_num_workers": 0, "bf16": True, "fp16": False},
    },
    ("balanced", "gpu"): {
        "logprob_batch_size": None,
        "rollout_batch_size": 256,
        "dataloader_num_workers": 1,
        "bf16": True,
        "fp16": False,
    },
}
"""The arguments; pinned memory on a GPU is told apart below, as on a CPU nothing is pinned."""


def layers(mode: str, verb: str, *overrides: str, **sources: Any) -> Layers:
    required = ["model.path=m", "output_dir=out"]
    return with_mode(
        read_layers(overrides=[*required, *overrides], **sources),
        mode,
        verb,
        after=len(sources.get("recipes", ())),
    )


def config(mode: str, verb: str, *overrides: str, **sources: Any) -> RunConfig:
    return resolve(layers(mode, verb, *overrides, **sources))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tf32_restored: None) -> None:
    """An Ampere GPU, as far as settings depend on it."""
    monkeypatch.setattr(modes, "hardware_here", lambda **_: GPU)
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("mode", NAMES)
def test_on_a_cpu_a_mode_asks_for_nothing_that_it_lacks(mode, verb):
    made = config(mode, verb, "training.use_cpu=true")
    args = training_arguments(verb, made)
    expected = {
        name: value
        for name, value in EXPECTED[mode, "cpu"].items()
        if verb == "grpo" or name != "rollout_batch_size"
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert not args.tf32 and not args.torch_compile and args.optim == "adamw_torch_fused"
    assert made.sampler.batch_size == (16 if mode == "memory" else 64)


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # bitsandbytes uses it
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("mode", NAMES)
def test_on_a_gpu_every_option_arrives(mode, verb):
    if mode == "memory" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes (the extra `cuda`)")
    made = config(mode, verb)
    assert made.training["dataloader_pin_memory"] is True
    args = training_arguments(verb, made)
    expected = {
        name: value
        for name, value in EXPECTED[mode, "gpu"].items()
        if verb == "grpo" or name != "rollout_batch_size"
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_every_section_is_one_that_can_hold():
    for mode in NAMES:
        assert set(read_settings(MODES / f"{mode}.yaml")) <= {
            "everywhere",
            "cpu",
            "gpu",
            "ampere",
            "fsdp",
            *VERBS,
        }
        older = mode_settings(mode, {"sft", "gpu"})["training"]
        assert not {"bf16", "tf32", "rollout_batch_size"} & older.keys()


def test_the_hardware_is_what_this_machine_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware_here() == {"cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in [((7, 5), {"gpu"}), ((8, 0), GPU), ((9, 0), GPU)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert hardware_here() == expected
    assert hardware_here(use_cpu=True) == {"cpu"}
    assert config("speed", "sft", "training.use_cpu=true").training["bf16"] is False


@pytest.mark.usefixtures("gpu")
def test_a_mode_wins_over_recipes_and_gives_way_to_all_else(tmp_path):
    (tmp_path / "run.yaml").write_text("training: {torch_compile: false}")
    sources = {
        "recipes": ["rtx3090-24gb"],
        "config_files": [tmp_path / "run.yaml"],
        "environ": {"UNMASK_TRAINING__TF32": "false"},
    }
    found = layers("speed", "grpo", "training.logprob_batch_size=2", **sources)
    training = resolve(found).training
    # the recipe: 8 bits, recomputed
    assert (training["optim"], training["activation_checkpointing"]) == ("adamw_torch_fused", False)
    assert (training["torch_compile"], training["tf32"], training["logprob_batch_size"]) == (False, False, 2)
    assert found.source_of("training.optim") == "--mode speed"


@pytest.mark.usefixtures("gpu")
def test_shards_recompute_in_their_own_way_and_take_no_8_bit_optimizer():
    made = training_arguments("sft", config("memory", "sft", recipes=["a40-48gb-x3"]))
    assert not made.activation_checkpointing and made.fsdp_config["activation_checkpointing"]
    assert (made.optim, made.logprob_batch_size) == ("adamw_torch_fused", 1)


def test_the_word_on_the_command_line():
    run = ["grpo", "--model", "m", "--output", "out", "--print-config", "training.use_cpu=true"]
    result = unmask(*run, "--mode", "memory")
    assert result.exit_code == 0, result.output
    training = parse_yaml(result.stdout, "stdout")["training"]
    assert (
        training["activation_checkpointing"],
        training["logprob_batch_size"],
        training["rollout_batch_size"],
    ) == (True, 1, 16)
    refused = unmask(*run, "--mode", "fast")
    assert refused.exit_code == 2 and "speed" in refused.stderr


@pytest.mark.parametrize(("mode", "rows"), [("speed", 12), ("balanced", 3), ("memory", 1)])
def test_as_many_noised_rows_of_reinforcement_learning_go_together_as_the_mode_says(mode, rows, tmp_path):
    training = mode_settings(mode, {"grpo", "cpu"})["training"] | {
        "activation_checkpointing": False,
        "max_steps": 1,
    }
    trainer = make("grpo", tmp_path, method="coupled-grpo", **training)  # four completions in three views
    seen: list[int] = []
    trainer.lm.model.model.layers[0].register_forward_hook(
        lambda module, args, out: seen.append(len(args[0]) * torch.is_grad_enabled())
    )
    trainer.train()
    assert max(seen) == rows
