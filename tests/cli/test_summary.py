"""What a finished run shows."""

from __future__ import annotations

import json
import math

import pytest

from unmask.artifacts import MetricsLog
from unmask.cli.summary import next_commands, summarize
from unmask.config.run import RunConfig
from unmask.training.run.log import LOG_NAME


def config(folder, **data):
    return RunConfig(model={"path": "m"}, data=data, output_dir=str(folder / "out"))


def shown(folder, lines):
    log = MetricsLog(folder / "out" / LOG_NAME)
    for number, line in enumerate(lines):
        log.write({"step": number + 1, **line})
    return dict(summarize(folder / "out", 65.0))


def test_the_first_and_the_last_value_are_shown(tmp_path):
    lines = [
        {"loss": 0.69314, "accuracy": 0.5},
        {"loss": 0.6, "accuracy": 0.75},
        {"loss": 0.51, "accuracy": 0.875},
        {"train_loss": 0.6},
    ]
    found = shown(tmp_path, lines)
    assert found["time"] == "1:05, 4 steps"
    assert found["training loss"] == "0.6931 → 0.51" and found["accuracy"] == "0.5 → 0.875"


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    lines = [{"loss": 0.5, "grad_norm": math.inf, "accuracy": math.nan}, {"loss": 0.25, "grad_norm": 1.0}]
    assert {"training loss": "0.5 → 0.25"}.items() <= shown(
        tmp_path, lines
    ).items() and "accuracy" not in shown(tmp_path, [])


def test_a_run_that_logged_nothing_shows_its_mean_loss(tmp_path):
    assert shown(tmp_path, [{"train_loss": 2.5}])["training loss"] == "2.5"


def test_of_several_rewards_each_is_shown_and_the_loss_is_not(tmp_path):
    first = {
        "loss": 0.0,
        "reward": 0.4,
        "rewards/short": 0.875,
        "rewards/sudoku/partial": 0.1,
        "rewards/sudoku/partial/wrong": 1.0,
    }
    found = shown(tmp_path, [first, {**first, "reward": 0.5, "rewards/short": 1.0}])
    assert {name: value for name, value in found.items() if "reward" in name or "loss" in name} == {
        "reward": "0.4 → 0.5",
        "rewards/short": "0.875 → 1",
        "rewards/sudoku/partial": "0.1",
    }


def test_rewards_that_are_all_the_same_are_said_to_teach_nothing(tmp_path):
    assert "nothing was learned" in shown(tmp_path / "same", [{"reward": 0.5, "reward_std": 0.0}] * 2)["note"]
    assert "note" not in shown(
        tmp_path / "differing", [{"reward": 0.5, "reward_std": 0.0}, {"reward": 0.5, "reward_std": 0.5}]
    )


def test_the_loss_of_a_conversion_is_of_its_last_stage(tmp_path):
    lines = [
        {"loss": 4.0, "stage": 1},
        {"loss": 3.5, "stage": 2},
        {"train_loss": 3.75, "stage": 2},
        {"train_loss": 1.5, "stage": 3},
    ]
    assert shown(tmp_path, lines)["training loss"] == "4 → 1.5"


def test_the_next_command_asks_for_as_many_problems_of_a_task_of_the_user(tmp_path):
    command = next_commands("sft", config(tmp_path, task="my.py:Mine", max_rows=64))[0]
    assert "--task my.py:Mine" in command and "data.max_rows=64" in command
    assert "rows" not in next_commands("sft", config(tmp_path, task="sudoku", max_rows=64))[0]


def test_a_run_without_steps_shows_no_loss(tmp_path):
    MetricsLog(tmp_path / "out" / LOG_NAME).write({"step": 0, "train_loss": 0.0})
    assert dict(summarize(tmp_path / "out", 65.0)).keys() == {"model", "time"}


BODY = {"train": "b.jsonl", "text_column": "body"}


@pytest.mark.parametrize(
    ("verb", "data", "imports", "first"),
    [
        (
            "pretrain",
            BODY,
            [],
            "convert --model r/model --data b.jsonl --output convert data.text_column=body",
        ),
        ("convert", BODY, [], "sft --model r/model --data PAIRS.jsonl --output sft"),
        (
            "sft",
            {"task": "sudoku", "style": "chat"},
            [],
            "grpo --model r/model --task sudoku --output grpo data.style=chat",
        ),
        (
            "sft",
            {"task": "sudoku"},
            ["my.py"],
            "grpo --model r/model --task sudoku --output grpo 'imports=[my.py]'",
        ),
        ("grpo", {"task": "sudoku"}, ["my.py"], "generate r/model --prompt TEXT"),
        ("grpo", {"task": "sudoku"}, [], "evaluate r/model --task sudoku"),
    ],
)
def test_the_next_command_has_what_its_data_needs(verb, data, imports, first):
    run = RunConfig(model={"path": "m"}, output_dir="r", data=data, imports=imports)
    assert next_commands(verb, run)[0] == f"unmask {first}"


MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"prompt": MESSAGES, "completion": MESSAGES}, ["--chat"]),
        ({"conversations": [{"from": "human", "value": "Hello"}]}, ["--chat"]),
        ({"prompt": "Hello", "completion": "you"}, []),
    ],
)
def test_a_model_that_was_trained_on_chats_is_asked_by_chat(row, chat, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    look = next_commands("sft", config(tmp_path, train=str(path)))[-1]
    assert look.split()[3:] == [*chat, "--prompt", "TEXT"]


def test_the_next_verb_comes_first_then_a_look_at_the_texts(tmp_path):
    onward, look = next_commands("convert", config(tmp_path, train="text.txt"))
    assert onward.split()[1] == "sft" and look == f"unmask generate {tmp_path}/out/model --prompt TEXT"


def test_after_the_last_verb_a_task_is_evaluated_as_it_was_posed(tmp_path):
    assert next_commands("grpo", config(tmp_path, task="sudoku", style="chat")) == [
        f"unmask evaluate {tmp_path}/out/model --task sudoku --style chat"
    ]


def test_what_comes_next_can_train_the_model():
    def after(verb, **training):
        run = RunConfig(model={"path": "m"}, data={"task": "sudoku"}, output_dir="r", training=training)
        return next_commands(verb, run)[0].split()[1]

    assert after("pretrain") == "convert" and after("pretrain", attention="bidirectional") == "sft"
    assert after("sft") == "grpo" and after("sft", noise="uniform") == "evaluate"
