"""Read rows of local text files. Errors name the file, the row and the remedy."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from unmask.errors import DataError, require_names

RowSequence = Sequence[Mapping[str, Any]]
"""Rows of columns."""
PlacedRecord = tuple[str, dict[str, Any]]
"""The location of a row ("file, line 3"), and the row."""


def kind_of(path: str | os.PathLike[str]) -> str:
    """The suffix of a file in lower case, ignoring .gz."""
    return Path(str(path).lower().removesuffix(".gz")).suffix


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a UTF-8 file (gzipped or not), each with its newline; a byte-order mark is dropped.

    Raises:
        DataError: a missing or empty file, one that is not UTF-8, or a compressed file that is damaged.
    """
    with closing(_byte_lines(Path(path))) as lines:  # closes the file after an error, too
        for number, line in enumerate(lines, start=1):
            yield _text(line, str(path), number)


def _byte_lines(path: Path) -> Generator[bytes, None, None]:
    if not path.is_file():
        raise DataError("no such file", where=str(path), remedy="Check the path")
    number, blank = 0, True
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                blank = blank and not line.strip()
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"the compressed file is damaged or cut off: {error}"
        raise DataError(
            what, where=f"{path}, after line {number}", remedy="Write or download it again"
        ) from None
    if blank:
        raise DataError("the file is empty", where=str(path), remedy="Give a file with at least one row")


def _text(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        what, where = f"byte {error.start} is not UTF-8 ({error.reason})", f"{path}, line {number}"
        raise DataError(
            what, where=where, remedy="Save the file as UTF-8", reason="not valid Unicode"
        ) from None


def read_records(path: str | os.PathLike[str], columns: Collection[str] = ()) -> Iterator[PlacedRecord]:
    """Yield the rows of a .csv, .tsv, .json (an array of objects) or .jsonl file, gzipped or not. Only .json
    files are read whole.

    CSV values stay strings, so that leading zeros are kept.

    Args:
        path: the file.
        columns: column names that every row must have.

    Raises:
        DataError: a missing, empty or malformed file, or a row that lacks a column.
    """
    with closing(_rows(str(path))) as rows:  # closes the file after an error, too
        for where, row in rows:
            if isinstance(row, DataError):
                raise row
            require_names(row, columns, where)
            yield where, row


def read_examples(
    path: str | os.PathLike[str], *, keep_malformed: bool = False
) -> Generator[dict[str, Any] | DataError, None, None]:
    """Like `read_records`, without the locations of the rows.

    Args:
        path: the file.
        keep_malformed: for a line of a .jsonl file that is malformed or not UTF-8, yield the error in place
            of the row. In other files such an error is raised.
    """
    rows = _rows(str(path)) if keep_malformed else read_records(path)
    yield from (row for _, row in rows)


def _rows(path: str) -> Generator[PlacedRecord | tuple[str, DataError], None, None]:
    """Yield the rows of a file; for a line of a .jsonl file that cannot be read, its error."""
    reader = {".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_rows}.get(kind_of(path), _jsonl_rows)
    empty = True
    for row in reader(path):
        empty = False
        yield row
    if empty:
        raise DataError("the file contains no rows", where=path, remedy="Give a file with at least one row")


def _csv_rows(path: str) -> Iterator[PlacedRecord]:
    separator = "\t" if kind_of(path) == ".tsv" else ","
    reader = csv.DictReader(read_lines(path), delimiter=separator, strict=True)
    number = -1
    try:
        _check_header(reader.fieldnames or (), separator, path)
        for number, row in enumerate(reader):
            where = f"{path}, row {number}"
            if None in row or None in row.values():
                what = f"the number of fields differs from the header ({len(reader.fieldnames or ())})"
                raise DataError(what, where=where, remedy="Quote fields that contain commas")
            yield where, row
    except csv.Error as error:
        raise DataError(
            f"malformed CSV: {error}", where=f"{path}, row {number + 1}", remedy="Fix or remove the row"
        ) from None


def _check_header(names: Sequence[str], separator: str, path: str) -> None:
    """Raise a DataError for columns of the same name, or a single one whose name holds another separator."""
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(
            f"several columns are named {', '.join(map(repr, twice))}",
            where=path,
            remedy="Give each another name",
        )
    if other := next((mark for mark in ";\t,|" if len(names) == 1 and mark in names[0]), None):
        what = f"the columns are separated by {other!r}, not by {separator!r}: the only one is {names[0]!r}"
        raise DataError(what, where=path, remedy="Save the table with commas as .csv, or with tabs as .tsv")


def _jsonl_rows(path: str) -> Iterator[PlacedRecord | tuple[str, DataError]]:
    with closing(_byte_lines(Path(path))) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                if (text := _text(line, path, number)).strip():
                    yield where, _object(_decode(text, path, number), where)
            except DataError as error:
                yield where, error


def _json_rows(path: str) -> Iterator[PlacedRecord]:
    rows = _decode("".join(read_lines(path)), path, 1)
    if not isinstance(rows, list):
        raise DataError(
            "not an array of objects",
            where=path,
            remedy="Write [{...}, {...}], or one object a line in a .jsonl file",
        )
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        yield where, _object(row, where)


def _decode(text: str, path: str, first_line: int) -> Any:
    text = text.rstrip()
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        what = f"malformed JSON, column {error.colno}: {error.msg}"
        if error.pos >= len(text) or text[-1] not in "]}":
            what += "; the text ends in the middle of a record"
        where = f"{path}, line {first_line + error.lineno - 1}"
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep, a name twice
        what, where = f"malformed JSON: {error}", f"{path}, line {first_line}"
    raise DataError(what, where=where, remedy="Fix or remove the row", reason="malformed JSON")


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError if a name is in it twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in an object twice")
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"a row is an object of named columns, not {type(value).__name__}"
        raise DataError(what, where=where, remedy='Write {"column": value}', reason="wrong type")
    return value
