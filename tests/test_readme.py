"""README read from the top by somebody who has only made the demo: every block runs, also the second time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unmask as package
from tests.helpers import REPOSITORY
from tests.serving.commands import command
from tests.test_doc_blocks import SHORTER, TRAINING, blocks_of, commands, run_python
from tests.test_docs import anchors
from tests.training.tiny_runs import TINY_DEMO
from unmask.artifacts import MetricsLog
from unmask.cli.entry import app
from unmask.demo import run_demo

README = REPOSITORY / "README.md"
SHORT = ["training.max_steps=10", "training.use_cpu=true", "data.eval_rows=4"]
SAID = "What does a cow say?\n/quit\n"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_every_block_runs_from_an_empty_folder_and_runs_again(times, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "docs" / "samples", "docs/samples")
    run_demo(output="runs/demo", settings=TINY_DEMO)
    for _ in range(times):
        names: dict[str, Any] = {"__name__": __name__, "unmask": package}
        for block in blocks_of(README):
            for words in commands(block) if block.language == "bash" else []:
                give(words)
            if block.language == "python":
                run_python([block], names, SHORTER)
        logged = MetricsLog("runs/python/grpo/training_logs.json").read()
        # there is something to learn
        assert any(line.get("grad_norm", 0) > 0 and line["reward_std"] > 0 for line in logged)


def give(words: list[str]) -> None:
    """Run a command of Unmask, with few steps and rows."""
    if words[0] in ("make", "pip"):
        return
    if words[1] == "serve":
        with command(*words[2:]):
            return
    short = (
        SHORT
        if words[1] in TRAINING
        else ["--rows", "4"]
        if words[1] == "evaluate" and "--rows" not in words
        else []
    )
    shorter = [re.sub(r"^500$", "4", word) for word in words[1:]]
    result = CliRunner().invoke(app, [*shorter, *short], input=SAID if words[1] == "chat" else None)
    assert result.exit_code == 0, (words, result.output, result.exception)


def test_it_names_only_files_that_are_there_or_that_it_writes():
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.])(?:docs|unmask|tests)/[\w./-]+\.\w+", text))
    assert {"docs/samples/stories.txt", "docs/samples/pairs.jsonl"} <= named
    assert all((REPOSITORY / name).is_file() for name in named)
    bare = [
        word
        for block in blocks_of(README)
        for words in commands(block)
        for word in words
        if Path(word).suffix in SUFFIXES
    ]
    assert all(word.startswith(("docs/samples/", "runs/")) for word in bare)
    assert len(text.splitlines()) < 150


SUFFIXES = {".txt", ".jsonl", ".yaml", ".html", ".json", ".csv"}


def test_the_page_on_data_shows_the_samples_as_they_begin():
    page = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
    assert "samples" in anchors(page)
    for sample in sorted((REPOSITORY / "docs" / "samples").iterdir()):
        assert sample.name in page
        if sample.suffix != ".yaml":
            assert sample.read_text(encoding="utf-8").splitlines()[0] in page
