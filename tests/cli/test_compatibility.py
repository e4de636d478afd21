"""Whatever an error about two settings proposes is accepted: no remedy is refused in its turn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import partly_slow
from unmask.cli.run import check_together, planned_arguments
from unmask.cli.verbs import VERBS
from unmask.config.run import LoraSettings, RunConfig, StartConfig
from unmask.errors import ConfigError

Changes = Mapping[str, Any]

ADAPTERS: Changes = {"lora": LoraSettings(r=2)}
WHOLE: Changes = {"lora": None}
EVERYWHERE: dict[str, Changes] = {
    "lora": ADAPTERS,
    "fsdp": {"fsdp": True},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "4bit": {"model.quantization": "4bit"},
    "split": {"model.device_map": "balanced"},
    "offload": {"optimizer_offload": True},
    "rounding": {"optim_args": "bf16_stochastic_round=True"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "8bit": {"optim": "adamw_torch_8bit"},
}
OF_VERBS: dict[str, dict[str, Changes]] = {
    "pretrain": {"from scratch": {"model.from_scratch": True}},
    "convert": {"time": {"time_embedding": True}, "blocks": {"attention": "block_causal"}},
    "sft": {"head": {"quality_head": "alone"}, "gaps": {"max_gap": 4}},
    "dpo": {"adapter": {"reference": "adapter"}, "frozen": {"reference": "frozen"}},
    "grpo": {
        "vllm": {"rollout": {"backend": "vllm", "url": "http://127.0.0.1:9", "sync": "lora"}},
        "served": {"rollout": {"backend": "server", "url": "http://127.0.0.1:9"}},
        "moving": {"beta": 0.1, "sync_ref_model": True},
    },
}
UNSHARDED: Changes = {"fsdp": None, "deepspeed": None}
PROPOSALS: dict[str, list[Changes]] = {
    r"Train adapters \(lora\)|Set lora|Train with lora": [ADAPTERS],
    r"lora=null|[Tt]rain without adapters|without lora": [WHOLE],
    r"deepspeed zero1 or zero2": [{"fsdp": None, "deepspeed": name} for name in ("zero1", "zero2")],
    r"leave fsdp and deepspeed out|without FSDP and ZeRO 3": [UNSHARDED],
    r"(fsdp=null|Leave fsdp out)": [{"fsdp": None}],
    r"(deepspeed=null|Leave deepspeed out)": [{"deepspeed": None}],
    r"without quantization": [{"model.quantization": None}],
    r"reference stored or frozen": [{"reference": "stored"}, {"reference": "frozen"}],
    r"Leave optimizer_offload out": [{"optimizer_offload": False}],
    r"model\.device_map=null|start one process": [{"model.device_map": None}],
    r"[Ll]eave optim_args out": [{"optim_args": None}],
    r"use optim adamw_torch_8bit .*train all weights in bfloat16": [
        {"optim": optim, "model.dtype": "bfloat16", **WHOLE}
        for optim in ("adamw_torch_8bit", "adamw_torch_4bit")
    ],
    r"set model\.dtype to bfloat16": [{"model.dtype": "bfloat16"}],
    r"or --recipe offload|Use one of adamw": [{"optim": "adamw_torch"}],
    r"Leave quality_head out": [{"quality_head": "off"}],
    r"Leave max_gap out": [{"max_gap": None}],
    r"time_embedding: false": [{"time_embedding": False}],
    r"rollout\.backend server or local": [
        {"rollout": {"backend": "server", "url": "http://127.0.0.1:9"}},
        {"rollout": {"backend": "local"}},
    ],
    r"rollout\.backend local": [{"rollout": {"backend": "local"}}],
    r"rollout\.sync to disk": [{"rollout": {"backend": "vllm", "url": "http://127.0.0.1:9", "sync": "disk"}}],
    r"Leave sync_ref_model out": [{"sync_ref_model": False}],
    r"Leave one of (the two|them) out|^Leave it out": [],  # either of what was given
}
"""What the words of a remedy say to change."""


def check(verb: str, path: Path, changes: Changes) -> ConfigError | None:
    """The error of a run with these settings, whose processes a launcher is still to start."""
    model = {
        name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")
    }
    training = {
        name: value for name, value in changes.items() if name != "lora" and not name.startswith("model.")
    }
    own = {"use_cpu": True, "max_steps": 4}
    settings = {
        "model": StartConfig(
            path=str(path), attention=None if verb in ("convert", "grpo") else "bidirectional", **model
        ),
        "lora": changes.get("lora"),
    }
    config = RunConfig(**settings, training=own | training, output_dir="absent")
    try:
        check_together(config, planned_arguments(verb, config), planned=True)
    except ConfigError as error:
        return error
    return None


def proposed(error: ConfigError) -> list[Changes]:
    """All changes that a remedy names. Every remedy has to name one that is known here."""
    found = [changes for words, changes in PROPOSALS.items() if re.search(words, error.remedy or "")]
    assert found, f"no proposal is known in {error.remedy!r} of {error.where!r}"
    return [change for changes in found for change in changes]


@partly_slow("verb", list(VERBS), list(VERBS).index("convert"))
def test_what_an_error_proposes_is_accepted(verb, model):
    given = EVERYWHERE | OF_VERBS[verb]
    refused = 0
    for names in [*itertools.combinations(given, 2), *itertools.combinations(given, 1)]:
        changes = {key: value for name in names for key, value in given[name].items()}
        if (error := check(verb, model, changes)) is None:
            continue
        refused += 1
        # refused for themselves
        others = {str(check(verb, model, given[name])) for name in names if len(names) > 1}
        for change in proposed(error):
            after = check(verb, model, changes | change)
            if after is not None and str(after) not in others:
                pytest.fail(f"{names}: {error} Then with {change}: {after}")
    assert refused > 10


@pytest.mark.parametrize("key", ["fsdp", "deepspeed"])
def test_a_conversion_with_adapters_is_told_what_it_can_do(key, model):
    sharded = {"fsdp": {"fsdp": True}, "deepspeed": {"deepspeed": "zero1"}}[key]
    error = check("convert", model, {**ADAPTERS, **sharded})
    assert error is not None and error.where == f"training.{key} and lora" and "zero" not in str(error.remedy)
    assert check("convert", model, ADAPTERS) is None and check("convert", model, sharded) is None
