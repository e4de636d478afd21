"""A control group for each sandbox: its memory and processes are counted together, and none survives it. Versions 1 and 2."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class Group:
    """A control group of one sandbox after another.

    Args:
        name: of its folder.
        memory: bytes that its processes and their files in memory may take.
        processes: how many there may be, threads among them.

    Raises:
        OSError: this process may not make control groups here.
    """

    def __init__(self, name: str, memory: int, processes: int):
        limits = {"memory": ("memory.limit_in_bytes", memory), "pids": ("pids.max", processes)}
        if (ROOT / "cgroup.controllers").exists():
            own = _own("")
            (own / "cgroup.subtree_control").write_text("+memory +pids")  # refused if it has processes
            folder = own / name
            self.folders = [folder]
            settings = [(folder / "memory.max", memory), (folder / "memory.swap.max", 0), (folder / "pids.max", processes)]
        else:
            self.folders = [_own(controller) / name for controller in limits]
            settings = [(folder / file, value) for folder, (file, value) in zip(self.folders, limits.values(), strict=True)]
        try:
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            for file, value in settings:
                if file.exists() or "swap" not in file.name:
                    file.write_text(str(value))
        except OSError:
            self.remove()
            raise

    def entrance(self) -> list[str]:
        """The files to which a process writes 0 to enter."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def processes(self) -> list[int]:
        return [int(line) for line in (self.folders[0] / "cgroup.procs").read_text().split()]

    def kill(self, seconds: float) -> bool:
        """Kill every process in it; whether none is left after that time."""
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
    """Remove the groups of processes that were killed: they are named `unmask-<process id>-...`, and empty."""
    for controller in ("memory", "pids", ""):
        with contextlib.suppress(OSError):
            for folder in _own(controller).glob("unmask-*-*"):
                pid = folder.name.split("-")[1]
                if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _own(controller: str) -> Path:
    """The folder of the group that this process is in: of a controller (version 1), or the only one (version 2, `controller` empty)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inside = ROOT / controller / path.lstrip("/")
            return inside if inside.is_dir() else ROOT / controller  # a container may see its own group as the root
    raise FileNotFoundError(f"no cgroup controller {controller!r}")
