"""What the installation without extras says to users of what it lacks. tests/test_release.py installs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers import REPOSITORY
from tests.tiny import toy_lm

pytestmark = pytest.mark.slow
COLUMNS = ("text", "prompt", "completion", "chosen", "rejected")
"""What the training verbs read."""
WITHOUT = """
import json, sys
for name in ("accelerate", "datasets", "matplotlib", "peft", "psutil", "scipy", "fastapi", "lm_eval"):
    sys.modules[name] = None  # for importlib: it is not installed
"""
VERBS = (
    WITHOUT
    + """
import contextlib, io
from unmask.cli.entry import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, printed.getvalue().strip().splitlines()[-1]]))
"""
)
NAMES = (
    WITHOUT
    + """
import unmask
for name in unmask.__all__:
    try:
        getattr(unmask, name)
    except unmask.UnmaskError as error:
        print(json.dumps([name, str(error)]))
"""
)


def printed(code: str, *arguments: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def test_every_verb_names_the_extra_in_one_line(tmp_path):
    toy_lm().save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict.fromkeys(COLUMNS, "a")))
    model, rows = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    training = ["--model", model, "--data", rows, "--output", str(tmp_path / "run"), "--max-steps", "1"]
    calls = {
        **{(verb, *training): "train" for verb in ("pretrain", "convert", "sft", "dpo")},
        ("grpo", "--model", model, "--task", "sudoku", *training[4:]): "train",
        ("sft", *training, "--dry-run"): "train",
        ("profile", "sft", *training): "train",
        ("evaluate", model, "--task", "sudoku"): "train",
        ("evaluate", model, "--lm-eval", "piqa"): "train",
        ("runs", str(tmp_path)): "train",
        ("report", str(tmp_path)): "train",
        ("demo", "--quick", "--output", str(tmp_path / "demo")): "train",
        ("serve", model): "serve",
    }
    for (verb, *_), extra, (code, last) in zip(
        calls, calls.values(), printed(VERBS, json.dumps(list(calls))), strict=True
    ):
        assert code == 2 and last.startswith(f"error: unmask {verb}: needs "), last
        assert last.endswith(f", which is not installed. Install it with pip install 'unmask[{extra}]'.")


def test_every_public_name_is_there_or_names_the_extra():
    lacking = dict(printed(NAMES))
    assert lacking.keys() == {
        f"{verb}{part}"
        for verb in ("Pretrain", "Convert", "SFT", "DPO", "GRPO")
        for part in ("Trainer", "Config")
    }
    for name, message in lacking.items():
        assert message.startswith(f"unmask.{name}: needs ")
        assert message.endswith("Install it with pip install 'unmask[train]'.")
