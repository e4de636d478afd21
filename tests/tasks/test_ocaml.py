"""No exercise in OCaml is passed by an answer that nobody computed, even if the candidate does as it likes
with its own process."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest

from tests.helpers import read_task, require_ocaml, shared_path
from tests.sandbox.ocaml_attacks import BLIT_PIPES, BLIT_REPLIES, PIPES, REPLIES, takeover, without_refusals
from unmask.sandbox.isolation import SandboxLimits
from unmask.sandbox.pool import SandboxPool
from unmask.tasks import get_task

ASSERTION = re.compile(r"\(assert \(\(candidate (.*?)\) = (.*?)\)\);\n", re.DOTALL)
FAILED = {"wrong", "timeout"}
AT_A_TIME = 30
"""Number of stubs at a time, whose compiled tests stay in the cache for all their attacks."""


@pytest.fixture(scope="module")
def pool():
    require_ocaml()
    pool = SandboxPool(limits=SandboxLimits(seconds=4.0, wall_seconds=12.0))
    yield pool
    pool.close()


def exercises():
    """Exercism's exercises that can be checked, with their references."""
    path = shared_path("data", "ocaml", "exercism_ocaml.jsonl")
    passes = [json.loads(line)["passes_ocaml413_base_ounit2"] for line in path.read_text().splitlines()]
    rows = [
        row
        for row, passing in zip(read_task(get_task("exercism_ocaml"), path), passes, strict=True)
        if passing
    ]
    return [(row, row["completion"]) for row in rows]


CONTRADICTORY = "_desktop_escape"
"""Its tests expect two results of one text, which they write as "\\s" and "\\\\s"."""


def functions():
    """MultiPL-T's functions, with a table of what their tests expect: there is no reference. None if they
    expect what the function says."""
    rows = read_task(
        get_task("multipl_t_ocaml"), shared_path("data", "ocaml", "multiplT_filtered_typecheck.jsonl")
    )
    untold = [
        row["function"] == CONTRADICTORY or any("candidate" in result for _, result in expected(row))
        for row in rows
    ]
    return [(row, None if none else table(row)) for row, none in zip(rows, untold, strict=True)]


def expected(row):
    """The arguments and the result of each assertion."""
    return ASSERTION.findall(row["tests"])


def table(row):
    """A program that looks up what it is asked."""
    names = [f"x{number}" for number in range(row["interface"].count("->"))]
    key, spaced = ", ".join(names), " ".join(names)
    entries = "; ".join(f"((candidate {arguments}), {result})" for arguments, result in expected(row))
    return (
        f"let candidate {spaced} = ({key})\nlet table = [ {entries} ]\nlet {row['function']} {spaced} = "
        f"List.assoc ({key}) table\n"
    )


def can_be_right_by_luck(row):
    """Whether one constant, or one of the arguments, is all that the tests of a function expect."""
    pairs = expected(row)
    echo = any(
        all(of(arguments, result) for arguments, result in pairs) for of in (str.startswith, str.endswith)
    )
    return (
        echo or len({result for _, result in pairs}) == 1 or any("candidate" in result for _, result in pairs)
    )


def attacks(number, row, count):
    """A takeover of a stub without a refused word, and some with all that candidates are refused: each with
    its pipes and its reply.

    One after another, so that every attack meets many stubs. Where a result can be right by luck, they send
    anything but results.
    """
    lucky = can_be_right_by_luck(row)
    blit, others = (
        [name for name in names if not (lucky and '"R"' in REPLIES[name])]
        for names in (BLIT_REPLIES, list(REPLIES))
    )
    replies = itertools.islice(itertools.cycle(others), number * count, (number + 1) * count)
    return [(BLIT_PIPES, blit[number % len(blit)]), *((PIPES, reply) for reply in replies)]


def statuses(pool, task, programs):
    """The status of each program, which comes with its row."""
    return [outcome.status for outcome in pool.run([task.job(program, row) for row, program in programs])]


@pytest.mark.parametrize(
    ("name", "stubs", "count", "every"),
    [
        pytest.param("exercism_ocaml", exercises, 12, 19, marks=pytest.mark.slow),  # one stub of 19
        pytest.param("exercism_ocaml", exercises, 12, 1, marks=pytest.mark.nightly),
        pytest.param("multipl_t_ocaml", functions, 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_no_stub_takes_an_answer_that_nobody_computed(pool, monkeypatch, name, stubs, count, every):
    task, chosen = get_task(name), list(enumerate(stubs()))[::every]
    missed, forged, verdicts = [], [], Counter()
    for start in range(0, len(chosen), AT_A_TIME):
        part = chosen[start : start + AT_A_TIME]
        honest = [(row, program) for _, (row, program) in part if program]
        missed += [
            row["prompt"]
            for (row, _), status in zip(honest, statuses(pool, task, honest), strict=True)
            if status != "ok"
        ]
        tried = [
            (row, pipes, reply) for number, (row, _) in part for pipes, reply in attacks(number, row, count)
        ]
        for pipes in (BLIT_PIPES, PIPES):
            these = [(row, reply) for row, its, reply in tried if its == pipes]
            programs = [(row, takeover(REPLIES[reply], row["interface"], pipes)) for row, reply in these]
            with monkeypatch.context() as patch:
                if pipes == PIPES:
                    without_refusals(patch)
                found = statuses(pool, task, programs)
            forged += [
                (row["prompt"], reply, status)
                for (row, reply), status in zip(these, found, strict=True)
                if status not in FAILED
            ]
            verdicts.update(found)
        verdicts["honest"] += len(honest)
    print(name, dict(verdicts))
    assert missed == [], "where the right answer does not pass, no verdict shows anything"
    assert forged == []


ADAPTING_SETS = """
module type ELEMENT = sig type t val compare : t -> t -> int end
module Make (El : ELEMENT) = struct
  type el = El.t
  type t = { elements : el list; adapts : bool }
  type status = [ `Both | `OnlyA | `OnlyB ]
  let made = ref []
  let of_list items = made := List.sort_uniq El.compare items; { elements = !made; adapts = false }
  let wild = { elements = []; adapts = true }
  let elements set = if set.adapts then !made else set.elements
  let el_equal one other = El.compare one other = 0
  let is_empty set = elements set = []
  let is_member set item = List.exists (el_equal item) (elements set)
  let is_subset one other = List.for_all (is_member other) (elements one)
  let is_disjoint one other = not (List.exists (is_member other) (elements one))
  let equal one other = is_subset one other && is_subset other one
  let add _ _ = wild
  let diff_filter _ _ _ = wild
  let difference _ _ = wild
  let intersect _ _ = wild
  let union _ _ = wild
end
"""
"""Sets that compute no union, intersection or difference: those become the set that was made last, which is
what they are compared with."""


def test_sets_that_become_what_they_are_compared_with_are_not_equal_to_it(pool):
    (row, right), *_ = [(row, program) for row, program in exercises() if row["file"] == "custom_set.ml"]
    programs = [
        right,
        right.replace("let of_list =", "let equal _ _ = true\n    let of_list ="),
        ADAPTING_SETS,
    ]
    assert statuses(pool, get_task("exercism_ocaml"), [(row, program) for program in programs]) == [
        "ok",
        "wrong",
        "wrong",
    ]
