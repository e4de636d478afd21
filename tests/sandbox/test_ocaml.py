"""OCaml programs: what a run must print to count, and what is cached."""

from __future__ import annotations

import pytest

from tests.helpers import require_ocaml
from unmask.sandbox import ocaml
from unmask.sandbox.isolation import INSIDE
from unmask.sandbox.ocaml import OCamlTests, ocaml_job

INTERFACE = "val twice : int -> int\n"
SUITE = """
open OUnit2
open Double
let tests = [ "one" >:: (fun _ -> assert_equal 2 (twice 1)); "two" >:: (fun _ -> assert_equal 4 (twice 2)) ]
let () = run_test_tt_main ("double" >::: tests)
"""
CHECKS = "open Double\nlet () = Gate.check (twice 1 = 2)\nlet () = Gate.check (twice 2 = 4)\n"
RIGHT = "let twice x = 2 * x"


@pytest.fixture(autouse=True)
def there_is_ocaml():
    require_ocaml()


def outcome_of(pool, program, tests=SUITE, interface=INTERFACE, checks=0):
    return pool.run([ocaml_job(program, OCamlTests("double.ml", interface, tests, checks))])[0]


@pytest.mark.parametrize(
    ("program", "status", "passed", "total"),
    [
        (RIGHT, "ok", 2, 2),
        ("let twice x = if x = 1 then 2 else 5", "wrong", 1, 2),
        ('let twice _ = failwith "no"', "wrong", 0, 2),
        ("let twice x = 2 * y", "malformed", 0, 0),
        ("let double x = 2 * x", "malformed", 0, 0),
        ("let twice x = ", "malformed", 0, 0),
        ("let () = while true do () done\nlet twice x = 2 * x", "timeout", 0, 0),
        ("let () = raise Exit\nlet twice x = 2 * x", "wrong", 0, 1),
    ],
)
def test_what_comes_of_a_program(pool, program, status, passed, total):
    outcome = outcome_of(pool, program)
    assert (outcome.status, outcome.passed, outcome.total) == (status, passed, total)


def test_checks_count_as_tests(pool):
    assert outcome_of(pool, RIGHT, CHECKS, checks=2).status == "ok"
    outcome = outcome_of(pool, "let twice x = if x = 1 then 2 else 5", CHECKS, checks=2)
    assert (outcome.status, outcome.passed, outcome.total) == ("wrong", 1, 2)
    assert outcome_of(pool, RIGHT, CHECKS, checks=3).status == "wrong"  # one was never reached
    assert outcome_of(pool, RIGHT, "open Double\nlet () = ignore (twice 1)").status == "wrong"  # nothing was tested


def test_tests_that_do_not_compile_blame_nobody(pool):
    for tests, interface in ((SUITE + "let", INTERFACE), (SUITE, "val twice : absent"), ("open Absent", INTERFACE)):
        assert outcome_of(pool, RIGHT, tests, interface).status == "infrastructure"


def test_words_in_comments_and_strings_are_no_names(pool):
    program = '(* Obj.magic, exit, external *)\nlet s = "Unix.exit"\nlet twice x = 2 * x + 0 * String.length s'
    assert outcome_of(pool, program).status == "ok"


def test_a_program_is_compiled_once(pool, monkeypatch):
    assert outcome_of(pool, RIGHT + " (* once *)").status == "ok"
    monkeypatch.setattr(ocaml, "COMPILE_SECONDS", 0.0)
    assert outcome_of(pool, RIGHT + " (* once *)").status == "ok"
    assert outcome_of(pool, RIGHT + " (* twice *)").status == "timeout"
    monkeypatch.setattr(ocaml, "CACHED", 1)
    monkeypatch.setattr(ocaml, "COMPILE_SECONDS", 60.0)
    assert outcome_of(pool, RIGHT + " (* thrice *)").status == "ok" and len(ocaml._compiled) == 1


def test_without_a_compiler_nobody_is_blamed(pool, monkeypatch):
    ocaml.toolchain.cache_clear()
    monkeypatch.setattr(ocaml.shutil, "which", lambda _: None)
    outcome = outcome_of(pool, RIGHT + " (* not compiled *)")
    assert outcome.status == "infrastructure" and "apt-get install ocaml-nox" in outcome.detail


NONCE = b"n" * 32


def said(*findings, nonce=NONCE):
    return [b"\0".join((nonce, kind.encode(), name.encode())) for kind, name in findings]


PLAN = said(("planned", "a"), ("planned", "b"))
PASSED = said(("passed", "b"), ("passed", "a"))
DONE = said(("finished", ""))


@pytest.mark.parametrize(
    ("frames", "status", "passed", "total"),
    [
        (PLAN + PASSED + DONE, "ok", 2, 2),
        (PLAN + PASSED, "wrong", 2, 3),
        (PLAN + PASSED[:1] + DONE, "wrong", 1, 2),
        (PLAN + PASSED + PASSED[:1] + DONE, "wrong", 2, 3),
        (PLAN + PASSED[:1] * 2 + DONE, "wrong", 1, 2),
        (PLAN + PASSED + said(("failed", "b")) + DONE, "wrong", 2, 3),
        (DONE, "wrong", 0, 1),
        ([], "wrong", 0, 1),
        (PLAN + said(("passed", "a"), ("passed", "b"), nonce=b"m" * 32) + DONE, "wrong", 0, 2),
        (PLAN + PASSED + said(("finished", ""), nonce=b""), "wrong", 2, 3),
        ([*PLAN, b"passed\0a", b"", b"\0\0", *PASSED, *DONE], "ok", 2, 2),
    ],
)
def test_a_run_counts_by_what_the_nonce_signs(frames, status, passed, total):
    found = ocaml.ocaml_outcome(frames, NONCE, 0)
    assert (found.status, found.passed, found.total) == (status, passed, total)


@pytest.mark.parametrize(
    "value",
    [
        *("Obj.magic", "Marshal.to_string", "Callback.register", "Lexing.from_string", "Parsing.peek_val", "Printexc.to_string"),
        *("Gc.compact", "Sys.argv", "Bigarray.float32", "Ephemeron.K1.create", "Weak.create"),
    ],
)
def test_what_is_unsafe_is_not_there_even_where_words_are_not_looked_at(pool, monkeypatch, value):
    given = ocaml.Toolchain.commands
    blind = {f"{place}/vet": "/bin/true" for place in (f"{INSIDE}/ocaml",)}
    monkeypatch.setattr(ocaml.Toolchain, "commands", lambda *args: [[blind.get(c[0], c[0]), *c[1:]] for c in given(*args)])
    assert outcome_of(pool, f"let () = ignore String.length\n{RIGHT} (* blind to {value} *)").status == "ok"
    outcome = outcome_of(pool, f"let () = ignore {value}\n{RIGHT}")
    assert outcome.status == "malformed" and "Error" in outcome.detail
