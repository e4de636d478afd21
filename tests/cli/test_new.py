"""Folders that `unmask new` writes: their configs are complete and explained, and their commands run to the
end."""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import REPOSITORY, partly_nightly
from tests.training.tiny_runs import unmask
from unmask.cli.new import PARTS, TINY_MODEL, write_tiny_model
from unmask.cli.verbs import VERBS
from unmask.config.run import DataConfig, StartConfig
from unmask.config.yaml import parse_yaml
from unmask.data.characters import character_model
from unmask.models.chat_template import TEMPLATES as TEMPLATES_OF_CHATS
from unmask.models.load import load
from unmask.rl.weighted_rewards import Rewards

VERB = {"sft": "sft", "preferences": "dpo", "rewards": "grpo", "conversion": "convert"}
KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<value>.*)")
IMPROVES = {"sft": "eval_loss", "preferences": "accuracy", "rewards": "reward", "conversion": "cross_entropy"}
"""A metric of the log that says that the stand-in learns."""
UNSET = {"none", "all", "that", "as", "one", "null"}
"""What defaults are called that are no value: `Default: that of the model`."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(kind: str, *arguments: str) -> dict:
    """The config of a new folder, which has no tiny model."""
    result = unmask("new", "mine", "--kind", kind, "--model", "owner/name", *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return parse_yaml(Path("mine/config.yaml").read_text(), "config.yaml")


def made(target: str, *variables: str) -> list[list[str]]:
    """The commands that a target of the Makefile runs: the words of each after `unmask`."""
    words = ["make", "-s", "-C", "mine", target, "UNMASK=printf '%s\\n' COMMAND", *variables]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [command.splitlines() for command in printed.split("COMMAND\n")[1:]]


@pytest.mark.parametrize("kind", ["conversion", "sft"])
def test_the_tiny_model_is_a_character_model(kind, here):
    """Its files are written without torch, and hold what `character_model` makes."""
    write_tiny_model(here / TINY_MODEL, causal=kind == "conversion")
    lm = load(here / TINY_MODEL)
    attention = "causal" if kind == "conversion" else "bidirectional"
    made = character_model(string.printable, hidden=64, layers=2, context=512, seed=0, attention=attention)
    assert lm.settings == made.settings and lm.config.to_diff_dict() == made.config.to_diff_dict() | lm_only(
        lm, made
    )
    assert (
        lm.tokenizer.get_vocab() == made.tokenizer.get_vocab()
        and lm.tokenizer.chat_template == TEMPLATES_OF_CHATS["simple"]
    )
    assert lm.tokenizer(string.printable).input_ids == made.tokenizer(string.printable).input_ids
    wanted, found = made.model.state_dict(), lm.model.state_dict()
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in wanted.items()
    }
    for name, weights in found.items():
        torch.testing.assert_close(
            weights.std(correction=0), wanted[name].std(correction=0), atol=1e-3, rtol=0
        )


def lm_only(lm, made):
    """What the config of a saved model has beside that of a new one."""
    return {
        name: value
        for name, value in lm.config.to_diff_dict().items()
        if name not in made.config.to_diff_dict()
    }


@pytest.mark.parametrize("kind", PARTS)
def test_a_config_is_one_of_its_verb(kind, here):
    config = written(kind)
    assert config["model"]["path"] == "owner/name"
    result = unmask(VERB[kind], "--config", "mine/config.yaml", "--print-config")
    assert result.exit_code == 0, (result.output, result.exception)
    resolved = parse_yaml(result.stdout, "stdout")
    given = {name: value for name, value in config["training"].items() if value is not None}
    assert {name: resolved["training"][name] for name in given} == given


@pytest.mark.parametrize("kind", PARTS)
def test_every_key_is_explained_above_it_with_its_true_default(kind, here):
    config = written(kind)
    lines = Path("mine/config.yaml").read_text().splitlines()
    defaults = {
        name: field.default
        for section in (StartConfig, DataConfig)
        for name, field in section.model_fields.items()
    }
    defaults |= {name: getattr(VERBS[VERB[kind]].config_class, name) for name in config["training"]}
    keys = 0
    for number, line in enumerate(lines):
        if not (found := KEY.fullmatch(line)):
            continue
        keys += 1
        above = next(at for at in range(number - 1, -1, -1) if not lines[at].lstrip().startswith("#"))
        comment = " ".join(text.strip(" #") for text in lines[above + 1 : number])
        assert comment, line
        if found["indent"] and "No default." not in comment:
            default = re.search(r"Default: ([\w.-]*\w)", comment)
            assert default, line
            value = getattr(defaults[found["key"]], "value", defaults[found["key"]])  # of an enumeration
            assert default[1] in UNSET or parse_yaml(default[1], line) == value, (line, default[1], value)
    assert keys == len(config) + sum(len(section) for section in config.values() if isinstance(section, dict))


@pytest.mark.parametrize("kind", PARTS)
def test_the_files_that_a_config_and_its_readme_name_are_there(kind, here):
    config, readme = written(kind), Path("mine/README.md").read_text()
    named = [
        config["data"]["train"],
        config["data"]["eval"],
        *(reward.partition(":")[0] for reward in config.get("rewards", [])),
    ]
    named += re.findall(r"`([\w-]+\.(?:jsonl|txt|py|yaml))`", readme)
    assert all(Path("mine", name).is_file() for name in named), named
    assert Path("mine", config["data"]["train"]).read_text().splitlines()[0] in readme or kind == "conversion"


@pytest.mark.parametrize("kind", PARTS)
def test_the_makefile_trains_with_the_verb_of_the_kind(kind, here):
    written(kind)
    assert made("train")[-1] == [VERB[kind], "--config", "config.yaml"]
    config = (here / "mine/config.yaml").read_text()
    stand_in = "runs/tiny-model/model" if kind == "conversion" else "tiny-model"
    (here / "mine/config.yaml").write_text(config.replace("owner/name", stand_in))
    assert {"training.use_cpu=true", VERB[kind], "--config"} < set(made("train")[-1])


@pytest.mark.parametrize("kind", PARTS)
def test_a_prompt_reaches_the_model_as_it_was_typed(kind, here, monkeypatch):
    written(kind)
    prompt = 'say "hi" $HOME $(RUN) `id` \\ it\'s #1'
    assert prompt in made("generate", f"PROMPT={prompt}")[0]
    monkeypatch.setenv("PROMPT", prompt)
    assert prompt in made("generate")[0]


def test_the_reward_differs_within_a_group(here):
    config = written("rewards")
    os.chdir("mine")
    rewards = Rewards(config["rewards"])
    rows = [{"prompt": [{"role": "user", "content": "What do bees make?"}], "word": "honey"}] * 4
    found = rewards(
        rows,
        ["Honey.", "Bees make honey from flowers, all summer.", "Nothing.", "I do not know what bees make."],
        [[1]] * 4,
    )
    assert len(set(found.total_B.tolist())) == 4


def test_a_folder_that_is_in_use_is_refused_and_left_alone(here):
    (here / "mine").mkdir()
    (here / "mine/notes.txt").write_text("mine")
    result = unmask("new", "mine")
    assert result.exit_code == 2 and "mine: the output folder is not empty. Choose another." in result.stderr
    assert [path.name for path in (here / "mine").iterdir()] == ["notes.txt"]
    result = unmask("new", "mine/notes.txt/more")
    assert result.exit_code == 2 and "is a file, not a folder" in result.stderr


@pytest.mark.parametrize("model", ["", " "])
def test_a_model_without_a_name_is_refused(model, here):
    result = unmask("new", "mine", "--model", model)
    assert result.exit_code == 2 and "--model: is empty" in result.stderr and not list(here.iterdir())


@pytest.mark.parametrize("name", ["a model", "model#1", "it's", "modèle"])
def test_a_models_folder_is_found_from_the_new_one(name, here):
    (here / name).mkdir()
    assert unmask("new", "runs/mine", "--model", name).exit_code == 0
    config = (here / "runs/mine/config.yaml").read_text()
    assert parse_yaml(config, "config.yaml")["model"]["path"] == str(here / name)
    (here / "runs/mine/config.yaml").write_text(config + "\n")
    words = ["make", "-n", "-s", "-C", str(here / "runs/mine"), "evaluate", "UNMASK=printf '%s\\n'"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    run = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout.splitlines()
    assert run[run.index("--against") + 1] == str(here / name)


def test_it_says_what_comes_next(here):
    assert (
        unmask("new", "my run", "--model", "owner/name")
        .stdout.splitlines()[-1]
        .startswith("next: cd 'my run' && make train ")
    )
    result = unmask("new", "mine", "--kind", "rewards")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "mine/rewards.py\n" in result.stdout and result.stdout.endswith(
        "next: cd mine && make train  (README.md has the rest)\n"
    )
    assert (here / "mine/tiny-model/model.safetensors").stat().st_size < 1e6


def check_what_was_made(kind: str, mine: Path) -> None:
    assert all(
        (mine / name).is_file() for name in ("evaluation.before.json", "evaluation.json", "report.html")
    )
    log = [
        json.loads(line) for line in (mine / f"runs/{VERB[kind]}/training_logs.json").read_text().splitlines()
    ]
    first, *_, last = [line[IMPROVES[kind]] for line in log if IMPROVES[kind] in line]
    assert first > last if kind in ("sft", "conversion") else first < last
    assert any(line.get("loss") for line in log)


@pytest.mark.slow
@partly_nightly("kind", ["rewards", "sft", "conversion", "preferences"], 2)  # often: one of each Makefile
def test_each_command_runs_to_its_end(kind, here):
    assert unmask("new", "mine", "--kind", kind).exit_code == 0
    for target in ("train", "evaluate", "generate", "report"):
        commands = made(target)
        os.chdir("mine")
        for words in commands:
            result = unmask(*words)
            assert result.exit_code == 0, (words, result.output, result.exception)
        os.chdir(here)
    check_what_was_made(kind, here / "mine")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["rewards", "conversion"])  # one of each Makefile
def test_make_runs_each_command_to_its_end(kind, here):
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "UNMASK": f"{sys.executable} -m unmask",
    }
    subprocess.run(
        [sys.executable, "-m", "unmask", "new", "mine", "--kind", kind], env=environment, check=True
    )
    for target in ("help", "train", "evaluate", "generate", "report"):
        done = subprocess.run(["make", "-C", "mine", target], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "Warning" not in done.stderr, (target, done.stdout, done.stderr)
    check_what_was_made(kind, here / "mine")
