"""Rows survive the way through a file, and whatever cannot be read is named."""

from __future__ import annotations

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.errors import DataError
from unmask.tasks.files import read_records, read_text, require_names

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=12)
tables = st.lists(st.fixed_dictionaries({"a": texts, "b,c": texts}), min_size=1, max_size=5)


@given(tables)
def test_jsonl_and_json_round_trip(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "t.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in table), encoding="utf-8")
    (folder / "t.json").write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
    assert [row for _, row in read_records(folder / "t.jsonl")] == table
    assert [row for _, row in read_records(folder / "t.json")] == table


@given(tables)
def test_csv_round_trips_as_text(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("rows") / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["a", "b,c"], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(table)
    assert [row for _, row in read_records(path)] == table


def test_a_row_says_where_it_stands(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\r\n')
    assert read_records(path) == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"a": 2})]


def test_a_byte_order_mark_is_dropped(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa\n007\n")
    assert read_records(path, ["a"]) == [(f"{path}, row 1", {"a": "007"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"a": 1}\n{"a": \n', "line 2: malformed JSON"),
        ("t.jsonl", b'{"a": 1} {"a": 2}\n', "line 1: malformed JSON"),
        ("t.jsonl", b"[" * 200_000, "line 1: malformed JSON"),
        ("t.jsonl", b'"text"\n', "line 1: a row is an object"),
        ("t.jsonl", b"\n \n", "empty"),
        ("t.jsonl", b'{"a": "\xff"}\n', "byte 7 is not UTF-8"),
        ("t.json", b'{"a": 1}', "not an array of objects"),
        ("t.json", b"[]", "no rows"),
        ("t.json", b"[1]", "row 1: a row is an object"),
        ("t.csv", b'a,b\n1,2\n"1,2\n', "row 2: malformed CSV"),
        ("t.csv", b"a\n" + b"x" * 200_000, "row 1: malformed CSV"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_records(path)
    assert str(path) in str(caught.value) and caught.value.remedy


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_text(tmp_path / "t.txt")


def test_missing_names_are_told_with_those_present_and_the_nearest():
    require_names(["a", "b"], ["b"], "here")
    with pytest.raises(DataError, match=r"here: no column 'prompt' \(present: 'promt', 'x'\). Did you mean 'promt'\?"):
        require_names(["promt", "x"], ["x", "prompt"], "here")
