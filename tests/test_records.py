"""Rows are read as they were written, and errors name what cannot be read."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.errors import DataError, require_names
from unmask.records import kind_of, read_examples, read_lines, read_records

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=12)
tables = st.lists(st.fixed_dictionaries({"a": texts, "b,c": texts}), min_size=1, max_size=5)


@given(tables)
def test_jsonl_and_json_round_trip(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "t.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in table), encoding="utf-8"
    )
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
    assert list(read_records(path)) == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"a": 2})]


def test_a_byte_order_mark_is_dropped(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa\n007\n")
    assert list(read_records(path, ["a"])) == [(f"{path}, row 0", {"a": "007"})]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("t.jsonl", b'{"a": 1}\n{"a": \n', ", line 2"),
        ("t.jsonl", b'{"a": 1} {"a": 2}\n', ", line 1"),
        ("t.jsonl", b'  {"a" 1}\n', ", line 1"),
        ("t.jsonl", b'{"a": 1}\n{"a": "x', ", line 2"),
        ("t.jsonl", b"[" * 200_000, ", line 1"),
        ("t.jsonl", b'{"a": ' + b"1" * 5000 + b"}", ", line 1"),
        ("t.json", b'[{"a": 1},\n{"a": 2}', ", line 2"),
        ("t.json", b'[{"a": 1},\n{"a" 2}]', ", line 2"),
        ("t.jsonl", b'"text"\n', ", line 1"),
        ("t.jsonl", b"\n \n", ""),
        ("t.jsonl", b'{"a": "\xff"}\n', ", line 1"),
        ("t.json", b'{"a": 1}', ""),
        ("t.json", b"[]", ""),
        ("t.json", b"[1]", ", row 0"),
        ("t.csv", b'a,b\n1,2\n"1,2\n', ", row 1"),
        ("t.csv", b"a\n" + b"x" * 200_000, ", row 0"),
        ("t.csv", b"a,b,a\n1,2,3\n", ""),
        ("t.csv", b"a,,\n1,2,3\n", ""),
        ("t.csv", b"prompt;completion\n1;2\n", ""),
        ("t.csv", b"prompt\tcompletion\n1\t2\n", ""),
        ("t.tsv", b"prompt,completion\n1,2\n", ""),
        ("t.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', ", line 2"),
        ("t.json", b'[{"a": [{"b": 1, "b": 1}]}]', ", line 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, where):
    path = tmp_path / name
    path.write_bytes(content)
    with raises(DataError, where=f"{path}{where}") as caught:
        list(read_records(path))
    assert caught.value.remedy


def test_a_missing_file(tmp_path):
    with raises(DataError, where=str(tmp_path / "t.txt")):
        list(read_lines(tmp_path / "t.txt"))


@given(
    st.lists(texts.filter(str.strip), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]), st.booleans()
)
def test_lines_come_one_by_one_with_their_ends_compressed_or_not(tmp_path_factory, lines, end, terminated):
    lines = [line.replace("\n", "") or "x" for line in lines]
    folder = tmp_path_factory.mktemp("lines")
    content = (end.join(lines) + end * terminated).encode()
    (folder / "t.txt").write_bytes(content)
    (folder / "t.TXT.gz").write_bytes(gzip.compress(content))
    for name in ("t.txt", "t.TXT.gz"):
        read = list(read_lines(folder / name))
        assert "".join(read) == "\n".join(lines) + "\n" * terminated and len(read) == len(lines)
        assert kind_of(folder / name) == ".txt"


def test_rows_before_a_malformed_one_are_read_first(tmp_path):
    for name, content, where in [
        ("t.jsonl", '{"a": 1}\n{"a": ', "line 2"),
        ("t.csv", "a,b\n1,2\n3", "row 1"),
    ]:
        (tmp_path / name).write_text(content)
        rows = read_records(tmp_path / name)
        next(rows)
        with raises(DataError, where=f"{tmp_path}/{name}, {where}"):
            next(rows)


LINES = ['{"a": 1}', '{"a": 2}', "", " ", "\u3000", "\x1c", '"\u3000"', '{"a', "\udcff"]


@given(st.lists(st.sampled_from(LINES), max_size=5))
def test_an_error_is_raised_or_stands_in_place_of_its_row(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("rows") / "t.jsonl"
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))

    def read(**options):
        """The rows and errors, or the error that ended them."""
        try:
            return [str(row) for row in read_examples(path, **options)]
        except DataError as error:
            return str(error)

    kept = read(keep_malformed=True)
    assert isinstance(kept, str) == (not any(line.strip() for line in lines))
    errors = [row for row in kept if not row.startswith("{")] if isinstance(kept, list) else []
    assert len(errors) == sum(bool(line.strip()) and not line.endswith("}") for line in lines)
    assert read() == (errors[0] if errors else kept)


@pytest.mark.parametrize(("cut", "lines"), [(1, 3), (9, 3), (30, 0)])
def test_a_compressed_file_that_was_cut_off(cut, lines, tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 3 + b'{"a": 2}')[:-cut])
    with raises(DataError, where=f"{path}, after line {lines}") as caught:
        list(read_records(path))
    assert caught.value.remedy


def test_missing_names_are_told_with_those_present_and_the_nearest():
    require_names(["a", "b"], ["b"], "here")
    with raises(DataError, where="here"):
        require_names(["promt", "x"], ["x", "prompt"], "here")


def test_a_missing_column_without_a_similar_one_points_to_the_formats():
    with raises(DataError, where="row 0"):
        require_names(["messages"], ["chosen"], "row 0")
