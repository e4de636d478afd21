"""`unmask config`, and the settings in the help of the training verbs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from unmask.cli import app
from unmask.cli.settings import MOST_SET, MOST_SET_OF_GRPO, as_lines, groups_of_help
from unmask.cli.verbs import VERBS
from unmask.training.settings.listing import settings_of_verb


def run(*args: str, columns: int = 200) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(args))


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_the_settings_of_the_verb_and_where_the_others_are(verb: str) -> None:
    result = run(verb, "--help")
    groups = groups_of_help(verb)
    names = [name for rows in groups.values() for name, *_ in rows]
    known = {setting.key for setting in settings_of_verb(verb)}
    assert {name if name in known else f"training.{name}" for name in names} <= known and len(names) == len(
        set(names)
    )
    shown = {line.strip().split("  ")[0] for line in result.stdout.splitlines()}
    assert set(names) <= shown and {"sampler.steps", "lora.r", "data.max_rows", "model.path"} <= shown
    assert "weight_decay" not in result.stdout and f"unmask config {verb}" in result.stdout
    assert {"memory and speed", "data", "model", "sampler", "lora"} <= groups.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_help_begins_with_the_ten_settings_that_most_runs_set(verb: str) -> None:
    lines = [line.strip().split("  ")[0] for line in run(verb, "--help").stdout.splitlines()]
    first = [
        line
        for line in lines[: next(at for at, line in enumerate(lines) if "Arguments" in line)]
        if line.startswith("--")
    ]
    names = MOST_SET_OF_GRPO if verb == "grpo" else MOST_SET
    assert first == [f"--{name.replace('_', '-')}" for name in names] and len(first) == 10


def test_help_of_reinforcement_learning_has_the_groups_of_its_settings() -> None:
    groups = {title: [name for name, *_ in rows] for title, rows in groups_of_help("grpo").items()}
    assert "num_generations" in groups["method"] and "temperature" in groups["sampling of completions"]
    assert "reward_weights" in groups["rewards"] and "rewards" in groups["run"]
    assert groups["data"][0] == "max_length" and "data.train" in groups["data"]


def test_config_lists_all_settings_one_a_line() -> None:
    lines = run("config", "sft").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [setting.key for setting in settings_of_verb("sft")]
    [line] = [line for line in lines if line.startswith("training.weight_decay ")]
    assert line.split()[1:3] == ["float", "0.0"] and "Weight decay" in line


@given(
    st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=50), st.just("int"), st.text("cd ", max_size=99)),
        min_size=1,
    )
)
def test_lines_hold_every_cell_and_no_line_is_too_long(rows: list[tuple[str, str, str]]) -> None:
    lines = list(as_lines(rows, 80))
    assert all(len(line) <= 80 for line in lines)
    assert "".join("".join(lines).split()) == "".join("".join("".join(row) for row in rows).split())


def test_config_finds_settings_and_prints_json() -> None:
    [found] = json.loads(run("config", "dpo", "training.learning_rate", "--json").stdout)
    assert (found["key"], found["type"], found["default"]) == (
        "training.learning_rate",
        "float",
        1e-6,
    ) and "AdamW" in found["help"]
    assert len(json.loads(run("config", "grpo", "--json").stdout)) > 250


def test_config_of_no_setting_hints_at_near_ones() -> None:
    result = run("config", "sft", "learnin_rate")
    assert (result.exit_code, result.stdout.strip()) == (1, "")
    assert "no setting of sft matches 'learnin_rate'. Did you mean training.learning_rate" in result.stderr
    assert "Leave the pattern out" in run("config", "sft", "xyzzy\x1b[31m").stderr
    assert json.loads(run("config", "sft", "xyzzy", "--json").stdout) == []
    refused = run("config", "stf")
    assert refused.exit_code == 2 and "Did you mean 'sft'?" in refused.stderr
