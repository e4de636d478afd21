"""No program that does not read its problem passes the tests that decide. These tests need no sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import read_task, shared_path
from tests.tasks.blind import Problem, add_inputs, examine
from unmask.tasks import get_task
from unmask.tasks.code import MBPP, _passes_blindly, names_in
from unmask.tasks.ocaml import passes_blindly


def read(name, *parts):
    return read_task(get_task(name), shared_path("data", *parts))


def asserted(row):
    return [line for line in row["tests"].splitlines() if line.startswith("assert")]


def test_neither_a_constant_nor_an_argument_passes_mbpp():
    rows = read("mbpp", "mbpp", "mbpp.jsonl")
    hidden = [asserted(row) for row in rows]
    assert len(rows) == 962 and not any(map(_passes_blindly, hidden))
    published = read("mbpp_published", "mbpp", "mbpp.jsonl")
    assert sum(_passes_blindly(asserted(row)) for row in published) == 11


@pytest.mark.parametrize(
    ("tests", "blindly"),
    [
        (["assert f(1, 2) == 2", "assert f(3, 4) == 4"], True), (["assert f(1, 2) == 2", "assert f(4, 3) == 4"], False), (["assert f(1) == 0", "assert f(2) == 0"], True),
        (["assert f(1) == 1"], True), (["assert f([2, 1]) == [1, 2]", "assert f([1]) == [1]"], False), (["assert f('a', 1)=='a'", "assert f('b') == 'b'"], True), (["assert not f(1)", "assert f(2)"], False),
    ],
)  # fmt: skip
def test_what_passes_without_reading(tests, blindly):
    assert _passes_blindly(tests) == blindly


def test_the_cases_of_mbpp_are_those_of_its_problems():
    """Each names a problem and a function of it, which the cases call; a record of another dataset with this
    number has none."""
    records = {
        record["task_id"]: record
        for record in map(json.loads, shared_path("data", "mbpp", "mbpp.jsonl").read_text().splitlines())
    }
    for key, cases in MBPP.cases.items():
        number, name = key.split()
        assert f"def {name}" in records[int(number)]["code"] and all(name in names_in(case) for case in cases)
        assert len(set(cases)) == len(cases)
    record = {
        "task_id": 309,
        "text": "Double.",
        "code": "def f(x): return 2 * x",
        "test_list": ["assert f(1) == 2", "assert f(2) == 4"],
    }
    (row,) = get_task("mbpp").rows([("row 1", record)])
    assert row["tests"] == "\nassert f(1) == 2\nassert f(2) == 4\n"


def double(x):
    return 2 * x


def test_the_search_finds_what_passes_and_cases_that_tell():
    """Two tests of a function that doubles: `a + 2` is paid with one, and what equals `2 * a` is right."""
    problem = Problem("double", [((2,), 4), ((4,), 8)], lambda output: output, "{}", double)
    add_inputs(problem, 30)
    assert {arguments for arguments, _ in problem.inputs} > {(3,), (5,), (9,)} and all(
        y == 2 * x for (x,), y in problem.inputs
    )
    found = examine(problem, most=20)
    assert found["num_right"] > 10 and found["num_paid"] > 10 and found["cases"]
    problem.tests += [each for each in problem.inputs if problem.case(*each) in found["cases"]]
    assert len(problem.tests) == 2 + len(found["cases"]) and not examine(problem, most=20)["paid"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [48, pytest.param(1, marks=pytest.mark.nightly)])
def test_what_passes_mbpp_without_reading_it_is_right(step):
    command = [
        sys.executable,
        "-m",
        "tests.tasks.blind",
        str(shared_path("data", "mbpp", "mbpp.jsonl")),
        str(step),
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": "0"}
    )
    found = list(map(json.loads, ran.stdout.splitlines()))
    assert len(found) > 930 // step and sum(each["tried"] for each in found) > 200_000 * len(found)
    assert [(each["task_id"], each["paid"]) for each in found if each["paid"]] == []
    assert sum(each["num_right"] > 0 for each in found) > 200 // step


@pytest.mark.parametrize(
    ("calls", "blindly"),
    [
        (["f 1 2) = 2", "f 3 4) = 4"], True), (["f 1 2) = 2", "f 4 3) = 4"], False), (['f "a b" (1)) = ("a b")', 'f "c" (2)) = "c"'], True), (["f [1; 2]) = true", "f []) = true"], True),
        (["f 1) = 2"], True), (["f (-1)) = -1", "f 5) = 5"], True), (["f 1) = 1", "f\n 2) = 2"], True), (["f 1) = 1", "f 2) = 3"], False),
    ],
)  # fmt: skip
def test_what_passes_in_ocaml_without_reading(calls, blindly):
    assert passes_blindly("".join(f"  (assert (({call}));\n" for call in calls)) == blindly


def test_multipl_t_leaves_out_what_a_constant_or_an_argument_passes():
    rows = read("multipl_t_ocaml", "ocaml", "multiplT_filtered_typecheck.jsonl")
    assert len(rows) == 649 - 95 - 20
