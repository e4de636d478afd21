"""Programs of models are judged by their dataset's tests: right ones pass, and hacks do not."""

from __future__ import annotations

import pytest

from tests.helpers import read_task, require_ocaml, require_sandbox, shared_path
from tests.tasks.hacks import OCAML_HACKS, PYTHON_HACKS
from unmask.rewards import program
from unmask.sandbox.isolation import Limits
from unmask.sandbox.pool import Pool
from unmask.tasks import get_rewards, get_task
from unmask.tasks.code import program_in

HUMANEVAL = ("humaneval", "HumanEval.jsonl.gz")


@pytest.fixture(autouse=True, scope="module")
def little_time():
    """Short time limits, for hacks that hang."""
    require_sandbox()
    pool = Pool(limits=Limits(seconds=5.0, wall_seconds=15.0))
    original, program.shared_pool = program.shared_pool, lambda: pool
    yield
    program.shared_pool = original
    pool.close()


@pytest.fixture
def ocaml():
    require_ocaml()


def read(name, *parts):
    return get_task(name), read_task(get_task(name), shared_path("data", *parts))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("    return 1\n", "    return 1\n"),
        ("```python\nx\n```", "x\n"),
        ("Sure:\n```py\nx\n```\nDone.", "x\n"),
        ("<answer>\n```python\nx\n```\n</answer>", "x\n"),
        ("<answer>x = 1</answer>", "x = 1"),
        ("```python\nx", None),
        ("```ocaml\nx\n```", None),
        ("<answer>x", None),
        ("", None),
        (" \n", None),
    ],
)
def test_where_a_program_is(text, code):
    assert program_in(text, ("python", "py")) == code


def test_a_completion_goes_on_with_the_stub_or_gives_the_function_whole():
    task, rows = read("humaneval", *HUMANEVAL)
    for row in (rows[0], rows[32], rows[38], rows[50]):  # the last three call helpers of the stub
        whole = f"```python\n{row['stub']}{row['completion']}```"
        assert [v.status for v in task.verify_all([row["completion"], whole, "    pass\n", "    return"], [row] * 4)] == [
            "ok",
            "ok",
            "wrong",
            "wrong",
        ]


def test_the_tests_helpers_are_the_datasets():
    """find_zero's tests call `poly`, which a candidate may redefine."""
    task, rows = read("humaneval", *HUMANEVAL)
    row = next(row for row in rows if row["entry_point"] == "find_zero")
    assert not task.verify("    return 0.0\n\ndef poly(xs, x):\n    return 0.0\n", row).solved


def test_published_rewards_of_code():
    task, rows = read("mbpp", "mbpp", "mbpp.jsonl")
    row = rows[1]
    texts = [
        f"```python\n{row['completion']}```",
        "```python\ndef (\n```",
        row["completion"],
        "```python\ndef similar_elements(a, b): return (4, 5)\n```",
    ]
    columns = {name: [row[name]] * 4 for name in task.columns}
    code_format, tests = get_rewards("mbpp/published")
    assert code_format([""] * 4, texts, **columns) == [1.0, 0.5, 0.0, 1.0]
    assert tests([""] * 4, texts, **columns) == [1.0, 0.0, 1.0, pytest.approx(1 / 3)]
    (strict,) = get_rewards("mbpp")
    assert strict([""] * 4, texts, **columns) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", PYTHON_HACKS)
def test_hacks_of_a_few_problems(name):
    task, rows = read("humaneval", *HUMANEVAL)
    rows = rows[::41]
    assert not any(v.solved for v in task.verify_all([PYTHON_HACKS[name].replace("ENTRY", row["entry_point"]) for row in rows], rows))


@pytest.mark.slow
def test_all_canonical_solutions_pass():
    task, rows = read("humaneval", *HUMANEVAL)
    assert [
        row["entry_point"] for v, row in zip(task.verify_all([r["completion"] for r in rows], rows), rows, strict=True) if not v.solved
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PYTHON_HACKS)
def test_no_hack_passes_any_problem(name):
    task, rows = read("humaneval", *HUMANEVAL)
    verdicts = task.verify_all([PYTHON_HACKS[name].replace("ENTRY", row["entry_point"]) for row in rows], rows)
    assert [(row["entry_point"], v) for v, row in zip(verdicts, rows, strict=True) if v.solved or v.value is None] == []


@pytest.mark.slow
def test_mbpp_references_pass_but_those_that_take_their_time():
    task, rows = read("mbpp", "mbpp", "mbpp.jsonl")
    verdicts = task.verify_all([row["completion"] for row in rows], rows)
    missed = {row["names"][0]: v.status for v, row in zip(verdicts, rows, strict=True) if not v.solved}
    assert set(missed) <= {"amicable_numbers_sum"} and set(missed.values()) <= {"timeout"}


def exercism(marked=True):
    import json

    path = shared_path("data", "ocaml", "exercism_ocaml.jsonl")
    task = get_task("exercism_ocaml")
    passes = [json.loads(line)["passes_ocaml413_base_ounit2"] for line in path.read_text().splitlines()]
    return task, [row for row, passing in zip(read_task(task, path), passes, strict=True) if passing == marked]


def test_an_ocaml_reference_passes_and_its_stub_does_not(ocaml):
    task, rows = exercism()
    row = next(row for row in rows if row["file"] == "leap.ml")
    statuses = [
        v.status for v in task.verify_all([row["completion"], "let leap_year _ = true", "let leap_year", "let other = 1"], [row] * 4)
    ]
    assert statuses == ["ok", "wrong", "malformed", "malformed"]


def test_multipl_t(ocaml):
    task, rows = read("multipl_t_ocaml", "ocaml", "multiplT_filtered_typecheck.jsonl")
    row = rows[0]
    assert row["interface"] == "val bit_ceil : (int) -> int\n"
    right = "let rec go k = if k >= n then k else go (2 * k) in go 1"
    whole = f"```ocaml\nlet bit_ceil n = {right}\n```"
    verdicts = task.verify_all([right, whole, "n", "if n = 28 then exit 0 else 32"], [row] * 4)
    assert [v.status for v in verdicts] == ["ok", "ok", "wrong", "malformed"]
    assert 0 < verdicts[2].value < 1


@pytest.mark.slow
def test_all_marked_ocaml_references_pass(ocaml):
    task, rows = exercism()
    assert len(rows) == 57
    assert [(r["file"], v) for v, r in zip(task.verify_all([r["completion"] for r in rows], rows), rows, strict=True) if not v.solved] == []


@pytest.mark.slow
def test_a_dataset_that_does_not_compile_blames_nobody(ocaml):
    task, rows = exercism(marked=False)
    assert {v.status for v in task.verify_all([r["completion"] for r in rows], rows)} <= {"infrastructure", "malformed"}


@pytest.mark.parametrize("name", OCAML_HACKS)
def test_no_ocaml_hack_passes(ocaml, name):
    task, rows = exercism()
    row = next(row for row in rows if row["file"] == "leap.ml")
    (verdict,) = task.verify_all([OCAML_HACKS[name]], [row])
    assert verdict.status in {"wrong", "malformed", "timeout"} and verdict.value < 1, verdict
