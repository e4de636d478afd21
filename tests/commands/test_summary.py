"""What a finished run shows, without training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unmask.commands.summary import next_command, summarise
from unmask.config.run import DataConfig, ModelConfig, RunConfig


def finished(folder: Path, *lines: dict, **settings) -> RunConfig:
    (folder / "training_logs.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunConfig(model=ModelConfig(path="m"), output_dir=str(folder), **settings)


def test_an_evaluation_that_is_not_of_the_run_is_not_shown(tmp_path):
    (tmp_path / "evaluation.json").write_text("of another model")
    config = finished(tmp_path, {"step": 3, "loss": 0.25, "tokens_per_second": 10.0})
    assert summarise("sft", config, 61.0) == [
        ("model", f"{tmp_path}/model"),
        ("time", "1:01, 3 steps"),
        ("last loss", "0.25"),
        ("tokens per second", "10"),
    ]


@pytest.mark.parametrize("steps, shown", [(0, "0 steps"), (1, "1 step")])
def test_a_run_without_steps_has_no_loss(steps, shown, tmp_path):
    rows = dict(summarise("sft", finished(tmp_path, {"step": steps, "train_loss": 0.0, "loss": 0.0}), 0.0))
    assert rows["time"].endswith(f", {shown}") and ("last loss" in rows) == (steps > 0)


BODY = {"train": "b.jsonl", "text_column": "body"}


BODY = {"train": "b.jsonl", "text_column": "body"}


@pytest.mark.parametrize(
    "verb, data, imports, following",
    [
        ("pretrain", BODY, [], "convert --model r/model --data b.jsonl --output convert data.text_column=body"),
        ("convert", BODY, [], "sft --model r/model --data PAIRS.jsonl --output sft"),
        ("sft", {"task": "sudoku", "style": "chat"}, [], "grpo --model r/model --task sudoku --output grpo data.style=chat"),
        ("sft", {"task": "sudoku"}, ["my.py"], "grpo --model r/model --task sudoku --output grpo 'imports=[my.py]'"),
        ("grpo", {"task": "sudoku"}, ["my.py"], "generate r/model --prompt TEXT"),
        ("grpo", {"task": "sudoku"}, [], "evaluate r/model --task sudoku"),
    ],
)
def test_the_next_command_has_what_its_data_needs(verb, data, imports, following):
    config = RunConfig(model=ModelConfig(path="m"), output_dir="r", data=DataConfig(**data), imports=imports)
    assert next_command(verb, config) == f"unmask {following}"
