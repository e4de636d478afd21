"""What the seccomp filter permits, tried in a sandbox that has it."""

from __future__ import annotations

import errno
import subprocess

import pytest

from unmask.sandbox.isolation import FILTER, FIRST_UID, probe

TRIED = {
    "socket": "(2, 1, 0)",
    "unshare": "(0x10000000,)",
    "mount": "(0, 0, 0, 0, 0)",
    "ptrace": "(0, 0, 0, 0)",
    "keyctl": "(0, 0, 0, 0, 0)",
    "bpf": "(0, 0, 0)",
    "io_uring_setup": "(1, 0)",
    "perf_event_open": "(0, 0, 0, 0, 0)",
    "shmget": "(0, 4096, 0)",
    "memfd_create": "(b'x', 0)",
    "setuid": "(0,)",
    "setsid": "()",
    "flock": "(0, 2)",
    "fcntl": "(0, 6, 0)",  # F_SETLK
    "setpgid": "(0, 0)",
    "clone": "(0x10000000 | 17, 0, 0, 0, 0)",
    "ioctl": "(0, 0x5412, 0)",  # TIOCSTI: type into a terminal
}
"""System calls that are not allowed, with arguments."""


def in_sandbox(script: str, *, filtered: bool = True) -> str:
    host = probe()
    if not host.isolated or "seccomp" in host.missing:
        pytest.skip(f"missing here: {dict(host.missing)}")
    with (host.folder / FILTER).open("rb") as rules:
        command = [
            *host.command(FIRST_UID, (), rules.fileno() if filtered else None),
            host.python,
            "-I",
            "-S",
            "-c",
            script,
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, pass_fds=(rules.fileno(),)
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TRIED)
def test_what_is_not_allowed_fails_with_eperm_and_by_the_filter_s_doing(name):
    pyseccomp = pytest.importorskip("pyseccomp")
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    script = (
        f"import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall({number}, *{TRIED[name]}), "
        "ctypes.get_errno())"
    )
    refused = ["-1", str(errno.EPERM)]
    assert in_sandbox(script).split() == refused != in_sandbox(script, filtered=False).split()


def test_programs_still_compute_write_and_start_threads_and_processes():
    script = """
import os, subprocess, sys, tempfile, threading, time
with tempfile.TemporaryFile() as file:
    file.write(b"x")
threading.Thread(target=time.sleep, args=(0,)).start()
print(subprocess.run([sys.executable, "-I", "-S", "-c", "print(6 * 7)"], capture_output=True, text=True).stdout, os.isatty(1))
"""
    assert in_sandbox(script).split() == ["42", "False"]
