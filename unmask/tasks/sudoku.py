"""4x4 and 9x9 Sudoku."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import islice
from typing import Any

from unmask.errors import DataError
from unmask.tasks.base import Row, Split, split_of
from unmask.tasks.grids import GridPuzzle, candidates, differences, flip, solutions, units_of_cells

GRIDS = sorted(solutions("0" * 16))
"""All 288 solved 4x4 grids."""
_GRIDS_WITH = {
    (cell, digit): {grid for grid in GRIDS if grid[cell] == digit} for cell in range(16) for digit in "1234"
}


def solve(puzzle: str) -> list[str]:
    """All solutions of a 4x4 puzzle (16 digits, 0 for an empty cell), in ascending order. DataError if the
    text is no such puzzle."""
    if len(puzzle) != 16 or not set(puzzle) <= set("01234"):
        raise DataError(
            f"{puzzle!r} is not a 4x4 puzzle",
            remedy="Write 16 digits, row by row: 1 to 4, and 0 for an empty cell",
        )
    return sorted(
        set(GRIDS).intersection(
            *(_GRIDS_WITH[cell, digit] for cell, digit in enumerate(puzzle) if digit != "0")
        )
    )


class Sudoku(GridPuzzle):
    """4x4 Sudoku. Puzzles with a unique solution have at most 12 empty cells; those of the published test
    file have 8."""

    name = "sudoku"
    digits = "1234"
    most_empty = 12
    alphabet = "01234="
    max_completion = 17
    instructions = (
        "Solve the 4x4 Sudoku: every row, column and 2x2 box holds 1 to 4. It is given row by row, "
        "with 0 for an empty cell. "
        "Give the 16 digits of the solution between <answer> and </answer>."
    )

    def __init__(self, *, min_empty: int = 6, max_empty: int = 11):
        super().__init__(min_empty, max_empty)
        self._grids = {
            split: [grid for grid in GRIDS if split_of(grid) == split] for split in ("train", "test")
        }

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """Empty random cells of random grids until one keeps a unique solution (of puzzles with 12 empty
        cells, one in 20 does)."""
        count = rng.randint(self.min_empty, self.max_empty)
        for _ in range(200):
            solution = rng.choice(self._grids[split])
            empty = set(rng.sample(range(16), count))
            puzzle = "".join("0" if cell in empty else digit for cell, digit in enumerate(solution))
            if len(solve(puzzle)) == 1:
                return self.posing(puzzle, solution)
        return None

    def errors(self, grid: str, row: Mapping[str, Any]) -> int:
        """Compared with the nearest solution, if the puzzle has several."""
        return min(differences(grid, solution) for solution in solve(row["puzzle"]))

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        """A mistake leaves the last third of the empty cells empty; it is more likely the more cells are
        empty."""
        empty = [cell for cell, digit in enumerate(row["puzzle"]) if digit == "0"]
        effort = (len(empty) - self.min_empty) / max(1, self.max_empty - self.min_empty)
        if rng.random() >= self.chance(effort, mistake_rate):
            return row["completion"]
        left = set(empty[-max(1, len(empty) // 3) :])
        return "".join("0" if cell in left else digit for cell, digit in enumerate(row["completion"]))


class Sudoku9(GridPuzzle):
    """9x9 Sudoku."""

    name = "sudoku9"
    digits = "123456789"
    most_empty = 50
    alphabet = "0123456789="
    max_completion = 82
    instructions = (
        "Solve the Sudoku: every row, column and 3x3 box holds 1 to 9. It is given row by row, with 0 "
        "for an empty cell. "
        "Give the 81 digits of the solution between <answer> and </answer>."
    )

    def __init__(self, *, min_empty: int = 20, max_empty: int = 45):
        super().__init__(min_empty, max_empty)

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """A random grid of the split, emptied cell by cell in random order; a cell without which the solution
        is not unique is kept."""
        solution = _random_grid(rng)
        if split_of(solution) != split:
            return None
        cells, units, missing, wanted = (
            list(solution),
            units_of_cells(9),
            [0] * 27,
            rng.randint(self.min_empty, self.max_empty),
        )
        for cell in rng.sample(range(81), 81):
            if cells.count("0") == wanted:
                return self.posing("".join(cells), solution)
            bit = 1 << int(solution[cell]) - 1
            cells[cell] = "0"
            flip(missing, units[cell], bit)
            forced = candidates(missing, units[cell]) == bit
            if not forced and len(list(islice(solutions("".join(cells)), 2))) > 1:
                cells[cell] = solution[cell]
                flip(missing, units[cell], bit)
        return None


def _random_grid(rng: random.Random) -> str:
    """A solved grid: the pattern (3 r + r // 3 + c) mod 9 with its digits, bands, stacks, and rows and
    columns within them shuffled.

    Of the 6.7e21 grids these are 9! x 6^8 / symmetries of one class: enough for training, not a uniform draw.
    """
    rows, columns = (
        [3 * band + line for band in rng.sample(range(3), 3) for line in rng.sample(range(3), 3)]
        for _ in range(2)
    )
    digits = rng.sample("123456789", 9)
    return "".join(digits[(3 * (r % 3) + r // 3 + c) % 9] for r in rows for c in columns)
