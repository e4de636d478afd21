"""A task and a method of one's own are named on the command line by their files; a resumed run and an
evaluation notice other code."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_run import assert_refused
from tests.training.tiny_runs import QUICK, equal, unmask, weights
from unmask.cli.inputs import data_name
from unmask.cli.run import training_arguments
from unmask.config.layers import read_layers
from unmask.config.run import DataConfig, RunConfig, resolve
from unmask.config.yaml import parse_yaml
from unmask.evaluation.result_file import read_result
from unmask.models.load import load
from unmask.rl.config import GRPOConfig
from unmask.rl.methods import METHODS
from unmask.rl.weighted_rewards import reward_identities
from unmask.tasks import Task, get_rewards, get_task
from unmask.training.run.record import run_settings

TASK = """
from unmask.rewards.verdict import OK, Verdict
from unmask.tasks import Task

class Twins(Task):
    name = "twins"
    fields = columns = ("digit",)
    max_completion = 3

    def row(self, record, where):
        digit = record["digit"]
        return {"prompt": f"{digit}=", "completion": 2 * digit, "group": digit, "digit": digit}

    def verify(self, completion, row):
        return OK if completion == 2 * row["digit"] else Verdict(completion.count(row["digit"]) / 4, "wrong")

    def generate(self, split, count, seed):
        return [self.row({"digit": digit}, "") for digit in "1234"][:count]
"""
METHOD = """
import torch
from unmask.rl.methods import TokenMethod, register

@register
class Parts(TokenMethod):
    name = "parts"
    scale_rewards: str = "leave-one-out"
    parts: int = 2

    def plan(self, rollout, draw):
        position_T = torch.arange(rollout.ids_BT.shape[1])
        target_BMT = rollout.completion_BT[:, None] & (position_T % self.parts == torch.arange(self.parts)[:, None])
        return rollout.hiding(target_BMT, target_BMT)
"""
GRPO = [
    *QUICK,
    "training.num_generations=2",
    "model.attention=bidirectional",
    "training.learning_rate=1e-2",
    "sampler.batch_size=4",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Iterator[None]:
    """A folder with both files, which is the current one. What they register is forgotten, and the package of
    a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unmask.rl.methods.base.METHODS", dict(METHODS))
    monkeypatch.setattr(Task, "registered", dict(Task.registered))
    Path("twins.py").write_text(TASK)
    Path("parts.py").write_text(METHOD)
    yield
    for name in ("own", "own.both"):
        sys.modules.pop(name, None)


def grpo_config(*overrides: str) -> RunConfig:
    return resolve(read_layers(flags={"model.path": "m", "output_dir": "out"}, overrides=overrides))


def moved(name: str, *, edited: bool) -> str:
    """The path of a copy of a file in another folder, where it may say something else."""
    folder = Path("edited" if edited else "moved")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(Path(name).read_text() + "# edited\n" * edited)
    return str(folder / name)


def test_the_config_keeps_how_they_are_named_and_loads_again(model):
    named = ["--task", "twins.py:Twins", "training.method=parts.py:Parts", "training.method_settings.parts=3"]
    printed = unmask("grpo", "--model", model, "--output", "out", *GRPO, *named, "--print-config")
    assert printed.exit_code == 0, printed.output
    config = parse_yaml(printed.output, "config")
    assert config["data"]["task"] == "twins.py:Twins" and config["imports"] == []
    assert config["training"]["method"] == "parts.py:Parts" and config["training"]["method_settings"] == {
        "parts": 3
    }
    assert (config["training"]["scale_rewards"], config["training"]["max_completion_length"]) == (
        "leave-one-out",
        3,
    )
    Path("config.yaml").write_text(printed.output)
    assert unmask("grpo", "--config", "config.yaml", "--print-config").output == printed.output


@pytest.mark.parametrize("imported", ["[twins.py, parts.py]", "[own]", "[own.both]"])
def test_what_imported_modules_define_is_found_by_name(imported, model):
    """Before recipes are fitted to the method."""
    Path("own").mkdir()
    Path("own/__init__.py").write_text("from own import both")
    Path("own/both.py").write_text(TASK + METHOD)
    words = [
        "grpo",
        "--recipe",
        "grpo-sudoku",
        "--model",
        model,
        "--output",
        "out",
        f"imports={imported}",
        "--print-config",
    ]
    printed = unmask(*words, "--task", "twins", "training.method=parts")
    assert printed.exit_code == 0, (printed.output, printed.exception)
    config = parse_yaml(printed.output, "config")
    assert (config["data"]["task"], config["training"]["method"]) == ("twins", "parts")
    assert config["imports"] == parse_yaml(imported, "imports")


def test_a_task_is_found_by_its_own_name_once_it_is_named():
    task = get_task("twins.py:Twins")
    assert type(task) is type(get_task("twins")) and [
        reward.name for reward in get_rewards("twins/partial")
    ] == ["twins/partial"]
    assert not task.needs_data and get_task("gsm8k").needs_data
    assert data_name(DataConfig(task="twins.py:Twins"), task) == "twins"  # no path in a model card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--task", "absent.py:Twins"],
            ["absent.py:Twins: there is no such file", "from the current folder"],
        ),
        (["--task", "twins.py:Twin"], ["twins.py:Twin: there is no such name", "'Twins'"]),
        (
            ["--task", "parts.py:Parts"],
            ["parts.py:Parts: is a class, not a subclass of unmask.tasks.base.Task"],
        ),
        (["--task", "half.py:Half"], ["half.py:Half: Half lacks row, columns", "docs/tasks.md"]),
        (
            ["--task", "broken.py:Task"],
            ["broken.py:Task: cannot be imported (ZeroDivisionError: division by zero, line 2 of broken.py)"],
        ),
        (
            ["training.method=absent.py:Parts"],
            ["training.method (command line): absent.py:Parts: there is no such file"],
        ),
        (
            ["training.method=twins.py:Twins"],
            ["training.method", "not a subclass of unmask.rl.methods.base.Method"],
        ),
        (
            ["training.method=nameless.py:Parts"],
            ["nameless.py:Parts: cannot be imported (ConfigError", "Parts has no name", "name ="],
        ),
        (["training.method=parts.py:TokenMethod"], ["training.method", "is not registered", "@register"]),
        (
            ["imports=[broken]"],
            ["imports (command line): broken: cannot be imported (ZeroDivisionError", "line 2 of broken.py"],
        ),
        (
            ["imports=broken"],
            ["imports (command line): broken: cannot be imported (ZeroDivisionError", "line 2 of broken.py"],
        ),
        (["imports=3"], ["imports (command line)", "3 is not valid", "list"]),
        (["training.method_settings.beta=1"], ["training.method_settings.beta", "Set beta itself"]),
        (["training.method_settings.part=1"], ["training.method_settings.part", "Did you mean 'parts'"]),
        (
            ["training.method_settings={parts: many}"],
            ["training.method_settings.parts", "'many' is not valid", "integer"],
        ),
        (
            ["training.method=wd1", "training.method_settings.parts=1"],
            ["training.method_settings.parts", "only wd1 has", "Leave it out"],
        ),
    ],
)
def test_what_is_wrong_with_them_is_one_error(options, words, model):
    Path("broken.py").write_text("x = 1\nx / 0")
    Path("nameless.py").write_text(METHOD.replace('name = "parts"', ""))
    Path("half.py").write_text(
        "from unmask.tasks import Task\nclass Half(Task):\n    name, fields = 'half', ()\n    def "
        "verify(self, *_): ..."
    )
    task = [] if "--task" in options else ["--task", "twins.py:Twins"]
    method = [] if any("method=" in option for option in options) else ["training.method=parts.py:Parts"]
    refused = unmask("grpo", "--model", model, "--output", "out", *GRPO, *task, *method, *options)
    assert_refused(refused, *words)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            "def plan(self, rollout, draw):\n        return rollout.hidden",
            ["parts.py, line 12, in plan: AttributeError: ", "hidden", "Correct"],
        ),
        (
            "def plan(self, rollout, draw):\n        raise TimeoutError('no answer')",
            ["line 12, in plan: TimeoutError: no answer"],
        ),
        (
            "def plan(self, rollout, draw):\n        open('absent')",
            ["line 12, in plan: FileNotFoundError", "absent"],
        ),
        (
            "def plan(self, rollout, draw):\n        return rollout.hiding(*2 * [rollout.completion_BT])",
            ["target_BMT", "[B, M, T]"],
        ),
        (
            "def loss(self, inputs):\n        return inputs.policy_BMT.sum()",
            ["loss of parts: returned Tensor, not Loss", "weighted_sum"],
        ),
    ],
)
def test_what_it_raises_in_a_run_is_one_error(own, words, model):
    Path("parts.py").write_text(
        METHOD.replace("def plan", f"{own}\n\n    def {'plan' if 'loss' in own else 'unused'}")
    )
    refused = unmask(
        "grpo",
        "--model",
        model,
        "--output",
        "out",
        *GRPO,
        "--task",
        "twins.py:Twins",
        "training.method=parts.py:Parts",
    )
    assert_refused(refused, *words)


def test_settings_of_its_own_are_those_of_the_method():
    args = GRPOConfig(method="parts.py:Parts", use_cpu=True)
    assert args.method_settings == {"parts": 2} and args.build_method().parts == 2
    args = GRPOConfig(method="parts.py:Parts", method_settings={"parts": 4}, epsilon=0.3, use_cpu=True)
    assert (args.build_method().parts, args.build_method().epsilon) == (4, 0.3)
    assert args.to_dict()["method"] == "parts"  # no path in trackers and model cards
    assert all(
        GRPOConfig(method=name, use_cpu=True).method_settings is None for name in METHODS.keys() - {"gdpo"}
    )


def test_code_is_compared_by_content_wherever_it_is():
    before = run_settings(grpo_config("data.task=twins.py:Twins"))
    assert before["data.task"][0] == "twins"
    assert run_settings(grpo_config(f"data.task={moved('twins.py', edited=False)}:Twins")) == before
    rewards = reward_identities(["twins/partial", "sudoku"])
    assert rewards[0].keys() == {"name", "sha256"} and rewards[1] == {"name": "sudoku"}
    other = run_settings(grpo_config(f"data.task={moved('twins.py', edited=True)}:Twins"))
    assert {name for name in before if before[name] != other[name]} == {"data.task_code"}
    assert reward_identities(["twins/partial"]) != rewards[:1]  # the class that was named last
    assert run_settings(grpo_config("data.task=sudoku"))["data.task_code"][0] is None


def test_a_task_that_names_no_length_leaves_that_of_the_verb():
    Path("long.py").write_text(TASK.replace("max_completion = 3", "max_completion = None"))
    assert (
        training_arguments(
            "grpo", grpo_config("data.task=twins.py:Twins", "training.use_cpu=true")
        ).max_completion_length
        == 3
    )
    assert (
        training_arguments(
            "grpo", grpo_config("data.task=long.py:Twins", "training.use_cpu=true")
        ).max_completion_length
        == 128
    )


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("converted") / "model"
    load(model, attention="bidirectional").save(folder)
    return str(folder)


def test_an_evaluation_says_which_code_it_used(converted):
    Path("digits.jsonl").write_text("".join(json.dumps({"digit": digit}) + "\n" for digit in "12"))
    several = [
        "--task",
        "twins.py:Twins,sudoku",
        "--data",
        "twins.py:Twins=digits.jsonl",
        "--rows",
        2,
        "--output",
        "out.json",
    ]
    evaluated = unmask("evaluate", converted, *several)
    assert evaluated.exit_code == 0, (evaluated.output, evaluated.exception)
    own, sudoku = read_result("out.json").tasks
    assert (own.task, own.protocol["data"], len(own.items)) == ("twins", "digits.jsonl", 2)
    assert len(own.protocol["task_sha256"]) == 64 and "task_sha256" not in sudoku.protocol
    assert "names code to run" in unmask("evaluate", "--rerun", "out.json").stderr
    both = unmask("evaluate", converted, "--task", f"twins.py:Twins,{moved('twins.py', edited=True)}:Twins")
    assert both.exit_code == 2 and "another task is named twins too" in both.stderr


@pytest.mark.parametrize("edited", [False, True])
def test_an_unfinished_evaluation_goes_on_with_the_same_code_only(edited, converted, monkeypatch):
    words = ["evaluate", converted, "--rows", 4, "--batch-size", 2, "--output", "out.json", "--task"]
    with monkeypatch.context() as patch:
        patch.setattr("unmask.cli.evaluation.EvaluationResult.write", lambda *_: 1 / 0)
        assert isinstance(unmask(*words, "twins.py:Twins").exception, ZeroDivisionError)
    again = unmask(*words, f"{moved('twins.py', edited=edited)}:Twins")
    if edited:
        assert (
            again.exit_code == 2 and "another evaluation" in again.stderr and "task_sha256: " in again.stderr
        )
    else:
        assert again.exit_code == 0 and read_result("out.json").times["resumed_items"] == 4


@pytest.mark.slow
def test_a_run_with_both_is_trained_evaluated_and_resumed_with_the_same_code_only(model):
    run = [
        "grpo",
        "--model",
        model,
        *GRPO,
        "training.max_steps=4",
        "training.save_steps=2",
        "--output",
        "out",
    ]
    task, method = (
        ["--task", "twins.py:Twins"],
        ["training.method=parts.py:Parts", "training.method_settings.parts=3"],
    )
    rewards = ["rewards=[twins, twins/partial]"]
    assert unmask(*run, *task, *method, *rewards).exit_code == 0
    straight = weights(load("out/model"))
    assert {part.task for part in read_result("out/evaluation.json").tasks} == {"twins"}
    card = Path("out/model/README.md").read_text()
    assert "| grpo | twins |" in card and "`method=parts`" in card and "parts.py" not in card
    shutil.rmtree("out/checkpoint-4")
    edited = f"training.method={moved('parts.py', edited=True)}:Parts"
    assert_refused(
        unmask(*run, *task, *method, *rewards, edited, "--resume"), "method_code", "would make another run"
    )
    other = ["--task", f"{moved('twins.py', edited=True)}:Twins"]
    assert_refused(
        unmask(*run, *other, *method, *rewards, "--resume"), "data.task_code", "would make another run"
    )
    assert_refused(
        unmask(*run, *task, *method, *rewards, "training.method_settings.parts=2", "--resume"),
        "method_settings",
    )
    elsewhere = f"training.method={moved('parts.py', edited=False)}:Parts"
    resumed = unmask(*run, *task, *method, *rewards, elsewhere, "--resume")
    assert resumed.exit_code == 0, (resumed.output, resumed.exception)
    assert equal(weights(load("out/model")), straight)
