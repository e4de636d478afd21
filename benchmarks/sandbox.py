"""Programs per second that the sandbox tests, compared with running them without isolation.

    python -m benchmarks.sandbox HumanEval.jsonl.gz

Ours: two fresh sandboxes per problem, with the tests outside the candidate's process. Bare: one `python -I
-S` per problem that runs candidate and tests together without isolation, on one thread per processor. Both
test every canonical solution, in turns, and all verdicts must be right.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness import heading
from unmask.data.problems import read_problems
from unmask.rewards.program import shared_pool
from unmask.tasks import get_task

BAR = 35


def bare(rows: Sequence[Mapping[str, Any]], python: str) -> int:
    """The number of programs that pass."""

    def passes(row: Mapping[str, Any]) -> bool:
        program = f"{row['stub']}{row['completion']}\n{row['test']}\ncheck({row['entry_point']})\n"
        return (
            subprocess.run(
                [python, "-I", "-S", "-"], input=program.encode(), capture_output=True, timeout=60
            ).returncode
            == 0
        )

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return sum(threads.map(passes, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("humaneval")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    task = get_task("humaneval")
    rows = read_problems(task, options.humaneval, None, split="test")
    host = shared_pool().host
    ways: dict[str, Callable[[], int]] = {
        "sandboxed": lambda: sum(
            verdict.solved for verdict in task.verify_all([row["completion"] for row in rows], rows)
        ),
        "bare": lambda: bare(rows, host.python),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            assert run() == len(rows), f"{name}: a canonical solution does not pass"
            rates[name].append(len(rows) / (time.perf_counter() - started))
    ours, theirs = (statistics.median(rates[name]) for name in ways)
    print(heading())
    print(
        f"layers missing: {dict(host.missing) or 'none'}; {os.cpu_count()} processors; all {len(rows)} "
        "canonical solutions pass"
    )
    print(
        f"{ours:.1f} programs a second in sandboxes (at least {BAR}); {theirs:.1f} bare; "
        f"{theirs / ours:.2f} x the time"
    )


if __name__ == "__main__":
    main()
