"""The machine: Python, platform, processors, memory, disks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unmask.artifacts import num_cores
from unmask.cli.doctor.findings import Finding

LITTLE_MEMORY, LITTLE_DISK = 2e9, 5e9
"""Bytes: the demo needs 1.3 GB of memory; a checkpoint of a model of 0.5 billion weights, with Adam's
moments, 6 GB of disk."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def python() -> Iterator[Finding]:
    version = f"{platform.python_version()} ({platform.python_implementation()})"
    yield Finding("Python", version, sys.executable)


def system() -> Iterator[Finding]:
    yield Finding("platform", platform.platform())


def processors() -> Iterator[Finding]:
    found = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.M)
    name = found[1] if found else platform.processor() or platform.machine()
    yield Finding(
        "CPU", f"{name}, {platform.machine()}", f"{num_cores()} of {os.cpu_count()} cores may be used here"
    )


def memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _text("/proc/meminfo"), re.M)
    free = 1024 * int(available[1]) if available else total
    limits = [int(text) for path in CGROUP_LIMITS if (text := _text(path).strip()).isdecimal()]
    limit = min([total, *limits])
    found = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB available" if available else f"{total / 1e9:.1f} GB"
    if limit < total:
        found += f"; this container may use {limit / 1e9:.1f} GB"
    little = min(free, limit) < LITTLE_MEMORY
    yield Finding("memory", found, "little: the demo needs 1.3 GB. End other programs" if little else "")


def disks() -> Iterator[Finding]:
    yield _disk("current folder", Path.cwd(), "start in another folder")
    yield _disk("temporary folder", tempfile.gettempdir(), "set TMPDIR to another folder")


def hub_cache() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    yield _disk("hub cache", HF_HUB_CACHE, "set HF_HOME to another folder")


def _disk(name: str, path: str | Path, remedy: str) -> Finding:
    """The free space at a path, which need not exist yet, and whether this user may write there."""
    path = Path(path).absolute()
    folder = next(each for each in (path, *path.parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    problems = ["not writable"] * (not os.access(folder, os.W_OK)) + [
        "little space for models and checkpoints"
    ] * (free < LITTLE_DISK)
    meaning = f"{' and '.join(problems)}: free some, or {remedy}" if problems else ""
    return Finding(name, f"{free / 1e9:.1f} GB free in {path}", meaning)


def _text(path: str) -> str:
    """A file of the kernel; "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
