"""Rows from wherever they are: text files, JSON, CSV and Parquet, saved datasets, and the Hugging Face hub.

Text, JSON and CSV files are read into memory, so that every malformed row is found and named; a corpus larger than memory belongs in
Parquet or a saved dataset, which are memory-mapped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.errors import DataError
from unmask.tasks.files import read_records, read_text, require_names

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".txt", ".csv", ".json", ".jsonl", ".parquet")
HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(:(?P<config>[\w.-]+))?")


def load_rows(
    path_or_id: str | os.PathLike[str], *, split: str = "train", text_column: str = "text", max_rows: int | None = None
) -> Dataset:
    """The rows of a dataset.

    Args:
        path_or_id: a file (.txt: documents, see `split_documents`; .csv: values stay text, so that leading zeros survive; .json: an array
            of objects; .jsonl; .parquet), a directory written by `save_to_disk`, or a hub id ("owner/name", or "owner/name:config").
        split: which split of a hub dataset or a saved `DatasetDict`; a file is one split.
        text_column: what to name the column of a .txt file.
        max_rows: keep only the first ones.

    Raises:
        DataError: for a missing, empty, malformed or wrongly encoded source.
    """
    source = str(path_or_id)
    path = Path(source)
    suffix = path.suffix.lower()
    if path.is_dir():
        dataset = _from_directory(source, split)
    elif suffix in SUFFIXES or path.exists():
        dataset = _from_file(source, suffix, text_column)
    else:
        dataset = _from_hub(source, split)
    if not len(dataset):
        raise _empty(source)
    return dataset if max_rows is None else dataset.select(range(min(max_rows, len(dataset))))


def require_columns(dataset: Dataset, columns: Iterable[str], where: str) -> None:
    """Raise a DataError that names the columns that are missing, those present, and the nearest."""
    require_names(dataset.column_names, columns, where)


def split_documents(text: str) -> list[str]:
    """The blocks of a text that blank lines separate; a text without blank lines has a document on every line."""
    lines = text.split("\n")
    blocks = [list(block) for blank, block in groupby(lines, key=lambda line: not line.strip()) if not blank]
    return ["\n".join(block) for block in blocks] if len(blocks) > 1 else [line for block in blocks for line in block]


def _from_file(source: str, suffix: str, text_column: str) -> Dataset:
    import datasets
    import pyarrow

    if suffix == ".parquet":
        return _from_parquet(source)
    if suffix == ".txt":
        return datasets.Dataset.from_dict({text_column: split_documents(read_text(source))})
    if suffix not in SUFFIXES:
        raise DataError(f"unknown kind of file {suffix!r}", where=source, remedy=f"Use one of {', '.join(SUFFIXES)}.")
    rows = [row for _, row in read_records(source)]
    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
    except pyarrow.ArrowException as error:
        what = f"a column mixes types: {error}"
        raise DataError(what, where=source, remedy="Write values of one type in each column.") from error


def _from_parquet(source: str) -> Dataset:
    import datasets
    import pyarrow.parquet

    if not Path(source).is_file():
        raise DataError("no such file", where=source, remedy="Check the path.")
    try:
        if not pyarrow.parquet.read_metadata(source).num_rows:
            raise _empty(source)
        return datasets.Dataset.from_parquet(source)
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowException) as error:
        what = f"not a readable Parquet file: {error.__cause__ or error}"
        raise DataError(what, where=source, remedy="Write the file again.") from error


def _from_directory(source: str, split: str) -> Dataset:
    import datasets

    try:
        saved = datasets.load_from_disk(source)
    except IndexError:  # how `datasets` fails on a saved dataset without rows
        raise _empty(source) from None
    except (FileNotFoundError, ValueError) as error:
        what = f"not a saved dataset: {error}"
        raise DataError(what, where=source, remedy="Name a file in it, or a directory written by `save_to_disk`.") from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise DataError(f"no split {split!r}", where=source, remedy=f"Present: {', '.join(map(repr, saved))}.")
    return saved[split]


def _from_hub(source: str, split: str) -> Dataset:
    import datasets

    match = HUB_ID.fullmatch(source)
    if not match:
        raise DataError("no such file or directory", where=source, remedy="Check the path.")
    try:
        return datasets.load_dataset(match["name"], match["config"], split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        what = f"neither a file here nor a dataset that the hub could give: {error}"
        raise DataError(what, where=source, remedy="Check the path, or the id, its config, the split and the network.") from error


def _empty(source: str) -> DataError:
    return DataError("the dataset is empty", where=source, remedy="Give a dataset with at least one row.")
