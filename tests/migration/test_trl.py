"""The tables compared with TRL's classes: every field is known, and every default that is written is
TRL's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from unmask.migration.formats import FORMATS
from unmask.migration.rules import TRANSFORMERS
from unmask.training.settings.listing import stock_settings

trl = pytest.importorskip("trl", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt")

NEW_IN_TRL = {
    "grpo": ("sapo_", "vespo_", "entropy_coef", "entropy_target", "max_tool", "transformers_continuous"),
    "dpo": (),
}
"""Settings of losses and of tools that Unmask lacks: the report calls them not known."""
NOT_WRITTEN = {"method"}


@pytest.mark.parametrize("verb", ["grpo", "dpo"])
def test_every_field_is_known(verb: str) -> None:
    config = {"grpo": trl.GRPOConfig, "dpo": trl.DPOConfig}[verb]
    known = (
        FORMATS[f"trl-{verb}"].table.keys()
        | TRANSFORMERS.keys()
        | {each.name for each in stock_settings().values()}
    )
    names = {
        field.name
        for cls in (config, trl.ModelConfig, trl.ScriptArguments)
        for field in dataclasses.fields(cls)
        if field.init
    }
    assert {name for name in names - known if not name.startswith(NEW_IN_TRL[verb] or ("?",))} == set()


@pytest.mark.parametrize("verb", ["grpo", "dpo"])
def test_defaults_are_those_of_trl(verb: str) -> None:
    config = {"grpo": trl.GRPOConfig, "dpo": trl.DPOConfig}[verb]
    theirs: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config)}
    form = FORMATS[f"trl-{verb}"]
    ours = form.defaults({}, None)
    for key, setting in ours.items():
        name = key.partition(".")[2]
        if name == "bf16":
            assert theirs["bf16"] is None and "fp16" in theirs  # None: on unless fp16 is
        elif name == "activation_checkpointing":
            assert theirs["gradient_checkpointing"] is True
        elif name in ("advantage", "loss_type"):
            old = {"advantage": "scale_rewards", "loss_type": "loss_type"}[name]
            assert form.table[old].read(theirs[old], {}) == {key: setting}
        elif name not in NOT_WRITTEN:
            assert theirs[name] == setting, name
