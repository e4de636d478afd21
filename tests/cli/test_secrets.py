"""A run with secrets: no file of it holds one, and it resumes from its recorded config."""

from __future__ import annotations

import shutil

from tests.training.tiny_runs import QUICK, equal, unmask, weights
from unmask.models.load import load

SECRET = "s3cr3t-p4ss"


def test_no_file_of_a_run_holds_its_token_and_its_record_resumes_it(model, tmp_path):
    token = ["--hub_token", SECRET]
    run = [
        "sft",
        "--model",
        model,
        "--task",
        "sudoku",
        *QUICK,
        "training.max_steps=4",
        "training.save_steps=2",
        "--output",
        tmp_path / "a",
    ]
    assert unmask(*run, *token).exit_code == 0
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not [path for path in files if path.name == "training_args.bin"]
    whole = weights(load(tmp_path / "a/model"))
    shutil.rmtree(tmp_path / "a/checkpoint-4")
    shutil.rmtree(tmp_path / "a/model")
    resumed = unmask("sft", "--config", tmp_path / "a/config.yaml", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert equal(weights(load(tmp_path / "a/model")), whole)
