"""4x4 Sudoku: fill the empty cells so that every row, column and 2x2 box holds 1, 2, 3 and 4.

There are only 288 solved grids, so solutions are found by look-up: each clue is a bit mask of the grids that agree with it.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Iterator, Mapping
from typing import Any

from unmask.errors import DataError
from unmask.tasks.base import Row, Split, split_of
from unmask.tasks.grids import GridPuzzle, differences

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
"""Bit i of `_GRIDS_WITH[cell, digit]` is set if grid i has that digit there."""


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


class Sudoku(GridPuzzle):
    """4x4 Sudoku.

    Args:
        min_empty, max_empty: how many cells of a generated puzzle are empty, drawn evenly from this range. A unique solution
            allows 12 at most. (The published test file has 8 everywhere.)
    """

    name = "sudoku"
    digits = DIGITS
    most_empty = 12
    alphabet = "01234="
    max_completion = CELLS + 1
    instructions = (
        "Solve the 4x4 Sudoku: every row, column and 2x2 box holds 1 to 4. It is given row by row, with 0 for an empty cell. "
        "Give the 16 digits of the solution between <answer> and </answer>."
    )

    def __init__(self, *, min_empty: int = 6, max_empty: int = 11):
        super().__init__(min_empty, max_empty)
        self._grids = {split: [grid for grid in GRIDS if split_of(grid) == split] for split in ("train", "test")}

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """Empty random cells of random grids until one keeps a unique solution (of puzzles with 12 empty cells, one in 20 does)."""
        count = rng.randint(self.min_empty, self.max_empty)
        for _ in range(200):
            solution = rng.choice(self._grids[split])
            empty = set(rng.sample(range(CELLS), count))
            puzzle = "".join("0" if cell in empty else digit for cell, digit in enumerate(solution))
            if _agreeing(puzzle).bit_count() == 1:
                return self.posing(puzzle, solution)
        return None

    def is_valid(self, grid: str) -> bool:
        return is_valid_grid(grid)

    def errors(self, grid: str, row: Mapping[str, Any]) -> int:
        """Beside the nearest solution, where the puzzle has several."""
        return min(differences(grid, solution) for solution in solve(row["puzzle"]))

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        """As people do it: the more cells are empty, the likelier the grid is handed in with the last third of them left empty."""
        empty = [cell for cell, digit in enumerate(row["puzzle"]) if digit == "0"]
        effort = (len(empty) - self.min_empty) / max(1, self.max_empty - self.min_empty)
        if rng.random() >= self.chance(effort, mistake_rate):
            return row["completion"]
        left = set(empty[-max(1, len(empty) // 3) :])
        return "".join("0" if cell in left else digit for cell, digit in enumerate(row["completion"]))
