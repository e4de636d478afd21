"""Files that a run writes: atomic text files, metrics as JSON lines, the manifest."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from unmask.errors import DataError, first_line
from unmask.redaction import masked, masked_words
from unmask.variables import SETTING

MAX_FILE = 2**30
"""Bytes of a file of a run at most."""
PASSED = re.compile(r"/dev/stdin|(/dev|/proc/self)/fd/\d+")
"""The paths of pipes that a shell passes, as in `--config <(...)`."""
RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "safetensors",
    "tokenizers",
    "numpy",
)


def write_atomic(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically: after a crash the earlier file is still there. Creates missing parent
    folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name:.50}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(default_mode())  # mkstemp lets only its owner read it
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_file(path: str | Path) -> str:
    """The text of a UTF-8 file, as of a model from a hub, or of a pipe that the shell passes (`<(...)`).

    Raises:
        OSError: it is no regular file, has more than `MAX_FILE` bytes, or cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir() or PASSED.fullmatch(str(path))):
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    if path.stat().st_size > MAX_FILE:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE:,} bytes", str(path))
    return path.read_text(encoding="utf-8")


def entries(folder: Path) -> list[Path]:
    """What is in a folder and in the folders within it, where libraries look too, without links that lead
    nowhere."""
    return sorted(path for path in [*folder.iterdir(), *folder.glob("*/*")] if path.exists())


def irregular_file(folder: Path) -> str | None:
    """The path in a folder of an entry that is neither a file nor a folder, which would hang what reads it;
    None: there is none."""
    found = (path for path in entries(folder) if not (path.is_file() or path.is_dir()))
    return next((path.relative_to(folder).as_posix() for path in found), None)


def default_mode() -> int:
    """The permissions that the umask gives a new file."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def share(folder: str | Path) -> None:
    """Give the files of a folder the permissions of new ones: safetensors lets only the owner read."""
    for path in Path(folder).rglob("*.safetensors"):
        path.chmod(default_mode())


def plain(value: Any) -> Any:
    """Convert a value to JSON types: non-finite numbers become None, arrays and tensors lists or numbers,
    other objects strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


class MetricsLog:
    """The metrics of a run, one JSON object per line; each line is flushed before `write` returns."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line. Numbers may be Python's, numpy's or scalar tensors; NaN and infinity are written
        as null."""
        line = json.dumps(plain(metrics), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            written = file.seek(0, os.SEEK_END)
            # a crash left an incomplete last line
            if written and file.seek(written - 1) >= 0 and file.read(1) != b"\n":
                file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            file.write(line.encode())

    def read(self) -> list[dict[str, Any]]:
        """Return all lines in order, without an incomplete last line. Raises `DataError` for a missing or
        malformed file."""
        if not self.path.exists():
            raise DataError(
                "no such metrics file", where=str(self.path), remedy="Check the path, or train first"
            )
        records = []
        try:
            lines = read_file(self.path).splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot be read ({first_line(error)})",
                where=str(self.path),
                remedy="Move away what is in its place",
            ) from error
        for number, line in enumerate(lines, start=1):
            if line.endswith("\n"):
                try:
                    records.append(json.loads(line))
                except (ValueError, RecursionError) as error:  # or a number or a nesting without end
                    where = f"{self.path}, line {number}"
                    raise DataError(
                        f"not JSON ({first_line(error)})", where=where, remedy="Remove the line"
                    ) from error
        return records


@cache
def package_version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def started_by(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words that started this process: first `NAME=VALUE` of variables that are settings, in the order of
    their names."""
    return [
        *(f"{name}={environ[name]}" for name in sorted(environ) if SETTING.fullmatch(name)),
        *sys.orig_argv,
    ]


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_manifest(config: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """What is needed to repeat a run, without secrets: package versions (None: not installed), machine, date,
    command, git commit, config.

    Args:
        config: the resolved configuration.
        extra: further entries, such as data hashes or timings.

    Returns:
        A dictionary of JSON types only.
    """
    given = plain({"config": config, **extra})
    return {
        "unmask": package_version("unmask"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(masked_words(started_by())),
        "git": git_state(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": num_cores(),
        "packages": {package: package_version(package) for package in RECORDED_PACKAGES},
        **masked(given),
    }


def write_manifest(path: str | Path, config: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """Write `run_manifest(config, **extra)` to `path` as JSON, atomically, and return it."""
    manifest = run_manifest(config, **extra)
    write_json(path, manifest)
    return manifest


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write values of JSON types atomically."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the folder's git repository, and whether tracked files differ from it; None without a
    repository or git."""
    # a repository may name a program as its file monitor
    git = ["git", "-c", "core.fsmonitor=false", "-C", str(folder)]
    asked = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            asked.append(
                subprocess.run(
                    [*git, *command], capture_output=True, text=True, timeout=10, check=True
                ).stdout.strip()
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return {"commit": asked[0], "changed": bool(asked[1])}
