"""9x9 Sudoku: with too many grids to list, solutions are found by search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType

from unmask.tasks.base import Row, Split, split_of
from unmask.tasks.grids import GridPuzzle, published_fraction

CELLS = 81
DIGITS = "123456789"
UNITS = [(cell // 9, 9 + cell % 9, 18 + cell // 27 * 3 + cell % 9 // 3) for cell in range(CELLS)]
"""Per cell, the numbers of its row, column and box."""
ALL = (1 << 9) - 1


def solutions(puzzle: str) -> Iterator[str]:
    """The solutions of a puzzle of 81 characters, 0 for empty; none where clues clash. The emptiest choice is made first."""
    cells, free = list(puzzle), [ALL] * 27
    for cell, digit in enumerate(cells):
        if digit == "0":
            continue
        bit = 1 << DIGITS.index(digit)
        if not _candidates(free, cell) & bit:
            return
        _flip(free, cell, bit)
    yield from _search(cells, free, [cell for cell in range(CELLS) if cells[cell] == "0"])


def is_valid_grid(text: str) -> bool:
    """Whether the text is a solved grid: 81 digits, with 1 to 9 in every row, column and box."""
    return len(text) == CELLS and set(text) <= set(DIGITS) and text in solutions(text)


def _flip(free: list[int], cell: int, bit: int) -> None:
    """Take a digit (as a bit) from the three units of a cell, or give it back."""
    for unit in UNITS[cell]:
        free[unit] ^= bit


def _candidates(free: list[int], cell: int) -> int:
    row, column, box = UNITS[cell]
    return free[row] & free[column] & free[box]


def _search(cells: list[str], free: list[int], empty: list[int]) -> Iterator[str]:
    if not empty:
        yield "".join(cells)
        return
    cell = min(empty, key=lambda cell: _candidates(free, cell).bit_count())
    rest = [other for other in empty if other != cell]
    for index in range(9):
        bit = 1 << index
        if _candidates(free, cell) & bit:
            _flip(free, cell, bit)
            cells[cell] = DIGITS[index]
            yield from _search(cells, free, rest)
            _flip(free, cell, bit)


class Sudoku9(GridPuzzle):
    """9x9 Sudoku.

    Args:
        min_empty, max_empty: how many cells of a generated puzzle are empty, drawn evenly from this range.
    """

    name = "sudoku9"
    digits = DIGITS
    most_empty = 50
    published = MappingProxyType({"sudoku9": published_fraction})
    alphabet = "0123456789="
    max_completion = CELLS + 1
    instructions = (
        "Solve the Sudoku: every row, column and 3x3 box holds 1 to 9. It is given row by row, with 0 for an empty cell. "
        "Give the 81 digits of the solution between <answer> and </answer>."
    )

    def __init__(self, *, min_empty: int = 20, max_empty: int = 45):
        super().__init__(min_empty, max_empty)

    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """A random grid of the split, emptied cell by cell in a random order as long as its solution stays the only one."""
        solution = _random_grid(rng)
        if split_of(solution) != split:
            return None
        cells, free, wanted = list(solution), [0] * 27, rng.randint(self.min_empty, self.max_empty)
        for cell in rng.sample(range(CELLS), CELLS):
            if cells.count("0") == wanted:
                return self.posing("".join(cells), solution)
            bit = 1 << DIGITS.index(solution[cell])
            cells[cell] = "0"
            _flip(free, cell, bit)
            forced = _candidates(free, cell) == bit
            if not forced and len(list(islice(solutions("".join(cells)), 2))) > 1:
                cells[cell] = solution[cell]
                _flip(free, cell, bit)
        return None

    def is_valid(self, grid: str) -> bool:
        return is_valid_grid(grid)


def _random_grid(rng: random.Random) -> str:
    """A solved grid: the pattern (3 r + r // 3 + c) mod 9 with its digits, bands, stacks, and rows and columns within them shuffled.

    Of the 6.7e21 grids these are 9! x 6^8 / symmetries of one class: enough for training, not a fair draw.
    """
    rows, columns = ([3 * band + line for band in rng.sample(range(3), 3) for line in rng.sample(range(3), 3)] for _ in range(2))
    digits = rng.sample(DIGITS, 9)
    return "".join(digits[(3 * (r % 3) + r // 3 + c) % 9] for r in rows for c in columns)
