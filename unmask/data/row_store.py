"""Rows on disk: a memory-mapped `datasets.Dataset` that one process makes, for all others and for later runs.

Rows are stored where `datasets` stores its own, in HF_DATASETS_CACHE, under a hash of everything that they
are made from: the content of their source, the tokenizer with its chat template, the settings, and the code
of this package and of the libraries that it calls.
"""

from __future__ import annotations

import array
import functools
import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
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

    The dataset has `content`, a hash of the rows, and the `report`.

    Args:
        make: a function with all its arguments, on which alone the rows depend.
        types: of the columns, such as `TOKENS`.
        report: an argument of `make`, which fills it in; of stored rows it is read instead.

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
    except OSError as error:
        if not str(error.filename or folder).startswith(str(folder.parent)):
            raise  # of the source
        raise ConfigError(
            f"cannot store rows in {folder.parent}: {error.strerror}",
            where="HF_DATASETS_CACHE",
            remedy="Set it to a folder that can be written and has room",
        ) from error
    assert manifest is not None
    rows: Any = datasets.Dataset.from_file(str(folder / ROWS))
    if report is not None:
        report.restore(manifest["report"])
    rows.content, rows.report = manifest["content"], report
    return rows


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


def _write(
    folder: Path,
    make: Callable[[], Iterator[Mapping[str, Any]]],
    types: Mapping[str, Any],
    report: RowCounts | None,
) -> None:
    """Write atomically: the folder is renamed when it is complete."""
    from datasets.arrow_writer import ArrowWriter

    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    content, file = hashlib.sha256(), unfinished / ROWS
    try:
        with ArrowWriter(features=_features(types), path=str(file), writer_batch_size=ROWS_AT_ONCE) as writer:
            for row in make():
                content.update(_bytes(row))
                writer.write(dict(row))
            writer.finalize()
        manifest = {
            "file": file_hash(file),
            "content": content.hexdigest(),
            "report": None if report is None else report.state(),
        }
        write_atomic(unfinished / MANIFEST, json.dumps(manifest))
        unfinished.chmod(0o755)  # mkdtemp allows only the owner
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _features(types: Mapping[str, Any]) -> Any:
    from datasets import Features, List, Value

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
    values = (
        [*value.encode()] if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
    )
    return len(values).to_bytes(8, "little") + array.array("q", values).tobytes()


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
    if isinstance(value, Dataset):  # not by its fingerprint alone: its file may have been replaced
        stored = getattr(value, "content", None)
        files = (file_hash(Path(file["filename"])) for file in value.cache_files)
        return stored or [value._fingerprint, *files]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, tuple):
        return [*map(_identity, value)]
    return rows_hash(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """A hash of what a tokenizer saves, of its code if that is a user's, and what else text depends on."""
    tokenizer("")  # resets truncation and padding of earlier calls, which would be saved too
    saved, home = hashlib.sha256(), type(tokenizer).__module__.partition(".")[0]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            saved.update(file.read_bytes())
    if home not in ("transformers", "unmask"):
        saved.update(Path(inspect.getfile(type(tokenizer))).read_bytes())
    dated = "strftime_now" in str(tokenizer.chat_template)  # a template that writes the date
    return [
        saved.hexdigest(),
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        getattr(tokenizer, "parse_special_tokens", None),
        str(date.today()) if dated else None,
    ]


def rows_hash(rows: Iterable[Any]) -> str:
    """A hash of rows of any columns, or of texts."""
    from datasets.fingerprint import Hasher

    content = hashlib.sha256()
    for row in rows:
        try:
            content.update(json.dumps(row, default=Hasher.hash).encode())
        except (TypeError, ValueError):  # keys that JSON does not have, a row that contains itself
            content.update(Hasher.hash(row).encode())
    return content.hexdigest()


def file_hash(path: Path) -> str:
    """A hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
