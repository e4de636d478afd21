"""OCaml programs: what a run must print to count, and what is cached."""

from __future__ import annotations

import pytest

from tests.helpers import partly_nightly, partly_slow, require_ocaml
from tests.sandbox.ocaml_attacks import BLIT_PIPES, REPLIES, takeover, without_refusals
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
CHECKS = (
    "open Double\nlet () = Gate.check (fun () -> twice 1 = 2)\nlet () = Gate.check (fun () -> twice 2 = 4)\n"
)
RIGHT = "let twice x = 2 * x"


@pytest.fixture(autouse=True)
def there_is_ocaml():
    require_ocaml()


def outcomes_of(pool, programs, tests=SUITE, interface=INTERFACE):
    """The outcome of each program, by program."""
    outcomes = pool.run(
        [ocaml_job(program, OCamlTests("double.ml", interface, tests)) for program in programs]
    )
    return dict(zip(programs, outcomes, strict=True))


def outcome_of(pool, program, tests=SUITE, interface=INTERFACE):
    return outcomes_of(pool, [program], tests, interface)[program]


def test_what_comes_of_a_program(pool):
    expected = {
        RIGHT: ("ok", 2, 2),
        "let twice x = if x = 1 then 2 else 5": ("wrong", 1, 2),
        'let twice _ = failwith "no"': ("wrong", 0, 2),
        "let twice x = 2 * y": ("malformed", 0, 0),
        "let double x = 2 * x": ("malformed", 0, 0),
        "let twice x = ": ("malformed", 0, 0),
        "let () = raise Exit\nlet twice x = 2 * x": ("wrong", 0, 2),
    }
    found = outcomes_of(pool, expected)
    assert {
        program: (outcome.status, outcome.passed, outcome.total) for program, outcome in found.items()
    } == expected


@pytest.mark.slow
def test_a_program_that_never_ends_is_over_in_its_time(pool):
    outcome = outcome_of(pool, "let () = while true do () done\nlet twice x = 2 * x")
    assert (outcome.status, outcome.passed, outcome.total) == ("timeout", 0, 0)


def test_checks_count_as_tests(pool):
    assert outcome_of(pool, RIGHT, CHECKS).status == "ok"
    outcome = outcome_of(pool, "let twice x = if x = 1 then 2 else 5", CHECKS)
    assert (outcome.status, outcome.passed, outcome.total) == ("wrong", 1, 2)
    # the tests ended early
    assert outcome_of(pool, RIGHT, CHECKS + "let () = failwith {|broken|}").status == "wrong"
    # nothing was tested
    assert outcome_of(pool, RIGHT, "open Double\nlet () = ignore (twice 1)").status == "wrong"


def test_tests_that_do_not_compile_blame_nobody(pool):
    for tests, interface in (
        (SUITE + "let", INTERFACE),
        (SUITE, "val twice : absent"),
        ("open Absent", INTERFACE),
    ):
        assert outcome_of(pool, RIGHT, tests, interface).status == "verifier_error"


def test_words_in_comments_and_strings_are_no_names(pool):
    program = (
        '(* Obj.magic, exit, external *)\nlet s = "Unix.exit"\nlet twice x = 2 * x + 0 * String.length s'
    )
    assert outcome_of(pool, program).status == "ok"


def test_underscores_are_refused_in_names_of_modules_only(pool):
    assert outcome_of(pool, "let __two__times x = 2 * x\nlet twice x = __two__times x").status == "ok"
    assert outcome_of(pool, "let twice x = Stdlib__Int.mul 2 x").status == "malformed"


def test_a_program_is_compiled_once(pool, monkeypatch):
    assert outcome_of(pool, RIGHT + " (* once *)").status == "ok"
    monkeypatch.setattr(ocaml, "COMPILE_SECONDS", 0.0)
    assert outcome_of(pool, RIGHT + " (* once *)").status == "ok"
    assert outcome_of(pool, RIGHT + " (* twice *)").status == "timeout"
    # the candidate is not to blame
    assert outcome_of(pool, RIGHT + " (* once *)", SUITE + "(* twice *)").status == "verifier_error"
    monkeypatch.setattr(ocaml, "CACHED", 1)
    monkeypatch.setattr(ocaml, "COMPILE_SECONDS", 60.0)
    assert outcome_of(pool, RIGHT + " (* thrice *)").status == "ok" and len(ocaml.built_programs) == 1


def test_without_a_compiler_nobody_is_blamed(pool, monkeypatch):
    ocaml.toolchain.cache_clear()
    monkeypatch.setattr(ocaml.shutil, "which", lambda _: None)
    outcome = outcome_of(pool, RIGHT + " (* not compiled *)")
    assert outcome.status == "verifier_error" and "apt-get install ocaml-nox" in outcome.detail


APPLY = "val apply : (int -> int) -> int -> int\nval raised : (int -> int) -> bool\n"
WITHIN = """
open OUnit2
open Double
let tests = [
  "raises" >:: (fun _ -> assert_equal true (raised (fun _ -> raise Exit)));
  "within" >:: (fun _ -> ignore (apply (fun x -> assert_equal ~printer:string_of_int 5 x; x) 4));
]
let () = run_test_tt_main ("double" >::: tests)
"""


@partly_slow(
    "apply, passed",
    [
        ("let apply f x = f (x + 1)", 2),
        ("let apply f x = f x", 1),
        ("let apply f x = try f x with _ -> 5", 1),
        ("let apply f x = try f x with _ -> f 5", 1),
        ("let apply f x = try f x with _ -> raise Not_found", 1),
        ("let apply f x = let rec go n = try f n with _ -> go (n + 1) in go x", 1),
    ],
    *(0, 3),
)
def test_an_assertion_that_fails_within_a_passed_function_is_final(pool, apply, passed):
    """The candidate catches the exception, and would learn the expected value from its text."""
    raised = "let raised f = try ignore (f 1); false with _ -> true\n"
    outcome = outcome_of(pool, raised + apply, WITHIN, APPLY)
    assert (outcome.passed, outcome.total) == (passed, 2)
    text = (
        "let apply f x = try f x with error -> if String.length (Base.Exn.to_string error) > 40 then "
        'failwith "told" else 0'
    )
    assert "told" not in outcome_of(pool, raised + text, WITHIN, APPLY).detail


UNSAFE = (
    *(
        "Obj.magic",
        "Marshal.to_string",
        "Callback.register",
        "Lexing.from_string",
        "Parsing.peek_val",
        "Printexc.to_string",
    ),
    *("Gc.compact", "Sys.argv", "Bigarray.float32", "Ephemeron.K1.create", "Weak.create"),
)


def test_what_is_unsafe_is_not_there_even_where_words_are_not_looked_at(pool, monkeypatch):
    given = ocaml.Toolchain.build_candidate
    blind = {f"{place}/vet": "/bin/true" for place in (f"{INSIDE}/ocaml",)}
    monkeypatch.setattr(
        ocaml.Toolchain,
        "build_candidate",
        lambda *args: [[blind.get(c[0], c[0]), *c[1:]] for c in given(*args)],
    )
    programs = {value: f"let () = ignore {value}\n{RIGHT}" for value in ("String.length", *UNSAFE)}
    found = outcomes_of(pool, programs.values())
    refused = [
        value
        for value, text in programs.items()
        if found[text].status == "malformed" and "Error" in found[text].detail
    ]
    assert refused == [*UNSAFE] and found[programs["String.length"]].status == "ok"


FEW = (
    "the number 2",
    "a list of sixteen million",
    "the report to every descriptor",
    "signals to all processes",
    "the exception Failure",
)


def check_replies(pool, monkeypatch, names):
    without_refusals(monkeypatch)
    programs = {takeover(REPLIES[name], INTERFACE): name for name in names}
    found = {programs[program]: outcome for program, outcome in outcomes_of(pool, programs).items()}
    assert not {
        name: each
        for name, each in found.items()
        if each.status not in {"wrong", "timeout"} or each.passed > 1
    }


def test_a_candidate_of_any_power_passes_only_what_it_answers(pool, monkeypatch):
    check_replies(pool, monkeypatch, FEW)


@pytest.mark.slow
@partly_nightly("name", [name for name in REPLIES if name not in FEW], 3)
def test_a_candidate_of_any_power_passes_only_what_it_answers_at_length(pool, monkeypatch, name):
    check_replies(pool, monkeypatch, [name])


def test_the_takeovers_take_over(pool, monkeypatch):
    """One that computes what it is asked passes, with Obj or by a hole of Base: that the others do not is not
    for want of power."""
    honest = 'put ("R" ^ int (2 * Int64.to_int (String.get_int64_le (arguments asked) 0)))'
    assert outcome_of(pool, takeover(honest, INTERFACE, BLIT_PIPES)).status == "ok"
    without_refusals(monkeypatch)
    assert outcome_of(pool, takeover(honest, INTERFACE)).status == "ok"


def test_the_candidate_holds_no_test(pool, monkeypatch):
    """Neither the expected values nor the names of tests are in the candidate's program."""
    suite = SUITE.replace("2 (twice 1)", "987654321 (twice 1)").replace('"one"', '"a name of a test"')
    sent = []
    given = ocaml.build
    monkeypatch.setattr(
        ocaml,
        "build",
        lambda slot, files, commands, **k: sent.append(files) or given(slot, files, commands, **k),
    )
    assert outcome_of(pool, RIGHT + "(* none *)", suite).status == "wrong"
    tests, candidate = sent
    assert "987654321" in tests["tests__.ml"] and not any(
        "987654321" in text or "a name" in text for text in candidate.values()
    )


TYPES = """
open Base
type shape = { size : int; name : string }
type 'a tree = Leaf | Node of 'a * shape
type bag
val empty : bag
val put : int -> bag -> bag
val total : bag -> int
val swap : int * string -> string * int
val both : (int, string) Result.t -> string option -> char list
val apply : f:(int -> int -> int) -> ?start:int -> int array -> int
val same : 'a -> 'a list -> bool
val pick : 'a list -> 'b list -> ('a * 'b) list
val grow : int tree -> int tree
val count : string -> int Map.M(String).t
val rna : [ `A | `C ] list -> [ `G | `U ] list
val far : int64 -> float -> float
val fail : string -> int
"""
TYPED = """
open Base
type shape = { size : int; name : string }
type 'a tree = Leaf | Node of 'a * shape
type bag = int list
let empty = []
let put item bag = item :: bag
let total bag = List.fold bag ~init:0 ~f:( + )
let swap (number, text) = (text, number)
let both result text = String.to_list ((match result with Ok n -> Int.to_string n | Error e -> e) ^ Option.value text ~default:"-")
let apply ~f ?(start = 0) numbers = Array.fold numbers ~init:start ~f
let same item items = List.for_all items ~f:(fun other -> Poly.equal item other)
let pick left right = List.zip_exn left right |> List.rev
let grow = function Leaf -> Node (1, { size = 0; name = "" }) | Node (n, s) -> Node (n + 1, { s with size = s.size + 1 })
let count text = Map.of_alist_exn (module String) [ (text, String.length text) ]
let rna = List.map ~f:(function `A -> `U | `C -> `G)
let far number other = Int64.to_float number +. other
let fail text = failwith text
"""
USES = """
open Double
let sum_of name = Base.Map.find_exn (count name) name
let () = Gate.check (fun () -> total (put 3 (put 4 empty)) = 7)
let () = Gate.check (fun () -> swap (3, "x") = ("x", 3))
let () = Gate.check (fun () -> both (Ok 12) None = ['1'; '2'; '-'] && both (Error "e") (Some "f") = ['e'; 'f'])
let () = Gate.check (fun () -> apply ~f:(fun a b -> (10 * a) + b) [| 1; 2 |] = 12 && apply ~f:( + ) ~start:5 [| 1 |] = 6)
let () = Gate.check (fun () -> same "a" [ "a"; "a" ] && not (same [ 1 ] [ [ 2 ] ]))
let () = Gate.check (fun () -> pick [ 1; 2 ] [ "a"; "b" ] = [ (2, "b"); (1, "a") ])
let () = Gate.check (fun () -> grow (grow Leaf) = Node (2, { size = 1; name = "" }))
let () = Gate.check (fun () -> sum_of "four" = 4)
let () = Gate.check (fun () -> rna [ `A; `C ] = [ `U; `G ])
let () = Gate.check (fun () -> far min_int 0.25 = Int64.to_float min_int +. 0.25)
let () = Gate.check (fun () -> match fail "why" with _ -> false | exception Failure text -> text = "why")
""".replace("min_int", "Int64.min_int")


def test_values_of_every_type_pass_between_the_processes(pool):
    outcome = outcome_of(pool, TYPED, USES, TYPES)
    assert (outcome.status, outcome.passed, outcome.total) == ("ok", 11, 11), outcome


PLAIN_TYPES = """
type t
val make : int -> t
val size : t -> int
val number : int -> float
val numbers : int -> int list
val texts : int -> string array
val pick : 'a list -> 'a
val change : (int -> int) -> int array
"""
PLAIN = """
type t = int
let make n = n
let size n = n
let number _ = 0.5
let numbers _ = [ 1; 2 ]
let texts _ = [| "a"; "b" |]
let pick = List.hd
let change f = [| f 1; f 2 |]
"""
PLAIN_USES = """
open Double
let () = Gate.check (fun () -> size (make 3) = 3)
let () = Gate.check (fun () -> number 1 = 0.5)
let () = Gate.check (fun () -> numbers 1 = [ 1; 2 ])
let () = Gate.check (fun () -> texts 1 = [| "a"; "b" |])
let () = Gate.check (fun () -> pick [ 0.5; nan ] = 0.5)
let () = Gate.check (fun () -> change succ = [| 2; 3 |])
"""
ODD_VALUES = {
    "not a number": "let number _ = nan",
    "an infinite number": "let number _ = infinity",
    "a list that is its own rest": "let numbers _ = let rec all = 1 :: all in all",
    "a list that begins as it should, and is its own rest": (
        "let numbers _ = let rec all = 1 :: 2 :: all in all"
    ),
    "a list beyond a frame": "let numbers _ = List.init 3_000_000 succ",
    "a text beyond a frame": "let texts _ = [| String.make (1 lsl 25) 'a' |]",
    "an array beyond memory": "let texts _ = Array.make (1 lsl 40) (String.make 10 'a')",
    "an array that changes": (
        'let kept = [| "a"; "c" |]\nlet texts _ = ignore (Lazy.from_fun (fun () -> kept.(1) <- "b")); kept'
    ),
    "a value that is not the first": "let pick items = List.nth items 1",
    "what a function does not give": "let change f = ignore (f 1 + f 2); [| 2; 2 |]",
    "an exception of its own": "exception Same\nlet size _ = raise Same",
    "an exception with the right text": 'let size _ = failwith "3"',
    "an object that compares as equal": "let size _ = (object method compare _ = 0 end)#compare 3",
    "a lazy value that needs itself": (
        "let size _ = let rec value = lazy (1 + Lazy.force value) in Lazy.force value"
    ),
    "a recursion without end": "let rec size value = 1 + size value",
}


@pytest.mark.slow
def test_no_value_of_a_type_passes_for_another_one(pool):
    programs = {"plain": PLAIN} | {name: f"{PLAIN}{odd}\n" for name, odd in ODD_VALUES.items()}
    found = pool.run(
        [
            ocaml_job(program, OCamlTests("double.ml", PLAIN_TYPES, PLAIN_USES))
            for program in programs.values()
        ]
    )
    statuses = {name: outcome.status for name, outcome in zip(programs, found, strict=True)}
    assert statuses.pop("plain") == "ok"
    assert not {name: status for name, status in statuses.items() if status not in {"wrong", "timeout"}}


def test_a_candidate_cannot_invent_a_value_of_a_type_that_it_does_not_know(pool, monkeypatch):
    without_refusals(monkeypatch)
    tests = 'open Double\nlet () = Gate.check (fun () -> String.length (pick [ "text" ]) = 4)\n'
    interface = "val pick : 'a list -> 'a\n"
    assert outcome_of(pool, "let pick items = List.hd items", tests, interface).status == "ok"
    for forged in (
        "Obj.magic 7",
        "Obj.magic (Obj.repr (ref 7))",
        'Obj.magic "other"',
        "Obj.magic (fun () -> 7)",
    ):
        assert outcome_of(pool, f"let pick _ = {forged}", tests, interface).status == "wrong"


@pytest.mark.parametrize(
    "interface",
    [
        "val twice : < size : int >\n",
        "include module type of String\n",
        "type t = ..\n",
        "val x : (module S)\n",
    ],
)
def test_an_interface_that_cannot_pass_between_processes_blames_nobody(pool, interface):
    outcome = outcome_of(pool, RIGHT, SUITE, interface)
    assert outcome.status == "verifier_error" and "cannot pass between two processes" in outcome.detail
