"""Sudokus of any size. A prompt is the cells, row by row, with 0 for an empty one, and "="; a completion is
the solution."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import isqrt
from types import MappingProxyType
from typing import Any, ClassVar

from unmask.errors import ConfigError, DataError
from unmask.rewards.format import tagged_answers
from unmask.rewards.parsing import answer_of
from unmask.rewards.verdict import MALFORMED, OK, Verdict
from unmask.tasks.base import Puzzle, Row

RULE = re.compile(r"[-+|=: \u2500-\u257f]*|```[a-z]*")
"""A line between rows, or the end of a fence."""
LAYOUT = str.maketrans(dict.fromkeys(" \t|\u2502\u2503\u2551,[]`"))
Units = tuple[int, int, int]
"""The numbers of a cell's row, column and box."""


@functools.cache
def units_of_cells(side: int) -> list[Units]:
    """The units of each cell, row by row. Rows have the numbers 0 to side - 1, columns and boxes the next
    ones."""
    box = isqrt(side)
    return [
        (cell // side, side + cell % side, 2 * side + cell // (side * box) * box + cell % side // box)
        for cell in range(side**2)
    ]


def flip(missing: list[int], units: Units, bit: int) -> None:
    """Remove a digit (as a bit) from those that the three units of a cell lack, or add it again."""
    for unit in units:
        missing[unit] ^= bit


def candidates(missing: list[int], units: Units) -> int:
    """The digits (as bits) that all three units of a cell lack."""
    row, column, box = units
    return missing[row] & missing[column] & missing[box]


def solutions(puzzle: str) -> Iterator[str]:
    """The solutions of a puzzle (digits row by row, 0 for an empty cell); none if clues clash."""
    side = isqrt(len(puzzle))
    cells, units, missing = list(puzzle), units_of_cells(side), [(1 << side) - 1] * (3 * side)
    for cell, digit in enumerate(cells):
        if digit == "0":
            continue
        bit = 1 << int(digit) - 1
        if not candidates(missing, units[cell]) & bit:
            return
        flip(missing, units[cell], bit)
    yield from _search(cells, units, missing, [cell for cell, digit in enumerate(cells) if digit == "0"])


def _search(cells: list[str], units: list[Units], missing: list[int], empty: list[int]) -> Iterator[str]:
    """Fill the empty cells, the one with the fewest candidates first."""
    if not empty:
        yield "".join(cells)
        return
    cell = min(empty, key=lambda cell: candidates(missing, units[cell]).bit_count())
    rest = [other for other in empty if other != cell]
    for digit in range(1, isqrt(len(cells)) + 1):
        bit = 1 << digit - 1
        if candidates(missing, units[cell]) & bit:
            flip(missing, units[cell], bit)
            cells[cell] = str(digit)
            yield from _search(cells, units, missing, rest)
            flip(missing, units[cell], bit)


def differences(a: str, b: str) -> int:
    """The number of cells in which two grids differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def published_fraction(completion: str, row: Mapping[str, Any]) -> float:
    """The fraction of empty cells in which the digits of the last answer tags agree with the solution."""
    puzzle, solution = row["puzzle"], row["solution"]
    answers = tagged_answers(completion)
    digits = "".join(filter(str.isdigit, answers[-1])) if answers else ""
    pairs = zip(puzzle, solution, digits, strict=False)
    return sum(clue == "0" and wanted == digit for clue, wanted, digit in pairs) / puzzle.count("0")


def _digits_of(answer: str, side: int) -> str:
    """The digits of a grid that is written in one line, or a line for each row (or `;` or `/` between rows),
    between spaces, commas, brackets, rules or the lines of a fence."""
    lines = [
        line.translate(LAYOUT)
        for line in re.sub("[;/]", "\n", answer).splitlines()
        if not RULE.fullmatch(line)
    ]
    return "".join(lines) if len(lines) == 1 or {len(line) for line in lines} == {side} else ""


class GridPuzzle(Puzzle):
    """A Sudoku: each row, column and box holds each of `digits` once.

    Args:
        min_empty, max_empty: range of the number of empty cells in generated puzzles, from which it is drawn
            uniformly.
    """

    digits: ClassVar[str]
    most_empty: ClassVar[int]
    """With more empty cells, unique solutions are too rare to be found."""
    fields = ("Puzzle", "Solution")
    columns = ("puzzle", "solution")
    published = MappingProxyType({"sudoku": published_fraction})

    def __init__(self, min_empty: int, max_empty: int):
        if not 1 <= min_empty <= max_empty <= self.most_empty:
            what = (
                f"min_empty {min_empty} and max_empty {max_empty} are not a range within 1 to "
                f"{self.most_empty}"
            )
            raise ConfigError(
                what, where=self.name, remedy=f"Use 1 <= min_empty <= max_empty <= {self.most_empty}"
            )
        self.min_empty, self.max_empty = min_empty, max_empty

    def is_valid(self, grid: str) -> bool:
        """Whether a text is a solved grid."""
        return (
            len(grid) == len(self.digits) ** 2 and set(grid) <= set(self.digits) and grid in solutions(grid)
        )

    def errors(self, grid: str, row: Mapping[str, Any]) -> int:
        """The number of wrong cells in a grid."""
        return differences(grid, row["solution"])

    def solves(self, grid: str, puzzle: str) -> bool:
        """Whether a grid is valid and keeps the clues."""
        return self.is_valid(grid) and all(
            clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True)
        )

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record with `Puzzle` (0 or . for an empty cell) and `Solution`. A puzzle may have
        several solutions."""
        puzzle, solution, side = record["Puzzle"], record["Solution"], len(self.digits)
        puzzle = puzzle.replace(".", "0") if isinstance(puzzle, str) else puzzle
        if (
            not isinstance(puzzle, str)
            or "0" not in puzzle
            or len(puzzle) != side**2
            or not set(puzzle) <= {"0", *self.digits}
        ):
            remedy = (
                f"Write {side**2} digits as text, row by row: 1 to {side}, and 0 for an empty cell (at "
                "least one)"
            )
            raise DataError(
                f"{puzzle!r} is not a {side}x{side} puzzle", where=f"{where}, column 'Puzzle'", remedy=remedy
            )
        if not (isinstance(solution, str) and self.solves(solution, puzzle)):
            what, remedy = f"{solution!r} does not solve {puzzle!r}", "Fix or remove the row"
            raise DataError(what, where=f"{where}, column 'Solution'", remedy=remedy)
        return self.posing(puzzle, solution)

    def posing(self, puzzle: str, solution: str) -> Row:
        """The row of a puzzle."""
        return {
            "prompt": puzzle + "=",
            "completion": solution,
            "group": solution,
            "puzzle": puzzle,
            "solution": solution,
        }

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """A valid grid that keeps the clues is right. The value of another: the fraction of empty cells that
        are right, less one cell for each changed clue."""
        grid, puzzle = _digits_of(answer_of(completion) or "", len(self.digits)), row["puzzle"]
        if len(grid) != len(self.digits) ** 2 or not set(grid) <= set(self.digits):
            return MALFORMED
        if self.solves(grid, puzzle):
            return OK
        return Verdict(max(0.0, 1 - self.errors(grid, row) / puzzle.count("0")), "wrong")

    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """The solution with one empty cell changed or two swapped. Never a solution, as solved grids differ
        in at least four cells."""
        cells = list(row["completion"])
        empty = [cell for cell, digit in enumerate(row["puzzle"]) if digit == "0"]
        swaps = [(a, b) for a, b in combinations(empty, 2) if cells[a] != cells[b]]
        if swaps and rng.random() < 0.5:
            a, b = rng.choice(swaps)
            cells[a], cells[b] = cells[b], cells[a]
        else:
            cell = rng.choice(empty)
            cells[cell] = rng.choice([digit for digit in self.digits if digit != cells[cell]])
        return "".join(cells)
