"""Token rows for training, made from text, and their batches.

A row is a dict: `input_ids`, `documents` (the number of each token's document, from 1; documents do not see
one another), `maskable` (which tokens are trained on) and `sample_id`.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unmask.artifacts import num_cores
from unmask.data.encoding import encode_documents
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import ConfigError, DataError, prepending_place, require_text

TEXTS_AT_ONCE = 256
"""Texts that are tokenized together and held in memory."""

SURROGATE = re.compile("[\ud800-\udfff]")

TokenRow = dict[str, Any]

Item = TypeVar("Item")
Made = TypeVar("Made")
ITEMS_AT_ONCE = 256
"""Items that are sent to another process together."""
FEW_ITEMS = 2000
"""Items that one process makes in about a second."""


def or_error(function: Callable[[Item], Made], item: Item) -> Made | DataError:
    """What a function makes of an item, or its error: processes hand it over, and the next items are made."""
    try:
        return function(item)
    except DataError as error:
        return error


def required(found: Made | DataError) -> Made:
    """What was made of an item. Raises its error."""
    if isinstance(found, DataError):
        raise found
    return found


def in_order(
    function: Callable[[Item], Made],
    items: Iterable[Item],
    processes: int | None,
    at_once: int = ITEMS_AT_ONCE,
) -> Iterator[Made]:
    """`map(function, items)` by several processes; None: as many as there are cores, if there are many items.
    Few of them are read in advance."""
    iterator, pending = iter(items), deque[Any]()
    if multiprocessing.current_process().daemon:  # which may have no children
        processes = 1
    yield from map(function, iterator if processes == 1 else islice(iterator, 0 if processes else FEW_ITEMS))
    if not (chunk := list(islice(iterator, at_once))):
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)  # no script is run again
    processes = processes or num_cores()
    with ProcessPoolExecutor(processes, context, _begin, (function,)) as pool:
        try:
            while chunk:
                pending.append(pool.submit(_apply, chunk))
                if len(pending) > 2 * processes:
                    yield from pending.popleft().result()
                chunk = list(islice(iterator, at_once))
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool as error:
            what, remedy = "a process that tokenizes was killed, perhaps for its memory", "Use fewer, or 1"
            raise ConfigError(what, where="dataset_num_proc", remedy=remedy) from error
        finally:
            pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]  # of a process of `in_order`


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function, os.environ["TOKENIZERS_PARALLELISM"] = function, "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended: a killed one stops no others."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _apply(items: list[Any]) -> list[Any]:
    return [*map(_function, items)]


@dataclass(frozen=True)
class Column:
    """The values of one column of a list of rows, a `datasets.Dataset` or a stream; with no name, the rows.
    It can be iterated repeatedly.

    `setting` is the setting that names the column, for the error. Iteration raises DataError at a row without
    the column or a value in it, or with a text that is not valid Unicode.
    """

    dataset: Iterable[Mapping[str, Any]]
    name: str | None
    where: str
    setting: str | None = None

    def identity(self) -> tuple[Any, ...]:
        """What rows depend on."""
        return self.name, self.dataset

    def __iter__(self) -> Iterator[Any]:
        for index, row in enumerate(self.dataset):
            if self.name is None:
                yield row
                continue
            where = f"{self.where}, row {index}"
            require_text(row, self.name, where, self.setting)
            value = row[self.name]
            if isinstance(value, str) and not value.isascii() and SURROGATE.search(value):
                what = f"{value!r:.80} is not valid Unicode"  # Python's escape of a byte that is not UTF-8
                raise DataError(what, where=where, remedy="Save it as UTF-8", reason="not valid Unicode")
            yield value


def require_rows(dataset: Any, where: str) -> None:
    """Raise DataError for what holds no rows, such as a path."""
    try:
        if isinstance(dataset, str | bytes):
            raise TypeError
        iter(dataset)
    except TypeError as error:
        remedy = "Give a list of rows or a datasets.Dataset: unmask.data.sources.load_rows reads files"
        raise DataError(f"{dataset!r:.80} holds no rows", where=where, remedy=remedy) from error


def check_dataset(dataset: Any, where: str, *, streams: bool) -> None:
    """Raise DataError for what holds no rows, several datasets, an empty one, rows that can be read only
    once, and, unless `streams` are accepted, a stream."""
    require_rows(dataset, where)
    if isinstance(dataset, Mapping):
        raise DataError(
            f"are several datasets: {', '.join(map(str, dataset))}", where=where, remedy="Give one of them"
        )
    if not isinstance(dataset, Sized) and not streams:
        raise DataError(
            "is a stream, or has no length", where=where, remedy="Give a list of rows or a datasets.Dataset"
        )
    if isinstance(dataset, Iterator):
        raise DataError(
            f"a {type(dataset).__name__} can be read only once",
            where=where,
            remedy="Give its list, or datasets.IterableDataset.from_generator(FUNCTION)",
        )
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise DataError("the dataset is empty", where=where, remedy="Give at least one row")


def iter_text_rows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    max_length: int,
    *,
    packed: bool = True,
    where: str = "train_dataset",
    unknown: UnknownTokens | None = None,
    ends: Sequence[int] = (),
    processes: int | None = None,
) -> Iterator[TokenRow]:
    """Rows of plain text, made lazily. Every document begins with BOS, if the tokenizer has one, and ends
    with EOS. If the text has them, they are not added again; `ends` are the model's end tokens.

    Packed: the documents are concatenated and cut into rows of `max_length`. Otherwise each row is one
    document, cut to `max_length` (a cut document has no EOS). The first token of a document and of a row is
    never trained on, because a model with a logit shift predicts a token from the one before. A row with no
    token to learn is left out.

    Raises:
        DataError: a text is not a string or has the mask token; or, at the end, there was no text, or too
            many `unknown` tokens.
    """
    unknown = unknown or UnknownTokens()
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    documents = (bos + body for body in _encoded(tokenizer, texts, where, unknown, ends, processes))
    empty = True
    for sample_id, (ids, numbers, maskable) in enumerate(
        (_packed if packed else _cut)(documents, max_length)
    ):
        if any(maskable):
            empty = False
            yield make_row(ids, numbers, maskable, sample_id)
    if empty:
        raise DataError(
            "no text to train on", where=where, remedy="Give at least one document that is not empty"
        )


Tokens = tuple[list[int], list[int], list[bool]]
"""The id of each token, the number of its document, and whether it is trained on: all but the first tokens of
documents and rows."""


def _cut(documents: Iterable[list[int]], max_length: int) -> Iterator[Tokens]:
    """Each document, up to `max_length` tokens."""
    for number, document in enumerate(documents, start=1):
        ids = document[:max_length]
        yield ids, [number] * len(ids), [False, *[True] * (len(ids) - 1)]


def _packed(documents: Iterable[list[int]], max_length: int) -> Iterator[Tokens]:
    """The documents one after another, `max_length` tokens at a time."""
    ids, numbers, maskable = list[int](), list[int](), list[bool]()
    for number, document in enumerate(documents, start=1):
        start = 0
        while start < len(document):
            part = document[start : start + max_length - len(ids)]
            maskable += [start > 0 and bool(ids), *[True] * (len(part) - 1)]
            ids += part
            numbers += [number] * len(part)
            start += len(part)
            if len(ids) == max_length:
                yield ids, numbers, maskable
                ids, numbers, maskable = [], [], []
    if ids:
        yield ids, numbers, maskable


def _encoded(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    where: str,
    unknown: UnknownTokens,
    ends: Sequence[int],
    processes: int | None,
) -> Iterator[list[int]]:
    """The ids of each text with its end token; texts that are empty without it are left out."""
    numbered, closing = enumerate(texts), {*ends, tokenizer.eos_token_id}
    chunks = iter(lambda: list(islice(numbered, TEXTS_AT_ONCE)), [])
    encode = partial(_encoded_chunk, tokenizer, where=where, ends=ends)
    for chunk, encoded in in_order(encode, chunks, processes or 1, at_once=1):  # threads tokenize a chunk
        if isinstance(encoded, DataError):
            raise encoded
        bodies = [ids[:-1] if ids and ids[-1] in closing else ids for ids in encoded]
        for (index, text), ids in zip(chunk, bodies, strict=True):
            with prepending_place(f"{where}, row {index}"):
                refuse_mask(tokenizer, ids)
            unknown.count(tokenizer, ids, text)
        if unknown.lazily:
            unknown.check(where)
        yield from (ids for ids, body in zip(encoded, bodies, strict=True) if body)
    unknown.check(where)


def _encoded_chunk(
    tokenizer: PreTrainedTokenizerBase, chunk: list[tuple[int, str]], where: str, ends: Sequence[int]
) -> tuple[list[tuple[int, str]], list[list[int]] | DataError]:
    """Numbered texts, and the ids of each or the first error."""
    for index, text in chunk:
        if not isinstance(text, str):
            what = f"{text!r:.40} is not text"
            return chunk, DataError(what, where=f"{where}, row {index}", remedy="Give strings")
    with suppress(DataError):
        return chunk, encode_documents(tokenizer, [text for _, text in chunk], ends)
    try:  # one at a time: the error names the row
        encoded = []
        for index, text in chunk:
            with prepending_place(f"{where}, row {index}"):
                encoded += encode_documents(tokenizer, [text], ends)
        return chunk, encoded
    except DataError as error:
        return chunk, error


def refuse_mask(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Raise a DataError if the mask token is in the text: it is never predicted, so that its loss would be
    infinite."""
    if tokenizer.mask_token_id in ids:
        raise DataError(
            f"the text holds the mask token {tokenizer.mask_token!r}",
            remedy="Remove it, or read it as text with model.parse_special_tokens=false",
            reason="mask token in the text",
        )


def make_row(
    ids: Sequence[int], documents: Sequence[int], maskable: Sequence[bool], sample_id: int
) -> TokenRow:
    """A row, its documents renumbered from 1."""
    first = documents[0] - 1
    return {
        "input_ids": list(ids),
        "documents": [d - first for d in documents] if first else list(documents),
        "maskable": list(maskable),
        "sample_id": sample_id,
    }


def pad_rows(rows: Sequence[Sequence[int | bool]], fill: int | bool) -> Tensor:
    """A [B, T] tensor of rows padded to the longest, on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


class Collator:
    """Makes batches of rows, padded on the right; padding is document 0. Noise is drawn in the step, not
    here, so that resuming is exact.

    With `marking` a batch says in `one_document`, a bool, whether every row is one document without padding:
    a step would have to wait for the GPU to know. Batches that processes send to one another may hold only
    tensors.
    """

    def __init__(self, pad_token_id: int, *, marking: bool = True):
        self.fills = {"input_ids": pad_token_id, "documents": 0, "maskable": False}
        self.marking = marking

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        batch: dict[str, Any] = {
            name: pad_rows([row[name] for row in rows], fill) for name, fill in self.fills.items()
        }
        if self.marking:
            width = batch["documents"].shape[1]
            batch["one_document"] = all(list(row["documents"]).count(1) == width for row in rows)
        return batch | {"sample_id": torch.tensor([row["sample_id"] for row in rows])}


def separate_documents(batch: Mapping[str, Any]) -> Tensor | None:
    """The documents [B, T] of a batch; None if every row is one document without padding, so that a cached
    attention mask serves."""
    return None if batch.get("one_document") else batch["documents"]
