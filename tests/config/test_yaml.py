"""YAML of configs: mistakes are one error, secrets are not quoted, and what is accepted is valid."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from unmask.cli.run import resolved, training_arguments
from unmask.cli.verbs import VERBS
from unmask.config.layers import MODES, RECIPES, Layer, Layers, read_layers, read_settings
from unmask.config.run import RunConfig, resolve, to_yaml
from unmask.config.yaml import dump_yaml, parse_yaml
from unmask.errors import ConfigError, UnmaskError

MALFORMED = {
    "an object of Python": ("a: !!python/object/apply:os.system [ls]", "x.yaml, line 1"),
    "a switch that is none": ("a: !!bool x", "x.yaml"),
    "a number that is none": ("a: !!int ''", "x.yaml"),
    "a control character": ("a: \x07", "x.yaml"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_yaml_is_one_error(name: str) -> None:
    text, where = MALFORMED[name]
    with raises(ConfigError, where=where):
        parse_yaml(text, "x.yaml")


MALFORMED_SECRETS = [
    "*sEcReT",
    "!sEcReT x",
    "!sEcReT!y x",
    "{sEcReT: 1, sEcReT: 2}",
    "&sEcReT &sEcReT x",
    "[1, *sEcReT]",
]
AROUND = [
    ("hub_token: {}", "x.yaml"),
    ("training: {{a: 1, hub_token: {}\n }}", "x.yaml"),
    ("a: 1\ntraining.password: {}\nb: 2", "x.yaml"),
    ("{}", "command line, training.hub_token"),
    ("{}", "environment variable UNMASK_TRAINING__HUB_TOKEN"),
]


@pytest.mark.parametrize("value", MALFORMED_SECRETS)
def test_an_error_quotes_nothing_of_a_secret(value: str) -> None:
    for around, where in AROUND:
        with pytest.raises(ConfigError) as caught:
            parse_yaml(around.format(value), where)
        assert where in str(caught.value) and "sEcReT" not in str(caught.value)


@pytest.mark.parametrize(
    "override", ["training=hub_token=sEcReT", "--hub_token sEcReT", "training.hub_token sEcReT"]
)
def test_a_misspelt_override_shows_no_secret(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(read_layers(overrides=["model.path=m", "output_dir=o", override]))
    assert "hub_token" in str(caught.value) and "sEcReT" not in str(caught.value)


def test_errors_outside_of_a_secret_name_what_is_wrong() -> None:
    texts = {
        "hub_token: x\na: *b": 2,
        "hub_token: {x: 1}\nb: 1\nb: 2": 3,
        "hub_token: [x]\na: !b x": 2,
        "a: {hub_token: {b: c}, b: 1, b: 2}": 1,
    }
    for text, line in texts.items():
        with raises(ConfigError, where=f"x.yaml, line {line}") as caught:
            parse_yaml(text, "x.yaml")
        assert re.search("'!?b'", str(caught.value))


def test_aliases_in_reason_are_read() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: *a\nc: {<<: {d: *a}}", "x") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": [1, 2]},
    }


@pytest.mark.parametrize(
    "text",
    ["2024_05_01", "2024-05-01", "1_000", "010", "0012345", "00", "0o10", "0b11", "1.5_0", "._5", "=", "no"],
)
def test_what_only_other_versions_read_as_numbers_is_text(text: str) -> None:
    """Such as a day in a name, or the hash of a commit."""
    assert parse_yaml(text, "x") == text and parse_yaml(f"{{{text}: [{text}]}}", "x") == {text: [text]}
    assert parse_yaml(dump_yaml([text]), "x") == [text]


@pytest.mark.parametrize("value", ["true", "'true'", "1", "null", "[]"])
def test_only_the_command_line_lets_a_model_run_code(value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model: {{path: m, trust_remote_code: {value}}}\noutput_dir: o")
    with raises(ConfigError, where=f"model.trust_remote_code ({path})"):
        read_layers(config_files=[path])
    # as every recorded config says
    path.write_text("model: {path: m, trust_remote_code: false}\noutput_dir: o")
    assert not resolve(read_layers(config_files=[path])).model.trust_remote_code
    assert resolve(
        read_layers(config_files=[path], overrides=["model.trust_remote_code=true"])
    ).model.trust_remote_code
    assert resolve(
        read_layers(config_files=[path], environ={"UNMASK_MODEL__TRUST_REMOTE_CODE": "true"})
    ).model.trust_remote_code


SEEDS = [path.read_text() for path in sorted(RECIPES.glob("*/*.yaml")) if path.parent != MODES]
SNIPPETS = [
    "*a", "&a ", "<<: *a", "!x ", "? ", "- ", ": ", "{", "}", "[", "]", "\n", "  ", "|\n", "null", "~", "true", "'", '"', ".nan", "-.inf",
    "1e400", "-1", "0", "1e-5", "0x1f", "''", "#", "\t", "\x1b", "model: {trust_remote_code: true}", "training:", "model:", "output_dir:",
    "rewards:", "lora:", "hardware:", "sampler:", "overwrite: true",
]  # fmt: skip


RUN = {"model": {"path": "m"}, "output_dir": "o"}


def seeds() -> list[tuple[str, str]]:
    """The recipes and the recorded default config of every verb, each with the verbs that accept it."""
    defaults = [
        to_yaml(resolved(RunConfig(**RUN), training_arguments(verb, RunConfig(**RUN)))) for verb in VERBS
    ]
    found = []
    for text in [*SEEDS, *defaults]:
        config = resolve(Layers([Layer("test", RUN), Layer("file", parse_yaml(text, "seed"))]))
        for verb in VERBS:
            with contextlib.suppress(UnmaskError):
                training_arguments(verb, config)
                found.append((text, verb))
    return found


def mutate(text: str, draw: random.Random) -> str:
    """The text after one to four changes of characters, tokens, lines or values."""
    for _ in range(draw.randint(1, 4)):
        lines, place = text.splitlines(keepends=True) or [""], draw.randint(0, len(text))
        number = draw.randrange(len(lines))
        match draw.randrange(7):
            case 0:
                text = text[:place] + text[place + draw.randint(1, 9) :]
            case 1:
                text = text[:place] + draw.choice(SNIPPETS) + text[place:]
            case 2:
                text = (
                    text[:place]
                    + chr(draw.choice([*range(128), 0x85, 0xA0, 0x202E, 0xFEFF, 0x1F600]))
                    + text[place + 1 :]
                )
            case 3:
                text = "".join([*lines[:number], *lines[number + 1 :]])
            case 4:
                text = "".join([*lines[:number], lines[number] * 2, *lines[number + 1 :]])
            case 5:
                key, colon, _ = lines[number].partition(":")
                text = "".join(
                    [*lines[:number], f"{key}{colon} {draw.choice(SNIPPETS)}\n", *lines[number + 1 :]]
                )
            case 6:
                text += draw.choice(draw.choice(SEEDS).splitlines(keepends=True) or [""])
    return text


def check(text: str, verb: str, path: Path) -> bool:
    """Whether a file is accepted. If so it is valid: it makes training arguments, and its record loads back
    as the same run."""
    try:
        path.write_text(text, encoding="utf-8")
        layers = Layers([Layer("test", RUN), Layer("file", read_settings(path))])
        config = resolve(layers)
        with layers.naming_sources():
            args = training_arguments(verb, config)
    except UnmaskError:
        return False
    recorded: dict[str, Any] = parse_yaml(to_yaml(resolved(config, args)), "record")
    again = RunConfig(**recorded)
    assert again.model_dump(exclude={"training"}) == config.model_dump(exclude={"training"})
    assert training_arguments(verb, again).to_dict() == args.to_dict()
    return True


def accepted(count: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    draw, start = random.Random(0), seeds()
    drawn = (draw.choice(start) for _ in range(count))
    return sum(check(mutate(text, draw), verb, path / "a.yaml") for text, verb in drawn)


@pytest.mark.filterwarnings("ignore")
def test_what_is_accepted_of_mutated_files_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 20 < accepted(200, tmp_path, monkeypatch) < 180


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_what_is_accepted_of_many_mutated_files_is_valid(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accepted(count, tmp_path, monkeypatch) > count / 10


@pytest.mark.parametrize(
    ("text", "line"), [("a:\n\tb: 1\n", 2), ("\ta: 1\n", 1), ("a:\n  b: 1\n\tc: 2\n", 3), ("a:\tb\n", 1)]
)
def test_a_tab_is_named(text, line):
    with raises(ConfigError, where=f"own.yaml, line {line}") as caught:
        parse_yaml(text, "own.yaml")
    assert caught.value.remedy == "Replace tabs by spaces"
    assert parse_yaml(text.replace("\t", "  ").removeprefix("  "), "own.yaml")
