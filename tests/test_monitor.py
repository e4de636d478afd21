"""Progress with its time left, the metrics log and the manifest."""

from __future__ import annotations

import io
import json
import math
import resource
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask import monitor
from unmask.errors import DataError
from unmask.monitor import (
    MetricsLog,
    Progress,
    format_duration,
    peak_memory_bytes,
    run_manifest,
    take_peak_memory,
    write_atomic,
    write_manifest,
)


class Clock:
    """Time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(pace=st.floats(0.1, 10), seconds=st.lists(st.floats(1, 500), min_size=1, max_size=6))
def test_time_left_follows_the_observed_pace(pace, seconds):
    """A run that goes `pace` times slower than expected: the estimate moves from the expected time to the true one."""
    clock, stages = Clock(), [(f"stage {i}", weight) for i, weight in enumerate(seconds)]
    with Progress(stages, stream=io.StringIO(), clock=clock) as progress:
        assert progress.fraction == 0
        assert progress.seconds_left == (pytest.approx(sum(seconds)) if len(seconds) > 1 else None)
        true_left, last = pace * sum(seconds), 0.0
        for name, weight in stages:
            with progress.stage(name) as stage:
                for step in range(1, 21):
                    clock.now += pace * weight / 20
                    true_left -= pace * weight / 20
                    stage.update(step / 20)
                    assert last <= progress.fraction <= 1 + 1e-9
                    last = progress.fraction
                    expected_left = true_left / pace
                    assert min(true_left, expected_left) - 1e-6 <= progress.seconds_left <= max(true_left, expected_left) + 1e-6
            if true_left > 1 and progress.fraction > 0.5:
                assert progress.seconds_left == pytest.approx(true_left, rel=max(0.1 / pace, 0.1))
        assert progress.fraction == pytest.approx(1) and progress.seconds_left == pytest.approx(0, abs=1e-6)


def test_a_single_stage_needs_no_estimate_of_its_time():
    clock = Clock()
    with Progress([("sft", 1.0)], stream=io.StringIO(), clock=clock) as progress, progress.stage("sft") as stage:
        clock.now += 30
        stage.update(0.25)
        assert progress.seconds_left == pytest.approx(90)


def test_stages_passed_over_count_as_not_needed_and_names_may_come_again():
    clock = Clock()
    with Progress([("train", 10.0), ("evaluate", 5.0), ("train", 10.0), ("evaluate", 5.0)], stream=io.StringIO(), clock=clock) as progress:
        with progress.stage("evaluate"):
            clock.now += 5
        assert progress.fraction == pytest.approx(5 / 20) and progress.seconds_left == pytest.approx(15)
        with progress.stage("evaluate"):
            assert progress.seconds_left == pytest.approx(5)
        with pytest.raises(AssertionError, match="no stage 'train' is left"), progress.stage("train"):
            pass


def test_without_a_terminal_lines_are_plain_and_rare(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock, stream = Clock(), io.StringIO()
    with Progress([("pretrain", 75.0), ("grpo", 25.0)], stream=stream, clock=clock) as progress:
        with progress.stage("pretrain") as stage:
            for step in range(75):
                clock.now += 1
                stage.update((step + 1) / 75, loss=2.0 - step / 100)
        with progress.stage("grpo") as stage:
            stage.update(0.5, loss=0.1, reward=0.875)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[ 10%] pretrain 13% · loss 1.91 · 0:10 elapsed, 1:30 left"
    assert lines[-2] == "[ 75%] pretrain done in 1:15 · loss 1.26 · 1:15 elapsed, 0:25 left"
    assert lines[-1].startswith("[100%] grpo done in 0:00 · loss 0.1 · reward 0.875 · ")
    assert len(lines) == 7 + 2  # one every ten seconds of 75, and two ends
    assert stream.getvalue().replace("\n", "").isprintable()


def test_a_failing_stage_says_so_and_the_error_goes_on():
    clock, stream = Clock(), io.StringIO()
    with (
        pytest.raises(KeyError),
        Progress([("sft", 10.0), ("dpo", 10.0)], stream=stream, clock=clock) as progress,
        progress.stage("sft") as stage,
    ):
        clock.now += 4
        stage.update(0.5)
        raise KeyError("label")
    assert stream.getvalue().startswith("[ 25%] sft stopped after 0:04 · ")


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_terminal_the_display_is_live_and_leaves_the_terminal_clean(fails, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()

    def run():
        with Progress([("convert [1]", 10.0), ("sft", 10.0)], stream=stream) as progress, progress.stage("convert [1]") as stage:
            stage.update(0.5, loss=1.5)
            if fails:
                raise RuntimeError("broken")

    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            run()
    else:
        run()
    shown = stream.getvalue()
    assert "whole run" in shown and "left" in shown and "loss 1.5" in shown
    assert ("convert [1] stopped after" if fails else "convert [1] done in") in shown
    assert shown.count("\x1b[?25l") == 1 and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert shown[shown.rindex("whole run") :].count("\n") >= 2  # the prompt of the shell comes below both bars


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress([("sft", 1.0)], stream=stream) as progress, progress.stage("sft"):
        pass
    assert stream.getvalue() == "[100%] sft done in 0:00 · 0:00 elapsed, 0:00 left\n"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3725, "1:02:05")])
def test_durations_read_as_clock_time(seconds, shown):
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_knows_the_unit_of_the_system(system, unit, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(monitor, "_peak_taken", 0)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000 if who == resource.RUSAGE_SELF else 0))
    assert peak_memory_bytes() == 5_000 * unit


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's own account in /proc")
def test_peak_memory_agrees_with_the_kernel():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    high_water_mark = int(status["VmHWM"].split()[0]) * 1024
    # At least the mark of this program; a little of the one that started it may count too.
    assert 0.8 * high_water_mark < peak_memory_bytes() < 100 * high_water_mark


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_peak_that_cannot_be_begun_anew_is_not_told(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    assert take_peak_memory() is not None
    monkeypatch.setattr(Path, "write_text", refuse)
    assert take_peak_memory() is None


def test_metrics_come_back_and_each_line_is_there_at_once(tmp_path):
    log = MetricsLog(tmp_path / "new" / "training_logs.json")
    for step in range(3):
        log.write({"step": step, "loss": np.float32(0.5), "train/tokens": np.int64(7), "note": "é\n"})
        assert log.read() == [{"step": i, "loss": 0.5, "train/tokens": 7, "note": "é\n"} for i in range(step + 1)]


def test_numbers_that_json_lacks_become_null(tmp_path):
    log = MetricsLog(tmp_path / "training_logs.json")
    log.write({"loss": math.nan, "bounds": (-math.inf, 1.0), "reward": np.float64("nan"), "norm": np.float32("inf"), "ok": True})
    assert log.read() == [{"loss": None, "bounds": [None, 1.0], "reward": None, "norm": None, "ok": True}]
    json.loads(log.path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_line_torn_by_a_crash_is_left_out_and_the_log_goes_on(tmp_path):
    log = MetricsLog(tmp_path / "training_logs.json")
    log.write({"step": 1})
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert log.read() == [{"step": 1}]
    log.write({"step": 3})
    assert log.read() == [{"step": 1}, {"step": 3}]


def test_a_missing_or_malformed_log_is_named(tmp_path):
    log = MetricsLog(tmp_path / "training_logs.json")
    with pytest.raises(DataError, match=r"training_logs\.json: no such metrics file"):
        log.read()
    log.path.write_text('{"step": 1}\nstep: 2\n')
    with pytest.raises(DataError, match=r"training_logs\.json, line 2: not JSON"):
        log.read()


def test_the_manifest_tells_how_to_repeat_the_run(tmp_path):
    config = {"seed": 7, "model": {"path": tmp_path, "rate": math.inf}, "layers": (1, 2)}
    manifest = write_manifest(tmp_path / "deep" / "manifest.json", config, seconds=1.5)
    assert json.loads((tmp_path / "deep" / "manifest.json").read_text()) == manifest
    assert manifest["seconds"] == 1.5
    assert manifest["config"] == {"seed": 7, "model": {"path": str(tmp_path), "rate": None}, "layers": [1, 2]}
    assert manifest["packages"]["numpy"] == np.__version__
    assert manifest["python"] == ".".join(map(str, sys.version_info[:3])) and manifest["cores"] >= 1
    date = datetime.fromisoformat(manifest["date"])
    assert date.utcoffset() == timedelta(0) and abs(datetime.now(UTC) - date) < timedelta(minutes=1)
    assert shlex.split(manifest["command"]) == sys.orig_argv


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(monitor, "RECORDED_PACKAGES", ("no-such-package",))
    assert run_manifest({})["packages"] == {"no-such-package": None}


def test_an_atomic_write_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "report.html"
    write_atomic(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "second \ud800")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_importing_the_monitor_loads_nothing_heavy():
    heavy = "print({'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import sys, unmask.monitor; {heavy}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
