"""Rows of a corpus that is too large for memory: streamed, or tokenized once into a cache on disk."""

from __future__ import annotations

import array
import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from unmask.artifacts import read_file, write_atomic
from unmask.data.rows import Column, TokenRow, iter_text_rows
from unmask.data.special_tokens import parses_special_tokens
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

CACHE_FORMAT = 4
"""Increase it when the content or the format of rows changes, so that earlier caches are not found."""
ROWS, MANIFEST = "rows.arrow", "manifest.json"
ROWS_AT_ONCE = 256
RECENT_ROWS = 2**16
"""More rows than a data loader reads in advance."""


class StreamedRows(IterableDataset):
    """An endless stream of text rows, tokenized while training. After the last document it starts again from
    the first.

    Every iteration yields the same rows, so that a resumed run, which skips the batches it has seen,
    continues exactly. Sample ids keep counting over the passes, so that the noise differs. A shuffled
    `datasets.IterableDataset` has another order in each pass.

    `make_rows` converts the texts to rows lazily; `skipped` rows at the beginning are left out. Iteration
    raises DataError at a bad row, or where the rows are not the `expected` ones.
    """

    def __init__(self, texts: Column, make_rows: Callable[[Iterable[str]], Iterator[TokenRow]]):
        self.texts, self.make_rows, self.skipped = texts, make_rows, 0
        self.expected: Mapping[str, int] | None = None
        """What `visited` returned in the run that is resumed."""
        # also with the process that makes the rows
        self._hashes = torch.zeros(RECENT_ROWS, 2, dtype=torch.int64).share_memory_()
        """For each recent row: the number of rows up to it, and their hash."""

    def __iter__(self) -> Iterator[TokenRow]:
        return islice(self._endless(), self.skipped, None)

    def skip(self, rows: int) -> StreamedRows:
        """The stream without its first `rows` rows; the sample ids of the others do not change."""
        stream = copy.copy(self)
        stream.skipped += rows
        return stream

    def visited(self, rows: int) -> dict[str, int] | None:
        """The number and hash of all rows up to `rows` rows of this stream; None if the last of them was not
        read recently."""
        number, found = self._hashes[(self.skipped + rows) % RECENT_ROWS].tolist()
        return {"rows": number, "hash": found} if number == self.skipped + rows else None

    def _endless(self) -> Iterator[TokenRow]:
        sample_ids, digest = count(), 0
        for epoch in count():
            if hasattr(self.texts.dataset, "set_epoch"):
                self.texts.dataset.set_epoch(epoch)
            for row in self.make_rows(self.texts):
                number, digest = next(sample_ids), _hash_with(digest, row)
                self._check(number + 1, digest)
                yield {**row, "sample_id": number}

    def _check(self, rows: int, found: int) -> None:
        """Remember the hash of the first rows, and compare it."""
        self._hashes[rows % RECENT_ROWS] = torch.tensor([rows, found])
        if self.expected is not None and rows == self.expected["rows"] and found != self.expected["hash"]:
            what = (
                f"the first {rows:,} rows of the stream are not those that the run read before its checkpoint"
            )
            raise DataError(
                what,
                where=self.texts.where,
                remedy="Give the data of that run, or start a new run in another output folder",
            )


def _hash_with(digest: int, row: TokenRow) -> int:
    """The hash of rows, from the hash of all but the last."""
    content = array.array("q", [digest, *row["input_ids"], *row["documents"]]).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def cached_rows(
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    max_length: int,
    *,
    packed: bool = True,
    where: str = "train_dataset",
    max_unknown: float = 1.0,
    ends: Sequence[int] = (),
) -> Dataset:
    """The rows of `iter_text_rows`, memory-mapped from a cache on disk, which is created if it does not
    exist.

    The caches in `folder` are named by a hash of the texts, the tokenizer, `max_length`, `packed`,
    `max_unknown` (the fraction of the tokens that may be unknown) and `ends` (the model's end tokens). The
    first process of each machine creates them. `texts` are iterated to compute the hash, and again to create
    a cache.

    Raises:
        DataError: as `iter_text_rows`; or the cache is truncated or altered.
        ConfigError: the folder cannot be created.
    """
    from accelerate import PartialState

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder {folder}: {error.strerror}",
            where="token_cache",
            remedy="Choose another",
        ) from error
    cache = Path(folder) / _cache_key(tokenizer, texts, [max_length, packed, max_unknown, *ends])
    with PartialState().local_main_process_first():
        if not cache.exists():
            unknown = UnknownTokens(max_unknown)
            _write_cache(
                cache,
                iter_text_rows(
                    tokenizer, texts, max_length, packed=packed, where=where, unknown=unknown, ends=ends
                ),
            )
    return _read_cache(cache)


def _cache_key(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], settings: Sequence[Any]) -> str:
    tokenizer("")  # resets truncation and padding of earlier calls, which would be saved too
    key = hashlib.sha256()
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        for file in sorted(Path(saved).iterdir()):
            key.update(file.read_bytes())
    settings = [
        CACHE_FORMAT,
        *settings,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        parses_special_tokens(tokenizer),
    ]
    key.update(json.dumps(settings).encode())
    for text in texts:
        key.update(repr(text).encode())  # quoted, so that the boundaries of texts count
    return key.hexdigest()[:32]


def _write_cache(cache: Path, rows: Iterator[TokenRow]) -> None:
    """Write atomically: the folder is renamed when it is complete."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features(
        input_ids=List(Value("int32")),
        documents=List(Value("int32")),
        maskable=List(Value("bool")),
        sample_id=Value("int64"),
    )
    unfinished = Path(tempfile.mkdtemp(dir=cache.parent, prefix=f".{cache.name}."))
    try:
        with ArrowWriter(
            features=features, path=str(unfinished / ROWS), writer_batch_size=ROWS_AT_ONCE
        ) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
        write_atomic(unfinished / MANIFEST, json.dumps({"sha256": _checksum(unfinished / ROWS)}))
        unfinished.chmod(0o755)  # mkdtemp allows only the owner
        unfinished.rename(cache)
    except OSError:
        if not cache.exists():  # otherwise another process created it in the meantime
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_cache(cache: Path) -> Dataset:
    import datasets

    try:
        if json.loads(read_file(cache / MANIFEST))["sha256"] != _checksum(cache / ROWS):
            raise ValueError(f"the checksum of {ROWS} differs")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"the token cache is damaged: {error}",
            where=str(cache),
            remedy="Remove the folder; the next run creates it again.",
        ) from error
    return datasets.Dataset.from_file(str(cache / ROWS))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
