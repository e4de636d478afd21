"""Rows of a corpus that is too large to be read before training: tokenized while training."""

from __future__ import annotations

import array
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice

import torch
from torch.utils.data import IterableDataset

from unmask.data.rows import Column, TokenRow
from unmask.errors import DataError

RECENT_ROWS = 2**16
"""More rows than a data loader reads in advance."""


class StreamedRows(IterableDataset):
    """An endless stream of text rows, tokenized while training. After the last document it starts again from
    the first.

    Every iteration yields the same rows, so that a resumed run, which skips the batches it has seen,
    continues exactly. Sample ids keep counting over the passes, so that the noise differs. A shuffled
    `datasets.IterableDataset` has another order in each pass.

    `make_rows` converts the texts to rows lazily; `skipped` rows at the beginning are left out. Iteration
    raises DataError at a bad row, in a pass without one, or where the rows are not the `expected` ones.
    """

    def __init__(self, texts: Column, make_rows: Callable[[Iterable[str]], Iterator[TokenRow]]):
        self.texts, self.make_rows, self.skipped = texts, make_rows, 0
        self._has_rows = False  # whether one was read
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
            texts = iter(self.texts)
            if not (some := [*islice(texts, 1)]):
                raise self._no_rows()
            self._has_rows = True
            for row in self.make_rows(chain(some, texts)):
                number, digest = next(sample_ids), _hash_with(digest, row)
                self._check(number + 1, digest)
                yield {**row, "sample_id": number}

    def _no_rows(self) -> DataError:
        what, remedy = "the stream has no rows", "Give at least one row"
        if self._has_rows:
            what = "the stream had rows, and now has none: it cannot be read again"
            remedy = "Give one that begins again in each pass"
        return DataError(what, where=self.texts.where, remedy=remedy)

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
