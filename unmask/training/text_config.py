"""Settings and rows of the trainers that train on plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unmask.config.run import DataConfig
from unmask.data.row_store import TOKENS, stored_rows
from unmask.data.rows import Column, TokenRow, iter_text_rows
from unmask.data.streamed_rows import StreamedRows
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config import TrainingConfig, row_length, rows_per_step


@dataclass
class TextConfig(TrainingConfig):
    """Settings of the trainers that train on plain text."""

    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    packing: bool = field(
        default=True, metadata={"help": "Pack documents into full rows, without attention between them."}
    )

    @classmethod
    def data_defaults(cls, data: DataConfig, task: str | None) -> dict[str, Any]:
        return {} if task else {"text_column": data.text_column}


def corpus_rows(
    lm: DiffusionLM, args: TextConfig, dataset: Iterable[Mapping[str, Any]], where: str
) -> Sequence[TokenRow] | StreamedRows:
    """The token rows of a text dataset: stored, or for a stream made during training.

    Args:
        dataset: a list, a `datasets.Dataset`, or a stream: any iterable without a length, such as a
            `datasets.IterableDataset`.
        where: the name of the dataset in errors.

    Raises:
        DataError: no text, a row without it, or too many unknown tokens.
        ConfigError: settings that do not work with a stream.
    """
    texts = Column(dataset, args.text_column, where, "data.text_column")
    length = row_length(lm, args)
    unknown = UnknownTokens(args.max_unknown, lazily=not isinstance(dataset, Sized))
    make_rows = partial(
        iter_text_rows,
        lm.tokenizer,
        max_length=length,
        packed=args.packing,
        where=where,
        unknown=unknown,
        ends=lm.eos_token_ids,
    )
    if isinstance(dataset, Sized):
        make = partial(make_rows, texts=texts, processes=args.dataset_num_proc)
        rows = stored_rows(make, TOKENS, unknown)
        unknown.check(where)
        return rows
    return streamed_rows(texts, make_rows, args)


def streamed_rows(
    source: Column, make_rows: Callable[[Iterable[Any]], Iterator[TokenRow]], args: TrainingConfig
) -> StreamedRows:
    """The rows of a stream, which are made while training. Errors in the first ones are raised before.

    Raises:
        ConfigError: settings that do not work with a stream.
    """
    if args.max_steps <= 0:
        raise ConfigError(
            "a stream has no end",
            where="max_steps",
            remedy="Set it, or give rows that are read before training",
        )
    if args.dataloader_num_workers > 1:
        what = f"{args.dataloader_num_workers} workers for one stream"
        raise ConfigError(
            what, where="dataloader_num_workers", remedy="Use 0, or 1 to make rows in the background"
        )
    rows = StreamedRows(source, make_rows)
    next(iter(rows))
    return rows


def rows_from_step(
    rows: Sequence[TokenRow] | StreamedRows, args: TextConfig, step: int
) -> Sequence[TokenRow] | StreamedRows:
    """The rows of a conversion stage that begins at this optimizer step of the run. A stream continues where
    the stage before ended."""
    return rows.skip(step * rows_per_step(args)) if isinstance(rows, StreamedRows) else rows
