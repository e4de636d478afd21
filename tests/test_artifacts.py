"""Files that a run writes: metrics and the manifest, each written atomically."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tests.errors import raises
from unmask import artifacts
from unmask.artifacts import MetricsLog, irregular_file, read_file, run_manifest, write_atomic, write_manifest
from unmask.errors import DataError


def test_metrics_come_back_and_each_line_is_there_at_once(tmp_path):
    log = MetricsLog(tmp_path / "new" / "training_logs.json")
    for step in range(3):
        log.write({"step": step, "loss": np.float32(0.5), "train/tokens": np.int64(7), "note": "é\n"})
        assert log.read() == [
            {"step": i, "loss": 0.5, "train/tokens": 7, "note": "é\n"} for i in range(step + 1)
        ]


def test_numbers_that_json_lacks_become_null(tmp_path):
    log = MetricsLog(tmp_path / "training_logs.json")
    log.write(
        {
            "loss": math.nan,
            "bounds": (-math.inf, 1.0),
            "reward": np.float64("nan"),
            "norm": np.float32("inf"),
            "ok": True,
        }
    )
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
    with raises(DataError, where=str(tmp_path / "training_logs.json")):
        log.read()
    log.path.write_text('{"step": 1}\nstep: 2\n')
    with raises(DataError, where=f"{tmp_path}/training_logs.json, line 2"):
        log.read()
    for line in ("1" * 5000, "[" * 100_000):
        log.path.write_text(f"{line}\n")
        with raises(DataError, where=f"{tmp_path}/training_logs.json, line 1"):
            log.read()
    log.path.write_bytes(b"\xff\n")
    with raises(DataError, where=str(tmp_path / "training_logs.json")):
        log.read()


def test_the_name_of_a_file_may_be_as_long_as_the_system_allows(tmp_path):
    write_atomic(tmp_path / ("x" * 255), "text")  # the temporary file beside it has a longer name
    assert [(len(path.name), path.read_text()) for path in tmp_path.iterdir()] == [(255, "text")]


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
    monkeypatch.setattr(artifacts, "RECORDED_PACKAGES", ("no-such-package",))
    assert run_manifest({})["packages"] == {"no-such-package": None}


@pytest.mark.parametrize("name", ["a FIFO", "a device", "a folder", "a file without end", "a link to a FIFO"])
def test_only_files_are_read(name, tmp_path):
    path, fifo = tmp_path / "manifest.json", tmp_path / "fifo"
    os.mkfifo(fifo)
    match name:
        case "a FIFO":
            path = fifo
        case "a device":
            path.symlink_to("/dev/zero")
        case "a folder":
            path.mkdir()
        case "a link to a FIFO":
            path.symlink_to(fifo)
        case "a file without end":
            path.touch()
            os.truncate(path, 2**40)
    with pytest.raises(OSError, match=r"regular file|Is a directory|more than 1,073,741,824 bytes"):
        read_file(path)
    assert irregular_file(tmp_path) == "fifo"


def test_a_pipe_that_the_shell_passes_is_read():
    """As `<(...)` is."""
    end, start = os.pipe()
    os.write(start, b"a: 1\n")
    os.close(start)
    assert read_file(f"/dev/fd/{end}") == "a: 1\n"
    os.close(end)


def test_an_atomic_write_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "report.html"
    write_atomic(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "second \ud800")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_importing_it_loads_nothing_heavy():
    heavy = "print({'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, unmask.artifacts; {heavy}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
