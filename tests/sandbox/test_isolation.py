"""What the host offers is found by trying, reported, and required."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time

import pytest

from tests.errors import raises
from tests.helpers import partly_slow, require_sandbox
from unmask.rewards import program
from unmask.sandbox import isolation
from unmask.sandbox.isolation import FIRST_UID, LAYERS, Host, SandboxError, SandboxLimits, probe
from unmask.sandbox.pool import PythonTests, SandboxPool, python_job
from unmask.variables import ACCEPT_UNSANDBOXED

DOUBLE = python_job("def f(x):\n    return 2 * x\n", PythonTests("assert f(1) == 2", {"f": "f"}))
EXITS = python_job("import sys; sys.exit(0)", PythonTests("assert f(1) == 2", {"f": "f"}))
READS = "import os\ndef f(x): return os.path.exists('/etc/passwd')"


def test_the_probe_reports_layers_and_what_gets_through():
    done = subprocess.run(
        [sys.executable, "-m", "unmask", "sandbox", "probe", "--json"], capture_output=True, text=True
    )
    told = json.loads(done.stdout)
    assert told["isolated"] == probe().isolated == (done.returncode == 0)
    shown = subprocess.run(
        [sys.executable, "-m", "unmask", "sandbox", "probe"],
        capture_output=True,
        text=True,
        env={"PATH": "/nowhere"},
    )
    assert shown.returncode == 2 and "bubblewrap" in shown.stdout and "no bwrap" in shown.stdout
    assert "forge" in shown.stdout and "forge" in LAYERS["bubblewrap"]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A host on which nothing isolates."""
    bare = Host(dict.fromkeys(LAYERS, "taken away"), tmp_path, sys.executable)
    isolation.compile_worker(sys.executable, tmp_path)
    monkeypatch.setattr("unmask.sandbox.pool.probe", lambda: bare)
    return bare


def test_without_isolation_nothing_is_run_unless_that_is_accepted(bare):
    with raises(SandboxError, where="sandbox"):
        SandboxPool()
    pool = SandboxPool(1, accept_unsandboxed=True)
    try:
        assert [outcome.status for outcome in pool.run([DOUBLE, EXITS, DOUBLE])] == ["ok", "wrong", "ok"]
    finally:
        pool.close()


def test_the_environment_variable_accepts(bare, monkeypatch):
    make = program.shared_pool.__wrapped__
    with pytest.raises(SandboxError):
        make()
    monkeypatch.setenv(ACCEPT_UNSANDBOXED, "1")
    make().close()


@pytest.mark.parametrize("layer", ["users", "cgroups", "cpu", "seccomp"])
def test_one_layer_less_still_isolates(layer, monkeypatch):
    require_sandbox()
    host = dataclasses.replace(probe(), missing={layer: "taken away"})
    monkeypatch.setattr("unmask.sandbox.pool.probe", lambda: host)
    pool = SandboxPool(1, SandboxLimits(seconds=5.0))
    try:
        reads = python_job(READS, PythonTests("assert f(1) is False", {"f": "f"}))
        assert [outcome.status for outcome in pool.run([DOUBLE, reads])] == ["ok", "ok"]
    finally:
        pool.close()


def test_processes_are_limited_where_their_count_is_the_sandboxs_own():
    assert any("NPROC" in word for word in SandboxLimits(processes=7).worker_arguments(True))
    assert not any("NPROC" in word for word in SandboxLimits(processes=7).worker_arguments(False))
    assert not Host({"bubblewrap": "taken away"}, probe().folder, sys.executable).counts_processes


def test_nothing_is_left_when_a_pool_is_closed():
    require_sandbox()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(2):
        pool = SandboxPool(2)
        pool.run([DOUBLE, EXITS] * 4)
        groups = [folder for slot in pool.slots for group in slot.groups for folder in group.folders]
        assert all(folder.is_dir() for folder in groups)
        pool.close()
        assert not any(folder.exists() for folder in groups)
    assert set(os.listdir("/proc/self/fd")) == before


def test_sandboxes_die_with_whoever_started_them():
    require_sandbox()
    code = """
import time
from unmask.sandbox.pool import SandboxPool, PythonTests, python_job
pool = SandboxPool(2)
tests = PythonTests("assert f(1) == 2", {"f": "f"})
pool.run([python_job("def f(x): return 2", tests)] * 2)
pool.submit(python_job("while True: pass", tests))
time.sleep(0.5)
print(*(uid for slot in pool.slots for uid in slot.uids), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        users = {int(uid) for uid in process.stdout.readline().split()}
        assert users and owned_by(users)
        process.kill()
        process.wait()
    for _ in range(100):
        if not owned_by(users):
            return
        time.sleep(0.05)
    pytest.fail(f"processes survive: {owned_by(users)}")


def owned_by(users):
    """The processes of these users."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"/proc/{pid}").st_uid in users:
                found.append(pid)
    return found


def test_folders_of_processes_that_were_killed_are_swept_up(monkeypatch, tmp_path):
    monkeypatch.setattr(isolation.tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"{isolation.PREFIX}dead"
    dead.mkdir()
    (dead / isolation.LOCK).touch()
    (tmp_path / f"{isolation.PREFIX}other").mkdir()  # not ours: it has no lock
    living = isolation.new_folder()
    assert (
        isolation.new_folder().is_dir()
        and living.is_dir()
        and not dead.exists()
        and (tmp_path / f"{isolation.PREFIX}other").is_dir()
    )


def test_the_place_of_a_lock_may_hold_anything(monkeypatch, tmp_path):
    """Anyone may write to /tmp. A FIFO as the lock would hang whoever opens it; folders of other users are
    theirs."""
    monkeypatch.setattr(isolation.tempfile, "tempdir", str(tmp_path))
    for name in ("fifo", "folder", "link"):
        (tmp_path / f"{isolation.PREFIX}{name}").mkdir()
    os.mkfifo(tmp_path / f"{isolation.PREFIX}fifo" / isolation.LOCK)
    (tmp_path / f"{isolation.PREFIX}folder" / isolation.LOCK).mkdir()
    (tmp_path / "target").touch()
    (tmp_path / f"{isolation.PREFIX}link" / isolation.LOCK).symlink_to(tmp_path / "target")
    (tmp_path / f"{isolation.PREFIX}file").touch()
    os.mkfifo(tmp_path / f"{isolation.PREFIX}pipe")
    before = set(tmp_path.iterdir())
    thread = threading.Thread(target=isolation.new_folder, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive() and before < set(tmp_path.iterdir())
    if os.geteuid() == 0:
        foreign = tmp_path / f"{isolation.PREFIX}foreign"
        foreign.mkdir()
        (foreign / isolation.LOCK).touch()
        os.chown(foreign, FIRST_UID, FIRST_UID)
        isolation.new_folder()
        assert foreign.is_dir()


@partly_slow("copied", [True, False], 0)
def test_an_interpreter_in_a_home_folder_shows_nothing_else_of_it(monkeypatch, tmp_path, copied):
    """As pyenv and conda install it: only its binary and its library are in the sandbox, copied there or
    linked."""
    require_sandbox()
    home, version = tmp_path / "home", f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    python, library = home / "bin" / version, home / "lib" / version
    shutil.copy(os.path.realpath(sys.executable), python)
    if copied:
        ignored = shutil.ignore_patterns(
            "test*", "idlelib", "tkinter", "ensurepip", "__pycache__", "config-*", "packages"
        )
        shutil.copytree(
            sysconfig.get_path("stdlib"),
            library,
            ignore=lambda folder, names: [*ignored(folder, names), "site-packages"],
        )
        (library / "site-packages").mkdir()
    else:
        library.symlink_to(sysconfig.get_path("stdlib"))
    secrets = [home / ".ssh" / "id_ed25519", home / "lib" / "token", home / "bin" / "key"]
    for secret in secrets:
        secret.parent.mkdir(exist_ok=True)
        secret.write_text("secret")
    monkeypatch.setattr(sys, "executable", str(python))
    which = shutil.which  # without user ids of its own, a sandbox may read what this user may
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "setpriv" else which(name))
    host = probe.__wrapped__()
    assert host.isolated and host.python == str(python)
    monkeypatch.setattr("unmask.sandbox.pool.probe", lambda: host)
    program = (
        f"import os\ndef f(x): return [path for path in {list(map(str, secrets))!r} if os.path.exists(path)]"
    )
    place = str(library / "site-packages")  # which Debian's library has not
    packages = f"import os\ndef f(x): return os.listdir({place!r}) if os.path.isdir({place!r}) else []"
    modules = "import ctypes, decimal, hashlib, json, zlib\ndef f(x): return []"
    pool = SandboxPool(1, SandboxLimits(seconds=5.0))
    try:
        tests = PythonTests("assert f(1) == []", {"f": "f"})
        found = pool.run([python_job(each, tests) for each in (program, packages, modules)])
        assert [outcome.status for outcome in found] == ["ok"] * 3, found
    finally:
        pool.close()


def test_an_interpreter_whose_library_is_not_found_is_not_used(monkeypatch, tmp_path):
    require_sandbox()
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert probe.__wrapped__().python == "/usr/bin/python3"
