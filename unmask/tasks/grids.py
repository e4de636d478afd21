"""What Sudokus of any size share: a prompt is the cells, row by row, with 0 for an empty one, and "="; a completion the solution."""

from __future__ import annotations

import abc
import random
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any, ClassVar

from unmask.errors import ConfigError, DataError
from unmask.rewards.format import tagged_answers
from unmask.rewards.parsing import answer_of
from unmask.rewards.verdict import MALFORMED, OK, Verdict
from unmask.tasks.base import Puzzle, Row


def differences(a: str, b: str) -> int:
    """How many cells of two grids differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def published_fraction(completion: str, row: Mapping[str, Any]) -> float:
    """The share of the empty cells that agree with the solution: of the digits in the last answer tags, as many as there are cells."""
    puzzle, solution = row["puzzle"], row["solution"]
    answers = tagged_answers(completion)
    digits = "".join(filter(str.isdigit, answers[-1])) if answers else ""
    pairs = zip(puzzle, solution, digits, strict=False)
    return sum(clue == "0" and wanted == digit for clue, wanted, digit in pairs) / puzzle.count("0")


class GridPuzzle(Puzzle):
    """A Sudoku of `digits`, as many to a row, a column and a box.

    Args:
        min_empty, max_empty: how many cells of a generated puzzle are empty, drawn evenly from this range.
    """

    digits: ClassVar[str]
    most_empty: ClassVar[int]
    """Beyond this, a unique solution is too rare to be found."""
    fields = ("Puzzle", "Solution")
    columns = ("puzzle", "solution")
    published = MappingProxyType({"sudoku": published_fraction})

    def __init__(self, min_empty: int, max_empty: int):
        if not 1 <= min_empty <= max_empty <= self.most_empty:
            what = f"min_empty {min_empty} and max_empty {max_empty} are no range within 1 to {self.most_empty}"
            raise ConfigError(what, where=self.name, remedy=f"Use 1 <= min_empty <= max_empty <= {self.most_empty}.")
        self.min_empty, self.max_empty = min_empty, max_empty

    @abc.abstractmethod
    def is_valid(self, grid: str) -> bool:
        """Whether a text is a solved grid: every digit in every row, column and box."""

    def errors(self, grid: str, row: Mapping[str, Any]) -> int:
        """How many cells of a grid that does not solve the row's puzzle are wrong."""
        return differences(grid, row["solution"])

    def solves(self, grid: str, puzzle: str) -> bool:
        """Whether a grid is valid and keeps the clues."""
        return self.is_valid(grid) and all(clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True))

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of a record with `Puzzle` (0 or . for an empty cell) and `Solution`. A puzzle may have several solutions."""
        puzzle, solution, side = record["Puzzle"], record["Solution"], len(self.digits)
        puzzle = puzzle.replace(".", "0") if isinstance(puzzle, str) else puzzle
        if not isinstance(puzzle, str) or "0" not in puzzle or len(puzzle) != side**2 or not set(puzzle) <= {"0", *self.digits}:
            remedy = f"Write {side**2} digits as text, row by row: 1 to {side}, and 0 for an empty cell (at least one)."
            raise DataError(f"{puzzle!r} is not a {side}x{side} puzzle", where=f"{where}, column 'Puzzle'", remedy=remedy)
        if not (isinstance(solution, str) and self.solves(solution, puzzle)):
            what, remedy = f"{solution!r} does not solve {puzzle!r}", "Mend or remove the row."
            raise DataError(what, where=f"{where}, column 'Solution'", remedy=remedy)
        return self.posing(puzzle, solution)

    def posing(self, puzzle: str, solution: str) -> Row:
        """The row that poses a puzzle."""
        return {"prompt": puzzle + "=", "completion": solution, "group": solution, "puzzle": puzzle, "solution": solution}

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Right where the grid is valid and keeps the clues; else the share of the empty cells that are right, less a cell for each
        changed clue."""
        grid, puzzle = answer_of(completion) or "", row["puzzle"]
        if len(grid) != len(self.digits) ** 2 or not set(grid) <= set(self.digits):
            return MALFORMED
        if self.solves(grid, puzzle):
            return OK
        return Verdict(max(0.0, 1 - self.errors(grid, row) / puzzle.count("0")), "wrong")

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
            cells[cell] = rng.choice([digit for digit in self.digits if digit != cells[cell]])
        return "".join(cells)
