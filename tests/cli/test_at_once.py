"""Mistakes and questions are answered at once: before torch, transformers or datasets are imported, which
takes seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers import REPOSITORY, shared_path

RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from unmask.cli import app

heavy = {"accelerate", "datasets", "matplotlib", "peft", "torch", "transformers"}
for line in json.load(sys.stdin):
    result = CliRunner().invoke(app, line)
    loaded = sorted(heavy & sys.modules.keys())
    print(json.dumps([line, result.exit_code, result.output, loaded]), flush=True)
    if loaded:
        break
"""
VERBS = ("pretrain", "convert", "sft", "dpo", "grpo")
HELP = [
    [],
    *([verb, "--help"] for verb in VERBS),
    *(
        [verb, "--help"]
        for verb in (
            "generate",
            "chat",
            "evaluate",
            "serve",
            "inspect",
            "export",
            "compare",
            "report",
            "runs",
            "demo",
        )
    ),
    *([verb, "--help"] for verb in ("new", "migrate", "config", "doctor", "profile", "sandbox")),
]
ANSWERS = [
    ["config", "grpo", "learning"],
    ["migrate", "trl.yaml"],
    ["new", "mine"],
    ["runs", "."],
    ["--version"],
]


def mistakes() -> list[list[str]]:
    wrong = [[verb, "--model", "nowhere/at/all", "--data", "rows.jsonl", "--output", "r"] for verb in VERBS]
    for verb in VERBS:
        start = [verb, "--model", "model", "--output", "r"]
        wrong += [
            [*start, "--data", "rwos.jsonl"],
            [*start, "--data", "rows.docx"],
            [*start, "--task", "sudku"],
            [*start, "--data", "rows.jsonl", "--lerning-rate", "1"],
            [*start, "--data", "rows.jsonl", "training.lerning_rate=1"],
            [*start, "--data", "rows.jsonl", "learning_rate=abc"],
            [*start, "--data", "rows.jsonl", "sampler.remasking=confidense"],
            [*start, "--data", "rows.jsonl", "--recipe", "tinny"],
            [*start, "--data", "rows.jsonl", "--config", "nowhere.yaml"],
            [*start, "--data", "rows.jsonl", "--output", "rows.jsonl"],
            [*start, "--data", "rows.jsonl", "--report-to", "wandbb"],
            [*start, "--data", "other.csv"],
            [*start, "--data", "broken.jsonl"],
            [*start, "--data", "rows.jsonl", "--task", "gsm8k"],
            [*start, "--data", "rows.jsonl", "--recipe", "tiny", "model.attention_block_size=4"],
            [*start, "--data", "rows.jsonl", "training.lr_scheduler_type=cosin"],
            [*start, "--data", "rows.jsonl", "training.optim=adamx"],
            [*start, "--data", "rows.jsonl", "training.max_length=1"],
            [*start, "--data", "rows.jsonl", "learning_rate=-1"],
            [*start, "--data", "rows.jsonl", "max_steps=0"],
            [*start, "--data", "rows.jsonl", "eval_steps=5"],
            [*start, "--data", "rows.jsonl", "training.eval_strategy=foo"],
            [*start, "--data", "rows.jsonl", "training.deepspeed=nope.json"],
            [*start, "--data", "rows.jsonl", "data.chat_template=nope.jinja"],
            [*start, "--data", "rows.jsonl", "--resume"],
        ]
    wrong += [[verb, "--model", "model", "--output", "r"] for verb in VERBS] + [
        ["evaluate", "model", "--task", "gsm8k"]
    ]
    wrong += [["sft", *start[1:], "--task", "gsm8k"], ["grpo", *start[1:], "--data", "rows.jsonl"]]
    wrong += [
        ["grpo", *start[1:], "--task", "sudoku", *more]
        for more in (["training.method=grop"], ["rewards=[nope.py:f]"], ["rewards=[sudoku/partal]"])
    ]
    wrong += [["dpo", *start[1:], "--data", "rows.jsonl", "training.ref_model=nowhere/at/all"]]
    wrong += [
        ["serve", "model", "--adapters", "a=nope"],
        ["inspect", "model", "--hardware", "h200x"],
        ["demo", "--task", "sudko"],
    ]
    wrong += [["export", "model", "--layout", "llama", "--output", "r"], ["evaluate", "--rerun", "nope.json"]]
    wrong += [
        [verb, "nowhere/at/all", *more]
        for verb, *more in (["generate", "--prompt", "a"], ["chat"], ["serve"], ["inspect"])
    ]
    wrong += [
        ["generate", "cut", "--prompt", "a"],
        ["serve", "cut"],
        ["export", "cut", "--layout", "hf", "--output", "r"],
    ]
    wrong += [["evaluate", "nowhere/at/all", "--task", "sudoku"], ["evaluate", "model", "--task", "sudku"]]
    wrong += [
        ["evaluate", "model", "--likelihood", "nowhere.txt"],
        ["evaluate", "model", "--task", "gsm8k", "--data", "nowhere.jsonl"],
    ]
    wrong += [["evaluate", "model", "--task", "sudoku", "--against", "nowhere/at/all"], ["evaluate", "model"]]
    wrong += [["evaluate", "model", "--task", "gsm8k", "--data", "other.csv"]]
    wrong += [
        ["migrate", "nowhere.yaml"],
        ["report", "nowhere"],
        ["runs", "nowhere"],
        ["new", "model"],
        ["config", "stf"],
        ["demo", "x"],
    ]
    return wrong


def test_every_mistake_and_question_is_answered_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    for name in ("model", "cut"):
        shutil.copytree(shared_path("models", "stories260K"), tmp_path / name, copy_function=shutil.copyfile)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows.docx").write_text("a")
    (tmp_path / "other.csv").write_text("question,reply\na,b\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"')
    shutil.copy(REPOSITORY / "docs" / "samples" / "trl-dpo.yaml", tmp_path / "trl.yaml")
    lines = [*HELP, *ANSWERS, *mistakes()]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(lines),
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line, loaded) for line, _, _, loaded in results if loaded] == [] and len(results) == len(lines)
    answered = [*HELP[1:], *ANSWERS]
    assert [(line, output) for line, code, output, _ in results if line in answered and code != 0] == []
    unclear = [
        (line, code, output)
        for line, code, output, _ in results[-len(mistakes()) :]
        if code != 2 or "Traceback" in output
    ]
    assert unclear == []
