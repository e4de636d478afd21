"""A log of items goes on where it was cut, and is refused by another evaluation."""

from __future__ import annotations

import pytest

from unmask.errors import DataError
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.result_file import Item

IDENTITY = {"model": {"fingerprint": "abc"}, "protocols": {"sudoku": {"seed": 0}}}
ITEMS = [Item(id=str(n), group="g", scores={"solved": 1 / 3}, prompt="ü", completions=["a\u2028b"]) for n in range(4)]


def test_items_are_read_as_they_were_written(tmp_path):
    log = ItemLog(tmp_path / "out.json", IDENTITY)
    assert log.finished("sudoku") == {} and log.resumed == 0
    log.add("sudoku", ITEMS[:2])
    again = ItemLog(tmp_path / "out.json", IDENTITY)
    assert again.finished("sudoku") == {"0": ITEMS[0], "1": ITEMS[1]} and again.resumed == 2
    again.add("sudoku", ITEMS[2:])
    assert list(again.gather("sudoku").values()) == ITEMS and again.gather("gsm8k") == {}
    again.remove()
    assert not list(tmp_path.iterdir())


def test_wherever_it_is_cut_whole_items_are_kept(tmp_path):
    log = ItemLog(tmp_path / "out.json", IDENTITY)
    log.add("sudoku", ITEMS[:2])
    written = log.own.path.read_bytes()
    for length in range(len(written) + 1):
        log.own.path.write_bytes(written[:length])
        again = ItemLog(tmp_path / "out.json", IDENTITY)
        found = again.finished("sudoku")
        assert list(found.values()) == ITEMS[: len(found)]
        again.add("sudoku", ITEMS[len(found) :])
        assert list(ItemLog(tmp_path / "out.json", IDENTITY).finished("sudoku").values()) == ITEMS
        log.own.path.unlink()


def test_the_items_of_another_evaluation_are_refused_and_kept(tmp_path):
    ItemLog(tmp_path / "out.json", IDENTITY).add("sudoku", ITEMS)
    kept = (tmp_path / "out.json.items.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"another evaluation \(seed: 0 there, 1 here\).*--output"):
        ItemLog(tmp_path / "out.json", {**IDENTITY, "protocols": {"sudoku": {"seed": 1}}})
    assert (tmp_path / "out.json.items.jsonl").read_bytes() == kept


def test_processes_share_items_and_gather_them(tmp_path):
    logs = [ItemLog(tmp_path / "out.json", IDENTITY, rank=rank, processes=2) for rank in (0, 1)]
    shares = [log.share(range(4)) for log in logs]
    assert sorted([*shares[0], *shares[1]]) == [0, 1, 2, 3]
    for log, share in zip(logs, shares, strict=True):
        log.add("sudoku", [ITEMS[n] for n in share])
    for log in logs:
        assert sorted(log.gather("sudoku")) == ["0", "1", "2", "3"]
    alone = ItemLog(tmp_path / "out.json", IDENTITY)  # another number of processes goes on
    assert len(alone.finished("sudoku")) == 4
