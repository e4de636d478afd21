"""A log of items goes on where it was cut, and is refused by another evaluation."""

from __future__ import annotations

import math

import pytest

from tests.errors import raises
from unmask.errors import DataError
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.result_file import Item

IDENTITY = {"model": {"fingerprint": "abc"}, "protocols": {"sudoku": {"seed": 0}}}
ITEMS = [
    Item(id=str(n), group="g", scores={"solved": 1 / 3}, prompt="ü", completions=["a\u2028b"])
    for n in range(4)
]


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
    with raises(DataError, where=str(tmp_path / "out.json.items.jsonl")):
        ItemLog(tmp_path / "out.json", {**IDENTITY, "protocols": {"sudoku": {"seed": 1}}})
    assert (tmp_path / "out.json.items.jsonl").read_bytes() == kept


def test_the_log_of_another_evaluation_without_an_item_is_replaced(tmp_path):
    ItemLog(tmp_path / "out.json", {"model": "another"})
    log = ItemLog(tmp_path / "out.json", IDENTITY)
    log.add("sudoku", ITEMS)
    assert len(ItemLog(tmp_path / "out.json", IDENTITY).finished("sudoku")) == 4


def test_an_item_that_could_not_be_scored_is_not_finished(tmp_path):
    unscored = ITEMS[1].model_copy(update={"scores": {}, "status": "verifier_error"})
    ItemLog(tmp_path / "out.json", IDENTITY).add("sudoku", [ITEMS[0], unscored])
    again = ItemLog(tmp_path / "out.json", IDENTITY)
    assert (list(again.finished("sudoku")), again.resumed) == (["0"], 1)
    again.add("sudoku", [ITEMS[1]])
    assert again.gather("sudoku") == {"0": ITEMS[0], "1": ITEMS[1]}


@pytest.mark.parametrize("line", ["[]", "{}", '{"task": "sudoku", "item": {"id": 1}}', "{"])
def test_a_damaged_line_is_one_error(line, tmp_path):
    log = ItemLog(tmp_path / "out.json", IDENTITY)
    log.add("sudoku", ITEMS[:1])
    with log.own.path.open("a") as file:
        file.write(line + "\n")
    with raises(DataError, where=f"{tmp_path}/out.json.items.jsonl, line 3"):
        ItemLog(tmp_path / "out.json", IDENTITY)


def test_a_name_that_is_a_pattern_is_one_file(tmp_path):
    ItemLog(tmp_path / "a[1].json", IDENTITY).add("sudoku", ITEMS)
    ItemLog(tmp_path / "a1.json", {"model": "another"}).add("sudoku", ITEMS[:1])
    assert len(ItemLog(tmp_path / "a[1].json", IDENTITY).finished("sudoku")) == 4


def test_processes_share_items_and_gather_them(tmp_path):
    logs = [ItemLog(tmp_path / "out.json", IDENTITY, rank=rank, processes=2) for rank in (0, 1)]
    shares = [log.share("0123") for log in logs]
    assert sorted([*shares[0], *shares[1]]) == ["0", "1", "2", "3"]
    for log, share in zip(logs, shares, strict=True):
        log.add("sudoku", [ITEMS[int(n)] for n in share])
    for log in logs:
        assert sorted(log.gather("sudoku")) == ["0", "1", "2", "3"]
    alone = ItemLog(tmp_path / "out.json", IDENTITY)  # another number of processes goes on
    assert len(alone.finished("sudoku")) == 4


def test_other_files_of_the_folder_are_neither_read_nor_removed(tmp_path):
    (tmp_path / "out.json.items-mine.jsonl").write_text("mine\nalso\n")
    log = ItemLog(tmp_path / "out.json", IDENTITY)
    log.add("sudoku", ITEMS)
    log.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json.items-mine.jsonl"]


def test_an_infinite_score_is_kept(tmp_path):
    item = Item(id="a", group="a", scores={"perplexity": math.inf})
    ItemLog(tmp_path / "out.json", IDENTITY).add("text", [item])
    assert ItemLog(tmp_path / "out.json", IDENTITY).finished("text") == {"a": item}
