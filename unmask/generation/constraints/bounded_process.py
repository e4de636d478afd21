"""Python in a process of its own, with bounds on time and memory: libraries that read patterns and grammars have none, and a short one may
need hours and all memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from unmask.errors import GenerationError

SECONDS, BYTES = 30, 2**32
SCRIPT = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
except (ImportError, ValueError, OSError):
    pass
given = json.load(sys.stdin){}json.dump(result, sys.stdout)
"""


def run_bounded(script: str, given: Any, where: str, *, remedy: str, seconds: float | None = None) -> Any:
    """The `result` that a script makes of what is `given`; both are sent as JSON.

    Raises:
        GenerationError: it takes too long, or too much memory.
    """
    command = [sys.executable, "-P", "-c", SCRIPT.replace("{}", script), str(BYTES)]
    try:
        timeout = SECONDS if seconds is None else max(seconds, 0)
        done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise GenerationError(f"its automaton takes more than {SECONDS} seconds to build", where=where, remedy=remedy) from None
    if done.returncode != 0:
        raise GenerationError(f"its automaton takes more than {BYTES >> 30} GiB to build", where=where, remedy=remedy)
    return json.loads(done.stdout)
