"""Rows on disk: a memory-mapped `datasets.Dataset` that one process makes, for all others and for later runs.

Rows are stored where `datasets` stores its own, in HF_DATASETS_CACHE, under a hash of everything that they
are made from: the content of their source, the tokenizer with its chat template, the settings, and the code
of this package and of the libraries that it calls.
"""

from __future__ import annotations

import array
import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock

from unmask.artifacts import read_file, write_atomic
from unmask.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ROWS, MANIFEST = "rows.arrow", "manifest.json"
ROWS_AT_ONCE = 256
LIBRARIES = ("transformers", "tokenizers", "jinja2")
"""What renders and tokenizes rows besides this package."""
TOKENS = {"input_ids": ["int32"], "documents": ["int32"], "maskable": ["bool"], "sample_id": "int64"}
"""The types of a `TokenRow`; in brackets: a list."""


class RowCounts(Protocol):
    """What is counted while rows are made, and stored with them."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


def stored_rows(make: partial[Any], types: Mapping[str, Any], report: RowCounts | None = None) -> Dataset:
    """The rows that `make()` yields. They are made only if they are not stored yet.

    The dataset has the `report`; `content_of` is a hash of the rows.

    Args:
        make: a function with all its arguments, on which alone the rows depend.
        types: of the columns, such as `TOKENS`, or as features of `datasets`.
        report: of the rows. If `make` fills it in, that of stored rows is read instead.

    Raises:
        DataError: a row cannot be made, or `report` refuses the rows.
        ConfigError: they cannot be stored.
    """
    import datasets

    folder = _home() / _key(make)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        manifest = _manifest(folder)
        if manifest is None:
            with FileLock(folder.with_suffix(".lock")):  # others wait, and read what this process has made
                if (manifest := _manifest(folder)) is None:
                    _write(folder, make, types, report)
                    manifest = _manifest(folder)
    except _OfSource as error:
        raise error.args[0] from None
    except OSError as error:
        raise ConfigError(
            f"cannot store rows in {folder.parent}: {error.strerror}",
            where="HF_DATASETS_CACHE",
            remedy="Set it to a folder that can be written and has room",
        ) from error
    assert manifest is not None
    rows: Any = datasets.Dataset.from_file(str(folder / ROWS))
    if report is not None and _fills(make, report):
        report.restore(manifest["report"])
    rows.content, rows.report = (rows._fingerprint, manifest["content"]), report
    return rows


def content_of(rows: Any) -> str | None:
    """A hash of stored rows; None: they are not those that were stored. Datasets that `datasets` derives from
    them keep their attributes, but not their fingerprint."""
    fingerprint, content = getattr(rows, "content", (None, None))
    return content if fingerprint == getattr(rows, "_fingerprint", "") else None


def first(rows: Any, count: int) -> Any:
    """The first rows of a dataset, or all that it has."""
    return rows.select(range(min(count, len(rows))))


def _home() -> Path:
    import datasets
    from datasets.fingerprint import get_temporary_cache_files_directory

    if datasets.is_caching_enabled():
        return Path(datasets.config.HF_DATASETS_CACHE) / "unmask"
    return Path(get_temporary_cache_files_directory())  # of this process


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What is stored about the rows in a folder; None if there are none, or they are damaged."""
    try:
        manifest: dict[str, Any] = json.loads(read_file(folder / MANIFEST))
        return manifest if manifest["file"] == file_hash(folder / ROWS) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _fills(make: partial[Any], report: RowCounts) -> bool:
    return any(each is report for each in (*make.args, *make.keywords.values()))


class _OfSource(Exception):
    """An error of what makes the rows, not of storing them."""


def _made(make: Callable[[], Iterator[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
    try:
        yield from make()
    except OSError as error:
        raise _OfSource(error) from error


def _write(
    folder: Path,
    make: partial[Any],
    types: Mapping[str, Any],
    report: RowCounts | None,
) -> None:
    """Write atomically: the folder is renamed when it is complete."""
    from datasets.arrow_writer import ArrowWriter

    for abandoned in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    content, file = hashlib.sha256(), unfinished / ROWS
    try:
        with ArrowWriter(features=_features(types), path=str(file), writer_batch_size=ROWS_AT_ONCE) as writer:
            for row in _made(make):
                content.update(_bytes(row))
                writer.write(dict(row))
            writer.finalize()
        manifest = {
            "file": file_hash(file),
            "content": content.hexdigest(),
            "report": report.state() if report is not None and _fills(make, report) else None,
        }
        write_atomic(unfinished / MANIFEST, json.dumps(manifest))
        unfinished.chmod(0o755)  # mkdtemp allows only the owner
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _features(types: Mapping[str, Any]) -> Any:
    from datasets import Features, List, Value

    if isinstance(types, Features):
        return types
    return Features(
        {
            name: _features(kind)
            if isinstance(kind, Mapping)
            else List(Value(kind[0]))
            if isinstance(kind, list)
            else Value(kind)
            for name, kind in types.items()
        }
    )


def _bytes(value: Any) -> bytes:
    """What stands for a row, or for one of its values, in a hash."""
    if isinstance(value, Mapping):
        return b"".join(name.encode() + _bytes(inside) for name, inside in value.items())
    try:
        values = value if isinstance(value, list) else [value]
        return len(values).to_bytes(8, "little") + array.array("q", values).tobytes()
    except (TypeError, OverflowError):  # not of integers
        return json.dumps(value).encode()


# What rows are made from.


def _key(make: partial[Any]) -> str:
    arguments = {name: value for name, value in make.keywords.items() if name not in ("where", "processes")}
    parts = [
        _code(),
        make.func.__qualname__,
        [*map(_identity, make.args)],
        {name: _identity(value) for name, value in sorted(arguments.items())},
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> list[str]:
    """The content of this package, and the versions of `LIBRARIES`."""
    content = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        content.update(file.read_bytes())
    return [content.hexdigest(), *map(version, LIBRARIES)]


def _identity(value: Any) -> Any:
    """What stands for an argument: equal for equal arguments, in every process."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    if hasattr(value, "identity"):
        return _identity(value.identity())
    if isinstance(value, PreTrainedTokenizerBase):
        return _tokenizer_identity(value)
    if isinstance(value, Dataset) and (content := content_of(value)):
        return content
    if isinstance(value, Dataset) and value.format["type"] is None and (files := _files(value.data)):
        # not by its fingerprint alone: its file may have been replaced, or a function that chose its rows
        # been edited
        chosen = None if value._indices is None else value._indices.column(0).to_numpy()
        indices = None if chosen is None else hashlib.sha256(chosen).hexdigest()
        return [value._fingerprint, indices, *files]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _identity(inside) for name, inside in value.items()}
    if isinstance(value, tuple):
        return [*map(_identity, value)]
    if isinstance(value, str | int | float | None):
        return value
    return rows_hash(value)


def _files(table: Any) -> list[str]:
    """The hash of each file of a table, with what is read of it; none if a part of the table is in memory."""
    from datasets.table import ConcatenationTable, MemoryMappedTable

    blocks = [*chain.from_iterable(table.blocks)] if isinstance(table, ConcatenationTable) else [table]
    if not all(isinstance(block, MemoryMappedTable) for block in blocks):
        return []
    return [file_hash(Path(block.path)) + repr(block.replays) for block in blocks]


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """A hash of what a tokenizer saves, of its code if that is a user's, and what else text depends on."""
    tokenizer("")  # resets truncation and padding of earlier calls, which would be saved too
    saved = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            saved.update(file.read_bytes())
    for own in type(tokenizer).__mro__:
        if own.__module__.partition(".")[0] not in ("transformers", "unmask", "builtins"):
            saved.update(_code_beside(own))
    dated = "strftime_now" in str(tokenizer.chat_template)  # a template that writes the date
    return [
        saved.hexdigest(),
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        getattr(tokenizer, "parse_special_tokens", None),
        str(date.today()) if dated else None,
    ]


@functools.lru_cache(maxsize=256)
def _code_beside(of: Any) -> bytes:
    """The code of the folder that defines a class or function, and of the user's modules that it imports from
    elsewhere; of one without a file something that equals nothing else, so that its rows are not taken for
    others."""
    try:
        folder = Path(inspect.getfile(of)).resolve(strict=True).parent
    except (OSError, TypeError):
        return os.urandom(16)
    files, modules, waiting = {*folder.glob("*.py")}, set[str](), [of.__module__]
    while waiting:
        name = waiting.pop()
        if name not in modules and (file := _own_file(name)) is not None:
            files.add(file)
            with suppress(ImportError, SyntaxError):  # of code that is not reached
                waiting += _imported(file, name)
        modules.add(name)
    return b"".join(file.read_bytes() for file in sorted(files))


def _imported(file: Path, name: str) -> Iterator[str]:
    """The modules that the code of a module imports, anywhere in it, and perhaps names of their content."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found = [f"{source}.{each.name}" for each in node.names]
        else:
            continue
        for path in found:
            yield from accumulate(path.split("."), "{}.{}".format)  # a, a.b, a.b.c


def _own_file(name: str) -> Path | None:
    """The file with the source of a user's module; None: it has none, or is not a user's."""
    if not _is_own(name.partition(".")[0]):
        return None
    try:
        module = sys.modules.get(name)
        origin: Any = importlib.util.find_spec(name) if module is None else module
        file = Path(getattr(origin, "__file__", None) or origin.origin).resolve(strict=True)
    except (ImportError, AttributeError, TypeError, ValueError, OSError):  # no module, or none with a file
        return None
    return file if file.suffix == ".py" else None


@functools.cache
def _is_own(package: str) -> bool:
    """Whether a package or module is neither this one, nor Python's, nor an installed library."""
    if package == "__main__" or package in {"transformers", "unmask", *sys.stdlib_module_names}:
        return package == "__main__"
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places: Any = [] if spec is None else spec.submodule_search_locations or [spec.origin]
    libraries = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    return any(place and not any(map(Path(place).resolve().is_relative_to, libraries)) for place in places)


def rows_hash(rows: Iterable[Any]) -> str:
    """A hash of rows of any columns, or of texts."""
    content = hashlib.sha256()
    for row in rows:
        try:
            content.update(json.dumps(row, default=_other).encode() + b"\n")
        except (TypeError, ValueError):  # keys that JSON does not have, a row that contains itself
            content.update(_other(row).encode())
    return content.hexdigest()


def _other(value: Any) -> str:
    """What stands for a value that JSON does not have."""
    from datasets.fingerprint import Hasher

    if callable(value):  # a tool
        return hashlib.sha256(_code_beside(value)).hexdigest() + str(getattr(value, "__qualname__", ""))
    try:
        return str(Hasher.hash(value))
    except Exception:  # dill raises anything
        return os.urandom(16).hex()


def file_hash(path: Path) -> str:
    """A hash of a file's content. It is computed once as long as the file has the same time of last change,
    which no program can set, and the file is older than the steps of that clock."""
    now = path.stat()
    state = (now.st_dev, now.st_ino, now.st_size, now.st_ctime_ns)
    return (_hash_once if time.time_ns() - now.st_ctime_ns > 10**9 else _hash)(path, state)


def _hash(path: Path, state: tuple[int, ...]) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_hash_once = functools.lru_cache(maxsize=1024)(_hash)
