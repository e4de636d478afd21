"""The inputs of a training verb: task, rows and model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from unmask.cli.verbs import Verb
from unmask.config.run import DataConfig, ModelConfig, RunConfig, StartConfig
from unmask.data.byte_level import train_tokenizer
from unmask.data.rows import Column
from unmask.data.sources import held_out_problems, read_rows, training_problems
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.models.chat_template import read_template
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import initialize, load, pattern_settings
from unmask.models.model_files import read_config, read_tokenizer
from unmask.models.model_paths import fetched
from unmask.records import RowSequence
from unmask.tasks import Task, get_task
from unmask.training.config import TrainingConfig
from unmask.training.pair_config import PairConfig


def task_of(config: RunConfig) -> Task | None:
    """The task of the run, if it has one."""
    return get_task(config.data.task) if config.data.task else None


def read_data(
    config: RunConfig, entry: Verb, task: Task | None, args: TrainingConfig
) -> tuple[RowSequence, RowSequence | None]:
    """Training and held-out rows: of a task (generated, or read from `data.train`), or of any dataset."""
    data = config.data
    if task is not None:
        problems = training_problems(task, data)
        unseen = [] if args.eval_strategy == "no" else held_out_problems(task, data)
        held_out = entry.task_rows(task, unseen, data) if unseen else None
        return entry.task_rows(task, problems, data), held_out
    pairs = args if isinstance(args, PairConfig) else None
    if pairs and data.text_column != DataConfig().text_column:
        remedy = "Leave it out, and name the columns as in docs/data.md"
        raise ConfigError(
            "answers to prompts are read from columns of fixed names", where="data.text_column", remedy=remedy
        )
    bad_rows = pairs.bad_rows if pairs and not data.streaming else None
    train = read_rows(data, bad_rows=bad_rows)
    return train, None if data.eval is None else read_rows(data, held_out=True, bad_rows=bad_rows)


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


def load_or_initialize(config: RunConfig, train: RowSequence, args: TrainingConfig) -> DiffusionLM:
    """The model to start from, with its chat template: saved weights, or new ones for an architecture. A new
    tokenizer is trained on the rows `train`."""
    model, template = config.model, config.data.chat_template
    settings = model.load_arguments()
    if model.from_scratch:
        names = ("dtype", "device", "revision", "trust_remote_code", "eos_token_ids", "parse_special_tokens")
        kept = {name: settings[name] for name in names}
        tokenizer = _new_tokenizer(model, train, args)
        lm = initialize(model.path, seed=config.data.seed, tokenizer=tokenizer, **kept)
    else:
        lm = load(model.path, **settings)
    if template is not None:
        lm.set_chat_template(read_template(template), ends=model.eos_token_ids is None)
    return lm


def _new_tokenizer(model: StartConfig, train: RowSequence, args: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model from scratch: trained, or read; None: that of `model.path`."""
    if model.tokenizer_size is not None:
        texts = Column(train, args.text_column, "train_dataset", "data.text_column")
        return train_tokenizer(texts, model.tokenizer_size)
    if model.tokenizer:
        code = model.trust_remote_code
        folder = fetched(model.tokenizer, weights=False, model=False, trust_remote_code=code)
        return read_tokenizer(folder, trust_remote_code=code)
    return None


def read_pattern(model: ModelConfig) -> dict[str, Any]:
    """How a model will be read: attention, block size, logit shift. Its weights are not loaded."""
    code = model.trust_remote_code
    folder = fetched(model.path, weights=False, revision=model.revision, trust_remote_code=code)
    config, _ = read_config(folder, trust_remote_code=code)
    return pattern_settings(config, model.attention, model.block_size, model.logit_shift)


def without_folder(source: str) -> str:
    """The name of a model or data in a model card: that on the hub, or a file's or folder's own."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def data_name(data: DataConfig, task: Task | None = None) -> str | None:
    """The name of the data in a model card: names on the hub, file names without their folders, or the name
    of the task."""
    sources = (
        [data.train or (task and task.name)]
        if not isinstance(data.train, list)
        else [source.path for source in data.train]
    )
    return ", ".join(without_folder(source) for source in sources if source) or None
