"""Reward functions edit copies only, and what they return is plain."""

from __future__ import annotations

import math
import os
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from unmask.rewards.answers import (
    NotANumber,
    answers_in,
    copied,
    copy_of,
    only_this_process,
)
from unmask.rewards.verdict import OK, Verdict


def test_each_entry_of_a_list_is_copied():
    entry = {"a": [1]}
    copies = copied({"column": [entry, entry], "state": entry})
    copies["column"][0]["a"].append(2)
    assert (
        copies["column"] == [{"a": [1, 2]}, {"a": [1]}] and entry == {"a": [1]} and copies["state"] is entry
    )


def test_what_cannot_be_copied_is_shared():
    lock = threading.Lock()
    assert copy_of([lock]) == [lock]


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        ([1, 2.5, None, True], [1.0, 2.5, None, 1.0]), (np.array([1, 2]), [1.0, 2.0]), (torch.tensor([0.5]), [0.5]), ((Fraction(1, 2),), [0.5]),
        ([OK, Verdict(None, "timeout")], [OK, Verdict(None, "timeout")]), ([Decimal(1), "a", [1.0]], [NotANumber("Decimal('1')"), NotANumber("'a'"), NotANumber("[1.0]")]),
        ([Verdict(1, "ok"), Verdict("1", "ok"), Verdict(1.0, ["ok"]), Verdict(1.0, "good")], [OK, *(NotANumber(f"{bad!r:.60}") for bad in (Verdict("1", "ok"), Verdict(1.0, ["ok"]), Verdict(1.0, "good")))]),
        ([10**999], [NotANumber(f"{10**999!r:.60}")]), (None, NotANumber("None")), (0.5, NotANumber("0.5")), (iter([1]), None),
    ],
)  # fmt: skip
def test_answers_are_plain(values, answers):
    found = answers_in(values)
    assert found == answers if answers is not None else isinstance(found, NotANumber)
    if isinstance(found, list):
        assert all(answer is None or type(answer) in (float, Verdict, NotANumber) for answer in found)


def test_a_number_cannot_pass_for_another():
    class Small(float):
        def __abs__(self):
            return 0.0

        def __le__(self, other):
            return True

    (answer,) = answers_in([Small(math.inf)])
    assert type(answer) is float and answer == math.inf


def test_a_fork_ends_where_it_returns():
    with only_this_process():
        child = os.fork()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
