"""What this host can isolate, and the command line that does it.

A sandbox is a process under bubblewrap: separate namespaces (users, processes, network, mounts, IPC, host
name), a read-only /usr, a small /tmp in memory, no /proc, no environment. If available: a seccomp filter, a
user id for each sandbox, a control group.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from unmask.errors import UnmaskError
from unmask.sandbox import worker
from unmask.sandbox.cgroups import ControlGroup, sweep
from unmask.sandbox.seccomp import write_filter

FIRST_UID, UIDS = 60_000, 5_000
"""The first user id of sandboxes that root starts, and their number: above those of people, within those of
containers."""
INSIDE, WORKER, FILTER = "/sandbox", "worker.pyc", "filter.bpf"
PREFIX, LOCK = "unmask-sandbox-", "lock"
DISK = 64 << 20
"""Bytes of a sandbox's /tmp, which is in memory."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}


class SandboxError(UnmaskError):
    """This host cannot run untrusted programs, or a sandbox failed through no fault of its program."""


@dataclass(frozen=True)
class SandboxLimits:
    """The resources that one program may use."""

    seconds: float = 10.0
    """Processor time of the program and its tests, with all their processes, from when they get their job."""
    idle_seconds: float = 10.0
    """Time in which all of them sleep. Waiting for a processor or the disk is not counted."""
    wall_seconds: float = 60.0
    """Time in all, less that in which they wait for a processor."""
    cpu_seconds: int = 20
    """Processor time of each process, in case it escapes the count of `seconds`."""
    memory: int = 512 << 20
    """Bytes of all its processes and files."""
    processes: int = 32
    """Processes and threads at a time."""
    file_size: int = 16 << 20
    """Bytes of one file."""

    def worker_arguments(self, counted: bool) -> list[str]:
        """The rlimits, for worker.py. `counted`: whether the kernel counts the processes of each sandbox
        separately."""
        limits = {
            "CPU": self.cpu_seconds,
            "AS": 2 * self.memory,
            "FSIZE": self.file_size,
            "NOFILE": 64,
            "CORE": 0,
            "STACK": 64 << 20,
        }
        if counted:  # otherwise all processes of this user would count
            limits["NPROC"] = self.processes
        return [f"{name}={value}" for name, value in limits.items()]


@dataclass(frozen=True, eq=False)
class Host:
    """What isolates programs on this host.

    Attributes:
        missing: the reason, for each missing layer (a key of `LAYERS`).
        folder: what sandboxes see at `INSIDE`: the worker, compiled for their interpreter, and the filter.
        python: interpreter of the sandboxes.
    """

    missing: Mapping[str, str]
    folder: Path
    python: str

    @property
    def isolated(self) -> bool:
        return "bubblewrap" not in self.missing

    @property
    def counts_processes(self) -> bool:
        """Whether the kernel counts each sandbox separately: by user id, or (since Linux 5.14, except for
        root) by namespace."""
        by_namespace = os.geteuid() != 0 and tuple(
            map(int, re.findall(r"[0-9]+", os.uname().release)[:2])
        ) >= (5, 14)
        return self.isolated and ("users" not in self.missing or by_namespace)

    def command(
        self,
        uid: int,
        entrances: Sequence[str] = (),
        filter_fd: int | None = None,
        info_fd: int | None = None,
    ) -> list[str]:
        """The command that runs the command line that follows it in a sandbox.

        Args:
            uid: user id in the sandbox, if it can be chosen.
            entrances: files of a control group (`ControlGroup.entrance`).
            filter_fd: descriptor of the seccomp filter.
            info_fd: descriptor to which bubblewrap writes the id of the first process.
        """
        if not self.isolated:
            return []
        enter = ["sh", "-c", ENTER, "sh", *entrances, "--"] if entrances else []
        if "cpu" in self.missing:
            enter = ["nice", "-n", "10", *enter]
        become = (
            ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
            if "users" not in self.missing
            else []
        )
        bubble = [
            "bwrap",
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
            "--new-session",
            "--clearenv",
        ]
        bubble += [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
        bubble += [
            *_file_system(self.python),
            "--ro-bind",
            str(self.folder),
            INSIDE,
            "--remount-ro",
            "/",
            "--chdir",
            "/tmp",
        ]
        bubble += ["--seccomp", str(filter_fd)] if filter_fd is not None else []
        bubble += ["--info-fd", str(info_fd)] if info_fd is not None else []
        return [*enter, *become, *bubble]


LAYERS = {
    "bubblewrap": (
        "programs read and write this user's files, kill its processes, reach the network, and can forge "
        "their verdicts"
    ),
    "users": (
        "sandboxes share a user id: only a control group, or Linux 5.14 for a user other than root, limits "
        "processes"
    ),
    "cgroups": "many processes together use more memory than one may",
    "cpu": (
        "programs that start many processes slow down the others: one program runs per processor, each at "
        "a low priority"
    ),
    "seccomp": "programs reach every system call: a hole in the kernel is a hole in the sandbox",
}
"""The risk if a layer is missing."""
ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1"; shift; done; shift; exec "$@"'
"""Shell script that enters control groups through their files and runs the command after `--`."""

FOLDERS = (
    "import json, sysconfig; print(json.dumps(sorted({sysconfig.get_path('stdlib'), "
    "sysconfig.get_path('platstdlib')})))"
)
"""Python program that prints the folders of the interpreter's standard library."""


@functools.cache
def probe() -> Host:
    """Find out by trial what isolates programs on this host."""
    folder = new_folder()
    missing = {}
    try:
        write_filter(folder / FILTER)
    except (ImportError, OSError) as error:
        missing["seccomp"] = f"{error} (pip install pyseccomp; apt-get install libseccomp2)"
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        missing["users"] = "only root can choose user ids"
    try:
        sweep()
        group = ControlGroup(f"unmask-{os.getpid()}-probe", 1 << 26, 16)
        group.remove()
        if not group.shares_processors:
            missing["cpu"] = "there is no cpu controller"
    except OSError as error:
        missing |= dict.fromkeys(("cgroups", "cpu"), str(error))
    python, problem = _find_python(Host(missing, folder, sys.executable))
    if problem:
        missing["bubblewrap"] = problem
    compile_worker(python, folder)
    return Host(missing, folder, python)


def new_folder() -> Path:
    """A folder for this process. Folders of processes that were killed, whose locks are free, are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _open_own(old / LOCK) as old_lock:
            fcntl.flock(old_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    outer = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = (outer / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    atexit.register(shutil.rmtree, outer, ignore_errors=True)
    atexit.register(lock.close)  # keeps the lock until then
    folder = outer / "inside"  # without the lock
    folder.mkdir()
    for each in (outer, folder):
        each.chmod(0o755)
    return folder


def _open_own(path: Path) -> IO[bytes]:
    """Open a regular file in a folder of this user, whatever others put in its place. OSError if it is
    anything else."""
    folder = path.parent.lstat()
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
        raise PermissionError(f"{path.parent} is not a folder of this user")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user")
    return open(descriptor, "rb")


def _find_python(host: Host) -> tuple[str, str]:
    """An interpreter that runs in a sandbox (this one or the system's), and if there is none, the reason."""
    if not shutil.which("bwrap"):
        return sys.executable, "there is no bwrap (apt-get install bubblewrap)"
    problem = ""
    for python in dict.fromkeys((os.path.realpath(sys.executable), "/usr/bin/python3")):
        try:
            sandbox = dataclasses.replace(host, python=python).command(FIRST_UID)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            problem = problem or f"the library of {python} is not found ({error})"
            continue
        command = [*sandbox, python, "-I", "-S", "-c", "import _json, resource, typing"]
        tried = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if tried.returncode == 0:
            return python, ""
        problem = problem or tried.stderr.strip()
    return sys.executable, problem or "no interpreter starts in it"


def compile_worker(python: str, folder: Path) -> None:
    """Write worker.py to a folder as bytecode of a sandbox's interpreter."""
    script = "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], doraise=True)"
    subprocess.run([python, "-I", "-c", script, worker.__file__, str(folder / WORKER)], check=True)


def _file_system(python: str) -> list[str]:
    """The mounts of a sandbox: /usr and the interpreter (read-only), a few devices, a /tmp in memory."""
    words = [
        "--ro-bind",
        "/usr",
        "/usr",
        "--dev",
        "/dev",
        "--remount-ro",
        "/dev",
        "--size",
        str(DISK),
        "--tmpfs",
        "/tmp",
    ]
    # no terminals, of which a host has a limited number
    words += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
    for name in ("/lib", "/lib64", "/bin"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    return [*words, *_interpreter(python)]


@functools.cache
def _interpreter(python: str) -> list[str]:
    """The mounts of an interpreter outside /usr: its binary, its standard library, and the shared libraries
    that they load. Never the folder that it is installed in, which may be someone's home."""
    if Path(python).is_relative_to("/usr"):
        return []
    folders = json.loads(
        subprocess.run([python, "-I", "-S", "-c", FOLDERS], check=True, capture_output=True, text=True).stdout
    )
    extensions = [str(file) for folder in folders for file in Path(folder).glob("lib-dynload/*.so")]
    loaded = subprocess.run(["ldd", python, *extensions], capture_output=True, text=True).stdout
    libraries = {
        path
        for path in re.findall(r"=> (/\S+) \(0x", loaded)
        if not path.startswith(("/usr/", "/lib/", "/lib64/"))
    }
    words = [word for path in (python, *folders, *sorted(libraries)) for word in ("--ro-bind", path, path)]
    packages = [str(folder) for path in folders if (folder := Path(path) / "site-packages").is_dir()]
    return words + [word for path in packages for word in ("--tmpfs", path, "--remount-ro", path)]
