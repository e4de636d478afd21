"""Run a training verb from its config: load, read the data, train, save, evaluate. The command line calls
it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments

from unmask.artifacts import write_atomic
from unmask.cli.inputs import (
    data_name,
    load_or_initialize,
    naming_files,
    read_data,
    read_pattern,
    task_of,
)
from unmask.cli.measurements import Measurements
from unmask.cli.retention import RESULT, Retention, result_before
from unmask.cli.verbs import VERBS
from unmask.config.run import RunConfig, build_training_args
from unmask.console import Progress
from unmask.data.report import data_reports
from unmask.errors import ConfigError
from unmask.evaluation.provenance import EVALUATION
from unmask.models.load import DTYPES, check_patterns
from unmask.models.model_paths import TRAINED_MODEL
from unmask.rl.completion_log import COMPLETIONS_FILE
from unmask.training.config import TrainingConfig, lora_rank
from unmask.training.hardware_checks import TrainedModel, bounded_memory, check_hardware_settings
from unmask.training.run.around import StopOnSignal, naming_lost_process, running_in
from unmask.training.run.checkpoint import check_last, written_whole
from unmask.training.run.folder import DATA_REPORT, RunFolder
from unmask.training.run.log import LOG_NAME
from unmask.training.run.record import RunRecord, run_settings
from unmask.training.settings.listing import SET_BY_RUN
from unmask.training.sharding import launched, read_deepspeed


def training_arguments(verb: str, config: RunConfig) -> Any:
    """The verb's training arguments. Unless `training` sets them, the canvas length comes from the task, and
    the text column from `data`.

    Raises:
        ConfigError: a setting that the verb does not have, or a value that it refuses.
    """
    entry = VERBS[verb]
    task = task_of(config)
    length = task.max_completion if task and config.data.style == "plain" else None
    defaults: dict[str, Any] = {entry.canvas: length} if entry.canvas and length else {}
    defaults |= entry.config_class.data_defaults(config.data, config.data.task)
    fixed: dict[str, Any] = {"output_dir": config.output_dir, "data_source": data_name(config.data, task)}
    args = build_training_args(entry.config_class, defaults | config.training, **fixed)
    args.choose_precision(in_float32=config.model.dtype == "float32")
    return args


def planned_arguments(verb: str, config: RunConfig) -> Any:
    """Like `training_arguments`, for a run that is only planned here: DeepSpeed is neither needed nor
    started."""
    if launched():
        return training_arguments(verb, config)
    args = training_arguments(
        verb, config.model_copy(update={"training": config.training | {"deepspeed": None}})
    )
    setting: Any = config.training.get("deepspeed")
    if setting:
        with naming_sections(args):
            args.deepspeed = read_deepspeed(setting)
    return args


def resolved(config: RunConfig, args: TrainingConfig) -> RunConfig:
    """The config with the verb's defaults filled in. Fields of TrainingArguments are listed only if the user
    set them, or if our default differs; settings that have no effect here are left out."""
    stock = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    listed = [
        f.name
        for f in dataclasses.fields(args)
        if f.name not in SET_BY_RUN and (f.name not in stock or f.default != stock[f.name])
    ]
    values = args.to_dict()
    set_by_user = {
        name: value for name, value in config.training.items() if value is not None or values[name] is None
    }
    filled_in = config.model_copy(update={"training": {name: values[name] for name in listed} | set_by_user})
    return without_unread(filled_in, args, set_by_user)


def without_unread(config: RunConfig, args: TrainingConfig, given: Collection[str]) -> RunConfig:
    """The config without settings that have no effect, unless they were given; the trainer knows of more than
    the settings alone."""
    left_out = args.unread() - {*given}
    return config.model_copy(
        update={"training": {name: value for name, value in config.training.items() if name not in left_out}}
    )


def run_verb(verb: str, config: RunConfig, folder: RunFolder, measurements: Measurements) -> Retention | None:
    """Run `unmask VERB`: train and save the model, then measure it.

    Writes the trained model to `output_dir/model`, with checkpoints, `training_logs.json`, the resolved
    config and a manifest beside it.

    Args:
        verb: pretrain, convert, sft, dpo or grpo.
        config: the run.
        folder: its output folder.
        measurements: of the trained model.

    Returns:
        What `retention` measured, in the first process.

    Raises:
        UnmaskError: an error in the config, model or data. Nothing is written before all three are loaded.
        RunStopped: a signal has stopped the run.
    """
    phases = [(verb, 20.0), *measurements.phases]
    with surroundings(verb, folder) as (args, stop):
        recorded, model = resolved(config, args), folder.path / TRAINED_MODEL
        if folder.overwrite:
            args.overwriting(given=config.training)  # in this launch only: the config does not record it
        with Progress(phases, stream=None if args.should_save else io.StringIO()) as progress:
            with progress.phase(verb) as phase:
                trainer = make_trainer(verb, config, args, progress=phase, callbacks=[stop])
                measurements.check(trainer.lm)
                recorded = without_unread(recorded, args, config.training)
                begin(verb, folder, trainer, recorded)
                trainer.train(resume_from_checkpoint=folder.resume)
                save_whole(trainer, model, writes=args.should_save)
                # conversion stages evaluate at their end
                if args.eval_strategy == "no" and getattr(trainer, "eval_dataset", None) is not None:
                    trainer.evaluate()
                    save_whole(trainer, model, writes=args.should_save)  # for its card
                if args.push_to_hub:
                    trainer.push_to_hub()
            measurements.evaluate(trainer.lm, folder.path, args, progress)
        del trainer  # whose memory two models may need now
        retention = measurements.retention(model)
        folder.finish()
    # A process aborts if it exits while others still communicate with it.
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
    return retention


@contextlib.contextmanager
def surroundings(verb: str, folder: RunFolder) -> Iterator[tuple[TrainingConfig, StopOnSignal]]:
    """What surrounds a run: lost processes, signals, the lock of its folder with errors of the disk, and full
    memory. Each is entered once, here. Yields the training arguments, and the callback that ends the run."""
    with (
        naming_lost_process(folder.path),
        StopOnSignal(folder.path, resumes=folder.in_place, overwrites=folder.overwrite) as stop,
    ):
        args = training_arguments(verb, folder.settings)
        with running_in(folder.path, folder.ended), bounded_memory(folder.settings.hardware, args.device):
            refuse_another_run(folder, args)
            yield args, stop


def refuse_another_run(folder: RunFolder, args: TrainingConfig) -> None:
    """Raise ConfigError or TrainingError if another run has begun in the folder, or if the settings would
    make another run than the one to resume."""
    folder.check()  # again, now that no other run can write here
    args.run_settings = run_settings(folder.settings)  # type: ignore[misc]
    if (resumed := folder.resumed_from) is not None:
        check_last(resumed, folder.path)
        RunRecord(args, {}, {}).refuse_settings(resumed)


def begin(verb: str, folder: RunFolder, trainer: Any, recorded: RunConfig) -> None:
    """Write what a run writes before it trains. Raises the errors of a checkpoint that cannot be resumed."""
    if folder.resume:
        trainer.checkpoint_to_resume(folder.resume)  # refuses another run
    steps, record = trainer.planned_steps(trainer.args), trainer.run_record  # made by all processes
    if not trainer.args.should_save:
        return
    if folder.overwrite:
        forget_earlier_run(folder.path)
    folder.begin(verb, recorded, record, steps)
    if reports := data_reports(trainer):
        write_atomic(folder.path / DATA_REPORT, json.dumps(reports, indent=2, ensure_ascii=False) + "\n")


def save_whole(trainer: Any, folder: Path, *, writes: bool) -> None:
    """Save the model to a folder, which is replaced when it is complete. `writes`: whether this process
    writes it."""
    with written_whole(folder, writes=writes, listed=False) as unfinished:
        if writes and (card := folder / "README.md").is_file():  # it may have been edited
            shutil.copy(card, unfinished)
        trainer.save_whole(unfinished)


def make_trainer(verb: str, config: RunConfig, args: TrainingConfig, **rest: Any) -> Any:
    """The verb's trainer, with its model and data; `rest` is passed to it."""
    check_together(config, args)
    entry = VERBS[verb]
    task = task_of(config)
    rest |= entry.trainer_arguments(config, task)
    train, held_out = read_data(config, entry, task, args)
    if config.lora:
        rest["peft_config"] = config.lora.to_peft()
    with naming_files(config.data):
        lm = load_or_initialize(config, train, args)
        return entry.trainer(model=lm, args=args, train_dataset=train, eval_dataset=held_out, **rest)


def check_together(config: RunConfig, args: TrainingConfig, *, planned: bool = False) -> None:
    """Refuse, before the model is loaded, the combinations that the trainer would refuse after loading it.
    `planned`: other processes will make the run.

    Raises:
        ConfigError: `where` holds the keys of both settings, joined by " and ".
    """
    with naming_sections(args):
        adapters = lora_rank(config) is not None
        args.check_run(config, has_adapters=adapters)
        model, patterns = config.model, args.patterns()
        if not patterns and args.flash_attention and not model.from_scratch:
            patterns = [read_pattern(model)["attention"]]
        quantized, split = (part is not None for part in (model.quantization, model.device_map))
        for attention in patterns or ["causal"]:
            subject = TrainedModel(attention, DTYPES[model.dtype], adapters, quantized, split)
            check_hardware_settings(args, subject, planned=planned)
        args.check_model(partial(read_pattern, config.model), config)
        check_patterns(model.path, args.patterns(), model.load_arguments())


@contextlib.contextmanager
def naming_sections(args: TrainingConfig) -> Iterator[None]:
    """Errors name settings with their section, which the trainer does not know."""
    try:
        yield
    except ConfigError as error:
        known = {field.name for field in dataclasses.fields(args)}
        keys = [
            f"training.{key}" if key.partition(".")[0] in known else key
            for key in (error.where or "").split(" and ")
        ]
        raise error.moved(" and ".join(keys)) from error


def forget_earlier_run(output: Path) -> None:
    """Remove the checkpoints, metrics, samples and results of a run that is overwritten: a later resume must
    not find them."""
    for path in output.glob("*-*"):
        if re.fullmatch(r"(checkpoint|stage)-\d+", path.name) and path.is_symlink():
            path.unlink()
        elif re.fullmatch(r"(checkpoint|stage)-\d+", path.name) and path.is_dir():
            shutil.rmtree(path)
    for name in (LOG_NAME, COMPLETIONS_FILE, EVALUATION):
        (output / name).unlink(missing_ok=True)
    for name in (RESULT, result_before(Path(RESULT)).name):
        # with the items and answers that a killed evaluation left beside it
        for path in output.glob(f"{name}*"):
            path.unlink()
