"""One training verb from its config: load, read the data, train, save, evaluate. What the command line calls."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments

from unmask.config import DataConfig, DataSource, RunConfig, build_training_args, continues, to_yaml
from unmask.data.chat import read_template
from unmask.data.problems import pose, read_problems
from unmask.data.report import Rows as TokenRows
from unmask.data.sources import load_examples, load_mixture, load_rows
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.evaluation.tasks import check_evaluation, evaluate_task
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.ends import set_chat_template
from unmask.models.load import initialise, load
from unmask.monitor import Progress, write_atomic, write_manifest
from unmask.tasks import Puzzle, Row, Task, as_puzzle, get_task
from unmask.training.checkpoints import check_last
from unmask.training.compatible import check_together
from unmask.training.convert import ConvertConfig, ConvertTrainer
from unmask.training.dpo import DPOTrainer
from unmask.training.dpo_config import DPOConfig
from unmask.training.grpo import GRPOTrainer
from unmask.training.grpo_config import GRPOConfig
from unmask.training.log import LOG_NAME
from unmask.training.pairs import PairConfig
from unmask.training.pretrain import PretrainConfig, PretrainTrainer
from unmask.training.samples import SAMPLES_NAME
from unmask.training.sft import SFTConfig, SFTTrainer
from unmask.training.stage_config import StageConfig
from unmask.training.switches import bound_memory, naming_memory, sharded_by
from unmask.training.text import TextConfig

DATA_REPORT = "data_report.json"
GENERATED_ROWS = 10_000
TRAINED_MODEL = "model"

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Verb:
    """What differs between the training verbs."""

    trainer: Callable[..., Any]
    config: type[StageConfig]
    task_rows: Callable[[Task, list[Row], DataConfig], Rows]
    canvas: str | None = None
    """The setting that a task's longest completion is the default of."""


def as_text(task: Task, rows: list[Row], data: DataConfig) -> Rows:
    """Problems with their answers, as plain text."""
    refuse_chat(data)
    return [{"text": row["prompt"] + row["completion"]} for row in rows]


def as_pairs(task: Task, rows: list[Row], data: DataConfig) -> Rows:
    """Prompts and completions, in the style asked for."""
    return pose(task, rows, data.style)


def as_preferences(task: Task, rows: list[Row], data: DataConfig) -> Rows:
    """The right answer preferred to a corrupted one. A task that makes no problems makes none: ConfigError."""
    refuse_chat(data)
    rng, corrupt = random.Random(data.seed), as_puzzle(task).corrupt
    return [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": corrupt(row, rng)} for row in rows]


def refuse_chat(data: DataConfig) -> None:
    if data.style == "chat":
        raise ConfigError("this verb takes a task's problems as text", where="data.style", remedy="Leave it at plain")


VERBS = {
    "pretrain": Verb(PretrainTrainer, PretrainConfig, as_text),
    "convert": Verb(ConvertTrainer, ConvertConfig, as_pairs, "canvas_length"),
    "sft": Verb(SFTTrainer, SFTConfig, as_pairs, "canvas_length"),
    "dpo": Verb(DPOTrainer, DPOConfig, as_preferences, "canvas_length"),
    "grpo": Verb(GRPOTrainer, GRPOConfig, as_pairs, "max_completion_length"),
}


def training_arguments(verb: str, config: RunConfig) -> Any:
    """The verb's arguments; a task gives the length of the canvas, and `data` the column of the text, where `training` does not.

    Raises:
        ConfigError: a setting that the verb does not have, or a value that it refuses.
    """
    kind = VERBS[verb]
    task = get_task(config.data.task) if config.data.task else None
    defaults: dict[str, Any] = {kind.canvas: task.max_completion} if task and kind.canvas and config.data.style == "plain" else {}
    if issubclass(kind.config, TextConfig) and task is None:
        defaults["text_column"] = config.data.text_column
    fixed: dict[str, Any] = {"output_dir": config.output_dir, "data_source": data_name(config.data)}
    fixed["resume_from_checkpoint"] = None  # of a start, and not of the run
    args = build_training_args(kind.config, defaults | config.training, **fixed)
    args.choose_precision(in_float32=config.model.dtype == "float32")
    return args


def data_name(data: DataConfig) -> str | None:
    """What a model card calls the data: names on the hub, or files' names without the folders of this machine."""
    sources = [data.train or data.task] if not isinstance(data.train, list) else [source.path for source in data.train]
    return ", ".join(Path(source).name if Path(source).exists() else source for source in sources if source) or None


def resolved(config: RunConfig, args: StageConfig) -> RunConfig:
    """The config with the verb's own settings filled in; those of TrainingArguments stay out unless set, or other than there."""
    stock = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    fixed = ("output_dir", "data_source", "resume_from_checkpoint")
    own = [f.name for f in dataclasses.fields(args) if f.name not in fixed and (f.name not in stock or f.default != stock[f.name])]
    values = args.to_dict()
    given = {name: value for name, value in config.training.items() if value is not None or values[name] is None}
    return config.model_copy(update={"training": {name: values[name] for name in own} | given})


def run_stage(verb: str, config: RunConfig, resume: str | bool = False) -> None:
    """Run `unmask VERB`.

    The trained model goes to `output_dir/model`, beside checkpoints, `training_logs.json`, the resolved config and a manifest. With
    a task, the model is then evaluated on held-out problems (`evaluation.json`).

    Args:
        verb: pretrain, convert, sft, dpo or grpo.
        config: the run.
        resume: go on from the last whole checkpoint (True), or from this one.

    Raises:
        UnmaskError: whatever in the config, model or data a user can mend; nothing is written before all three are loaded.
    """
    args = training_arguments(verb, config)
    output, settings = Path(config.output_dir), resolved(config, args)
    overwrite = config.overwrite and not continues(output, resume)
    if overwrite and isinstance(args, DPOConfig) and "stale_reference" not in config.training:
        args.stale_reference = "replace"  # scores of the run that is overwritten
    if isinstance(resume, str):
        check_last(Path(resume), output)
    display = Progress([(verb, 1.0)], stream=None if args.should_save else io.StringIO())
    with display as progress, progress.stage(verb) as stage, naming_memory(config.hardware):
        trainer = make_trainer(verb, config, args, progress=stage)
        task, held_out = held_out_problems(config)
        if task and held_out:
            check_evaluation(trainer.lm, task, held_out, config.sampler)
        if args.should_save:
            if overwrite:
                forget_earlier_run(output)
            write_atomic(output / "config.yaml", to_yaml(settings.model_copy(update={"overwrite": False})))
            write_data_report(trainer, output / DATA_REPORT)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(output / TRAINED_MODEL))
        if args.eval_strategy == "no" and getattr(trainer, "eval_dataset", None) is not None:  # of a conversion every stage ends with one
            trainer.evaluate()
            trainer.save_model(str(output / TRAINED_MODEL))  # its card tells of it
    if args.should_save:
        write_manifest(output / "manifest.json", config.model_dump(), verb=verb, seed=args.seed)
    if args.should_save and task and held_out:
        evaluated = trainer.lm
        if sharded_by(args):  # then a pass would take all processes
            evaluated = load(output / TRAINED_MODEL, device=str(args.device), trust_remote_code=config.model.trust_remote_code)
        write_atomic(output / "evaluation.json", evaluate_task(evaluated, task, held_out, config.sampler).to_json() + "\n")
    # A process that leaves while others still talk to it aborts.
    processes = PartialState()
    processes.wait_for_everyone()
    processes.destroy_process_group()


def write_data_report(trainer: Any, path: Path) -> None:
    """What was found in the data, of verbs that report it."""
    if isinstance(trainer, SFTTrainer | DPOTrainer):
        data = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
        reports = {name: rows.report.to_dict() for name, rows in data.items() if isinstance(rows, TokenRows)}
        write_atomic(path, json.dumps(reports, indent=2, ensure_ascii=False) + "\n")


def held_out_problems(config: RunConfig) -> tuple[Task | None, list[Row]]:
    """The task, and the problems of it that the trained model is evaluated on: of the file given, else new ones if the task makes any."""
    task = get_task(config.data.task) if config.data.task else None
    problems = unseen_problems(task, config.data) if task else []
    return task, pose(task, problems, config.data.style) if task and problems else []


def unseen_problems(task: Task, data: DataConfig) -> list[Row]:
    """Held-out problems: of the file given, else new ones; none of a task that makes none."""
    if not (isinstance(task, Puzzle) or data.eval):
        return []
    return read_problems(task, data.eval, data.eval_rows, split="test", hub_split=data.split, seed=data.seed)


def make_trainer(verb: str, config: RunConfig, args: StageConfig, **rest: Any) -> Any:
    """The verb's trainer, with its model and data loaded; `rest` goes to it."""
    check_together(config, args)
    kind = VERBS[verb]
    bound_memory(config.hardware, args.device)
    task = get_task(config.data.task) if config.data.task else None
    train, held_out = read_data(config, kind, task, args)
    lm = load_model(config)
    if config.data.chat_template is not None:
        set_chat_template(lm, read_template(config.data.chat_template), ends=config.model.eos_token_ids is None)
    if config.lora:
        rest["peft_config"] = config.lora.to_peft()
    if verb == "grpo":
        rest["reward_funcs"] = config.rewards or ([task.name] if task else [])
    if verb == "dpo":
        rest["sampler"] = config.sampler  # of completions for a judge
    with naming_files(config.data):
        return kind.trainer(model=lm, args=args, train_dataset=train, eval_dataset=held_out, **rest)


def forget_earlier_run(output: Path) -> None:
    """Remove the checkpoints, metrics and samples of an earlier run that is overwritten: a later resume must not find them."""
    for path in output.glob("*-*"):
        if re.fullmatch(r"(checkpoint|stage)-\d+", path.name) and path.is_dir():
            shutil.rmtree(path)
    for name in (LOG_NAME, SAMPLES_NAME):
        (output / name).unlink(missing_ok=True)


def read_data(config: RunConfig, kind: Verb, task: Task | None, args: StageConfig) -> tuple[Rows, Rows | None]:
    """Training and held-out rows: of a task (generated, or read from the file given), or of any data set."""
    data = config.data
    if data.shuffle_buffer is not None and not data.streaming:
        raise ConfigError("there is no stream to shuffle", where="data.shuffle_buffer", remedy="Set data.streaming, or remove it")
    if task is not None and (data.streaming or isinstance(data.train, list) or isinstance(data.eval, list)):
        raise ConfigError("a task reads whole files, one at a time", where="data.task", remedy="Give no stream and no mixture, or no task")
    if task is not None:
        count = data.max_rows or (None if data.train else GENERATED_ROWS)
        problems = read_problems(task, data.train, count, split="train", hub_split=data.split, seed=data.seed)
        held_out = unseen_problems(task, data) if args.eval_strategy != "no" else []
        return kind.task_rows(task, problems, data), kind.task_rows(task, held_out, data) if held_out else None
    if isinstance(args, PairConfig) and data.text_column != DataConfig().text_column:
        remedy = "Leave it out, and call the columns as docs/data.md does"
        raise ConfigError("answers to prompts are read from columns of fixed names", where="data.text_column", remedy=remedy)
    if data.train is None:
        raise ConfigError("no training data", where="data.train", remedy="Give --data FILE_OR_ID or --task NAME")
    examples = args if isinstance(args, PairConfig) and not data.streaming else None
    train = read_source(data, data.train, data.max_rows, examples, streaming=data.streaming)
    if data.shuffle_buffer is not None:
        train = train.shuffle(seed=data.seed, buffer_size=data.shuffle_buffer)
    return train, None if data.eval is None else read_source(data, data.eval, data.eval_rows, examples)


def read_source(
    data: DataConfig, source: str | list[DataSource], max_rows: int | None, examples: PairConfig | None, *, streaming: bool = False
) -> Any:
    """The rows of `data.train` or `data.eval`: a data set, a mixture, or a stream of either; of one file of `examples` as written there."""
    if examples is not None and isinstance(source, str):
        return load_examples(source, split=data.split, max_rows=max_rows, keep_malformed=examples.bad_rows == "skip")
    kept: dict[str, Any] = {"split": data.split, "text_column": data.text_column, "streaming": streaming, "max_rows": max_rows}
    return load_rows(source, **kept) if isinstance(source, str) else load_mixture(source, seed=data.seed, **kept)


@contextlib.contextmanager
def naming_files(data: DataConfig) -> Iterator[None]:
    """Errors about rows then name the files that these came from."""
    try:
        yield
    except (DataError, GenerationError) as error:
        where = error.where or ""
        for name, source in (("train_dataset", data.train), ("eval_dataset", data.eval)):
            where = where.replace(name, source if isinstance(source, str) else " and ".join(one.path for one in source or ()) or name)
        raise type(error)(error.what, where=where or None, remedy=error.remedy) from error


def load_model(config: RunConfig) -> DiffusionLM:
    """The model to start from: saved weights, or new ones for an architecture."""
    settings = config.model.model_dump(exclude={"path", "from_scratch"})
    if config.model.from_scratch:
        kept = {name: settings[name] for name in ("dtype", "device", "revision", "trust_remote_code", "eos_token_ids")}
        return initialise(config.model.path, seed=config.data.seed, **kept)
    return load(config.model.path, **settings)
