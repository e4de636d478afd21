"""One run per output folder: who is refused, who shares the lock, and that a dead process keeps none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.errors import raises
from tests.helpers import REPOSITORY, partly_slow
from unmask.config.run import LOCK_FILE
from unmask.errors import TrainingError
from unmask.training.run.lock import is_running, sole_run


def without_flock(*_: int) -> None:
    """As filelock locks a file on a file system without flock."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


HOLD = f"""
import errno, os, sys, time
from pathlib import Path
import fcntl
{inspect.getsource(without_flock)}
from unmask.training.run.lock import sole_run
if "soft" in sys.argv:
    fcntl.flock = without_flock
with sole_run(Path(sys.argv[1])):
    if "forked" in sys.argv and os.fork() == 0:
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds a folder. All are ended after the test."""
    started = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path / "out"), *more]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
            )
        )
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_second_run_is_refused_with_who_holds_the_folder(tmp_path, holder):
    first = holder()
    assert is_running(tmp_path / "out")
    with raises(TrainingError, where=str(tmp_path / "out")) as refused, sole_run(tmp_path / "out"):
        pass
    assert f"process {first.pid} on " in str(refused.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("more", [(), ("forked",)])
def test_a_killed_run_keeps_no_lock_even_if_a_forked_process_survives_it(tmp_path, holder, more):
    process = holder(*more)
    process.kill()
    process.wait()
    for _ in range(500):  # a forked process closes the lock when it first runs
        if not is_running(tmp_path / "out"):
            break
        time.sleep(0.02)
    assert not is_running(tmp_path / "out")
    with sole_run(tmp_path / "out"):
        assert is_running(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_the_process_that_is_named_decides(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_flock)
    process = holder("soft")
    assert is_running(tmp_path / "out")
    with raises(TrainingError, where=str(tmp_path / "out")), sole_run(tmp_path / "out"):
        pass
    process.kill()
    process.wait()
    with sole_run(tmp_path / "out"), sole_run(tmp_path / "out"):
        assert is_running(tmp_path / "out")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / LOCK_FILE).write_text("1\nelsewhere\n2\n")
    with raises(TrainingError, where=str(tmp_path / "out")), sole_run(tmp_path / "out"):
        pass


def test_a_run_may_lock_again_and_leaves_no_trace_where_it_wrote_nothing(tmp_path):
    with sole_run(tmp_path / "out"), sole_run(tmp_path / "out"):
        assert is_running(tmp_path / "out")
    assert not (tmp_path / "out").exists() and not is_running(tmp_path / "out")
    with sole_run(tmp_path / "out"):
        (tmp_path / "out" / "log").write_text("x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["log"]


def test_a_forked_process_is_refused_and_leaves_the_lock_to_its_parent(tmp_path):
    with sole_run(tmp_path / "out"):
        if (child := os.fork()) == 0:
            try:
                with sole_run(tmp_path / "out"):
                    os._exit(1)
            except TrainingError:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / "out" / LOCK_FILE).read_text().startswith(f"{os.getpid()}\n")


def test_the_other_processes_of_a_run_share_its_lock(tmp_path, holder, monkeypatch):
    holder()
    monkeypatch.setenv("RANK", "1")
    with sole_run(tmp_path / "out"):
        pass


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with raises(TrainingError, where=str(tmp_path / "file")), sole_run(tmp_path / "file"):
        pass


def _enter(folder, barrier, entered):
    barrier.wait()
    try:
        with sole_run(folder):
            entered.value += 1
            time.sleep(1)
    except TrainingError:
        pass


@pytest.mark.filterwarnings("ignore:flock not supported")
@partly_slow("flock", [True, False], 0)
def test_of_many_that_start_together_one_enters(tmp_path, flock, monkeypatch):
    if not flock:
        monkeypatch.setattr(fcntl, "flock", without_flock)
    context = multiprocessing.get_context("fork")
    barrier, entered = context.Barrier(8), context.Value("i", 0)
    processes = [context.Process(target=_enter, args=(tmp_path / "out", barrier, entered)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert entered.value == 1
