"""Loads rows from text, JSON, CSV and Parquet files, saved datasets and the Hugging Face hub, and mixes
several sources.

Also the problems of a task, from such a source or generated. Text, JSON and CSV files are read again in each
pass (`FileRows`). Parquet files and saved datasets are memory-mapped.
"""

from __future__ import annotations

import glob
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, groupby, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from unmask.config.run import DataConfig, DataSource
from unmask.data.row_store import ROWS_AT_ONCE, file_hash, rows_hash, stored_rows
from unmask.errors import ConfigError, DataError, UnmaskWarning, first_line, require_names
from unmask.models.model_paths import near_path
from unmask.records import PlacedRecord, kind_of, read_examples, read_lines, read_records

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from unmask.tasks import Row, Task
    from unmask.tasks.base import Style

GENERATED_ROWS = 10_000
"""Training rows of a task that generates them, unless `data.max_rows` sets another number."""
RECORDS = (".csv", ".tsv", ".json", ".jsonl")
TEXTS = (".txt", *RECORDS)
SUFFIXES = (*TEXTS, ".parquet")
FAMILIES = ((".parquet",), (".json", ".jsonl"), (".csv", ".tsv"), (".txt",))
"""Kinds of files that are read together, by precedence in a folder that has as many of several."""
PACKED = (".7z", ".bz2", ".lz4", ".rar", ".tar", ".tgz", ".xz", ".zip", ".zst")
UNREAD = (*PACKED, ".arrow", ".avro", ".feather", ".ndjson", ".orc", ".xlsx")
"""Kinds of files that may hold rows, and are not read."""
SAVED = ("state.json", "dataset_dict.json")
"""Files of `save_to_disk`."""
INFORMATION = ("dataset_infos.json", "dataset_info.json")
"""Files of a dataset that hold no rows."""
CARDS = ("README.md", ".huggingface.yaml")
CONFIGS = re.compile(rb"^configs:", re.MULTILINE)
"""Where a dataset names its files."""
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


def load_rows(
    path_or_id: str | os.PathLike[str],
    *,
    split: str = "train",
    text_column: str = "text",
    max_rows: int | None = None,
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """The rows of a dataset.

    Args:
        path_or_id: a file (.txt: documents, see `split_documents`; .csv, .tsv: values stay text, so that
            leading zeros survive; .json: an array of objects; .jsonl; .parquet; all but the last may be
            gzipped, as .jsonl.gz), a pattern of files ("data/**/*.jsonl", as of `datasets.load_dataset`), a
            directory written by `save_to_disk`, another directory with files (each is read as it is alone;
            splits are found as by `datasets.load_dataset`), or a hub id ("owner/name"). A directory or id
            whose README has several configs is followed by the name of one ("owner/name:config").
        split: as `datasets` writes it: "train[:10%]", "train+test", "all". A file, or a saved dataset, is the
            split "train"; so are the files of a pattern, unless they have names of several splits.
        text_column: the name of the column of a .txt file.
        max_rows: keep only the first rows.
        streaming: read rows lazily, again on every pass. A malformed row is then reported only when it is
            reached.

    Raises:
        DataError: the source is missing, empty, malformed or wrongly encoded, or has no such split.
    """
    source = str(path_or_id)
    check_source(source)
    name, config = _name_and_config(source)
    parts = _parts(source, split)
    if parts and kind_of(parts[0].files[0]) == ".parquet":
        dataset = _from_parquet(source, parts, streaming)
    elif parts:
        dataset = _from_files(source, parts, text_column, streaming)
    elif Path(source).is_dir():
        dataset = _from_directory(source, split, streaming)
    else:
        dataset = _load_dataset(name, config, split, streaming)
    if not streaming and not len(dataset):
        raise _empty(source)
    return dataset if max_rows is None else dataset.take(max_rows)


def check_source(path_or_id: str | os.PathLike[str]) -> None:
    """Raise DataError for a path that leads nowhere, or to a kind of file that is not read. A name on the hub
    is not looked up."""
    source = str(path_or_id)
    path, kind = Path(_name_and_config(source)[0]), kind_of(source)
    if not path.exists() and glob.has_magic(source):
        if not _matches(source):
            raise DataError("no file matches this pattern", where=source, remedy="Correct it")
    elif not path.exists() and (kind in SUFFIXES or not HUB_ID.fullmatch(source)):
        raise DataError("no such file", where=source, remedy=near_path(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError("is neither a file nor a folder", where=source, remedy="Check the path")
    if path.is_file() and kind not in SUFFIXES:
        raise _unknown_kind(source)


def _name_and_config(source: str) -> tuple[str, str | None]:
    """The path or hub id of a source, and the config that it names after a colon."""
    name, colon, config = source.rpartition(":")
    named = colon and not Path(source).exists() and (Path(name).is_dir() or HUB_ID.fullmatch(source))
    return (name, config) if named else (source, None)


def _matches(pattern: str) -> list[str]:
    """The files that `datasets` finds for a pattern; none for a path that exists."""
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return []
    from datasets.data_files import resolve_pattern

    try:
        return list(map(str, resolve_pattern(pattern, base_path=os.getcwd())))
    except (FileNotFoundError, ValueError):  # `**` beside other characters
        return []


def _unknown_kind(file: str) -> DataError:
    kind = kind_of(file)
    remedy = (
        "Unpack it, or pack it with gzip"
        if kind in PACKED
        else "Rename it to .jsonl"
        if kind == ".ndjson"
        else "Write it as another kind"
    )
    return DataError(
        f"unknown kind of file {kind!r}", where=file, remedy=f"{remedy}: {', '.join(SUFFIXES)} are read."
    )


def first_records(source: str) -> Generator[PlacedRecord, None, None]:
    """The rows of a CSV or JSON file, each with its place; none of other sources, which are slow to open.
    Raises as `read_records`."""
    if kind_of(source) in RECORDS and Path(source).is_file():
        yield from read_records(source)


def load_records(
    path_or_id: str | os.PathLike[str], split: str = "train"
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """The rows of any source, each with its place for errors. Raises as `load_rows`."""
    parts = _record_parts(path_or_id, split)
    if parts and all(kind_of(file) in RECORDS for part in parts for file in part.files):
        for part in parts:
            yield from islice(chain.from_iterable(map(read_records, part.files)), part.start, part.stop)
        return
    for number, row in enumerate(load_rows(path_or_id, split=split), start=1):
        yield f"{path_or_id}, row {number}", row


@dataclass(frozen=True)
class FilePart:
    """Rows of files that are read in turn, from number `start` up to `stop`, without it; None: to the end."""

    files: tuple[str, ...]
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class FileRows(Sequence[Any]):
    """The rows of text, CSV and JSON files, whose columns may mix types. They are read again in each pass,
    and stored for access by index.

    Args:
        parts: their paths, and which of their rows.
        text_column: the name of the column of a .txt file.
        max_rows: only as many of the first rows.
        bad_rows: "skip": the error of a malformed line of a .jsonl file replaces its row; "error": it says
            how to skip such rows; None: nothing skips them.
    """

    parts: tuple[FilePart, ...]
    text_column: str = "text"
    max_rows: int | None = None
    bad_rows: str | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from islice(chain.from_iterable(map(self._read_part, self.parts)), self.max_rows)
        if "_content" in vars(self) and self._content != self._hashes():
            what, files = "changed while it was read", chain.from_iterable(part.files for part in self.parts)
            where = " and ".join(dict.fromkeys(files))
            raise DataError(what, where=where, remedy="Start again once it is complete")

    def _read_part(self, part: FilePart) -> Iterator[Any]:
        return islice(chain.from_iterable(map(self._read, part.files)), part.start, part.stop)

    def _read(self, file: str) -> Iterator[dict[str, Any] | DataError]:
        if kind_of(file) == ".txt":
            return ({self.text_column: document} for document in split_documents(partial(read_lines, file)))
        rows = read_examples(file, keep_malformed=self.bad_rows == "skip")
        return _skippable(rows) if self.bad_rows == "error" and kind_of(file) == ".jsonl" else rows

    @cached_property
    def _count(self) -> int:
        return int(stored_rows(partial(_counted, self), {"rows": "int64"})[0]["rows"])

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _stored(self) -> Any:
        return stored_rows(partial(_as_json, self), {"row": "string"})

    def __getitem__(self, index: Any) -> Any:
        return json.loads(self._stored[index]["row"])

    def identity(self) -> tuple[Any, ...]:
        """What rows depend on."""
        return (*self._content, self.text_column, self.max_rows, self.bad_rows)

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        return self._hashes()

    def _hashes(self) -> tuple[Any, ...]:
        return tuple(
            (part.start, part.stop, *(file_hash(Path(file)) + kind_of(file) for file in part.files))
            for part in self.parts
        )


def _skippable(rows: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except DataError as error:
        raise error.skippable() from error


def _counted(rows: FileRows) -> Iterator[dict[str, Any]]:
    yield {"rows": sum(1 for _ in rows)}


def _as_json(rows: FileRows) -> Iterator[dict[str, Any]]:
    return ({"row": json.dumps(row)} for row in rows)


def load_examples(
    path_or_id: str | os.PathLike[str],
    *,
    split: str = "train",
    text_column: str = "text",
    max_rows: int | None = None,
    bad_rows: str | None = None,
) -> Sequence[Any]:
    """Like `load_rows`, for columns that may mix types, or that no table can hold: text, CSV and JSON files
    become `FileRows`."""
    check_source(path_or_id)
    parts = _record_parts(path_or_id, split)
    if not parts:
        return load_rows(path_or_id, split=split, text_column=text_column, max_rows=max_rows)
    return FileRows(tuple(parts), text_column, max_rows, bad_rows)


def _record_parts(source: str | os.PathLike[str], split: str) -> list[FilePart]:
    """The `_parts` of a source if all its files hold records or text; else none."""
    parts = _parts(str(source), split)
    return parts if all(kind_of(file) in TEXTS for part in parts for file in part.files) else []


def _parts(source: str, split: str) -> list[FilePart]:
    """The files of a split of a source, of the kind that most have, each a part if all its rows are in the
    split; none for a saved dataset, a folder without files, and a name on the hub.

    Raises:
        DataError: the source has no such split, or in it a file of a kind that is not read.
    """
    name, config = _name_and_config(source)
    folder, matches = Path(name), _matches(source)
    if not folder.is_dir() and not matches:
        found = {"train": [source]} if kind_of(source) in SUFFIXES else {}
    elif any((folder / file).exists() for file in SAVED):
        found = {}
    else:
        found = _files_of_pattern(source, matches, split) if matches else _files_by_split(name, config)
    if not found:
        return []
    if not (splits := _named_splits(split, found)):
        raise _no_split(source, split, found)
    named = [*chain.from_iterable(found[name] for name in splits)]
    by_family = [[file for file in named if kind_of(file) in family] for family in FAMILIES]
    files = max(by_family, key=len)
    unread = [file for file in named if kind_of(file) in UNREAD] or ([] if files else named)
    if unread:
        raise _unknown_kind(unread[0])
    family = FAMILIES[by_family.index(files)]
    kinds = {*SUFFIXES, *UNREAD}.difference(family)
    others = [
        file.name
        for file in (map(Path, named) if matches or config else sorted(folder.rglob("*")))
        if kind_of(file) in kinds and file.name not in INFORMATION
    ]
    if others:
        what = (
            f"{source}: only files of one kind are read, {' and '.join(sorted({*map(kind_of, files)}))}, "
            f"but not {', '.join(others[:3])}"
        )
        warnings.warn(what + ", ..." * (len(others) > 3), UnmaskWarning, stacklevel=2)
    read = {name: [file for file in found[name] if kind_of(file) in family] for name in found}
    parts = []
    for name, start, stop in _ranges(source, split, found, lambda name: sum(map(_num_rows, read[name]))):
        groups = [(file,) for file in read[name]] if stop is None else [tuple(read[name])]
        parts += [FilePart(group, start, stop) for group in groups if group]
    return parts


def _is_one_split(source: str) -> bool:
    """Whether a source is one split: a file, a saved dataset, or files whose names are not of several."""
    if matches := _matches(source):
        return len(_files_of_pattern(source, matches, "all")) == 1
    return Path(source).is_file() or (Path(source) / SAVED[0]).exists()


def _named_splits(split: str, present: Iterable[str]) -> list[str]:
    """The splits that `split` names, such as "train[:10%]+test" or "all"."""
    names = re.findall(r"\w[\w.]*", split)
    return [name for name in present if split in (name, "all") or name in names]


def _ranges(
    source: str, split: str, present: Collection[str], count: Callable[[str], int]
) -> list[tuple[str, int, int | None]]:
    """The splits that `split` names, each with the number of its first row and of the first one that is not
    read; None: all are. `count` gives the number of rows of a split. Raises DataError if there is none."""
    import datasets

    named = _named_splits(split, present)
    if split in (*named, "all"):
        return [(name, 0, None) for name in named]
    sliced = "[" in split
    lengths = {name: count(name) if sliced else 0 for name in named}
    try:
        found = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except ValueError as error:
        raise _no_split(source, split, present) from error
    if not sliced:
        return [(each.splitname, 0, None) for each in found]
    ranges = [(each.splitname, each.from_, each.to) for each in found if each.from_ < each.to]
    if not ranges:
        raise DataError(f"the split {split!r} has no rows", where=source, remedy="Name some of its rows.")
    return ranges


def _no_split(source: str, split: str, present: Iterable[str]) -> DataError:
    return DataError(f"no split {split!r}", where=source, remedy=f"Present: {', '.join(map(repr, present))}.")


def _num_rows(file: str) -> int:
    if kind_of(file) == ".parquet":
        import pyarrow.parquet

        try:  # reads the footer, which a truncated file lacks
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            _refuse_parquet(file, error)
    return len(FileRows((FilePart((file,)),), bad_rows="skip"))


def _files_of_pattern(pattern: str, files: list[str], split: str) -> dict[str, list[str]]:
    """The files of each split of a pattern, by their names below its folder, as `datasets` finds those of a
    folder. If they are of one split, all are of it, and this may be called train."""
    from datasets.data_files import _get_data_files_patterns
    from fsspec.utils import glob_translate

    fixed = [*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)]
    home = Path.cwd().joinpath(*fixed)
    below = {file: os.path.relpath(file, home) for file in files}

    def matching(name: str) -> list[str]:
        fits = re.compile(glob_translate(name)).match
        return [file for file, path in below.items() if fits(path)]

    found = {}
    for name, patterns in _get_data_files_patterns(matching).items():
        of_split = {*chain.from_iterable(map(matching, patterns))}
        found[str(name)] = [file for file in files if file in of_split]
    if len(found) == 1:
        return {name: files for name in _named_splits(split, found) or ["train"]}
    read = {*chain.from_iterable(found.values())}
    if left := [Path(file).name for file in files if file not in read]:
        what = f"{pattern}: files whose names are of no split are not read: {', '.join(left[:3])}"
        warnings.warn(what + ", ..." * (len(left) > 3), UnmaskWarning, stacklevel=2)
    return found


def _files_by_split(folder: str, config: str | None) -> dict[str, list[str]]:
    """The files of each split of a folder, whatever their kinds: those that its README names for a config, or
    those that `datasets` finds by their names; none if it finds none. Raises DataError if its README has
    several configs, none of which is named or the default one."""
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    cards = [path for name in CARDS if (path := Path(folder) / name).is_file()]
    base = glob.escape(folder)
    try:
        if config or any(CONFIGS.search(path.read_bytes()) for path in cards):
            names = datasets.get_dataset_config_names(folder)
            if not config and len(names) > 1 and datasets.get_dataset_default_config_name(folder) is None:
                what, remedy = f"has several configs: {', '.join(names)}", f"Name one, as {folder}:{names[0]}"
                raise DataError(what, where=folder, remedy=remedy)
            found = datasets.load_dataset_builder(folder, config).config.data_files
        else:
            found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except DataError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError):
        return {}  # `load_dataset` says why
    return {str(split): [*map(str, files)] for split, files in (found or {}).items()}


def load_mixture(
    sources: Sequence[DataSource],
    *,
    seed: int,
    split: str = "train",
    text_column: str = "text",
    max_rows: int | None = None,
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Rows sampled from several sources by weight. A source that runs out is repeated until every row of
    every source was sampled.

    Only columns that all sources have are kept. A source with its own `text_column` has only that one,
    renamed to the common name.

    Args:
        sources: paths or ids, weights (relative numbers of rows, i.e. documents), and exceptions to the
            settings below.
        seed: of the order.
        split, text_column, max_rows, streaming: as in `load_rows`.

    Raises:
        DataError: as `load_rows`; the sources have no common column, or a common column has different types.
    """
    import datasets

    where = " and ".join(source.path for source in sources)
    parts, renamings = [], []  # of each source, and its columns as {new name: old name}
    for source in sources:
        how: dict[str, Any] = {
            "split": source.split or split,
            "text_column": source.text_column or text_column,
        }
        rows: Any = (
            load_rows(source.path, streaming=True, **how) if streaming else load_examples(source.path, **how)
        )
        if isinstance(rows, FileRows):
            present = [*dict.fromkeys(name for row in rows for name in row)]
        else:
            present = rows.column_names or list(next(iter(rows), ()))  # a stream may not know its columns yet
        if source.text_column is not None:
            require_names(present, [source.text_column], source.path)
        parts.append(rows)
        renamings.append(
            {text_column: source.text_column} if source.text_column else {name: name for name in present}
        )
    common = [name for name in renamings[0] if all(name in others for others in renamings)]
    if not common:
        raise DataError(
            "the sources have no column in common",
            where=where,
            remedy="Give the `text_column` of each source.",
        )
    total = sum(source.weight for source in sources)
    try:
        mixture = datasets.interleave_datasets(
            [
                _select(rows, {name: old[name] for name in common}, source.path)
                for rows, old, source in zip(parts, renamings, sources, strict=True)
            ],
            probabilities=[source.weight / total for source in sources],
            seed=seed,
            stopping_strategy="all_exhausted",
        )
    except ValueError as error:
        raise DataError(
            f"the sources cannot be mixed: {error}",
            where=where,
            remedy="Write values of one type in each column.",
        ) from error
    return mixture if max_rows is None else mixture.take(max_rows)


def read_rows(data: DataConfig, *, held_out: bool = False, bad_rows: str | None = None) -> Any:
    """The rows of a config's `data.train`, or `data.eval` if `held_out`: a dataset, a mixture, or a stream.

    Args:
        bad_rows: "error" or "skip", as `FileRows` has it.

    Raises:
        DataError: as `load_rows` and `load_mixture`.
    """
    source = data.eval if held_out else data.train
    assert source is not None
    streaming = data.streaming and not held_out
    how: dict[str, Any] = {
        "split": _split_of(source, data.split, held_out) if isinstance(source, str) else data.split,
        "text_column": data.text_column,
        "max_rows": data.eval_rows if held_out else data.max_rows,
    }
    if not isinstance(source, str):
        each = [
            one.model_copy(update={"split": one.split or _split_of(one.path, data.split, held_out)})
            for one in source
        ]
        rows: Any = load_mixture(each, seed=data.seed, streaming=streaming, **how)
    elif streaming:
        rows = load_rows(source, streaming=True, **how)
    else:
        rows = load_examples(source, bad_rows=bad_rows, **how)
    if data.shuffle_buffer is not None and streaming:
        return rows.shuffle(seed=data.seed, buffer_size=data.shuffle_buffer)
    return rows


def _split_of(source: str, split: str, held_out: bool) -> str:
    """`data.split` as it holds for a source: held-out rows that have a file of their own are all read."""
    return "all" if held_out and _is_one_split(source) else split


def _select(rows: Any, names: dict[str, str], source: str) -> Dataset | IterableDataset:
    """The columns in `names`, renamed; `names` is {new name: old name}."""
    import datasets

    if isinstance(rows, FileRows):
        return _table(rows, names, source)
    if isinstance(rows, datasets.Dataset):
        return rows.select_columns(list(names.values())).rename_columns(
            {old: new for new, old in names.items() if old != new}
        )
    return datasets.IterableDataset.from_generator(_renamed, gen_kwargs={"rows": rows, "names": names})


def _renamed(rows: Iterable[dict[str, Any]], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    return ({new: row.get(old) for new, old in names.items()} for row in rows)


def split_documents(read: Callable[[], Iterable[str]]) -> Iterator[str]:
    """The documents of a text: blocks separated by blank lines, or single lines if there are no blank lines.

    `read` returns the lines from the beginning; it is called twice, so that only one block is held in memory.
    """
    single_block = sum(1 for _ in islice(_blocks(read()), 2)) < 2
    for block in _blocks(read()):
        lines = (line.removesuffix("\n") for line in block)
        if single_block:
            yield from lines
        else:
            yield "\n".join(lines)


def _blocks(lines: Iterable[str]) -> Iterator[Iterator[str]]:
    return (block for blank, block in groupby(lines, key=lambda line: not line.strip()) if not blank)


def _file_rows(parts: Sequence[FilePart], text_column: str) -> Iterator[dict[str, Any]]:
    yield from FileRows(tuple(parts), text_column)


def _from_files(
    source: str, parts: list[FilePart], text_column: str, streaming: bool
) -> Dataset | IterableDataset:
    import datasets

    if streaming:
        arguments = {"parts": parts, "text_column": text_column}
        return datasets.IterableDataset.from_generator(_file_rows, gen_kwargs=arguments)
    rows = FileRows(tuple(parts), text_column)
    return _table(rows, {name: name for row in rows for name in row}, source)


def _table(rows: FileRows, names: Mapping[str, str], source: str) -> Dataset:
    """Columns of rows as a stored table; `names` is {new name: old name}."""
    import datasets
    import pyarrow

    try:
        [kinds] = stored_rows(partial(_kinds, rows, names), {"features": "string"})
        features = datasets.Features.from_dict(json.loads(kinds["features"]))
        return stored_rows(partial(_columns, rows, names), features)
    # the others: an integer of more than 64 bits, a lone surrogate
    except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
        raise DataError(
            f"a column mixes types, or a table cannot hold a value: {error}",
            where=source,
            remedy="Write values of one type in each column.",
        ) from error


def _columns(rows: FileRows, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    return ({new: row.get(old) for new, old in names.items()} for row in rows)


def _kinds(rows: FileRows, names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The types of the columns, as JSON of `datasets`, that hold the values of all rows."""
    import datasets
    import pyarrow

    columns, schema = _columns(rows, names), pyarrow.schema([])
    while part := list(islice(columns, ROWS_AT_ONCE)):
        found = pyarrow.Table.from_pydict({name: [row[name] for row in part] for name in names}).schema
        schema = pyarrow.unify_schemas([schema, found], promote_options="permissive")
    features = datasets.Features.from_arrow_schema(schema)
    yield {"features": json.dumps(features.to_dict())}


def _from_parquet(source: str, parts: list[FilePart], streaming: bool) -> Dataset | IterableDataset:
    if all(part.stop is None for part in parts):
        return _parquet_rows(source, [file for part in parts for file in part.files], streaming)
    ranges = [(_parquet_rows(source, part.files, streaming), part.start, part.stop) for part in parts]
    return _joined(source, ranges)


def _parquet_rows(source: str, files: Sequence[str], streaming: bool) -> Dataset | IterableDataset:
    import datasets
    import pyarrow

    if not sum(map(_num_rows, files)):
        raise _empty(source)
    names: Any = [*map(glob.escape, files)]
    try:
        if streaming:
            return _naming_files(datasets.IterableDataset.from_parquet(names), source)
        content = rows_hash(map(file_hash, map(Path, files)))  # `datasets` looks at times and sizes alone
        home = Path(datasets.config.HF_DATASETS_CACHE) / "unmask" / f"parquet-{content}"
        return datasets.Dataset.from_parquet(names, cache_dir=str(home))
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowException, OSError) as error:
        _refuse_parquet(files[-1], error)


def _refuse_parquet(file: str, error: Exception) -> NoReturn:
    if getattr(error, "errno", None):
        raise error  # the system's, such as a missing permission, and not of what the file holds
    what = f"not a readable Parquet file: {first_line(error.__cause__ or error).rstrip('.')}"
    raise DataError(what, where=file, remedy="Write the file again.") from error


def _joined(source: str, ranges: Iterable[tuple[Any, int, int | None]]) -> Any:
    """The rows, or streams, of which each is cut to those from the first number up to the second."""
    import datasets

    cut = [
        rows
        if stop is None
        else rows.select(range(start, stop))
        if isinstance(rows, datasets.Dataset)
        else rows.skip(start).take(stop - start)
        for rows, start, stop in ranges
    ]
    try:
        return cut[0] if len(cut) == 1 else datasets.concatenate_datasets(cut)
    except ValueError as error:
        what = f"the splits have other columns or types: {first_line(error).rstrip('.')}"
        raise DataError(what, where=source, remedy="Read one of them.") from error


def _from_directory(source: str, split: str, streaming: bool) -> Dataset | IterableDataset:
    import datasets

    try:
        saved = datasets.load_from_disk(source)
    except IndexError:  # the error of `datasets` for a saved dataset without rows
        raise _empty(source) from None
    except FileNotFoundError:
        found = _load_dataset(source, None, split, streaming)
        return _naming_files(found, source) if streaming else found
    except (ValueError, OSError) as error:
        if getattr(error, "errno", None):
            raise
        raise DataError(
            f"not a readable saved dataset: {first_line(error).rstrip('.')}",
            where=source,
            remedy="Save it again.",
        ) from error
    if not isinstance(saved, datasets.DatasetDict):
        saved = {name: saved for name in _named_splits(split, [str(saved.split)]) or ["train"]}
    ranges = _ranges(source, split, saved, lambda name: len(saved[name]))
    rows = _joined(source, [(saved[name], start, stop) for name, start, stop in ranges])
    return rows.to_iterable_dataset() if streaming else rows


def _naming_files(rows: IterableDataset, source: str) -> IterableDataset:
    """The stream with errors that name the file. It keeps its shards (files), so that they can be
    shuffled."""
    import datasets

    count = rows.num_shards
    names = [f"{source}, part {index + 1} of {count}" if count > 1 else source for index in range(count)]
    arguments = {"shards": [rows.shard(count, index) for index in range(count)], "names": names}
    return datasets.IterableDataset.from_generator(
        _rows_of_shards, features=rows.features, gen_kwargs=arguments
    )


def _rows_of_shards(shards: Iterable[IterableDataset], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    import datasets
    import pyarrow

    for shard, name in zip(shards, names, strict=True):
        try:
            yield from shard
        except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, OSError) as error:
            what = f"the rest cannot be read: {' '.join(str(error).split())}"
            raise DataError(what, where=name, remedy="Write the file again.") from error


def _load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        tried = (
            "not a saved dataset, nor files that"
            if Path(name).is_dir()
            else "neither a local file nor a dataset that"
        )
        raise DataError(
            f"{tried} `datasets` could read: {error.__cause__ or error}",
            where=f"{name}:{config}" if config else name,
            remedy="Check the path or id, its config (NAME:CONFIG), the split and the network.",
        ) from error


def _empty(source: str) -> DataError:
    return DataError("the dataset is empty", where=source, remedy="Give a dataset with at least one row.")


def read_problems(
    task: Task,
    source: str | list[DataSource] | None,
    count: int | None,
    *,
    split: Literal["train", "test"],
    hub_split: str | None = None,
    seed: int = 0,
) -> list[Row]:
    """The rows of a task, from a source (see `load_rows`) or generated.

    Args:
        source: a file, a folder or a hub id; None: the task generates problems, of this `split` and `seed`.
        count: at most this many; None: all of the source.
        hub_split: as in `load_rows`; None: `split`, or all of a source that is one split.

    Raises:
        DataError: the source is missing or malformed, or has no such split.
        ConfigError: several sources; or none, and the task generates no problems.
    """
    if isinstance(source, list):
        raise ConfigError("a task reads one source", where="data", remedy="Give no mixture, or no task")
    if source:
        wanted = hub_split or ("train" if _is_one_split(source) else split)
        # closes the file after an error too
        with closing(load_records(source, wanted)) as records:
            return list(islice(task.rows(records), count))
    return task.generate(split, count or 0, seed)


def training_problems(task: Task, data: DataConfig) -> list[Row]:
    """The problems of a task that a run trains on. Raises as `read_problems`."""
    count = data.max_rows or (None if data.train else GENERATED_ROWS)
    return read_problems(task, data.train, count, split="train", hub_split=data.split, seed=data.seed)


def held_out_problems(task: Task, data: DataConfig) -> list[Row]:
    """Held-out problems: from `data.eval`, or generated; none of a task that cannot generate. Raises as
    `read_problems`."""
    if task.needs_data and not data.eval:
        return []
    split = _split_of(data.eval, data.split, True) if isinstance(data.eval, str) else data.split
    return read_problems(task, data.eval, data.eval_rows, split="test", hub_split=split, seed=data.seed)


def pose(task: Task, rows: list[Row], style: Style, shots: int = 0) -> list[Row]:
    """The rows with their prompts. The first `shots` rows are solved examples in the prompts of the others;
    raises ConfigError if no others are left."""
    if len(rows) <= shots:
        raise ConfigError(
            f"{shots} examples use all {len(rows)} rows",
            where="shots",
            remedy="Give fewer shots, or more rows",
        )
    return [task.posed(row, style, rows[:shots]) for row in rows[shots:]]
