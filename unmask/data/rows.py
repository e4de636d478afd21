"""Token rows for training, made from text, and their batches.

A row is a dict: `input_ids`, `documents` (the number of each token's document, from 1; documents do not see
one another), `maskable` (which tokens are trained on) and `sample_id`.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import encode_documents
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import DataError, prepending_place, require_text

TEXTS_AT_ONCE = 256
"""Texts that are tokenized together and held in memory."""

SURROGATE = re.compile("[\ud800-\udfff]")

TokenRow = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """The values of one column of a list of rows, a `datasets.Dataset` or a stream. It can be iterated
    repeatedly.

    `setting` is the setting that names the column, for the error. Iteration raises DataError at a row without
    the column or a value in it, or with a text that is not valid Unicode.
    """

    dataset: Iterable[Mapping[str, Any]]
    name: str
    where: str
    setting: str | None = None

    def __iter__(self) -> Iterator[Any]:
        for index, row in enumerate(self.dataset):
            where = f"{self.where}, row {index}"
            require_text(row, self.name, where, self.setting)
            value = row[self.name]
            if isinstance(value, str) and not value.isascii() and SURROGATE.search(value):
                what = f"{value!r:.80} is not valid Unicode"  # Python's escape of a byte that is not UTF-8
                raise DataError(what, where=where, remedy="Save it as UTF-8", reason="not valid Unicode")
            yield value


def check_dataset(dataset: Any, where: str, *, streams: bool) -> None:
    """Raise DataError for several datasets, an empty one, and, unless `streams` are accepted, a stream."""
    if isinstance(dataset, Mapping):
        raise DataError(
            f"are several datasets: {', '.join(map(str, dataset))}", where=where, remedy="Give one of them"
        )
    if not isinstance(dataset, Sized) and not streams:
        raise DataError(
            "is a stream, or has no length", where=where, remedy="Give a list of rows or a datasets.Dataset"
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
    documents = (bos + body for body in _encoded(tokenizer, texts, where, unknown, ends))
    # A token is its id, the number of its document, and whether it is trained on.
    tokenized = (
        zip(document, repeat(number), chain([False], repeat(True)))
        for number, document in enumerate(documents, start=1)
    )
    rows: Iterator[list[tuple[int, int, bool]]] = (
        list(islice(document, max_length)) for document in tokenized
    )
    if packed:
        stream = chain.from_iterable(tokenized)
        rows = iter(lambda: list(islice(stream, max_length)), [])  # until the stream is empty
    empty = True
    for sample_id, tokens in enumerate(rows):
        ids, numbers, maskable = zip(*tokens, strict=True)
        if any(maskable[1:]):
            empty = False
            yield make_row(ids, numbers, [False, *maskable[1:]], sample_id)
    if empty:
        raise DataError(
            "no text to train on", where=where, remedy="Give at least one document that is not empty"
        )


def _encoded(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    where: str,
    unknown: UnknownTokens,
    ends: Sequence[int],
) -> Iterator[list[int]]:
    """The ids of each text with its end token; texts that are empty without it are left out."""
    numbered, closing = enumerate(texts), {*ends, tokenizer.eos_token_id}
    while chunk := list(islice(numbered, TEXTS_AT_ONCE)):
        for index, text in chunk:
            if not isinstance(text, str):
                raise DataError(
                    f"{text!r:.40} is not text", where=f"{where}, row {index}", remedy="Give strings"
                )
        try:
            encoded = encode_documents(tokenizer, [text for _, text in chunk], ends)
        except DataError:
            encoded = []  # one at a time: the error names the row
            for index, text in chunk:
                with prepending_place(f"{where}, row {index}"):
                    encoded += encode_documents(tokenizer, [text], ends)
        bodies = [ids[:-1] if ids and ids[-1] in closing else ids for ids in encoded]
        for (index, text), ids in zip(chunk, bodies, strict=True):
            with prepending_place(f"{where}, row {index}"):
                refuse_mask(tokenizer, ids)
            unknown.count(tokenizer, ids, text)
        if unknown.lazily:
            unknown.check(where)
        yield from (ids for ids, body in zip(encoded, bodies, strict=True) if body)
    unknown.check(where)


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
        "documents": [d - first for d in documents],
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
