"""What the stages share that train on plain text: where its rows come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unmask.config.run import DataConfig
from unmask.data.rows import Column, Row, iter_text_rows
from unmask.data.token_cache import StreamedRows, cached_rows
from unmask.errors import ConfigError, DataError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config import TrainingConfig, row_length, rows_per_step


@dataclass(kw_only=True)
class TextConfig(TrainingConfig):
    """Settings of the stages that train on plain text."""

    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    packing: bool = field(default=True, metadata={"help": "Lay documents end to end; they do not see one another."})
    token_cache: str | None = field(default=None, metadata={"help": "A folder that keeps token rows on disk, for this run and later ones."})

    @classmethod
    def data_defaults(cls, data: DataConfig, task: str | None) -> dict[str, Any]:
        return {} if task else {"text_column": data.text_column}


def corpus_rows(lm: DiffusionLM, args: TextConfig, dataset: Iterable[Mapping[str, Any]], where: str) -> Sequence[Row] | StreamedRows:
    """The rows of a text data set: from the token cache where there is one, else in memory, or made while training where it is a stream.

    Args:
        lm: the model that is trained.
        args: the stage's config.
        dataset: a list, a `datasets.Dataset`, or a stream, which is all that has no length, such as a `datasets.IterableDataset`.
        where: what errors call the data set.

    Raises:
        DataError: no text, a row without it, a corrupted cache, or held-out rows that are a stream.
        ConfigError: settings with which a stream cannot be trained on.
    """
    texts, length = Column(dataset, args.text_column, where, "text_column (on the command line data.text_column)"), row_length(lm, args)
    if args.token_cache is not None:
        return cached_rows(args.token_cache, lm.tokenizer, texts, length, packed=args.packing, where=where)
    make_rows = partial(iter_text_rows, lm.tokenizer, max_length=length, packed=args.packing, where=where)
    if isinstance(dataset, Sized):
        return list(make_rows(texts))
    if where == "eval_dataset":
        raise DataError("is a stream", where=where, remedy="Give rows that end, as list(stream.take(200))")
    if args.max_steps <= 0:
        raise ConfigError("a stream has no end", where="max_steps", remedy="Set it, or token_cache to go over a stream before training")
    if args.dataloader_num_workers > 1:
        what = f"{args.dataloader_num_workers} workers for one stream"
        raise ConfigError(what, where="dataloader_num_workers", remedy="Use 0, or 1 to make rows in the background")
    rows = StreamedRows(texts, make_rows)
    next(iter(rows))  # what is wrong with the first rows is told before training
    return rows


def rows_from(rows: Sequence[Row] | StreamedRows, args: TextConfig, step: int) -> Sequence[Row] | StreamedRows:
    """The rows of a run that begins at an optimizer step of a longer one: a stream goes on where it stood."""
    return rows.skip(step * rows_per_step(args)) if isinstance(rows, StreamedRows) else rows
