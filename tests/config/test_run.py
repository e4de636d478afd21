"""Configs: strict, frozen, documented, the same after a round trip; errors that say which key of which source
is wrong and what to do."""

from __future__ import annotations

import dataclasses
import math
import os
import string
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from unmask.config.layers import MODES, RECIPES, Layer, Layers, read_layers, recipe_names, recipe_path
from unmask.config.run import (
    Config,
    DataConfig,
    DataSource,
    LoraSettings,
    ModelConfig,
    RunConfig,
    StartConfig,
    build_training_args,
    check_output_folder,
    resolve,
    to_yaml,
)
from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import dump_yaml, parse_yaml
from unmask.errors import ConfigError, TrainingError, did_you_mean

RUN = {"model": {"path": "m"}, "output_dir": "out"}

texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
) | st.sampled_from(
    ["1e5", "no", "null", "~", "<<", "0x1", ".nan", "1:30", " ", "a\x85b\u2028", "- a", "a: b", "#", "\ufeff"]
)


def plain(floats: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """What YAML can hold."""
    scalars = st.none() | st.booleans() | st.integers() | floats | texts
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    )


numbers = st.floats(allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# YAML


@given(plain(numbers))
def test_yaml_comes_back_as_it_was(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "here") == value


@given(finite)
def test_every_way_to_write_a_float_is_a_float(value: float) -> None:
    for text in (repr(value), f"{value:.3e}", f"{value:.3E}", f"{value:.0e}"):
        read = parse_yaml(text, "here")
        assert isinstance(read, float)
        assert read == float(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5e3", 500.0),
        ("1.", 1.0),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("", None),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert parse_yaml(text, "here") == value
    assert type(parse_yaml(text, "here")) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a'"),
        ("x:\n  a: 1\n  a: 2\n", 3, "'a'"),
        ("a: 1\nb: [1\n", 3, ""),
        ("a: 1\n2: b\n", 2, "'2'"),
        ("a: *b\n", 1, "b"),
    ],
)
def test_malformed_yaml_names_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        read_layers(config_files=[path])
    assert caught.value.where == f"{path}, line {line}"
    assert what in caught.value.what


@pytest.mark.parametrize("content", [b"- 1\n- 2\n", b"just text", b"\xff\xfe\x00", b"a: \x07"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    with raises(ConfigError, where=str(tmp_path / "bad.yaml")):
        read_layers(config_files=[tmp_path / "bad.yaml"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, where=str(tmp_path / "absent.yaml")):
        read_layers(config_files=[tmp_path / "absent.yaml"])


# The order of sources


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, "1.yaml", "training: {a: 1, b: 1, c: 1, d: 1, e: {x: 1, y: 1}}\nlora: {r: 4}\n")
    second = write(tmp_path, "2.yaml", "training: {b: 2, c: 2, d: 2, e: {y: 2}}\nlora: null\n")
    layers = read_layers(
        config_files=[first, second],
        environ={
            "UNMASK_TRAINING__C": "3",
            "UNMASK_TRAINING__D": "3",
            "UNMASK_TRAINING__E__Z": "1e-3",
            "OTHER": "x",
        },
        flags={"training.f": "5", "training.g": None},
        overrides=["training.d=4"],
    )
    assert layers.merged() == {
        "training": {"a": 1, "b": 2, "c": 3, "d": 4, "e": {"x": 1, "y": 2, "z": 1e-3}, "f": "5"},
        "lora": None,
    }
    assert layers.source_of("training.b") == str(second)
    assert layers.source_of("training.d") == "command line"
    assert layers.source_of("training.h") is None


def test_a_value_in_place_of_a_section_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path, "1.yaml", "training: {a: 1}\n")
    for rest in ({"overrides": ["training.b=2"]}, {"config_files": [config]}):
        with raises(ConfigError, where="training (environment variable UNMASK_TRAINING)"):
            read_layers(environ={"UNMASK_TRAINING": "5"}, **rest)


sources = st.lists(
    st.builds(Layer, texts, st.dictionaries(st.sampled_from("abc"), plain(finite), max_size=3)), max_size=4
).map(Layers)


@given(sources, sources)
def test_a_layer_wins_over_those_before_it_and_loses_nothing_of_them(before: Layers, after: Layers) -> None:
    merged = Layers([*before, *after]).merged()
    assert merged.keys() == before.merged().keys() | after.merged().keys()
    assert Layers([Layer("", merged), *after]).merged() == merged
    for key in before.merged().keys() - after.merged().keys():
        assert merged[key] == before.merged()[key]


def test_variables_of_the_tests_and_of_the_command_line_are_no_settings() -> None:
    names = (
        "UNMASK_SHARED",
        "UNMASK_DEBUG",
        "UNMASK_ACCEPT_UNSANDBOXED_CODE",
        "UNMASK_API_KEY",
        "UNMASK_ADMIN_KEY",
    )
    assert read_layers(environ=dict.fromkeys(names, "1")) == ()


@pytest.mark.parametrize("override", ["learning_rate", "=1", "training.=1", ".a=1", "a..b=1"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with raises(ConfigError, where="command line"):
        read_layers(overrides=[override])


def test_files_that_a_shell_writes_in_place_of_a_pattern_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jsonl").touch()
    with raises(ConfigError, where="command line"):
        read_layers(overrides=["b.jsonl"])


@pytest.mark.parametrize(
    ("sources", "key", "source"),
    [
        ({"overrides": ["sampler.steps=0"]}, "sampler.steps", "command line"),
        ({"flags": {"sampler.steps": 0}}, "sampler.steps", "command line"),
        ({"overrides": ["data.train=[{path: a, weight: -1}]"]}, "data.train.0.weight", "command line"),
        (
            {"environ": {"UNMASK_SAMPLER__STEPS": "0"}},
            "sampler.steps",
            "environment variable UNMASK_SAMPLER__STEPS",
        ),
        ({"environ": {"UNMASK_SAMPLR__STEPS": "1"}}, "samplr", "environment variable UNMASK_SAMPLR__STEPS"),
    ],
)
def test_errors_name_the_source(sources: dict[str, Any], key: str, source: str, tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", to_yaml(RunConfig(**RUN)))
    with pytest.raises(ConfigError) as caught:
        resolve(read_layers(config_files=[base], **sources))
    assert caught.value.where == f"{key} ({source})"
    assert caught.value.remedy


def test_an_error_in_a_file_names_that_file(tmp_path: Path) -> None:
    good = write(tmp_path, "good.yaml", to_yaml(RunConfig(**RUN)))
    bad = write(tmp_path, "bad.yaml", "sampler: {top_p: 1.5}")
    with pytest.raises(ConfigError) as caught:
        resolve(read_layers(config_files=[good, bad]))
    assert (
        str(caught.value) == f"sampler.top_p ({bad}): 1.5 is not valid. It should be less than or equal to 1."
    )


# Recipes


def test_recipes_are_all_but_the_modes() -> None:
    modes = {path.stem for path in MODES.glob("*.yaml")}
    assert modes == {"speed", "memory", "balanced"}
    assert {path.stem for path in RECIPES.rglob("*.yaml")} == {*recipe_names(), *modes}


@pytest.mark.parametrize("path", [recipe_path(name) for name in recipe_names()], ids=lambda path: path.stem)
def test_every_recipe_is_a_valid_run(path: Path, tmp_path: Path) -> None:
    from unmask.convert.config import ConvertConfig
    from unmask.preference.config import DPOConfig
    from unmask.rl.config import GRPOConfig
    from unmask.supervised.sft import SFTConfig
    from unmask.training.config import TrainingConfig

    assert recipe_path(path.stem) == path  # no two of one name
    config = resolve(read_layers(recipes=[path.stem], overrides=["model.path=m", "output_dir=out"]))
    verb = {"sft": SFTConfig, "quality": SFTConfig, "variable": SFTConfig}.get(
        path.stem.split("-")[0], TrainingConfig
    )  # of recipes for one verb
    kind = {"conversion": ConvertConfig, "preference": DPOConfig, "rl": GRPOConfig}.get(
        path.parent.name, verb
    )
    build_training_args(kind, config.training, output_dir=str(tmp_path))
    assert config != RunConfig(**RUN)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with raises(ConfigError, where="--recipe"):
        read_layers(recipes=["tinny"])


# The configs


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
    maybe = st.none() | st.integers(1, 9)
    lora = st.builds(
        LoraSettings,
        r=st.integers(1, 64),
        alpha=st.floats(0, 64, exclude_min=True),
        dropout=st.floats(0, 1, exclude_max=True),
        target_modules=names | st.lists(names, max_size=3),
    )
    return RunConfig(
        model=StartConfig(
            path=draw(names),
            block_size=draw(maybe),
            logit_shift=draw(st.none() | st.booleans()),
            revision=draw(st.none() | texts),
        ),
        data=DataConfig(train=draw(st.none() | names), max_rows=draw(maybe), seed=draw(st.integers())),
        sampler=SamplerConfig(
            temperature=draw(st.just(0.0) | st.floats(1e-6, 1e6)),
            top_p=draw(st.floats(0, 1, exclude_min=True)),
            steps=draw(maybe),
        ),
        lora=draw(st.none() | lora),
        training=draw(st.dictionaries(texts, plain(finite), max_size=3)),
        rewards=draw(st.lists(names, max_size=2)),
        output_dir=draw(names),
        overwrite=draw(st.booleans()),
    )


@settings(max_examples=30)
@given(run_configs())
def test_a_printed_config_loads_back(config: RunConfig) -> None:
    assert RunConfig(**parse_yaml(to_yaml(config), "here")) == config


def test_a_temperature_is_printed_where_it_is_given() -> None:
    """It is refused for models of uniform noise, whichever it is: a record may not give it."""
    for sampler in ({}, {"steps": 4}, {"temperature": 0.0}):
        again = RunConfig(**parse_yaml(to_yaml(RunConfig(**RUN, sampler=sampler)), "here"))
        assert ("temperature" in again.sampler.model_fields_set) == ("temperature" in sampler)


@pytest.mark.parametrize(
    "config", [ModelConfig, StartConfig, DataSource, DataConfig, LoraSettings, SamplerConfig, RunConfig]
)
def test_every_field_is_documented(config: type[Config]) -> None:
    assert not [name for name, field in config.model_fields.items() if not field.description]


def test_configs_are_frozen() -> None:
    config = SamplerConfig()
    for name in ("steps", "stepz"):
        with raises(ConfigError, where=name):
            setattr(config, name, 3)
    assert config == SamplerConfig()


@pytest.mark.parametrize(
    ("values", "where", "remedy"),
    [
        ({"model": {"pth": "m"}}, "model.pth", "Did you mean 'path'?"),
        ({"modle": {"path": "m"}}, "modle", "Did you mean 'model'?"),
        ({"lora": {"rnk": 8}}, "lora.rnk", "Known: alpha, dropout, r, target_modules."),
        ({"model": {}}, "model.path", "Set it"),
        ({"model": 3}, "model", "Set model.path, or another of its keys"),
        ({"output_dir": None}, "output_dir", "It should be a valid string"),
        ({"sampler": {"steps": True}}, "sampler.steps", "It should be a valid integer"),
        ({"sampler": {"seed": 1.5}}, "sampler.seed", "It should be a valid integer"),
        ({"sampler": {"temperature": math.inf}}, "sampler.temperature", "It should be a finite number"),
        ({"sampler": {"temperature": -0.1}}, "sampler.temperature", "greater than or equal to 0"),
        ({"sampler": {"top_p": 0.0}}, "sampler.top_p", "greater than 0"),
        (
            {"sampler": {"remasking": "best"}},
            "sampler.remasking",
            "'low_confidence', 'margin', 'entropy', 'random' or 'left_to_right'",
        ),
        ({"lora": {"target_modules": 3}}, "lora.target_modules", "a valid string or a valid list"),
        ({"rewards": ["a", 3]}, "rewards.1", "a valid string"),
        ({"data": {"train": 3}}, "data.train", "a valid string or a valid list"),
        ({"data": {"train": []}}, "data.train", "at least 1 item"),
        ({"data": {"train": [{"weight": 1}]}}, "data.train.0.path", "Set it"),
        (
            {"data": {"train": [{"path": "a"}, {"path": "b", "weight": 0}]}},
            "data.train.1.weight",
            "greater than 0",
        ),
        ({"data": {"train": [{"path": "a", "wieght": 1}]}}, "data.train.0.wieght", "Did you mean 'weight'?"),
        ({"training": {"x": {"y": object()}}}, "training.x.y", "a valid JSON value"),
    ],
)
def test_errors_name_key_value_and_remedy(values: dict[str, Any], where: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{**RUN, **values})
    assert caught.value.where == where
    assert remedy in (caught.value.remedy or "")


def test_a_config_of_its_own_names_its_own_keys() -> None:
    with raises(ConfigError, where="steps"):
        SamplerConfig(steps=0)


@given(st.text(string.ascii_lowercase, min_size=4, max_size=10), st.integers(0, 9))
def test_one_missing_letter_is_understood(name: str, gap: int) -> None:
    misspelt = name[: gap % len(name)] + name[gap % len(name) + 1 :]
    assert did_you_mean(misspelt, [name, "0123456789"]) == f"Did you mean {name!r}?"


def test_lora_settings_are_those_of_peft() -> None:
    config = LoraSettings(r=3, alpha=5.0, dropout=0.25, target_modules=["q_proj"]).to_peft()
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (
        3,
        5.0,
        0.25,
        {"q_proj"},
    )
    assert config.task_type == "CAUSAL_LM"


# The training section


@dataclasses.dataclass
class Other:
    number: int


@dataclasses.dataclass
class Arguments:
    output_dir: str
    rate: float = 0.1
    rows: int = 1
    smooth: bool = False
    optional: int | None = None
    name: Literal["a", "b"] | None = None
    extra: dict | str | None = None
    other: Other | int = 0
    derived: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError("rate must be at most 1.")
        if self.rows > 9:
            raise ConfigError("too many", where="rows", remedy="Take fewer.")
        if self.smooth and self.rate:
            raise ValueError("smooth and rate exclude each other")


def test_a_training_section_is_read_by_the_annotations() -> None:
    section = {"rate": "1e-5", "rows": 3, "optional": None, "extra": {"a": [1]}, "name": "b", "smooth": False}
    assert build_training_args(Arguments, section, output_dir="out") == Arguments(
        "out", 1e-5, 3, extra={"a": [1]}, name="b"
    )


def test_what_pydantic_cannot_read_is_left_to_the_dataclass() -> None:
    value = object()
    assert (
        build_training_args(dataclasses.make_dataclass("Nested", [("field", Other)]), {"field": value}).field
        is value
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rat": 1}, "training.rat: is not a known key. Did you mean 'rate'?"),
        (
            {"derived": 1},
            "training.derived: is not a known key. Known: extra, name, optional, other, rate, rows, smooth.",
        ),
        ({"output_dir": "b"}, "training.output_dir: is set by the run itself. Remove it from this section."),
        ({"rows": True}, "training.rows: True is not valid. It should be a valid integer."),
        (
            {"rows": 1.5},
            (
                "training.rows: 1.5 is not valid. It should be a valid integer, got a number with a "
                "fractional part."
            ),
        ),
        ({"rate": True}, "training.rate: True is not valid. It should be a valid number."),
        ({"name": "c"}, "training.name: 'c' is not valid. It should be 'a' or 'b'."),
        ({"extra": 3}, "training.extra: 3 is not valid. It should be a valid dictionary or a valid string."),
        ({"rate": 2.0, "rows": 2}, "training.rate: rate must be at most 1. Change it in this section."),
        (
            {"smooth": True, "rate": 0.5},
            "training: smooth and rate exclude each other. Change it in this section.",
        ),
        ({"rows": 10}, "training.rows: too many. Take fewer."),
    ],
)
def test_a_refused_training_section_names_key_value_and_remedy(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_training_args(Arguments, section, output_dir="out")
    assert str(caught.value) == message


def test_training_arguments_are_known_by_their_own_names(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    section = parse_yaml(
        (
            "learning_rate: 1e-5\nsave_strategy: no\nlr_scheduler_type: cosine\nmax_steps: 7\nreport_to: "
            "[tensorboard]"
        ),
        "here",
    )
    args = build_training_args(TrainingArguments, section, output_dir=str(tmp_path), use_cpu=True)
    assert (args.learning_rate, args.save_strategy, args.lr_scheduler_type, args.max_steps) == (
        1e-5,
        "no",
        "cosine",
        7,
    )
    with raises(ConfigError, where="training.learning_rat"):
        build_training_args(TrainingArguments, {"learning_rat": 1e-5})
    with raises(ConfigError, where="training.save_strategy"):
        build_training_args(TrainingArguments, {"save_strategy": "sometimes"}, output_dir=str(tmp_path))


# The output folder


def test_an_output_folder_in_use_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_output_folder(tmp_path / "absent")
    check_output_folder(tmp_path)
    kept = write(tmp_path, "kept.txt", "mine")
    for options in ({}, {"overwrite": False}, {"overwrite": False, "resume": False}):
        with raises(TrainingError, where=str(tmp_path)):
            check_output_folder(tmp_path, **options)
    check_output_folder(tmp_path, overwrite=True)
    check_output_folder(tmp_path, resume=True)
    for beneath in (kept, kept / "a/b"):
        with raises(ConfigError, where=str(kept)):
            check_output_folder(beneath, overwrite=True)
    with monkeypatch.context() as patch, raises(ConfigError, where=str(tmp_path)):
        patch.setattr(os, "access", lambda *_: False)
        check_output_folder(tmp_path / "absent/more")
    monkeypatch.setenv("RANK", "1")
    check_output_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "mine"


def test_one_reward_needs_no_brackets():
    assert RunConfig(**RUN, rewards="mine.py:short").rewards == ["mine.py:short"]


def test_what_a_run_must_have_is_named_by_its_option():
    with raises(ConfigError, where="output_dir"):
        RunConfig(**{name: value for name, value in RUN.items() if name != "output_dir"})
