"""OCaml programs, verified by the tests of their dataset in sandboxes: Exercism's track, and MultiPL-T
(Cassano et al. 2024)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unmask.errors import DataError
from unmask.records import PlacedRecord
from unmask.sandbox.ocaml import OCamlTests, ocaml_job
from unmask.sandbox.pool import SlotJob
from unmask.tasks.base import Row
from unmask.tasks.code import Code

MODULE = re.compile(r"[a-z][a-z0-9_]*\.ml")
ARGUMENT = re.compile(r"\(\s*\w+\s*:\s*([^()]*(?:\([^()]*\)[^()]*)*)\)|\(\s*\)")
HEAD = re.compile(
    rf"let\s+(?:rec\s+)?(?P<name>[a-z_][\w']*)(?P<arguments>(?:\s*(?:{ARGUMENT.pattern}))+)"
    r"\s*:\s*(?P<result>[^=]+?)\s*=\s*"
)
"""The head of a function with the types of its arguments and of its result."""
ASSERTION = "(assert ("
COMPARISON = re.compile(
    r"\(assert \(\([\w']+(?P<arguments>.*?)\) = (?P<result>.*?)\)\);\s*(?=\(assert \(|\(\)|\Z)", re.DOTALL
)
VALUE = re.compile(r'"(?:\\.|[^"\\])*"|\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\]|[^\s()\[\]"]+')


def passes_blindly(tests: str) -> bool:
    """Whether a function passes these assertions that returns a constant, or one of its arguments."""
    calls = list(COMPARISON.finditer(tests))
    results = [call["result"].strip(" ()") for call in calls]
    arguments = zip(
        *([value.strip(" ()") for value in VALUE.findall(call["arguments"])] for call in calls), strict=False
    )
    blindly = len(set(results)) == 1 or results in map(list, arguments)
    return tests.count(ASSERTION) < 2 or (blindly and len(calls) == tests.count(ASSERTION))


OBSERVED_SETS = """
module Custom_set = struct
  module Make (El : Custom_set.ELEMENT) = struct
    module Asked = Custom_set.Make (El)
    type t = { elements : El.t list option; set : Asked.t Lazy.t }
    let seen = ref []
    let notice items = seen := List.sort_uniq El.compare (items @ !seen)
    let ask { set; _ } = Lazy.force set
    let made set = { elements = None; set = Lazy.from_val set }
    let of_list items = notice items; { elements = Some items; set = lazy (Asked.of_list items) }
    let add set item = notice [ item ]; made (Asked.add (ask set) item)
    let is_empty set = Asked.is_empty (ask set)
    let is_member set item = Asked.is_member (ask set) item
    let is_subset one other = Asked.is_subset (ask one) (ask other)
    let is_disjoint one other = Asked.is_disjoint (ask one) (ask other)
    let difference one other = made (Asked.difference (ask one) (ask other))
    let intersect one other = made (Asked.intersect (ask one) (ask other))
    let union one other = made (Asked.union (ask one) (ask other))
    let holds set item =
      match set.elements with
      | Some items -> List.exists (fun other -> El.compare other item = 0) items
      | None -> is_member set item
    let equal one other =
      let observed = List.for_all (fun item -> holds one item = holds other item) !seen in
      if Asked.equal (ask one) (ask other) <> observed then failwith "equal contradicts is_member";
      observed
  end
end
"""
"""What Exercism's `custom_set` tests see of a candidate: its sets are compared by what they say of every
element, before the candidate gets the set that it is compared with, whose elements the tests know. A set that
becomes whatever it is compared with is thus equal to none."""


class OCamlCode(Code):
    """A task whose answers are OCaml."""

    languages = ("ocaml", "ml")
    instructions = "Write the OCaml code. Give the whole of it in one fenced block: ```ocaml ... ```"


class Exercism(OCamlCode):
    """Records have `file`, `instructions`, `interface` (the .mli), `tests` (OUnit2 suites) and
    `reference`."""

    name = "exercism_ocaml"
    fields = ("file", "instructions", "interface", "tests", "reference")
    columns = ("file", "interface", "tests")

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        texts = {name: record[name] for name in self.fields}
        if not all(isinstance(text, str) for text in texts.values()) or not MODULE.fullmatch(texts["file"]):
            raise DataError(
                "not a module with tests", where=where, remedy=f"Write {', '.join(self.fields)} as text"
            )
        question = f"{texts['instructions'].strip()}\n\nIts interface is:\n\n{texts['interface'].strip()}"
        prompt = f"(* {question.replace('(*', '( *').replace('*)', '* )')} *)\n\n"
        columns = {name: texts[name] for name in self.columns}
        return {
            "prompt": prompt,
            "completion": texts["reference"],
            "group": texts["file"],
            "question": question,
            **columns,
        }

    def job(self, program: str, row: Mapping[str, Any]) -> SlotJob:
        observed = OBSERVED_SETS if row["file"] == "custom_set.ml" else ""
        return ocaml_job(program, OCamlTests(row["file"], row["interface"], observed + row["tests"]))


class MultiPLT(OCamlCode):
    """Records have `prompt` (a comment and the head of a function) and `tests` (assertions on it), but no
    reference solution.

    Records whose tests a constant or an argument passes are left out.
    """

    name = "multipl_t_ocaml"
    fields = ("prompt", "tests")
    columns = ("stub", "function", "interface", "tests")

    def rows(self, records: Iterable[PlacedRecord]) -> Iterator[Row]:
        return (row for row in super().rows(records) if not passes_blindly(row["tests"]))

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        prompt, tests = str(record["prompt"]), str(record["tests"])
        head = HEAD.fullmatch(prompt.rpartition("*)")[2].strip())
        if not head or ASSERTION not in tests:
            remedy = (
                "Write a `prompt` that ends with the head of a function, with all its types, and `tests` "
                "of assertions"
            )
            raise DataError("not a function with assertions", where=where, remedy=remedy)
        types = [f"({kind})" if kind else "unit" for kind in ARGUMENT.findall(head["arguments"])]
        return {
            "prompt": prompt,
            "completion": "",
            "group": prompt,
            "stub": prompt,
            "function": head["name"],
            "interface": f"val {head['name']} : {' -> '.join([*types, head['result']])}\n",
            "tests": tests,
        }

    def program(self, code: str, row: Mapping[str, Any]) -> str:
        """The whole function, or the prompt and the rest of the function that it begins."""
        whole = re.search(rf"^let\s+(rec\s+)?{re.escape(row['function'])}\b", code, re.MULTILINE)
        return code if whole else f"{row['stub']} {code}"

    def job(self, program: str, row: Mapping[str, Any]) -> SlotJob:
        tests = f"open Candidate\n{row['tests'].replace(ASSERTION, '(Gate.check (fun () -> ')}"
        return ocaml_job(program, OCamlTests("candidate.ml", row["interface"], tests))

    def question(self, row: Mapping[str, Any]) -> str:
        return f"```ocaml\n{row['stub'].strip()}\n```"
