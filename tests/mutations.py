"""What the tests protect: change one place of the core at a time, and see whether its tests fail.

`python -m tests.mutations [--places 60] [--seed 0] [--jobs 2]` prints a line for each place, then how many were
caught. The places are drawn evenly from `CORE`; a change is made in a copy of the repository.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.helpers import REPOSITORY

CORE = {
    "unmask/diffusion": "tests/diffusion tests/generation/test_sampler.py tests/supervised",
    "unmask/generation/engine": "tests/generation/engine tests/generation/test_sampler.py",
    "unmask/generation/policies.py": "tests/generation/test_policies.py tests/generation/test_published.py",
    "unmask/generation/naive.py": "tests/generation/test_naive.py tests/generation/test_sampler.py "
    "tests/generation/test_variable_length.py tests/generation/test_revise.py",
    "unmask/models/attention.py": "tests/models/test_attention.py tests/models/test_diffusion_lm.py",
    "unmask/models/diffusion_lm.py": "tests/models/test_diffusion_lm.py tests/models/test_load.py",
    "unmask/rl/losses.py": "tests/rl/test_losses.py tests/rl/test_trl.py",
    "unmask/rl/policy_loss.py": "tests/rl/test_policy_loss.py tests/rl/test_trl.py tests/rl/methods",
    "unmask/rl/methods": "tests/rl/methods tests/rl/test_masks_kept.py",
    "unmask/preference/losses.py": "tests/preference/test_losses.py tests/preference/test_trl.py",
    "unmask/training/per_view_backward.py": "tests/training/test_per_view_backward.py tests/supervised",
    "unmask/data/decoding.py": "tests/data/test_decoding.py",
    "unmask/evaluation/statistics.py": "tests/evaluation/test_statistics.py",
}
"""Modules and folders whose places are changed, with the tests that should notice first."""
OTHERS = (
    "tests/generation tests/models tests/supervised tests/convert tests/preference tests/rl tests/evaluation"
)
"""Tests that are run where those notice nothing: a module is also tested by what is built on it."""
LONGEST = 1800  # seconds until tests count as failed, because a changed loop may never end


class Change(NamedTuple):
    """One change of one file."""

    path: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr},
    **{ast.BitOr: ast.BitAnd, ast.FloorDiv: ast.Mult},
}


def changed(node: ast.AST) -> ast.AST | None:
    """The node with another meaning; None: nothing about it is changed."""
    match node:
        case ast.Compare(left=left, ops=[first, *rest], comparators=right) if type(first) in COMPARISONS:
            return ast.Compare(left, [COMPARISONS[type(first)](), *rest], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            if any(
                isinstance(side, ast.Constant | ast.JoinedStr) and not _is_number(side)
                for side in (left, right)
            ):
                return None
            return ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1)
    return None


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def changes(path: Path) -> Iterator[Change]:
    """Every change of the functions of a file, but not of annotations, defaults, assertions and raised errors."""
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        left: list[ast.AST] = list(function.body)
        while left:
            node = left.pop()
            if isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign | ast.FunctionDef | ast.JoinedStr):
                continue
            left += ast.iter_child_nodes(node)
            other = changed(node)
            if other is not None and isinstance(node, ast.expr):
                assert node.end_lineno is not None and node.end_col_offset is not None
                start, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                after = ast.unparse(ast.fix_missing_locations(other))
                new = encoded[:start] + f"({after})".encode() + encoded[end:]
                yield Change(path, node.lineno, encoded[start:end].decode(), after, new.decode())


def draw(places: int, seed: int) -> list[tuple[Change, str]]:
    """Changes, evenly over the entries of `CORE`, each with the tests that should notice."""
    rng, drawn = random.Random(seed), []
    for number, (room, tests) in enumerate(CORE.items()):
        root = REPOSITORY / room
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        found = [change for file in files for change in changes(file.relative_to(REPOSITORY))]
        count = places * (number + 1) // len(CORE) - places * number // len(CORE)
        drawn += [(change, tests) for change in rng.sample(found, count)]
    return drawn


def fails(tests: str, copy: Path) -> bool:
    """Whether a test fails in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    environment = {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "UNMASK_SHARED": os.environ.get("UNMASK_SHARED", str(REPOSITORY.parent / "shared")),
    }
    try:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=copy,
            env=os.environ | environment,
            capture_output=True,
            timeout=LONGEST,
        )
        return bool(done.returncode)
    except subprocess.TimeoutExpired:
        return True


def is_caught(change: Change, tests: str, copy: Path) -> bool:
    """Whether a test fails in a copy of the repository with the change."""
    file = copy / change.path
    before = file.read_text(encoding="utf-8")
    file.write_text(change.source, encoding="utf-8")
    try:
        return fails(tests, copy) or fails(OTHERS, copy)
    finally:
        file.write_text(before, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="of the places drawn, only these: FILE:LINE ...")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            copy = Path(folder, str(number))
            ignored = shutil.ignore_patterns(
                ".git", ".venv*", "__pycache__", "runs", "site", "node_modules", ".*_cache"
            )
            shutil.copytree(REPOSITORY, copy, ignore=ignored)
            copies.put(copy)

        red = {tests for tests in CORE.values() if fails(tests, copy)}
        if red:  # they would catch anything
            sys.exit(f"these tests fail without a change: {red}")

        def tried(pair: tuple[Change, str]) -> bool:
            copy = copies.get()
            try:
                caught = is_caught(*pair, copy)
            finally:
                copies.put(copy)
            print("caught" if caught else "MISSED", pair[0], flush=True)
            return caught

        drawn = draw(given.places, given.seed)
        if given.only:
            drawn = [pair for pair in drawn if f"{pair[0].path}:{pair[0].line}" in given.only]
        caught = list(pool.map(tried, drawn))
    print(f"{sum(caught)} of {len(caught)} caught")


if __name__ == "__main__":
    main()
