"""Programs of models are judged by their dataset's tests: right ones pass, and hacks do not."""

from __future__ import annotations

import ast
import json

import pytest

from tests.errors import raises
from tests.helpers import partly_slow, read_task, require_ocaml, require_sandbox, shared_path
from tests.tasks.hacks import OCAML_HACKS, PYTHON_HACKS
from unmask.errors import ConfigError
from unmask.rewards import program
from unmask.sandbox.isolation import SandboxLimits
from unmask.sandbox.pool import SandboxPool
from unmask.tasks import get_rewards, get_task
from unmask.tasks.code import names_in, program_in

HUMANEVAL = ("humaneval", "HumanEval.jsonl.gz")


@pytest.fixture(autouse=True, scope="module")
def little_time():
    """Short time limits, for hacks that hang."""
    require_sandbox()
    pool = SandboxPool(limits=SandboxLimits(seconds=5.0, idle_seconds=1.0, wall_seconds=15.0))
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
        assert [
            v.status
            for v in task.verify_all([row["completion"], whole, "    pass\n", "    return"], [row] * 4)
        ] == [
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
        "```python\ndef similar_elements(a, b): return (3, 4)\n```",
    ]
    columns = {name: [row[name]] * 4 for name in task.columns}
    code_format, tests = get_rewards("mbpp/published")
    assert code_format([""] * 4, texts, **columns) == [1.0, 0.5, 0.0, 1.0]
    assert tests([""] * 4, texts, **columns) == pytest.approx([1.0, 0.0, 1.0, 1 / 3])
    (strict,) = get_rewards("mbpp")
    assert strict([""] * 4, texts, **columns) == [1.0, 0.0, 1.0, 0.0]


def table_of(tests, functions, otherwise):
    """A program that looks up the results which assertions state, `f(...) == value`."""
    known = {}
    for test in tests:
        comparison = ast.parse(test).body[0].test
        call = next(
            node
            for node in ast.walk(comparison.left)
            if isinstance(node, ast.Call) and node.func.id in functions
        )
        known[call.func.id, ast.unparse(ast.Tuple(call.args, ast.Load()))] = ast.unparse(
            comparison.comparators[0]
        )
    names = {name for name, _ in known}
    table = "".join(
        f"    if name == {name!r} and args == {args}: return {value}\n"
        for (name, args), value in known.items()
    )
    defined = "".join(f"def {name}(*args): return look_up({name!r}, args)\n" for name in names)
    value = next(iter(known.values())) if otherwise == "shown" else otherwise
    return (
        f"import cmath, datetime, math, re, sys\ndef look_up(name, args):\n{table}    return "
        f"{value}\n{defined}"
    )


def shown_in(prompt):
    return [line for line in prompt.splitlines() if line.startswith("assert ")]


def paid_tables(rows, name, otherwise):
    """The functions of the rows whose shown assertions, as a table, pass."""
    task = get_task(name)
    shown = [(shown_in(row["prompt"]), row) for row in rows]
    programs = [(table_of(tests, row["names"], otherwise), row) for tests, row in shown if tests]
    verdicts = task.verify_all([program for program, _ in programs], [row for _, row in programs])
    return [row["names"][0] for verdict, (_, row) in zip(verdicts, programs, strict=True) if verdict.solved]


def test_a_table_of_what_mbpp_shows_does_not_pass():
    _, rows = read("mbpp", "mbpp", "mbpp.jsonl")
    assert paid_tables(rows[:30], "mbpp", "shown") == []
    # of the other one no test can be shown
    assert [len(shown_in(row["prompt"])) for row in rows].count(1) == 961
    assert not any(line in row["tests"].splitlines() for row in rows for line in shown_in(row["prompt"]))


@pytest.mark.slow
def test_no_test_that_mbpp_hides_follows_from_what_it_shows():
    """Calls and results are read as values: none that decides is shown in another spelling, and what is left
    has no one answer."""
    _, rows = read("mbpp", "mbpp", "mbpp.jsonl")
    for row in rows:
        shown = dict(map(as_values, shown_in(row["prompt"])))
        hidden = [as_values(line) for line in row["tests"].splitlines() if line.startswith("assert")]
        assert not any(shown.get(call) == result for call, result in hidden)
        assert len({result for call, result in hidden if call not in shown}) > 1


def as_values(test):
    """What an assertion calls, and what it compares with; literals by their values."""
    tested = ast.parse(test).body[0].test
    sides = (
        [tested.left, tested.comparators[-1]]
        if isinstance(tested, ast.Compare)
        else [tested, ast.Constant(True)]
    )
    return tuple(ast.unparse(by_value.visit(side)) for side in sides)


class ByValue(ast.NodeTransformer):
    """Writes every literal as its value."""

    def generic_visit(self, node):
        try:
            return ast.Constant(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError):
            return super().generic_visit(node)


by_value = ByValue()


def test_a_table_passes_the_published_protocol_which_is_no_reward():
    _, rows = read("mbpp_published", "mbpp", "mbpp.jsonl")
    assert len(paid_tables(rows[:10], "mbpp_published", "None")) == 10
    assert [len(shown_in(row["prompt"])) for row in rows] == [3] * 974
    with raises(ConfigError, where="reward mbpp_published"):
        get_rewards("mbpp_published")


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("otherwise", ["None", "shown"])
def test_no_table_of_what_mbpp_shows_passes(otherwise, step):
    _, rows = read("mbpp", "mbpp", "mbpp.jsonl")
    assert paid_tables(rows[::step], "mbpp", otherwise) == []


def test_challenges_decide_too_and_a_single_test_is_not_shown():
    record = {
        "text": "Double.",
        "code": "def f(x): return 2 * x",
        "test_list": ["assert f(1) == 2", "assert f(1)==2"],
    }
    (row,) = get_task("mbpp").rows([("row 1", record)])
    assert (
        row["prompt"] == '"""\nDouble.\nThe tests call f.\n"""\n' and row["tests"] == "\nassert f(1) == 2\n"
    )
    (row,) = get_task("mbpp").rows([("row 1", record | {"challenge_test_list": ["assert f(2) == 4"]})])
    assert row["tests"] == "\nassert f(1) == 2\nassert f(2) == 4\n" and shown_in(row["prompt"]) == []
    (row,) = get_task("mbpp").rows(
        [("row 1", record | {"challenge_test_list": ["assert f(2) == 4", "assert f(3) == 6"]})]
    )
    assert row["tests"] == "\nassert f(2) == 4\nassert f(3) == 6\n" and shown_in(row["prompt"]) == [
        "assert f(1) == 2"
    ]


@pytest.mark.slow
def test_no_test_compares_a_candidate_with_itself():
    for name, file in (("humaneval", HUMANEVAL[1]), ("mbpp", "mbpp.jsonl")):
        _, rows = read(name, name, file)
        for row in rows:
            tests, names = (
                (row["tests"], {*row["names"]})
                if name == "mbpp"
                else (row["test"], {"candidate", row["entry_point"]})
            )
            for node in ast.walk(ast.parse(tests)):
                if (
                    isinstance(node, ast.Assert)
                    and isinstance(node.test, ast.Compare)
                    and row.get("entry_point") != "sort_third"
                ):
                    assert (
                        sum(
                            bool(names & names_in(ast.unparse(side)))
                            for side in (node.test.left, *node.test.comparators)
                        )
                        < 2
                    )


def test_humaneval_33_is_compared_with_the_reference():
    task, rows = read("humaneval", *HUMANEVAL)
    (row,) = [row for row in rows if row["entry_point"] == "sort_third"]
    assert [
        v.solved
        for v in task.verify_all(["    return l\n", "    return [1]\n", row["completion"]], [row] * 3)
    ] == [False, False, True]


def test_a_test_that_calls_the_function_by_its_name_tests_the_candidate():
    record = {
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert f(1) == 1\n",
        "entry_point": "f",
    }
    task = get_task("humaneval")
    (row,) = task.rows([("row 1", record)])
    assert [v.solved for v in task.verify_all(["    return x\n", "    return 2\n"], [row] * 2)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("name", [*PYTHON_HACKS][::4])
def test_hacks_of_a_few_problems(name):
    task, rows = read("humaneval", *HUMANEVAL)
    rows = rows[::41]
    assert not any(
        v.solved
        for v in task.verify_all(
            [PYTHON_HACKS[name].replace("ENTRY", row["entry_point"]) for row in rows], rows
        )
    )


@pytest.mark.slow
def test_all_canonical_solutions_pass():
    task, rows = read("humaneval", *HUMANEVAL)
    assert [
        row["entry_point"]
        for v, row in zip(task.verify_all([r["completion"] for r in rows], rows), rows, strict=True)
        if not v.solved
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", PYTHON_HACKS)
def test_no_hack_passes_any_problem(name, step):
    task, rows = read("humaneval", *HUMANEVAL)
    rows = rows[::step]
    verdicts = task.verify_all(
        [PYTHON_HACKS[name].replace("ENTRY", row["entry_point"]) for row in rows], rows
    )
    assert [
        (row["entry_point"], v) for v, row in zip(verdicts, rows, strict=True) if v.solved or v.value is None
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_mbpp_references_pass_but_those_that_take_their_time(step):
    task, rows = read("mbpp", "mbpp", "mbpp.jsonl")
    rows = rows[::step]
    verdicts = task.verify_all([row["completion"] for row in rows], rows)
    missed = {row["names"][0]: v.status for v, row in zip(verdicts, rows, strict=True) if not v.solved}
    assert set(missed) <= {"amicable_numbers_sum"} and set(missed.values()) <= {"timeout"}


def exercism(marked=True):
    path = shared_path("data", "ocaml", "exercism_ocaml.jsonl")
    task = get_task("exercism_ocaml")
    passes = [json.loads(line)["passes_ocaml413_base_ounit2"] for line in path.read_text().splitlines()]
    return task, [
        row for row, passing in zip(read_task(task, path), passes, strict=True) if passing == marked
    ]


@pytest.mark.slow
def test_an_ocaml_reference_passes_and_its_stub_does_not(ocaml):
    task, rows = exercism()
    row = next(row for row in rows if row["file"] == "leap.ml")
    statuses = [
        v.status
        for v in task.verify_all(
            [row["completion"], "let leap_year _ = true", "let leap_year", "let other = 1"], [row] * 4
        )
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
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_all_marked_ocaml_references_pass(ocaml, step):
    task, rows = exercism()
    assert len(rows) == 57
    rows = rows[::step]
    assert [
        (r["file"], v)
        for v, r in zip(task.verify_all([r["completion"] for r in rows], rows), rows, strict=True)
        if not v.solved
    ] == []


@pytest.mark.slow
def test_a_dataset_that_does_not_compile_blames_nobody(ocaml):
    task, rows = exercism(marked=False)
    assert {v.status for v in task.verify_all([r["completion"] for r in rows], rows)} <= {
        "verifier_error",
        "malformed",
    }


@partly_slow(
    "name",
    OCAML_HACKS,
    *(index for index, name in enumerate(OCAML_HACKS) if index % 4 == 1 and name != "runs for ever"),
)
def test_no_ocaml_hack_passes(ocaml, name):
    task, rows = exercism()
    row = next(row for row in rows if row["file"] == "leap.ml")
    (verdict,) = task.verify_all([OCAML_HACKS[name]], [row])
    assert verdict.status in {"wrong", "malformed", "timeout"} and verdict.value < 1, verdict
