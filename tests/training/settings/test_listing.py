"""The settings of a verb: all are listed, the file that help shows is up to date, and they are found by
pattern."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import TrainingArguments

from scripts.list_settings import listed_settings
from tests.errors import raises
from unmask.artifacts import package_version
from unmask.cli.verbs import VERBS
from unmask.config.run import build_training_args, checked_fields
from unmask.errors import ConfigError
from unmask.training.settings import listing
from unmask.training.settings.listing import (
    GROUPS,
    GRPO_GROUPS,
    METHOD,
    SET_BY_RUN,
    SETTINGS,
    check_training,
    grouped,
    matching,
    near_keys,
    settings_of_verb,
)


@pytest.mark.skipif(
    json.loads(SETTINGS.read_text(encoding="utf-8"))["transformers"] != package_version("transformers"),
    reason="lists another version",
)
def test_the_list_has_the_settings_of_the_configs() -> None:
    listed = json.loads(json.dumps(listed_settings()))
    assert json.loads(SETTINGS.read_text(encoding="utf-8")) == listed, (
        "run scripts/list_settings.py, which writes it"
    )
    assert tuple(VERBS) == listing.VERBS


def test_another_version_of_transformers_may_have_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    assert listing.fields_of_training_arguments() == fields
    before = settings_of_verb("sft")
    monkeypatch.setattr(listing, "package_version", lambda name: "0.0")
    monkeypatch.setattr(listing, "fields_of_training_arguments", lambda: [*fields, "brand_new"])
    caches = (settings_of_verb, listing.listed_settings)
    for cache in caches:
        cache.cache_clear()
    try:
        assert {setting.key for setting in settings_of_verb("sft")} == {setting.key for setting in before} | {
            "training.brand_new"
        }
        check_training("sft", {"brand_new": [1]})
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize(
    ("verb", "training"),
    [
        ("sft", {"lerning_rate": 1}),
        ("sft", {"output_dir": "r"}),
        ("sft", {"learning_rate": "abc"}),
        ("grpo", {"num_generations": True}),
        ("dpo", {"max_steps": 1.5}),
        ("convert", {"max_length": None}),
        ("sft", {"max_length": 1}),
        ("convert", {"learning_rate": "-1e-4"}),
        ("pretrain", {"seed": 2**32}),
        ("dpo", {"label_smoothing": float("nan")}),
        ("sft", {"schedule": "linaer"}),
        ("sft", {"max_steps": 0}),
        ("sft", {"eval_steps": 3}),
        ("pretrain", {"neftune_noise_alpha": 5}),
        ("sft", {"cart_p": 0.2}),
        ("dpo", {"label_smoothing": 0.1, "loss_type": "ipo"}),
        ("grpo", {"kl": "k3", "beta": 0}),
    ],
)
def test_a_wrong_key_type_or_value_gets_the_error_of_the_config_itself(
    verb: str, training: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as early:
        check_training(verb, training)
    with pytest.raises(ConfigError) as late:
        build_training_args(VERBS[verb].config_class, training, output_dir="r")
    assert early.value.where == late.value.where and early.value.what == late.value.what


@pytest.mark.parametrize(
    ("verb", "training"),
    [
        (
            "sft",
            {
                "learning_rate": "1e-4",
                "max_steps": "3",
                "bf16": "true",
                "report_to": ["tensorboard"],
                "eval_strategy": "no",
            },
        ),
        (
            "grpo",
            {"method": "parity.py:Parity", "method_settings": {"a": 1}, "remasking": "margin", "beta": 0},
        ),
        ("grpo", {"method": "diffu-grpo", "kl": "k3", "sync_ref_model": True}),
        (
            "sft",
            {
                "logging_dir": None,
                "fsdp_config": {"version": 2},
                "optim": "adamw_torch",
                "loss_type": "sequence_nll",
            },
        ),
    ],
)
def test_what_the_config_takes_is_not_refused_before(verb: str, training: dict[str, object]) -> None:
    checked_fields(VERBS[verb].config_class, training, "training")
    check_training(verb, training)


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_out_of_range_is_refused_before_torch_is_imported(verb: str) -> None:
    limited = [(setting, setting.limits) for setting in settings_of_verb(verb) if setting.limits]
    assert len(limited) > 10
    for setting, limits in limited:
        for value in [limits[end] + sign for end, sign in (("low", -1), ("high", 1)) if end in limits]:
            with pytest.raises(ConfigError) as refused:
                check_training(verb, {setting.name: value})
            assert refused.value.where == setting.key and "out of range" in str(refused.value)


def test_an_unknown_word_is_refused_with_the_known_ones() -> None:
    with raises(ConfigError, where="training.loss_type"):
        check_training("sft", {"loss_type": "tokn"})


@pytest.mark.parametrize("verb", VERBS)
def test_every_field_of_the_training_arguments_is_listed(verb: str) -> None:
    found = {setting.key: setting for setting in settings_of_verb(verb)}
    fields = {field.name for field in dataclasses.fields(VERBS[verb].config_class) if field.init} - set(
        SET_BY_RUN
    )
    assert {f"training.{name}" for name in fields} == {key for key in found if key.startswith("training.")}
    assert {"model.path", "sampler.constraint.regex", "lora.r"} <= found.keys()
    assert found["training.weight_decay"].stock and not found["training.learning_rate"].stock
    assert all(json.dumps(setting.default) for setting in found.values())


def test_the_groups_name_settings_that_there_are() -> None:
    own = {
        verb: {setting.name for settings in grouped(verb).values() for setting in settings} for verb in VERBS
    }
    assert {name for names in GROUPS.values() for name in names} <= set().union(*own.values())
    assert {name for names in GRPO_GROUPS.values() for name in names} <= own["grpo"]
    assert {setting.name for setting in grouped("convert")[METHOD]} >= {"attention", "block_size", "stages"}
    assert "block_size" in {setting.name for setting in grouped("grpo")["sampling of completions"]}


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
