"""Control groups (versions 1 and 2): they limit the memory and processes of a sandbox, and give each the same
share of the processors."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class ControlGroup:
    """A control group for one sandbox after another. OSError if this process may not create control groups.

    Args:
        name: name of its folder.
        memory: bytes that its processes and their files in memory may use.
        processes: maximum number of processes and threads.

    Attributes:
        shares_processors: whether it has the cpu controller: then each group gets the same share, however
            many processes it has.
    """

    def __init__(self, name: str, memory: int, processes: int):
        if (ROOT / "cgroup.controllers").exists():
            parent = own_group("")
            self.shares_processors = "cpu" in (parent / "cgroup.controllers").read_text().split()
            wanted = "+memory +pids" + " +cpu" * self.shares_processors
            (parent / "cgroup.subtree_control").write_text(wanted)  # refused if the group has processes
            folder = parent / name
            limits = {
                folder / "memory.max": memory,
                folder / "memory.swap.max": 0,
                folder / "pids.max": processes,
            }
            self.folders = [folder]
        else:
            limits = {
                own_group("memory") / name / "memory.limit_in_bytes": memory,
                own_group("pids") / name / "pids.max": processes,
            }
            self.folders = list(dict.fromkeys(file.parent for file in limits))
            self.shares_processors = False
            with contextlib.suppress(FileNotFoundError):
                self.folders.append(own_group("cpu") / name)
                self.shares_processors = True
            with contextlib.suppress(FileNotFoundError):
                self.folders.append(own_group("cpuacct") / name)
        try:
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            for file, value in limits.items():
                if file.exists() or "swap" not in file.name:
                    file.write_text(str(value))
        except OSError:
            self.remove()
            raise

    def entrance(self) -> list[str]:
        """The files to which a process writes 0 to enter the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def processes(self) -> list[int]:
        return [int(line) for line in (self.folders[0] / "cgroup.procs").read_text().split()]

    def computed(self) -> float | None:
        """Seconds of processor time of all its processes, also of those that have ended, whether or not
        anybody waited for them. None: it has no such count."""
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):  # version 1
                return int((folder / "cpuacct.usage").read_text()) / 1e9
            with contextlib.suppress(FileNotFoundError, KeyError):  # version 2
                return (
                    int(dict(map(str.split, (folder / "cpu.stat").read_text().splitlines()))["usage_usec"])
                    / 1e6
                )
        return None

    def kill(self, seconds: float) -> bool:
        """Kill all processes of the group. Returns whether none is left after `seconds`."""
        deadline = time.monotonic() + seconds
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        return not pids

    def remove(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def sweep() -> None:
    """Remove the empty groups of processes that were killed. Their names are `unmask-<process id>-...`."""
    for controller in ("memory", "pids", "cpu", "cpuacct", ""):
        with contextlib.suppress(OSError):
            for folder in own_group(controller).glob("unmask-*-*"):
                pid = folder.name.split("-")[1]
                if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def own_group(controller: str) -> Path:
    """The folder of the group of this process: for a controller (version 1), or for all (version 2,
    `controller` empty)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inside = ROOT / controller / path.lstrip("/")
            # a container may see its own group as the root
            return inside if inside.is_dir() else ROOT / controller
    raise FileNotFoundError(f"no cgroup controller {controller!r}")
