"""Configs of Unmask itself, from before its settings took the names of TRL, vLLM and LLaDA."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from unmask.migration.rules import Old, Rule, RuleTable, Settings, to
from unmask.names import EARLIER_NAMES
from unmask.training.settings.listing import VERBS, settings_of_verb

SECTIONS = ("training", "sampler")
VALUES = {
    "loss_type": {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"},
    "scale_rewards": {"r-mean": "none", "z-score": "group", "population-z-score": "population"},
    "after_eos": {"hidden": "mask", "shown": "noise", "learnt": "train"},
    "remasking": {"confidence": "low_confidence"},
}
"""Today's values by the earlier ones, of each setting by its name of today."""
SFT_LOSSES = {"token": "nll", "sequence": "sequence_nll"}


def earlier_names() -> RuleTable:
    """Every key of a config: those with another name today, and all others as they are."""
    keys = {each.key for verb in VERBS for each in settings_of_verb(verb)}
    keys |= {".".join(key.split(".")[:2]) for key in keys}  # a section within a section is one value
    table = {key: to(key) for key in keys}
    for section in SECTIONS:
        for old, new in EARLIER_NAMES.items():
            if f"{section}.{new}" in keys and f"{section}.{old}" not in keys:
                table[f"{section}.{old}"] = Rule(partial(_renamed, f"{section}.{new}"))
    return table


def _renamed(key: str, value: Any, old: Old) -> Settings:
    name = key.rpartition(".")[2]
    names = (each.removeprefix("training.") for each in old if each.startswith("training."))
    of_sft = name == "loss_type" and verb_of(EARLIER_NAMES.get(each, each) for each in names) == "sft"
    known = SFT_LOSSES if of_sft else VALUES.get(name, {})
    return {key: known.get(value, value) if isinstance(value, str) else value}


def verb_of(names: Iterable[str]) -> str:
    """The first verb that has all of these settings of `training`; sft if none has."""
    wanted = {f"training.{name}" for name in names}
    having = (verb for verb in VERBS if wanted <= {each.key for each in settings_of_verb(verb)})
    return next(having, "sft")
