"""Verifiable tasks: each makes or reads problems, and judges answers to them."""

from unmask.tasks.base import Task, Verdict, get_task, split_of
from unmask.tasks.countdown import Countdown
from unmask.tasks.sudoku import Sudoku

__all__ = ["Countdown", "Sudoku", "Task", "Verdict", "get_task", "split_of"]
