"""Rows of a corpus too large for memory: streamed, or tokenised once into a cache on disk and read from there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from unmask.artifacts import write_atomic
from unmask.data.rows import Column, Row, iter_text_rows
from unmask.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

CACHE_FORMAT = 2
"""Raise it when rows are made or written in another way: earlier caches are then not found any more."""
ROWS, MANIFEST = "rows.arrow", "manifest.json"
ROWS_AT_ONCE = 256


class StreamedRows(IterableDataset):
    """Rows of text made while training, without end: after the last document the first one follows, with other noise.

    The same rows at every iteration, so that a resumed run, which skips the batches it has seen, goes on exactly. Where the source is a
    shuffled `datasets.IterableDataset`, each pass has an order of its own.

    Args:
        texts: a column of a source that can be gone over again and again; only what the next rows need is read.
        make_rows: texts to rows, lazily.
        skipped: rows to leave out at the beginning.

    Raises:
        DataError: on iteration, of a row that is wrong, when it is reached.
    """

    def __init__(self, texts: Column, make_rows: Callable[[Iterable[str]], Iterator[Row]], skipped: int = 0):
        self.texts, self.make_rows, self.skipped = texts, make_rows, skipped

    def __iter__(self) -> Iterator[Row]:
        return islice(self._endless(), self.skipped, None)

    def skip(self, rows: int) -> StreamedRows:
        """The same from its row number `rows` on; the sample ids of the rest stay as they are."""
        return StreamedRows(self.texts, self.make_rows, self.skipped + rows)

    def _endless(self) -> Iterator[Row]:
        sample_ids = count()
        for number in count():
            if hasattr(self.texts.dataset, "set_epoch"):
                self.texts.dataset.set_epoch(number)
            for row in self.make_rows(self.texts):
                yield {**row, "sample_id": next(sample_ids)}


def cached_rows(
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    max_length: int,
    *,
    packed: bool = True,
    where: str = "train_dataset",
) -> Dataset:
    """What `iter_text_rows` gives, memory-mapped from a cache, which is made if it is not there yet.

    It is found by the texts, the tokenizer, `max_length` and `packed`: where one of them changes, another one is made beside it. Of
    several processes the first of each machine makes it.

    Args:
        folder: holds any number of caches, each in a folder of its own.
        texts: gone over once to find the cache, and once more to make it.
        tokenizer, max_length, packed, where: as in `iter_text_rows`.

    Raises:
        DataError: as `iter_text_rows`; and a cache that was cut off or altered.
        ConfigError: the folder cannot be made.
    """
    from accelerate import PartialState

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make the folder {folder}: {error.strerror}"
        raise ConfigError(what, where="token_cache", remedy="Name another") from error
    home = Path(folder) / _cache_key(tokenizer, texts, max_length, packed)
    with PartialState().local_main_process_first():
        if not home.exists():
            _write_cache(home, iter_text_rows(tokenizer, texts, max_length, packed=packed, where=where))
    return _read_cache(home)


def _cache_key(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_length: int, packed: bool) -> str:
    tokenizer("")  # forgets truncation and padding of earlier calls, which would be saved as well
    key = hashlib.sha256()
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        for file in sorted(Path(saved).iterdir()):
            key.update(file.read_bytes())
    key.update(json.dumps([CACHE_FORMAT, max_length, packed, tokenizer.bos_token_id, tokenizer.eos_token_id]).encode())
    for text in texts:
        key.update(repr(text).encode())  # quoted, so that texts do not run together
    return key.hexdigest()[:32]


def _write_cache(home: Path, rows: Iterator[Row]) -> None:
    """Write all or nothing: the folder gets its name when it is complete."""
    import pyarrow as pa

    columns = {
        "input_ids": pa.list_(pa.int32()),
        "documents": pa.list_(pa.int32()),
        "maskable": pa.list_(pa.bool_()),
        "sample_id": pa.int64(),
    }
    schema = pa.schema(columns)
    unfinished = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}."))
    try:
        with (unfinished / ROWS).open("wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                while chunk := list(islice(rows, ROWS_AT_ONCE)):
                    writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        write_atomic(unfinished / MANIFEST, json.dumps({"sha256": _checksum(unfinished / ROWS)}))
        unfinished.chmod(0o755)  # mkdtemp gives it to its owner alone
        unfinished.rename(home)
    except OSError:
        if not home.exists():  # else another process has made the same in the meantime
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_cache(home: Path) -> Dataset:
    import datasets

    remedy = f"Remove the folder {home}; the next run makes it again."
    try:
        wanted: Any = json.loads((home / MANIFEST).read_text(encoding="utf-8"))
        intact = wanted["sha256"] == _checksum(home / ROWS)
    except OSError as error:
        raise DataError(f"the token cache is incomplete: {error.strerror}", where=error.filename, remedy=remedy) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"the token cache is corrupted: {error!r}", where=str(home / MANIFEST), remedy=remedy) from error
    if not intact:
        raise DataError("the token cache is corrupted: its checksum is another", where=str(home / ROWS), remedy=remedy)
    return datasets.Dataset.from_file(str(home / ROWS))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
