"""Samples of completions: what is logged, when, and where."""

from __future__ import annotations

import contextlib
import html
import importlib
import io
import json
import math
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from tests.helpers import examples
from tests.training.tiny_runs import Before, make
from unmask.artifacts import MetricsLog
from unmask.console import Progress
from unmask.rl.completion_log import COMPLETIONS_FILE, CompletionLog

NASTY = "a|b <answer>*7*</answer>\n_[bold]x[/bold]_ `c` # é\\"


def columns(count: int = 8, text: str = "a") -> dict[str, list[Any]]:
    return {
        "prompt": [f"prompt {i}" for i in range(count)],
        "completion": [f"{i}: {text}" for i in range(count)],
        "rewards/right": [math.nan if i == 0 else i / 8 for i in range(count)],
        "advantage": [i - 3.5 for i in range(count)],
        "truncated": [i % 2 == 1 for i in range(count)],
    }


def kept(folder: Path) -> list[dict[str, Any]]:
    return MetricsLog(folder / COMPLETIONS_FILE).read()


def test_rows_from_all_over_the_rollout_are_written_in_full(tmp_path, capsys):
    long = "x" * 5000
    CompletionLog(tmp_path, rows=4).write(3, columns(8, long))
    assert [line["completion"] for line in kept(tmp_path)] == [f"{i}: {long}" for i in (0, 2, 4, 6)]
    first = {
        "step": 3,
        "prompt": "prompt 0",
        "completion": f"0: {long}",
        "rewards/right": None,
        "advantage": -3.5,
        "truncated": False,
    }
    assert kept(tmp_path)[0] == first
    assert capsys.readouterr().out.count("x") < 4 * 500


def test_a_small_rollout_is_written_whole(tmp_path):
    CompletionLog(tmp_path, rows=None).write(1, columns(9))
    assert len(kept(tmp_path)) == 9
    (tmp_path / "few").mkdir()
    CompletionLog(tmp_path / "few", rows=4).write(1, columns(3))
    assert [line["prompt"] for line in kept(tmp_path / "few")] == ["prompt 0", "prompt 1", "prompt 2"]


def test_the_terminal_shows_the_text_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("unmask.console.MAX_WIDTH", 200)  # so that no text is folded
    CompletionLog(tmp_path).write(
        7, columns(2, NASTY) | {"prompt": [[{"role": "user", "content": "é?"}]] * 2}
    )
    shown = capsys.readouterr().out
    assert "completions of step 7" in shown and "│ é? " in shown and "role" not in shown
    assert (
        all(f" {line} " in shown for line in f"0: {NASTY}".splitlines())
        and "0.125" in shown
        and "nan" not in shown
    )
    assert shown.index("rewards/right") < shown.index("advantage") < shown.index("truncated")


def test_what_no_terminal_can_show_is_told_by_its_number(tmp_path, capsys):
    half = {"extra": ["\ud800", ["\udfff"]], "step": [7, 8]}
    samples = CompletionLog(tmp_path)
    samples.write(1, columns(2) | half)
    shown = capsys.readouterr().out.encode().decode()
    assert "\\ud800" in shown and "\\udfff" in shown
    assert [line["extra"] for line in kept(tmp_path)] == half["extra"]
    samples.rewind(0)  # by the step of the run, not by that of a function
    assert kept(tmp_path) == []


def test_columns_of_odd_keys_are_kept_by_their_names(tmp_path):
    CompletionLog(tmp_path).write(1, columns(1) | {"pairs": [{("a", "b"): 2}]})
    assert kept(tmp_path)[0]["pairs"] == {"('a', 'b')": 2}


def run(samples: CompletionLog, rollouts: range, every: int) -> None:
    for step in rollouts:
        if samples.due(step, every):
            samples.write(step, columns(1))


@examples(20)
@given(every=st.integers(1, 7), updates=st.integers(1, 4), before=st.integers(0, 5), lost=st.integers(0, 3))
def test_a_resumed_run_samples_at_the_steps_of_one_that_was_not_interrupted(
    tmp_path_factory, every, updates, before, lost
):
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    run(CompletionLog(whole), range(1, 20, updates), every)
    run(CompletionLog(broken), range(1, (before + lost) * updates + 1, updates), every)
    resumed = CompletionLog(broken)
    resumed.rewind(before * updates)
    run(resumed, range(before * updates + 1, 20, updates), every)
    lines = kept(whole)
    assert kept(broken) == lines
    steps = [line["step"] for line in lines]
    assert steps[0] == 1 and len({step // every for step in steps}) == len(steps) >= 19 // max(every, updates)


def test_a_torn_line_and_a_missing_file_are_no_obstacle(tmp_path):
    samples = CompletionLog(tmp_path, rows=1)
    samples.rewind(2)
    assert not list(tmp_path.iterdir())
    samples.write(1, columns())
    with (tmp_path / COMPLETIONS_FILE).open("a") as file:
        file.write('{"step": 2, "pro')
    samples.rewind(1)
    samples.write(2, columns())
    assert [line["step"] for line in kept(tmp_path)] == [1, 2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_live_display_makes_room_for_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress([("grpo", 1.0)], stream=terminal) as progress, progress.phase("grpo") as phase:
        phase.update(0.5)
        CompletionLog(tmp_path).write(1, columns())
    before, _, after = terminal.getvalue().partition("completions of step 1")
    assert re.search(r"whole run.*\r(\x1b\[1A)?\x1b\[2K\x1b\[3m *$", before, re.DOTALL)  # the line is cleared
    assert after.index("prompt 7") < after.index("whole run")  # and written again below


def test_a_bar_of_tqdm_makes_room_too(tmp_path, monkeypatch):
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    with tqdm(total=2, desc="steps"):
        CompletionLog(tmp_path).write(1, columns())
    before, _, after = terminal.getvalue().partition("completions of step 1")
    assert re.search(r"steps.*\r *\r\x1b\[3m *$", before) and "steps" in after


def train(folder: Path, tracker: str) -> None:
    """A run with a tracker, which is given samples in its second step."""
    trainer = make("sft", folder, report_to=[tracker], run_name="run")
    samples = CompletionLog(folder, rows=2)
    trainer.add_callback(
        Before(1, lambda: samples.write(2, columns(2, NASTY), trainer.callback_handler.callbacks))
    )
    trainer.train()


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer")  # TensorBoard's own
def test_tensorboard_shows_them_as_a_table(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    train(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.step == 2 and "train/loss" in events.Tags()["scalars"]
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
    assert shown.count("<tr>") == 3 and shown.count("<td>") == 10
    assert f"1: {NASTY}" in html.unescape(shown.replace("<br>", "\n"))


def test_wandb_keeps_them_as_a_table(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    train(tmp_path, "wandb")
    wandb = importlib.import_module("wandb")
    wandb.finish()
    wandb.teardown()  # else the next run of this process goes to the same folder
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
    read = json.loads(table.read_text())
    assert read["columns"] == list(columns()) and len(read["data"]) == 2
    assert read["data"][0] == ["prompt 0", f"0: {NASTY}", None, -3.5, False]


def test_trackio_keeps_them_as_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    train(tmp_path, "trackio")
    place = importlib.import_module("trackio.utils").TRACKIO_DIR  # that of the first import
    with contextlib.closing(sqlite3.connect(place / "huggingface.db")) as database:
        logged = [json.loads(metrics) for (metrics,) in database.execute("SELECT metrics FROM metrics")]
    (read,) = [line["completions"]["_value"] for line in logged if "completions" in line]
    assert (
        read[0] == dict(zip(columns(), ["prompt 0", f"0: {NASTY}", None, -3.5, False], strict=True))
        and len(read) == 2
    )
