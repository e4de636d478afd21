"""4x4 Sudoku compared with independent definitions, and with the published file."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import read_task, shared_path
from unmask.errors import ConfigError, DataError
from unmask.rewards.verdict import Verdict
from unmask.tasks import Sudoku, Sudoku9, split_of
from unmask.tasks.sudoku import GRIDS, solve

grids = st.sampled_from(GRIDS)
TASK = Sudoku()


def _units(grid: str) -> list[str]:
    rows = [grid[start : start + 4] for start in range(0, 16, 4)]
    columns = ["".join(row[column] for row in rows) for column in range(4)]
    boxes = [rows[r][c : c + 2] + rows[r + 1][c : c + 2] for r in (0, 2) for c in (0, 2)]
    return rows + columns + boxes


def _obeys_the_rules(grid: str) -> bool:
    return len(grid) == 16 and all(sorted(unit) == list("1234") for unit in _units(grid))


def _row(puzzle: str, solution: str) -> dict:
    return {"prompt": puzzle + "=", "completion": solution, "group": solution, "puzzle": puzzle}


@st.composite
def rows(draw):
    solution = draw(grids)
    empty = draw(st.sets(st.integers(0, 15), min_size=1, max_size=16))
    return _row("".join("0" if cell in empty else digit for cell, digit in enumerate(solution)), solution)


def test_there_are_288_grids():
    """All combinations of rows are tried, independently of the other code."""
    lines = ["".join(line) for line in itertools.permutations("1234")]
    pairs = [a + b for a in lines for b in lines if not any(map(str.__eq__, a, b))]
    tops = [
        pair for pair in pairs if all(len(set(pair[c : c + 2] + pair[c + 4 : c + 6])) == 4 for c in (0, 2))
    ]
    found = {top + bottom for top in tops for bottom in tops if _obeys_the_rules(top + bottom)}
    assert len(GRIDS) == len(found) == 288 and set(GRIDS) == found
    assert sorted(GRIDS) == GRIDS


@given(st.one_of(grids, st.text(alphabet="1234", min_size=16, max_size=16), st.text(max_size=20)))
def test_a_valid_grid_obeys_the_rules(text):
    assert TASK.is_valid(text) == _obeys_the_rules(text)


@given(rows())
def test_solutions_are_all_grids_that_keep_the_clues(row):
    puzzle = row["puzzle"]
    keeping = [
        grid for grid in GRIDS if all(clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True))
    ]
    assert solve(puzzle) == keeping
    assert row["completion"] in keeping


def test_the_empty_puzzle_has_every_solution():
    assert solve("0" * 16) == GRIDS


@pytest.mark.parametrize("puzzle", ["", "0" * 15, "0" * 17, "5" + "0" * 15, "x" * 16, "\u0663" + "0" * 15])
def test_solve_refuses_what_is_no_puzzle(puzzle):
    with raises(DataError, where=None):
        solve(puzzle)


@pytest.mark.parametrize("empty", [(1, 1), (6, 11), (12, 12)])
def test_generated_puzzles_are_unique_and_evenly_hard(empty):
    made = Sudoku(min_empty=empty[0], max_empty=empty[1]).generate("train", 600, seed=1)
    assert all(solve(row["puzzle"]) == [row["completion"]] for row in made)
    counts = Counter(row["puzzle"].count("0") for row in made)
    assert sorted(counts) == list(range(empty[0], empty[1] + 1))
    assert min(counts.values()) > 0.6 * max(counts.values())


def test_train_and_test_share_no_solution_and_cover_all():
    train, test = (
        {row["group"] for row in TASK.generate(split, 3000, seed=0)} for split in ("train", "test")
    )
    assert not train & test
    assert train | test == set(GRIDS)
    assert 0.25 <= len(test) / len(GRIDS) <= 0.30


@pytest.mark.parametrize("empty", [(0, 4), (5, 4), (6, 13)])
def test_ranges_are_checked(empty):
    with raises(ConfigError, where="sudoku"):
        Sudoku(min_empty=empty[0], max_empty=empty[1])


@pytest.mark.slow
def test_more_puzzles_than_there_are_is_an_error():
    with raises(ConfigError, where="sudoku, test"):
        Sudoku(min_empty=1, max_empty=1).generate(
            "test", 16 * sum(split_of(grid) == "test" for grid in GRIDS) + 1, seed=0
        )


@given(rows(), st.text(alphabet="1234", min_size=16, max_size=16))
def test_solved_means_valid_with_the_clues_kept(row, text):
    keeps = all(clue in ("0", digit) for clue, digit in zip(row["puzzle"], text, strict=True))
    assert TASK.verify(text, row).solved == (keeps and _obeys_the_rules(text))


@given(st.data())
def test_the_value_is_the_share_of_empty_cells_that_are_right(data):
    row = data.draw(rows().filter(lambda row: len(solve(row["puzzle"])) == 1))
    empty = [cell for cell, clue in enumerate(row["puzzle"]) if clue == "0"]
    wrong = data.draw(st.sets(st.sampled_from(empty)))
    text = "".join(
        "1234"[int(digit) % 4] if cell in wrong else digit for cell, digit in enumerate(row["completion"])
    )
    verdict = TASK.verify(text, row)
    assert verdict.value == pytest.approx(1 - len(wrong) / len(empty), abs=1e-12)
    assert verdict.status == ("wrong" if wrong else "ok")


@given(rows())
def test_changing_a_clue_never_pays(row):
    clues = [cell for cell, clue in enumerate(row["puzzle"]) if clue != "0"]
    best = {text: TASK.verify(text, row).value for text in GRIDS}
    for text, value in best.items():
        if any(text[cell] != row["puzzle"][cell] for cell in clues):
            assert value < 1
    assert {text for text, value in best.items() if value == 1} == set(solve(row["puzzle"]))


@pytest.mark.parametrize(
    "text",
    ["", "1" * 15, "1" * 17, "0" * 16, "5" * 16, "\u0661" * 16, "1234341221434321 1", "1234341221434321\0"],
)
def test_malformed(text):
    row = _row("0234341221434321", "1234341221434321")
    assert TASK.verify(row["completion"], row).solved
    assert TASK.verify(text, row) == Verdict(0.0, "malformed")


LAYOUTS = [
    "1234\n3412\n2143\n4321", "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1\n", "1234 3412 2143 4321", "1 2 | 3 4\n3 4 | 1 2\n----+----\n2 1 | 4 3\n4 3 | 2 1", "[[1,2,3,4],[3,4,1,2],[2,1,4,3],[4,3,2,1]]",
    "| 1 2 3 4 |\n| 3 4 1 2 |\n| 2 1 4 3 |\n| 4 3 2 1 |", "1234\r\n3412\r\n2143\r\n4321", "<answer>\n1234\n3412\n2143\n4321\n</answer>", "1,2,3,4\n3,4,1,2\n\n2,1,4,3\n4,3,2,1",
    "```\n1234\n3412\n2143\n4321\n```", "```text\n1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1\n```", "```\n1234341221434321\n```", "`1234341221434321`", "1234;3412;2143;4321", "1 2 3 4; 3 4 1 2; 2 1 4 3; 4 3 2 1;", "1234/3412/2143/4321", "1 2 3 4 / 3 4 1 2 / 2 1 4 3 / 4 3 2 1",
    "[1 2 3 4; 3 4 1 2; 2 1 4 3; 4 3 2 1]", "1 2 \u2502 3 4\n3 4 \u2502 1 2\n\u2500\u2500\u2500\u2500\u253c\u2500\u2500\u2500\u2500\n2 1 \u2502 4 3\n4 3 \u2502 2 1", "\u250c\u2500\u2500\u2510\n\u25021234\u2502\n\u25023412\u2502\n\u25022143\u2502\n\u25024321\u2502\n\u2514\u2500\u2500\u2518", "1234;\n3412;\n2143;\n4321;",
    "\u2551 1 2 \u2551 3 4 \u2551\n\u2551 3 4 \u2551 1 2 \u2551\n\u2560\u2550\u256c\u2550\u2563\n\u2551 2 1 \u2551 4 3 \u2551\n\u2551 4 3 \u2551 2 1 \u2551", "|1|2|3|4|\n|---|---|---|---|\n|3|4|1|2|\n|2|1|4|3|\n|4|3|2|1|", "|1|2|3|4|\n|:-:|:-:|:-:|:-:|\n|3|4|1|2|\n|2|1|4|3|\n|4|3|2|1|",
]  # fmt: skip
FORGED = [
    "1234\n3412\n2143\n4321\n1", "1234\n3412\n2143\n4321\n4321", "1234\n3412\n2143\n4322", "12\n34341221434321", "1234\n3412\n2143\n432", "12343412 or 21434321", "0234\n3412\n2143\n4321", "1-234341221434321", "x234\n3412\n2143\n4321",
    "1234\n3412\n2143\n4321\n1234\n3412\n2143\n4321", "1234341221434321\f2", "1(2)34\n3412\n2143\n4321", "1234\n3412\n2143\n4321?", "12\n34\n34\n12\n21\n43\n43\n21", "\u0661234\n3412\n2143\n4321", "\n" * 20_000 + "1234341221434321", "---", "|" * 9_000,
    "```\n1234\n3412\n2143\n4321\n```\n```\n1234\n3412\n2143\n4321\n```", "```1\n1234\n3412\n2143\n4321\n```", "```\n1234\n3412\n2143\n```\n4321;1234", "1234;3412;2143;4321;4321", "1234;3412;2143", "12343412;21434321", "1/2/3/4/3/4/1/2/2/1/4/3/4/3/2/1", "1234/3412/2143/432/1", "1234;3412/2143;4322",
    "1234341221434321;1", "1234341221434321 / 2143341212344321", "```python\nx=1\n```\n1234\n3412\n2143\n4321", "```python3\n1234\n3412\n2143\n4321\n```", "`" * 9_000, ";" * 9_000, "\u2502" * 9_000, "1234\u25003412\n2143\u25004321", "answer: 1234;3412;2143;4321", "1234;3412;2143;4321 or 4",
]  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_grid_may_be_written_in_lines(text):
    assert TASK.verify(text, _row("0234341221434321", "1234341221434321")).solved


@pytest.mark.parametrize("text", FORGED)
def test_more_or_other_than_the_grid_is_not(text):
    assert TASK.verify(text, _row("0234341221434321", "1234341221434321")).value < 1


@given(st.integers(0, 2**32))
def test_nine_lines_are_a_grid_of_nine(seed):
    (row,) = Sudoku9().generate("train", 1, seed)
    lines = [row["completion"][at : at + 9] for at in range(0, 81, 9)]
    assert (
        Sudoku9().verify("\n".join(lines), row).solved
        and not Sudoku9().verify("\n".join(lines[::-1] + lines[:1]), row).solved
    )


@given(rows(), st.integers(0, 2**32))
def test_a_corruption_touches_one_or_two_empty_cells(row, seed):
    text = TASK.corrupt(row, random.Random(seed))
    changed = [cell for cell in range(16) if text[cell] != row["completion"][cell]]
    assert 1 <= len(changed) <= 2
    assert all(row["puzzle"][cell] == "0" for cell in changed)
    assert not TASK.verify(text, row).solved


@pytest.mark.parametrize("task", [Sudoku(), Sudoku9()])
def test_a_row_of_another_size_rewards_nothing(task):
    size = len(task.digits) ** 2
    for puzzle, solution in (("0" * 25, "1" * 25), ("", ""), ("0", "1")):
        assert task.verify("1" * len(puzzle), {"puzzle": puzzle, "solution": solution}) == Verdict(
            0.0, "malformed"
        )
    for value in (12340000000000.0, int("1" * size)):
        with raises(DataError, where="row 1, column 'Puzzle'"):
            task.row({"Puzzle": value, "Solution": "1"}, "row 1")


def test_the_published_file():
    path = shared_path("data", "sudoku", "4x4_test_sudoku.csv")
    read = read_task(TASK, path)
    assert len(read) == 500
    assert all(TASK.verify(row["completion"], row).solved for row in read)
    assert read[3]["prompt"] == "2004001203201003=" and read[1]["puzzle"].startswith("0140")
    assert {row["puzzle"].count("0") for row in read} == {8}
    # the others have several: each counts as right
    assert sum(len(solve(row["puzzle"])) == 1 for row in read) == 376
    assert 0 < sum(split_of(row["group"]) == "test" for row in read) < 500


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("Puzzle,Answer\n0234341221434321,1234341221434321\n", ", row 0"),
        ("Puzzle,Solution\n", ""),
        ("", ""),
        (
            "Puzzle,Solution\n0234341221434321,1234341221434321\n234341221434321,1234341221434321\n",
            ", row 1, column 'Puzzle'",
        ),
        ("Puzzle,Solution\n1234341221434321,1234341221434321\n", ", row 0, column 'Puzzle'"),
        ("Puzzle,Solution\n0234341221434321,1234341221434322\n", ", row 0, column 'Solution'"),
        ("Puzzle,Solution\n2000341221434321,1234341221434321\n", ", row 0, column 'Solution'"),
        ("Puzzle,Solution\n0234341221434321\n", ", row 0"),
        ("Puzzle,Solution\n0234341221434321,1234341221434321,9\n", ", row 0"),
    ],
)
def test_malformed_files_name_file_and_row(tmp_path, text, where):
    path = tmp_path / "puzzles.csv"
    path.write_text(text)
    with raises(DataError, where=f"{path}{where}") as caught:
        read_task(TASK, path)
    assert caught.value.remedy
