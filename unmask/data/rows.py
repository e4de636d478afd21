"""Token rows for training: text or prompt and completion, packed or not, and the batches made of them.

A row is a dict: `input_ids`, `documents` (numbered from 1, so that packed documents do not see one another), `maskable`
(the tokens that are learnt) and `sample_id`.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unmask.data.chat import render
from unmask.errors import DataError
from unmask.tasks.files import require_names

TEXTS_AT_ONCE = 256
"""How many texts are tokenised in one go, which is also how many are held in memory."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a list of rows, of a `datasets.Dataset` or of a stream, value by value and as often as asked for.

    Raises:
        DataError: a row does not have it.
    """

    dataset: Iterable[Mapping[str, Any]]
    name: str
    where: str

    def __iter__(self) -> Iterator[Any]:
        for index, row in enumerate(self.dataset):
            require_values(row, (self.name,), f"{self.where}, row {index}")
            yield row[self.name]


def column(dataset: Iterable[Mapping[str, Any]], name: str, where: str) -> list[Any]:
    """All of a `Column`."""
    return list(Column(dataset, name, where))


def require_values(row: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """As `require_names`, of a row: a cell that a file does not fill is None, which is an error too."""
    names = list(names)
    require_names(row, names, where)
    if empty := [name for name in names if row[name] is None]:
        filled = ", ".join(repr(name) for name, value in row.items() if value is not None) or "none"
        what = f"no value in column {', '.join(map(repr, empty))}: null or left out (filled: {filled})"
        raise DataError(what, where=where, remedy="Fill it in, or remove the row")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors inside also tell which row they are about."""
    try:
        yield
    except DataError as error:
        raise DataError(error.what, where=f"{where}, {error.where}" if error.where else where, remedy=error.remedy) from error


def iter_text_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_length: int, *, packed: bool = True, where: str = "train_dataset"
) -> Iterator[Row]:
    """Rows of plain text, made as they are asked for: every document begins with BOS, if the tokenizer has one, and ends with EOS.

    Packed: documents are laid end to end and cut into rows of `max_length`. Else one document a row, cut where too long
    (then without an EOS: a cut is not an end). The first token of a document (the BOS, if there is one) and of a row is never
    learnt, as nothing stands before it from which a shifted model could predict it; a row with nothing to learn is left out.

    Raises:
        DataError: something is not text or holds the mask token, or, at the end, there was no text.
    """
    bos, eos = ([token] if token is not None else [] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    documents = (bos + body + eos for body in _encoded(tokenizer, texts, where) if body)
    # A token is its id, the number of its document, and whether it is learnt.
    numbered = (zip(document, repeat(number), chain([False], repeat(True))) for number, document in enumerate(documents, start=1))
    sample_id, empty = -1, True
    for tokens in [chain.from_iterable(numbered)] if packed else (islice(tokens, max_length) for tokens in numbered):
        while cut := list(islice(tokens, max_length)):
            sample_id += 1
            ids, numbers, maskable = zip(*cut, strict=True)
            if any(maskable[1:]):
                empty = False
                yield _row(ids, numbers, [False, *maskable[1:]], sample_id)
    if empty:
        raise DataError("no text to train on", where=where, remedy="Give at least one document that is not empty")


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], where: str) -> Iterator[list[int]]:
    """The ids of each text, without special tokens."""
    numbered = enumerate(texts)
    while chunk := list(islice(numbered, TEXTS_AT_ONCE)):
        for index, text in chunk:
            if not isinstance(text, str):
                raise DataError(f"{text!r:.40} is not text", where=f"{where}, row {index}", remedy="Give strings")
        encoded = tokenizer([text for _, text in chunk], add_special_tokens=False)["input_ids"]
        for (index, _), ids in zip(chunk, encoded, strict=True):
            _refuse_mask(tokenizer, ids, f"{where}, row {index}")
            yield ids


def _refuse_mask(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], where: str) -> None:
    """A mask token in the text can never be predicted: its loss would be infinite."""
    if tokenizer.mask_token_id in ids:
        raise DataError(f"the text holds the mask token {tokenizer.mask_token!r}", where=where, remedy="Remove it, or write it otherwise")


def pair_rows(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterable[Mapping[str, Any]],
    max_length: int,
    *,
    canvas_length: int | None = None,
    where: str = "train_dataset",
) -> list[Row]:
    """Rows of which only the completion (with its EOS) is learnt.

    Args:
        pairs: rows with `prompt` and `completion`, as strings or chat messages; or with `messages` or `text`, all of which is
            completion.
        max_length: rows that are longer are an error, never cut: a cut answer teaches a false stop.
        canvas_length: fill each completion with EOS to this many tokens, all of them learnt, as the sampler of a bidirectional
            model has to fill its whole canvas (LLaDA, Nie et al. 2025).
        where: what errors call the pairs.

    Raises:
        DataError: a row without its columns, too long or with the mask token in it, or a completion longer than the canvas.
    """
    rows: list[Row] = []
    for index, pair in enumerate(pairs):
        place = f"{where}, row {index}"
        given = {name: value for name, value in pair.items() if value is not None}
        if given.keys().isdisjoint(("messages", "text")):
            wanted = [name for name in ("messages", "text") if name in pair and "prompt" not in pair]
            require_values(pair, wanted or ("prompt", "completion"), place)
        with naming(place):
            prompt_ids, completion_ids = render(tokenizer, given)
        rows.append(pair_row(tokenizer, prompt_ids, completion_ids, max_length, canvas_length, sample_id=index, where=place))
    return rows


def pair_row(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    max_length: int,
    canvas_length: int | None,
    *,
    sample_id: int,
    where: str,
) -> Row:
    """One row of `pair_rows`, from token ids."""
    if canvas_length is not None and len(completion_ids) > canvas_length:
        what = f"{len(completion_ids)} completion tokens, but canvas_length is {canvas_length}"
        raise DataError(what, where=where, remedy="Raise canvas_length")
    filling = max(0, (canvas_length or 0) - len(completion_ids))
    ids = [*prompt_ids, *completion_ids] + [tokenizer.eos_token_id] * filling
    _refuse_mask(tokenizer, ids, where)
    if len(ids) > max_length:
        remedy = "Raise max_length as far as the model's context goes, or drop the row"
        raise DataError(f"{len(ids)} tokens, but a row holds {max_length}", where=where, remedy=remedy)
    maskable = [index >= max(1, len(prompt_ids)) for index in range(len(ids))]  # the first token has nothing to follow from
    return _row(ids, [1] * len(ids), maskable, sample_id)


def _row(ids: Sequence[int], documents: Sequence[int], maskable: Sequence[bool], sample_id: int) -> Row:
    first = documents[0] - 1
    return {"input_ids": list(ids), "documents": [d - first for d in documents], "maskable": list(maskable), "sample_id": sample_id}


def pad_rows(rows: Sequence[Sequence[int | bool]], fill: int | bool, *, left: bool = False) -> Tensor:
    """A [B, T] tensor of rows padded to the longest, on the right unless asked otherwise."""
    width = max(map(len, rows))
    padded = [[fill] * (width - len(r)) + list(r) if left else list(r) + [fill] * (width - len(r)) for r in rows]
    return torch.tensor(padded)


class Collator:
    """Batches of rows, padded on the right with document 0. Noise is drawn in the step, not here, so that resumes are exact."""

    def __init__(self, pad_token_id: int):
        self.fills = {"input_ids": pad_token_id, "documents": 0, "maskable": False}

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        batch = {name: pad_rows([row[name] for row in rows], fill) for name, fill in self.fills.items()}
        return batch | {"sample_id": torch.tensor([row["sample_id"] for row in rows])}
