"""The problems of a task, from any source and in any prompt style."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from tests.errors import raises
from unmask.config.run import DataSource
from unmask.data.sources import pose, read_problems
from unmask.errors import ConfigError, DataError
from unmask.tasks import get_task

TASK = get_task("gsm8k")
PROBLEMS = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(5)]


def written(kind: str, folder: Path) -> str:
    """Write the problems as a file or folder of this kind."""
    path = folder / f"problems.{kind}"
    rows = Dataset.from_list(PROBLEMS)
    if kind == "saved":
        rows.save_to_disk(str(path))
    elif kind == "hub":  # as a hub dataset lies on disk: a folder of files by split
        path.mkdir()
        rows.to_parquet(path / "test.parquet")
    else:
        {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[kind](path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved", "hub"])
def test_problems_are_read_from_any_source(kind, tmp_path):
    rows = read_problems(TASK, written(kind, tmp_path), 4, split="test")
    assert [row["answer"] for row in rows] == ["0", "2", "4", "6"]
    assert rows[1]["prompt"] == "Question: What is 1 + 1?\nAnswer:"


def test_shots_are_the_first_rows_and_are_not_problems(tmp_path):
    path = written("jsonl", tmp_path)
    rows = read_problems(TASK, path, 4, split="test")
    plain = pose(TASK, rows, "plain", 2)
    assert [row["answer"] for row in plain] == ["4", "6"]
    assert plain[0]["prompt"].count("Question:") == 3 and "#### 2\n\n" in plain[0]["prompt"]
    chat = pose(TASK, rows, "chat", 1)
    assert [turn["role"] for turn in chat[0]["prompt"]] == ["user", "assistant", "user"]
    with raises(ConfigError, where="shots"):
        pose(TASK, rows, "plain", 4)


def test_a_task_generates_problems_or_reads_one_source():
    sudoku = get_task("sudoku")
    assert read_problems(sudoku, None, 3, split="test", seed=1) == sudoku.generate("test", 3, 1)
    with raises(ConfigError, where="task"):
        read_problems(TASK, None, 3, split="test")
    with raises(ConfigError, where="data"):
        read_problems(TASK, [DataSource(path="a")], 3, split="test")


def test_a_malformed_row_of_any_source_is_named(tmp_path):
    Dataset.from_list([*PROBLEMS, {"question": "Why?", "answer": "Because."}]).to_parquet(
        tmp_path / "bad.parquet"
    )
    with raises(DataError, where=f"{tmp_path}/bad.parquet, row 6"):
        read_problems(TASK, str(tmp_path / "bad.parquet"), 10, split="test")
