"""Token rows for training: text or prompt and completion, packed or not, and the batches made of them.

A row is a dict: `input_ids`, `documents` (numbered from 1, so that packed documents do not see one another), `maskable`
(the tokens that are learnt) and `sample_id`.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unmask.data.chat import render
from unmask.errors import DataError
from unmask.tasks.files import require_names

Row = dict[str, Any]


def column(dataset: Sequence[Mapping[str, Any]], name: str, where: str) -> list[Any]:
    """One column of a list of rows or of a `datasets.Dataset`.

    Raises:
        DataError: a row does not have it.
    """
    for index, row in enumerate(dataset):
        require_values(row, (name,), f"{where}, row {index}")
    return [row[name] for row in dataset]


def require_values(row: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """As `require_names`, of a row: a cell that a file does not fill is None."""
    require_names([name for name, value in row.items() if value is not None], names, where)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors inside also tell which row they are about."""
    try:
        yield
    except DataError as error:
        raise DataError(error.what, where=f"{where}, {error.where}" if error.where else where, remedy=error.remedy) from error


def text_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_length: int, *, packed: bool = True, where: str = "train_dataset"
) -> list[Row]:
    """Rows of plain text: every document begins with BOS (which is given, not learnt) and ends with EOS (which is learnt).

    Packed: documents are laid end to end and cut into rows of `max_length`. Else one document a row, cut where too long
    (then without an EOS: a cut is not an end). The first token of a row is never learnt, as nothing stands before it from
    which a shifted model could predict it; a row with nothing to learn is left out.

    Raises:
        DataError: there is no text, or something that is not text.
    """
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{text!r:.40} is not text", where=f"{where}, row {index}", remedy="Give strings")
    bos, eos = ([token] if token is not None else [] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    documents = [bos + body + eos for body in encoded if body]
    rows: list[Row] = []
    for stream in [documents] if packed else [[document[:max_length]] for document in documents]:
        ids = list(chain.from_iterable(stream))
        numbers = [number for number, document in enumerate(stream, start=1) for _ in document]
        maskable = [index > 0 or not bos for document in stream for index in range(len(document))]
        for start in range(0, len(ids), max_length):
            cut = slice(start, start + max_length)
            rows.append(_row(ids[cut], numbers[cut], [False, *maskable[cut][1:]], len(rows)))
    rows = [row for row in rows if any(row["maskable"])]
    if not rows:
        raise DataError("no text to train on", where=where, remedy="Give at least one document that is not empty")
    return rows


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
        DataError: a row without its columns or too long, or a completion longer than the canvas.
    """
    rows: list[Row] = []
    for index, pair in enumerate(pairs):
        place = f"{where}, row {index}"
        given = {name: value for name, value in pair.items() if value is not None}
        if given.keys().isdisjoint(("messages", "text")):
            require_names(given, ("prompt", "completion"), place)
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
