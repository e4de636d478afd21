"""Count the tests of HumanEval that no example in the prompt shows, and write docs/humaneval.md.

python scripts/shown_tests.py path/to/HumanEval.jsonl.gz
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unmask.records import read_records

MANY = 4  # tests: problems with as many share a line
PAGE = Path(__file__).resolve().parent.parent / "docs" / "humaneval.md"
HEAD = """# Tests that HumanEval's prompts do not show

Some examples in the docstrings are also tests. If a problem has no other test, a program that only looks them up passes. This page has the problems with few tests (assertions; one in a loop counts once) whose arguments do not occur in the prompt. `python scripts/shown_tests.py HumanEval.jsonl.gz` writes it.

The prompts are as published. To train on verdicts that cannot be looked up, use `mbpp`, which decides by tests that it does not show ([tasks](tasks.md)).

| tests not shown | problems | HumanEval/ |
|---|---|---|
"""  # noqa: E501 (a paragraph is a line)


def not_shown(problem: Mapping[str, Any]) -> int:
    """The tests of a problem whose arguments do not occur in its prompt, as a call or as text."""
    entry_point, prompt = problem["entry_point"], _bare(problem["prompt"])
    asserts = [node.test for node in ast.walk(ast.parse(problem["test"])) if isinstance(node, ast.Assert)]
    tests = [test for test in asserts if not isinstance(test, ast.Constant)]
    calls = [_calls(test, {"candidate", entry_point}) for test in tests]
    return sum(not (each and all(_occurs(call, entry_point, prompt) for call in each)) for each in calls)


def page(problems: Iterable[Mapping[str, Any]]) -> str:
    """The page: a line for each small number of tests that are not shown."""
    numbers = defaultdict(list)
    for problem in problems:
        numbers[not_shown(problem)].append(problem["task_id"].rpartition("/")[2])
    few = "".join(
        f"| {count} | {len(ids)} | {', '.join(ids)} |\n"
        for count, ids in sorted(numbers.items())
        if count < MANY
    )
    rest = sum(len(ids) for count, ids in numbers.items() if count >= MANY)
    return f"{HEAD}{few}| {MANY} or more | {rest} | the others |\n"


def _calls(test: ast.expr, names: set[str]) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def _occurs(call: ast.Call, entry_point: str, prompt: str) -> bool:
    arguments = _bare(", ".join(map(ast.unparse, (*call.args, *call.keywords))))
    if f"{entry_point}({arguments})" in prompt:
        return True
    return (
        len(arguments) > 3 and re.search(rf"(?<![\w.\-]){re.escape(arguments)}(?![\w.])", prompt) is not None
    )


def _bare(text: str) -> str:
    """Without spaces, and with one kind of quotes."""
    return re.sub(r"\s+", "", text).replace('"', "'")


if __name__ == "__main__":
    PAGE.write_text(page(record for _, record in read_records(sys.argv[1])), encoding="utf-8")
