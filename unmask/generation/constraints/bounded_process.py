"""Python in a process of its own, with bounds on time and memory: libraries that read patterns and grammars
have none, and a short one may need hours and all memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any

from unmask.errors import GenerationError

SECONDS, BYTES = 30, 2**32
SCRIPT = """
import json, sys
try:
    import resource
    for limit, most in ((resource.RLIMIT_AS, int(sys.argv[1])), (resource.RLIMIT_CPU, int(sys.argv[2]))):
        resource.setrlimit(limit, (most, most))
except (ImportError, ValueError, OSError):
    pass
given = json.load(sys.stdin){}json.dump(result, sys.stdout)
"""


@dataclass(frozen=True)
class Bounds:
    """Bounds of what is built, in seconds and bytes; `until`: when the seconds are over."""

    seconds: float
    num_bytes: int
    until: float


_bounds: ContextVar[Bounds | None] = ContextVar("bounds", default=None)


@contextmanager
def bounded(seconds: float | None = None, num_bytes: int = BYTES) -> Iterator[None]:
    """Bound what is built within the context, in this thread: its seconds together, and the memory of each
    process. Without seconds, by the bounds of now."""
    most = bounds() if seconds is None else Bounds(seconds, num_bytes, monotonic() + seconds)
    token = _bounds.set(most)
    try:
        yield
    finally:
        _bounds.reset(token)


def bounds() -> Bounds:
    """The bounds of what is built from now on."""
    return _bounds.get() or Bounds(SECONDS, BYTES, monotonic() + SECONDS)


def too_slow(where: str, remedy: str) -> GenerationError:
    """The error once the seconds for what is built are over."""
    what = f"its automaton takes more than {bounds().seconds:g} seconds to build"
    return GenerationError(what, where=where, remedy=remedy)


def check_time(where: str, remedy: str = "Bound its repetitions, or split it") -> None:
    """Raise GenerationError once the seconds for what is built are over."""
    if monotonic() > bounds().until:
        raise too_slow(where, remedy)


def run_bounded(script: str, given: Any, where: str, *, remedy: str) -> Any:
    """The `result` that a script makes of what is `given`; both are sent as JSON.

    Raises:
        GenerationError: it takes too long, or too much memory.
    """
    most = bounds()
    seconds = max(most.until - monotonic(), 0)
    cpu_seconds = 2 * math.ceil(seconds) + 10  # should this process end before
    command = [
        sys.executable,
        "-P",
        "-c",
        SCRIPT.replace("{}", script),
        str(most.num_bytes),
        str(cpu_seconds),
    ]
    try:
        done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise too_slow(where, remedy) from None
    if done.returncode != 0:
        raise GenerationError(
            f"its automaton takes more than {most.num_bytes / 2**30:g} GiB to build",
            where=where,
            remedy=remedy,
        )
    return json.loads(done.stdout)
