"""4x4 Sudoku: fill the empty cells so that every row, column and 2x2 box holds 1, 2, 3 and 4.

A prompt is the 16 cells, row by row, with 0 for an empty one, and "="; a completion is the 16 digits of the solution. There are only 288
solved grids, so solutions are found by look-up: each clue is a bit mask of the grids that agree with it.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

from unmask.errors import ConfigError, DataError
from unmask.rewards.format import tagged_answers
from unmask.rewards.parsing import answer_of
from unmask.rewards.verdict import MALFORMED, Verdict
from unmask.tasks.base import Puzzle, Row, Split, split_of

CELLS = 16
DIGITS = "1234"
PEERS = [
    [b for b in range(CELLS) if b != a and (a // 4 == b // 4 or a % 4 == b % 4 or (a // 8 == b // 8 and a % 4 // 2 == b % 4 // 2))]
    for a in range(CELLS)
]
"""Per cell, the cells that share its row, column or box."""


def _completions(cells: str) -> Iterator[str]:
    """All solved grids that begin with these cells, in ascending order."""
    cell = len(cells)
    if cell == CELLS:
        yield cells
        return
    for digit in DIGITS:
        if all(cells[peer] != digit for peer in PEERS[cell] if peer < cell):
            yield from _completions(cells + digit)


GRIDS = list(_completions(""))
_GRIDS_SET = frozenset(GRIDS)
_ALL_GRIDS = (1 << len(GRIDS)) - 1
_GRIDS_WITH = {
    (cell, digit): sum(1 << index for index, grid in enumerate(GRIDS) if grid[cell] == digit) for cell in range(CELLS) for digit in DIGITS
}
"""Bit i of `_GRIDS_WITH[cell, digit]` tells whether grid i has that digit there."""


def is_valid_grid(text: str) -> bool:
    """Whether the text is a solved grid: 16 digits, with 1 to 4 in every row, column and box."""
    return text in _GRIDS_SET


def solve(puzzle: str) -> list[str]:
    """All solutions of a puzzle of 16 characters, 0 for empty, in ascending order; a text that is no puzzle raises a DataError."""
    if len(puzzle) != CELLS or not set(puzzle) <= set("0" + DIGITS):
        raise DataError(f"{puzzle!r} is not a 4x4 puzzle", remedy="Write 16 digits, row by row: 1 to 4, and 0 for an empty cell.")
    mask = _agreeing(puzzle)
    return [grid for index, grid in enumerate(GRIDS) if mask >> index & 1]


def _agreeing(puzzle: str) -> int:
    """The bit mask of the grids that agree with all clues."""
    clues = (_GRIDS_WITH[cell, digit] for cell, digit in enumerate(puzzle) if digit != "0")
    return functools.reduce(operator.and_, clues, _ALL_GRIDS)


def _differences(a: str, b: str) -> int:
    return sum(map(operator.ne, a, b))


def published_share(completion: str, row: Mapping[str, Any]) -> float:
    """The share of the empty cells that agree with the solution: of the digits in the last answer tags, as many as there are cells."""
    puzzle, solution = row["puzzle"], row["solution"]
    answers = tagged_answers(completion)
    digits = "".join(filter(str.isdigit, answers[-1])) if answers else ""
    pairs = zip(puzzle, solution, digits, strict=False)
    return sum(clue == "0" and wanted == digit for clue, wanted, digit in pairs) / puzzle.count("0")


class Sudoku(Puzzle):
    """4x4 Sudoku.

    Args:
        min_empty, max_empty: how many cells of a generated puzzle are empty, drawn evenly from this range. A unique solution
            allows 12 at most. (The published test file has 8 everywhere.)
    """

    name = "sudoku"
    fields = ("Puzzle", "Solution")
    columns = ("puzzle", "solution")
    alphabet = "01234="
    max_completion = CELLS + 1
    instructions = (
        "Solve the 4x4 Sudoku: every row, column and 2x2 box holds 1 to 4. It is given row by row, with 0 for an empty cell. "
        "Give the 16 digits of the solution between <answer> and </answer>."
    )
    published = MappingProxyType({"sudoku": published_share})

    def __init__(self, *, min_empty: int = 6, max_empty: int = 11):
        if not 1 <= min_empty <= max_empty <= 12:
            what = f"min_empty {min_empty} and max_empty {max_empty} are no range within 1 to 12"
            raise ConfigError(what, where=self.name, remedy="Use 1 <= min_empty <= max_empty <= 12.")
        self.min_empty, self.max_empty = min_empty, max_empty
        self._grids = {split: [grid for grid in GRIDS if split_of(grid) == split] for split in ("train", "test")}

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """Empty random cells of random grids until one keeps a unique solution (of puzzles with 12 empty cells, one in 20 does)."""
        count = rng.randint(self.min_empty, self.max_empty)
        for _ in range(200):
            solution = rng.choice(self._grids[split])
            empty = set(rng.sample(range(CELLS), count))
            puzzle = "".join("0" if cell in empty else digit for cell, digit in enumerate(solution))
            if _agreeing(puzzle).bit_count() == 1:
                return self._row(puzzle, solution)
        return None

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record with `Puzzle` and `Solution`. A puzzle may have several solutions."""
        puzzle, solution = record["Puzzle"], record["Solution"]
        if not isinstance(puzzle, str) or "0" not in puzzle or len(puzzle) != CELLS or not set(puzzle) <= set("0" + DIGITS):
            remedy = "Write 16 digits as text, row by row: 1 to 4, and 0 for an empty cell (at least one)."
            raise DataError(f"{puzzle!r} is not a 4x4 puzzle", where=f"{where}, column 'Puzzle'", remedy=remedy)
        if solution not in solve(puzzle):
            what, remedy = f"{solution!r} does not solve {puzzle!r}", "Mend or remove the row."
            raise DataError(what, where=f"{where}, column 'Solution'", remedy=remedy)
        return self._row(puzzle, solution)

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The value is the share of the empty cells that are right; a changed clue costs as much as a wrong cell.

        Where a puzzle has several solutions, each counts as right, and the nearest one is compared.
        """
        grid, puzzle = answer_of(completion) or "", row["puzzle"]
        if len(grid) != CELLS or not set(grid) <= set(DIGITS):
            return MALFORMED
        errors = min(_differences(grid, solution) for solution in solve(puzzle))
        return Verdict(max(0.0, 1 - errors / puzzle.count("0")), "wrong" if errors else "ok")

    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """The solution with one empty cell changed or two swapped: as solved grids differ in four cells or more, never a solution."""
        cells = list(row["completion"])
        empty = [cell for cell, digit in enumerate(row["puzzle"]) if digit == "0"]
        swaps = [(a, b) for a, b in combinations(empty, 2) if cells[a] != cells[b]]
        if swaps and rng.random() < 0.5:
            a, b = rng.choice(swaps)
            cells[a], cells[b] = cells[b], cells[a]
        else:
            cell = rng.choice(empty)
            cells[cell] = rng.choice([digit for digit in DIGITS if digit != cells[cell]])
        return "".join(cells)

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        """As people do it: the more cells are empty, the likelier the grid is handed in with the last third of them left empty.

        The chance rises evenly with the number of empty cells: of a rate of 0.4 from 0 to 0.8, of a rate of 0.6 from 0.2 to 1.
        """
        empty = [cell for cell, digit in enumerate(row["puzzle"]) if digit == "0"]
        effort = (len(empty) - self.min_empty) / max(1, self.max_empty - self.min_empty)
        chance = 2 * mistake_rate * effort if mistake_rate <= 0.5 else 1 - 2 * (1 - mistake_rate) * (1 - effort)
        if rng.random() >= chance:
            return row["completion"]
        left = set(empty[-max(1, len(empty) // 3) :])
        return "".join("0" if cell in left else digit for cell, digit in enumerate(row["completion"]))

    def _row(self, puzzle: str, solution: str) -> Row:
        return {"prompt": puzzle + "=", "completion": solution, "group": solution, "puzzle": puzzle, "solution": solution}
