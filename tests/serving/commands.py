"""`unmask serve` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers import REPOSITORY
from tests.serving.servers import connect


@contextmanager
def command(
    *words: Any, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`unmask serve` on a free port: the process, and its address."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | (environment or {})
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": environment,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "unmask", "serve", *map(str, words), "--port", "0"], **options
    ) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "is served as" in line), "")
            assert line, "it ended"
            url = line.split()[-1]
            connect(url).close()  # it accepts when it says where it is
            yield process, url
        finally:
            process.kill()
