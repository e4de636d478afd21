"""The inputs of a training verb: task, rows and model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from unmask.cli.verbs import Rows, Verb
from unmask.config.run import DataConfig, DataSource, ModelConfig, RunConfig
from unmask.data.byte_level import train_tokenizer
from unmask.data.problems import pose, read_problems
from unmask.data.sources import load_examples, load_mixture, load_rows
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import initialize, load, pattern_settings
from unmask.models.model_files import NO_CODE, read_config, read_tokenizer
from unmask.records import kind_of
from unmask.tasks import Row, Task, get_task
from unmask.training.config import TrainingConfig
from unmask.training.pair_config import PairConfig
from unmask.training.text_config import text_column

GENERATED_ROWS = 10_000


def task_of(config: RunConfig) -> Task | None:
    """The task of the run, if it has one."""
    return get_task(config.data.task) if config.data.task else None


def held_out_problems(config: RunConfig) -> tuple[Task | None, list[Row]]:
    """The task, and the held-out problems for the evaluation of the trained model: from `data.eval`, or
    generated if the task can."""
    task = task_of(config)
    problems = unseen_problems(task, config.data) if task else []
    return task, pose(task, problems, config.data.style) if task and problems else []


def evaluates(config: RunConfig) -> bool:
    """Whether there are held-out problems, on which the trained model is evaluated."""
    task = task_of(config)
    return task is not None and bool(config.data.eval or not task.needs_data)


def unseen_problems(task: Task, data: DataConfig) -> list[Row]:
    """Held-out problems: from `data.eval`, or generated; none for a task that cannot generate."""
    if task.needs_data and not data.eval:
        return []
    return read_problems(task, data.eval, data.eval_rows, split="test", hub_split=data.split, seed=data.seed)


def read_data(
    config: RunConfig, entry: Verb, task: Task | None, args: TrainingConfig
) -> tuple[Rows, Rows | None]:
    """Training and held-out rows: of a task (generated, or read from `data.train`), or of any dataset."""
    data = config.data
    if data.shuffle_buffer is not None and not data.streaming:
        remedy = "Set data.streaming, or remove it"
        raise ConfigError("there is no stream to shuffle", where="data.shuffle_buffer", remedy=remedy)
    if task is not None:
        if data.streaming or isinstance(data.train, list) or isinstance(data.eval, list):
            remedy = "Give no stream and no mixture, or no task"
            raise ConfigError("a task reads whole files, one at a time", where="data.task", remedy=remedy)
        count = data.max_rows or (None if data.train else GENERATED_ROWS)
        problems = read_problems(task, data.train, count, split="train", hub_split=data.split, seed=data.seed)
        unseen = unseen_problems(task, data)  # a missing file is found before the model is loaded
        if not unseen or args.eval_strategy == "no":
            return entry.task_rows(task, problems, data), None
        return entry.task_rows(task, problems, data), entry.task_rows(task, unseen, data)
    if args.answers_prompts and data.text_column != DataConfig().text_column:
        remedy = "Leave it out, and name the columns as in docs/data.md"
        raise ConfigError(
            "answers to prompts are read from columns of fixed names", where="data.text_column", remedy=remedy
        )
    assert data.train is not None
    pairs: Any = args if args.answers_prompts and not data.streaming else None
    train = read_source(data, data.train, data.max_rows, pairs, streaming=data.streaming)
    if data.shuffle_buffer is not None:
        train = train.shuffle(seed=data.seed, buffer_size=data.shuffle_buffer)
    return train, None if data.eval is None else read_source(data, data.eval, data.eval_rows, pairs)


def read_source(
    data: DataConfig,
    source: str | list[DataSource],
    max_rows: int | None,
    pairs: PairConfig | None,
    *,
    streaming: bool = False,
) -> Any:
    """The rows of `data.train` or `data.eval`: a dataset, a mixture, or a stream of either. The rows of
    `pairs` are unchanged."""
    if pairs is not None and isinstance(source, str):
        try:
            return load_examples(
                source, split=data.split, max_rows=max_rows, keep_malformed=pairs.bad_rows == "skip"
            )
        except DataError as error:
            if kind_of(source) != ".jsonl":  # read as a whole or not at all
                raise
            raise error.skippable() from error
    kept: dict[str, Any] = {"split": data.split, "text_column": data.text_column, "max_rows": max_rows}
    if isinstance(source, str):
        if streaming:
            return load_rows(source, streaming=True, **kept)
        rows: Any = load_examples(source, **kept)
        columns = dict.fromkeys(name for row in rows for name in row) if isinstance(rows, list) else {}
        # as a table, in which no row lacks a column
        return [columns | row for row in rows] if columns else rows
    return load_mixture(source, seed=data.seed, streaming=streaming, **kept)


@contextlib.contextmanager
def naming_files(data: DataConfig) -> Iterator[None]:
    """Errors about rows name their files."""
    try:
        yield
    except (DataError, GenerationError) as error:
        where = error.where or ""
        for name, source in (("train_dataset", data.train), ("eval_dataset", data.eval)):
            paths = [source] if isinstance(source, str) else [one.path for one in source or ()]
            where = where.replace(name, " and ".join(paths) or name)
        raise error.moved(where or None) from error


def load_or_initialize(config: RunConfig, train: Rows, args: TrainingConfig) -> DiffusionLM:
    """The model to start from: saved weights, or new ones for an architecture. A new tokenizer is trained on
    the rows `train`."""
    settings = config.model.load_arguments()
    if config.model.from_scratch:
        names = ("dtype", "device", "revision", "trust_remote_code", "eos_token_ids", "parse_special_tokens")
        kept = {name: settings[name] for name in names}
        return initialize(
            config.model.path,
            seed=config.data.seed,
            tokenizer=_new_tokenizer(config.model, train, args),
            **kept,
        )
    return load(config.model.path, **settings)


def _new_tokenizer(model: ModelConfig, train: Rows, args: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model from scratch: trained, or read; None: that of `model.path`."""
    if model.tokenizer_size is not None:
        return train_tokenizer(text_column(train, args, "train_dataset"), model.tokenizer_size)
    if model.tokenizer:
        return read_tokenizer(model.tokenizer, NO_CODE | {"trust_remote_code": model.trust_remote_code})
    return None


def read_pattern(model: ModelConfig) -> dict[str, Any]:
    """How a model will be read: attention, block size, logit shift. Its weights are not loaded."""
    config, _ = read_config(
        model.path, {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    )
    return pattern_settings(config, model.attention, model.block_size, model.logit_shift)


def without_folder(source: str) -> str:
    """The name of a model or data in a model card: that on the hub, or a file's or folder's own."""
    path = Path(source)
    return path.resolve().name if path.exists() else source
