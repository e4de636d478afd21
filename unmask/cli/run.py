"""Run a training verb from its config: load, read the data, train, save, evaluate. The command line calls
it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments

from unmask.artifacts import write_atomic
from unmask.cli.compatibility import check_together, naming_sections
from unmask.cli.evaluation import EvaluationPart, Harness
from unmask.cli.inputs import (
    evaluates,
    held_out_problems,
    load_or_initialize,
    naming_files,
    read_data,
    task_of,
    without_folder,
)
from unmask.cli.retention import RESULT, Retention, check_retention, result_before, retention_of_run
from unmask.cli.run_folder import RunFolder
from unmask.cli.verbs import VERBS
from unmask.config.run import DataConfig, RunConfig, build_training_args, resumes_in_place
from unmask.console import Progress
from unmask.data.report import data_reports
from unmask.evaluation.provenance import EVALUATION, write_result_of_run
from unmask.evaluation.tasks import check_evaluation, evaluate_task
from unmask.models.chat_template import read_template
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.models.model_paths import TRAINED_MODEL
from unmask.rl.completion_log import COMPLETIONS_FILE
from unmask.tasks import Task
from unmask.training.config import TrainingConfig
from unmask.training.hardware_checks import bound_memory, naming_full_memory
from unmask.training.run.around import StopOnSignal, naming_lost_process
from unmask.training.run.checkpoint import check_last, written_whole
from unmask.training.run.folder import DATA_REPORT, LOG_NAME
from unmask.training.settings.listing import SET_BY_RUN
from unmask.training.sharding import launched, read_deepspeed, weight_sharding_setting


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
    fixed["resume_from_checkpoint"] = None  # belongs to this launch, not to the run
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


def data_name(data: DataConfig, task: Task | None = None) -> str | None:
    """The name of the data in a model card: names on the hub, file names without their folders, or the name
    of the task."""
    sources = (
        [data.train or (task and task.name)]
        if not isinstance(data.train, list)
        else [source.path for source in data.train]
    )
    return ", ".join(without_folder(source) for source in sources if source) or None


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


def run_verb(
    verb: str, config: RunConfig, resume: str | bool = False, harness: Harness | None = None
) -> Retention | None:
    """Run `unmask VERB`.

    Writes the trained model to `output_dir/model`, with checkpoints, `training_logs.json`, the resolved
    config and a manifest beside it. With a task, the model is then evaluated on held-out problems
    (`evaluation.json`); with `retention`, beside the one that it was made of (`retention.json`).

    Args:
        verb: pretrain, convert, sft, dpo or grpo.
        config: the run.
        resume: True: resume from the last complete checkpoint; a path: from this one.
        harness: for a `retention` with tasks of lm-eval.

    Returns:
        What `retention` measured, in the first process.

    Raises:
        UnmaskError: an error in the config, model or data. Nothing is written before all three are loaded.
        RunStopped: a signal has stopped the run.
    """
    folder = _run(verb, config, resume, check_retention(config, harness))
    output, processes, found = folder.path, PartialState(), None
    if config.retention is not None:
        gc.collect()  # the trainer, whose memory two models need now
        with naming_lost_process(output), folder.locked():
            found = retention_of_run(config, output / TRAINED_MODEL, harness)
            folder.finish()
    # A process aborts if it exits while others still communicate with it.
    processes.wait_for_everyone()
    processes.destroy_process_group()
    return found


@contextlib.contextmanager
def surroundings(
    verb: str, config: RunConfig, resume: str | bool
) -> Iterator[tuple[RunFolder, RunConfig, StopOnSignal]]:
    """What surrounds a run, from its settings on: each is entered once, here. Yields its folder, the resolved
    config, and the callback that ends it."""
    output = Path(config.output_dir)
    resumes = resumes_in_place(output, resume)
    with (
        naming_lost_process(output),
        StopOnSignal(output, resumes=resumes, overwrites=config.overwrite and not resumes) as stop,
    ):
        args = training_arguments(verb, config)
        settings, folder = resolved(config, args), RunFolder(verb, config, args, resume)
        if folder.overwrite:
            args.overwriting(given=config.training)
        if isinstance(resume, str):
            check_last(Path(resume), output)
        # held: the lock, the state in the manifest, errors of the disk
        with folder.held(), naming_full_memory(config.hardware):
            yield folder, settings, stop


def _run(
    verb: str, config: RunConfig, resume: str | bool, retained: Mapping[str, EvaluationPart]
) -> RunFolder:
    """Train and save the model. The run is then finished, unless its retention is to be measured."""
    phases = [(verb, 20.0), *([("evaluate", 1.0)] if evaluates(config) else [])]
    with (
        surroundings(verb, config, resume) as (folder, settings, stop),
        Progress(phases, stream=None if folder.args.should_save else io.StringIO()) as progress,
    ):
        args, output = folder.args, folder.path
        with progress.phase(verb) as phase:
            trainer = make_trainer(verb, config, args, progress=phase, callbacks=[stop])
            task, held_out = held_out_problems(config)
            if task and held_out:
                check_evaluation(trainer.lm, task, held_out, config.sampler)
            for part in retained.values():
                check_evaluation(trainer.lm, part.task, part.rows, part.sampler)
            if resume:
                trainer.checkpoint_to_resume(resume)  # refuses another run
            if args.should_save and folder.overwrite:
                forget_earlier_run(output)
            folder.begin(
                without_unread(settings, args, config.training),
                trainer.run_record,
                trainer.planned_steps(args),
            )
            if args.should_save and (reports := data_reports(trainer)):
                write_atomic(output / DATA_REPORT, json.dumps(reports, indent=2, ensure_ascii=False) + "\n")
            trainer.train(resume_from_checkpoint=resume)
            save_whole(trainer, output / TRAINED_MODEL, writes=args.should_save)
            # conversion stages evaluate at their end
            if args.eval_strategy == "no" and getattr(trainer, "eval_dataset", None) is not None:
                trainer.evaluate()
                save_whole(trainer, output / TRAINED_MODEL, writes=args.should_save)  # for its card
        if args.should_save and task and held_out:
            with progress.phase("evaluate") as phase:
                lm = whole_model(trainer.lm, config, args)
                result = evaluate_task(lm, task, held_out, config.sampler, progress=phase)
                write_result_of_run(output, lm, output / TRAINED_MODEL, result)
        if config.retention is None:
            folder.finish()
    return folder


def whole_model(lm: DiffusionLM, config: RunConfig, args: TrainingConfig) -> DiffusionLM:
    """The trained model for one process. If its weights are sharded, a forward pass would need every process:
    it is loaded again."""
    if not weight_sharding_setting(args):
        return lm
    kept = {name: getattr(config.model, name) for name in ("trust_remote_code", "parse_special_tokens")}
    return load(Path(config.output_dir) / TRAINED_MODEL, device=str(args.device), **kept)


def save_whole(trainer: Any, folder: Path, *, writes: bool) -> None:
    """Save the model to a folder, which is replaced when it is complete. `writes`: whether this process
    writes it."""
    with written_whole(folder, writes=writes, listed=False) as unfinished:
        if writes and (card := folder / "README.md").is_file():  # it may have been edited
            shutil.copy(card, unfinished)
        trainer.save_model(str(unfinished))


def make_trainer(verb: str, config: RunConfig, args: TrainingConfig, **rest: Any) -> Any:
    """The verb's trainer, with its model and data; `rest` is passed to it."""
    check_together(config, args)
    entry = VERBS[verb]
    bound_memory(config.hardware, args.device)
    task = task_of(config)
    rest |= entry.trainer_arguments(config, task)
    train, held_out = read_data(config, entry, task, args)
    with naming_files(config.data):
        lm = load_or_initialize(config, train, args)
    if config.data.chat_template is not None:
        lm.set_chat_template(
            read_template(config.data.chat_template), ends=config.model.eos_token_ids is None
        )
    if config.lora:
        rest["peft_config"] = config.lora.to_peft()
    with naming_files(config.data):
        return entry.trainer(model=lm, args=args, train_dataset=train, eval_dataset=held_out, **rest)


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
