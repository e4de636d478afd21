"""The settings of a verb: all are listed, the file that help shows is up to date, and they are found by pattern."""

from __future__ import annotations

import dataclasses
import json

import pytest

from unmask.cli.settings import OWN_SETTINGS
from unmask.commands.settings.listing import GROUPS, METHOD, OF_GRPO, SET_BY_RUN, grouped, matching, near_keys, settings_of_verb
from unmask.commands.verbs import VERBS


def test_the_file_that_help_shows_has_the_settings_of_the_configs() -> None:
    assert json.loads(OWN_SETTINGS.read_text(encoding="utf-8")) == {verb: grouped(verb) for verb in VERBS}, (
        "run scripts/own_settings.py, which writes it"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_field_of_the_training_arguments_is_listed(verb: str) -> None:
    found = {setting.key: setting for setting in settings_of_verb(verb)}
    fields = {field.name for field in dataclasses.fields(VERBS[verb].config_class) if field.init} - set(SET_BY_RUN)
    assert {f"training.{name}" for name in fields} == {key for key in found if key.startswith("training.")}
    assert {"model.path", "sampler.constraint.regex", "lora.r"} <= found.keys()
    assert found["training.weight_decay"].stock and not found["training.learning_rate"].stock
    assert all(json.dumps(setting.default) for setting in found.values())


def test_the_groups_name_settings_that_there_are() -> None:
    own = {verb: {name for names in grouped(verb).values() for name in names} for verb in VERBS}
    assert {name for names in GROUPS.values() for name in names} <= set().union(*own.values())
    assert {name for names in OF_GRPO.values() for name in names} <= own["grpo"]
    assert grouped("convert")[METHOD].keys() >= {"attention", "block_size", "stages"}
    assert "block_size" in grouped("grpo")["sampling of completions"]


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("learning_rate", {"training.learning_rate"}),
        ("--Learning-Rate", {"training.learning_rate"}),
        ("*_rows", {"data.max_rows", "data.eval_rows", "training.bad_rows"}),
        ("sampler.revise.t_?n", {"sampler.revise.t_on"}),
        ("semi-autoregressive", {"sampler.block_size"}),
        ("no such thing", set()),
    ],
)
def test_settings_are_found_by_name_and_description(pattern: str, keys: set[str]) -> None:
    found = {setting.key for setting in matching(settings_of_verb("sft"), pattern)}
    assert keys <= found and bool(keys) == bool(found) and len(found) < 8


def test_settings_found_by_name_come_first() -> None:
    names = ["steps" in setting.key for setting in matching(settings_of_verb("sft"), "steps")]
    assert names == sorted(names, reverse=True) and len(set(names)) == 2


def test_near_keys_are_those_of_similar_names() -> None:
    settings = settings_of_verb("sft")
    assert near_keys("learnin_rate", settings)[0] == "training.learning_rate"
    assert near_keys("use_amp", settings) == ["training.bf16"] and near_keys("xyzzy", settings) == []
