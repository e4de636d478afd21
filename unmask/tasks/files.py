"""Rows of local text files, with errors that name the file, the row and the remedy."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from unmask.config_files import did_you_mean
from unmask.errors import DataError

Record = tuple[str, dict[str, Any]]
"""Where a row stands ("file, line 3"), and the row."""


def read_text(path: str | os.PathLike[str]) -> str:
    """A whole UTF-8 file, line ends normalised and a byte-order mark dropped. Missing, empty and otherwise encoded files: DataError."""
    path = Path(path)
    if not path.is_file():
        raise DataError("no such file", where=str(path), remedy="Check the path.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is not UTF-8 ({error.reason})"
        raise DataError(what, where=str(path), remedy="Save the file as UTF-8.") from None
    if not text.strip():
        raise DataError("the file is empty", where=str(path), remedy="Give a file with at least one row.")
    return text


def read_records(path: str | os.PathLike[str], columns: Collection[str] = ()) -> list[Record]:
    """All rows of a .csv, .json (an array of objects) or .jsonl file, in order.

    A CSV file has no types: its values stay text, so that leading zeros survive.

    Args:
        path: the file.
        columns: names that every row must have.

    Raises:
        DataError: for a missing, empty or malformed file, and for a row without a column.
    """
    text = read_text(path)
    reader = {".csv": _csv_records, ".json": _json_records}.get(Path(path).suffix.lower(), _jsonl_records)
    records = list(reader(text, str(path)))
    if not records:
        raise DataError("the file holds no rows", where=str(path), remedy="Give a file with at least one row.")
    for where, row in records:
        require_names(row, columns, where)
    return records


def require_names(present: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Raise a DataError that names the wanted columns that are missing, those present, and the nearest."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    names, found = ", ".join(map(repr, missing)), ", ".join(map(repr, present)) or "none"
    what = f"no column {names} (present: {found})"
    raise DataError(what, where=where, remedy=did_you_mean(missing[0], present))


def _csv_records(text: str, path: str) -> Iterator[Record]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    number = 0
    try:
        for number, row in enumerate(reader, start=1):
            where = f"{path}, row {number}"
            if None in row or None in row.values():
                what = f"the number of fields is not that of the header ({len(reader.fieldnames or ())})"
                raise DataError(what, where=where, remedy="Quote fields that hold commas.")
            yield where, row
    except csv.Error as error:
        raise DataError(f"malformed CSV: {error}", where=f"{path}, row {number + 1}", remedy="Mend or remove the row.") from None


def _jsonl_records(text: str, path: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _object(_decode(line, where), where)


def _json_records(text: str, path: str) -> Iterator[Record]:
    rows = _decode(text, path)
    if not isinstance(rows, list):
        raise DataError("not an array of objects", where=path, remedy="Write [{...}, {...}], or one object a line in a .jsonl file.")
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        yield where, _object(row, where)


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"malformed JSON: {error}", where=where, remedy="Mend or remove the row.") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"a row is an object of named columns, not {type(value).__name__}", where=where, remedy='Write {"column": value}.')
    return value
