# ruff: noqa: F401 (the public names)
"""Verifiable tasks: each reads problems (some also generate them), and verifies answers. To add one, subclass
`Task` and import it here."""

from unmask.tasks.base import Puzzle, Reward, Row, Task, as_puzzle, get_rewards, get_task, split_of
from unmask.tasks.code import MBPP, HumanEval, PublishedMBPP
from unmask.tasks.countdown import Countdown, Countdown4
from unmask.tasks.gsm8k import GSM8K
from unmask.tasks.math500 import Math500
from unmask.tasks.ocaml import Exercism, MultiPLT
from unmask.tasks.parallel import Copy, Count, Shuffle, Sort
from unmask.tasks.sudoku import Sudoku, Sudoku9
from unmask.tasks.text import MultipleChoice, Text
