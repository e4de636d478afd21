"""Control groups enforce their limits, are removed with their processes, and are cleaned up after processes
that could not do so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import require_sandbox
from unmask.sandbox import cgroups
from unmask.sandbox.cgroups import ControlGroup, sweep

GONE = 2**22 + 1  # beyond the largest process id


@pytest.fixture
def group():
    require_sandbox()
    group = ControlGroup(f"unmask-{os.getpid()}-test", 64 << 20, 4)
    yield group
    group.kill(5.0)
    group.remove()
    assert not any(folder.exists() for folder in group.folders)


def inside(group: ControlGroup, code: str) -> subprocess.Popen[str]:
    enter = f"import os\nfor path in {group.entrance()!r}:\n    open(path, 'w').write('0')\n"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", enter + code], stdout=subprocess.PIPE, text=True
    )


def test_memory_and_processes_are_limited(group):
    with inside(group, "held = [bytearray(1 << 24) for _ in range(8)]\nprint('held')") as process:
        assert process.communicate()[0] == "" and process.returncode == -9
    forks = """
import time
n = 0
try:
    while n < 50:
        n += 1
        os.fork() or time.sleep(20)
except OSError:
    print(n, flush=True)
"""
    with inside(group, forks) as process:
        assert int(process.stdout.readline()) <= 4
        assert group.processes() and group.kill(5.0) and not group.processes()


def test_processor_time_of_ended_processes_is_counted(group):
    before = group.computed()
    if before is None:
        pytest.skip("no cpuacct controller")
    with inside(
        group, "import time\nif os.fork() == 0:\n    while time.process_time() < 0.3: pass\n    os._exit(0)"
    ) as process:
        process.communicate()
    while group.processes():
        pass
    assert 0.3 <= group.computed() - before < 3.0


@pytest.mark.parametrize(
    ("controllers", "wanted"), [("memory pids", "+memory +pids"), ("cpu memory pids", "+memory +pids +cpu")]
)
def test_the_files_of_version_2(monkeypatch, tmp_path, controllers, wanted):
    """In a folder that imitates the hierarchy, as only a host with version 2 has a real one."""
    (tmp_path / "cgroup.controllers").write_text(controllers)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "own_group", lambda controller: tmp_path)
    group = ControlGroup("unmask-1-test", 64 << 20, 4)
    assert (tmp_path / "cgroup.subtree_control").read_text() == wanted and group.shares_processors == (
        "cpu" in controllers
    )
    assert {file.name: file.read_text() for file in (tmp_path / "unmask-1-test").iterdir()} == {
        "memory.max": "67108864",
        "pids.max": "4",
    }
    assert group.entrance() == [str(tmp_path / "unmask-1-test" / "cgroup.procs")] and group.computed() is None
    (tmp_path / "unmask-1-test" / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1400000\n")
    assert group.computed() == 1.5


def test_groups_of_the_dead_are_swept_up_and_those_of_the_living_are_not(group):
    dead = ControlGroup(f"unmask-{GONE}-test", 64 << 20, 4)
    sweep()
    assert not any(folder.exists() for folder in dead.folders)
    assert all(folder.exists() for folder in group.folders)
