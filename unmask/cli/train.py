"""`unmask pretrain`, `convert`, `sft`, `dpo` and `grpo`. The way of a setting from the command line to the
loss:

1. `train` merges its sources (`config/layers.py`: `read_layers`) and checks the sections (`config/run.py`:
`resolve`).
2. `cli/run.py` checks `training.*` (`training_arguments`) and makes the verb's config and trainer
(`make_trainer`).
3. The trainer's loss reads it as `self.args.NAME`; transformers' own, such as `learning_rate`, are read by
   its Trainer. A setting of an RL method is copied into the method's field of that name (`rl/config.py`:
   `GRPOConfig.build_method`), which `Method.loss` reads.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, suppress
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from unmask.cli.bare_options import split_words
from unmask.cli.compare import show_retention
from unmask.cli.options import OverwriteFolder, Unsandboxed
from unmask.cli.settings import most_set, show_help
from unmask.cli.threads import choose_threads
from unmask.config.layers import read_layers
from unmask.config.run import (
    DataSource,
    RunConfig,
    import_modules,
    inputs_of,
    refuse_inputs,
    resolve,
    to_yaml,
)
from unmask.config.trackers import check_trackers
from unmask.config.user_code import load_module
from unmask.console import for_stdout, is_first_process, show_table
from unmask.data.formats import check_row
from unmask.data.sources import check_source, first_records
from unmask.errors import ConfigError, DataError, UnmaskError
from unmask.models.model_paths import check_model, near_path
from unmask.redaction import shown
from unmask.tasks import Task, get_rewards, get_task
from unmask.tasks.base import names_reward_model
from unmask.training.run.folder import RunFolder, split_resume
from unmask.training.settings.listing import check_training

if TYPE_CHECKING:
    from unmask.cli.measurements import Measurements


class TrainingCommand(TyperCommand):
    """Settings may be given as options (`--max-steps 10`), and without their section (`max_steps=10`).
    `--resume` takes an optional path: the next argument, unless it is an option, or a setting and no
    folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, (arg, after) in enumerate(pairwise([*args, "-"])):
            no_path = after.startswith("-") or ("=" in after and not Path(after).is_dir())
            if arg == "--resume" and no_path:
                args[place] = "--resume="
        params = self.get_params(ctx)
        is_flag = {name: getattr(param, "is_flag", False) for param in params for name in param.opts}
        options, settings, ctx.meta[KEYS] = split_words(str(ctx.info_name), args, is_flag)
        return super().parse_args(ctx, [*options, "--", *settings] if settings else options)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        verb, described = str(ctx.info_name), self.help
        self.help = f"{described}\n\n\b\n{most_set(verb)}"
        super().format_help(ctx, formatter)
        self.help = described
        show_help(verb)


VERB_HELP = {
    "pretrain": "Train a causal model on text, token by token.",
    "convert": "Turn a causal model into a diffusion model, in stages.",
    "sft": "Fine-tune on prompts and their completions.",
    "dpo": "Prefer the chosen completions to the rejected ones (VRPO).",
    "grpo": "Raise the reward of the model's own completions (reinforcement learning).",
}


TRAINING_EPILOG = (
    "Later settings win: recipes, --mode, files, UNMASK_* variables "
    "(UNMASK_TRAINING__LEARNING_RATE=1e-4), the command line. "
    "--print-config prints the resolved config and exits."
)


PROFILE = "unmask.profile"
"""The key under which `profile` passes the verb the steps to record, and the file to write."""
TRACE = "trace.json"
"""The file of a profile, unless another is named."""
KEYS = "unmask.keys"
"""The key under which the parser passes the verb the dotted keys of settings, by the names that stand for
them."""


Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="train:SIZE|PATH",
        help="pretrain from scratch: train a tokenizer of SIZE tokens on the data, or take another one.",
    ),
]


def train(
    ctx: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings, for example training.learning_rate=1e-4 or max_steps=10."
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A YAML file of settings; repeatable, later ones win."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Settings that come with Unmask; repeatable.")
    ] = None,
    mode: Annotated[
        Literal["speed", "memory", "balanced"] | None,
        typer.Option(metavar="NAME", help="speed, memory or balanced."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="The model to start from: a folder or a hub name.")
    ] = None,
    tokenizer: Tokenizer = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH_OR_ID", help="The training data: a file or a hub name.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A task, which reads the data or generates its own: a name, or file.py:NAME."
        ),
    ] = None,
    accept_unsandboxed: Unsandboxed = False,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder for checkpoints and metrics.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]", help="Resume from the last checkpoint in the output folder, or from PATH."
        ),
    ] = None,
    overwrite: OverwriteFolder = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config and exit.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run two steps of every stage, print the estimate and exit.")
    ] = False,
    measure_variance: Annotated[
        bool,
        typer.Option(
            "--measure-variance", help="dpo: print the variance of the margin estimate, by budget, and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Few rows and steps, checks for anomalies, verbose.")
    ] = False,
) -> None:
    """Body of every training verb; the options are short for overrides."""
    from unmask.training.settings.older_variables import older_layers, with_whole_groups

    verb = str(ctx.info_name)
    if config:
        from unmask.migration.formats import refuse_old

        refuse_old(config)
    recipes = [*(recipe or []), *(["debug"] if debug else [])]
    layers = read_layers(
        recipes=recipes,
        config_files=config or [],
        environ=os.environ,
        flags={
            "model.path": model,
            "model.tokenizer": tokenizer,
            "data.train": data,
            "data.task": task,
            "output_dir": output,
            "overwrite": overwrite or None,
        },
        overrides=overrides or [],
        keys=ctx.meta[KEYS],
        older=older_layers(os.environ, verb),
    )
    import_modules(layers)
    if mode or recipes:
        resolve(layers)  # mistakes are found before anything heavy is imported
        from unmask.cli.modes import adapt_recipes

        layers = adapt_recipes(layers, verb, mode, recipes=len(recipes))
    if verb == "grpo":
        layers = with_whole_groups(layers, os.environ)
    if debug:
        enable_debug_output(ctx)
    resume_from, settings = split_resume(resume, resolve(layers))
    profiling = ctx.meta.get(PROFILE)
    if profiling and (resume_from or dry_run):
        raise ConfigError(
            "a profile makes a short run of its own", where="--resume, --dry-run", remedy="Leave them out"
        )
    if measure_variance and verb != "dpo":
        raise ConfigError(
            f"{verb} has no preference margin", where="--measure-variance", remedy="Use it with unmask dpo"
        )
    with layers.naming_sources():
        check_training(verb, settings.training, own_methods=bool(settings.imports))
        check_trackers(
            settings.training.get("report_to", "none"), settings.training.get("logging_dir"), "training."
        )
        if print_config:
            show_config(verb, settings)
            return
        check_inputs(verb, settings)
        if profiling:
            refuse_inputs(profiling[1] or Path(settings.output_dir, TRACE), config or [])
            show_profile(verb, settings, *profiling)
        elif dry_run:
            show_dry_run(verb, settings)
        elif measure_variance:
            show_variance(settings)
        else:
            folder = RunFolder(settings, resume_from, config or [])
            choose_threads(settings.model.path)
            from unmask.training.run.lost_process import ending_with_others

            with ending_with_others(folder.path):
                from unmask.cli.measurements import Measurements

                run(verb, settings, folder, Measurements(settings))


def run(verb: str, settings: RunConfig, folder: RunFolder, measurements: Measurements) -> None:
    """Train and save the model, measure it, and show what came of it."""
    from unmask.cli.run import run_verb

    started = time.monotonic()
    retention = run_verb(verb, settings, folder, measurements)
    if retention is not None:
        show_retention(retention, f"what {verb} kept of {settings.model.path}")
    if is_first_process():
        from unmask.cli.summary import next_commands, summarize

        rows = summarize(folder.path, time.monotonic() - started, measurements.result)
        show_table(rows, f"{verb}: finished")
        for label, command in zip(("next:", "or:  "), next_commands(verb, settings), strict=False):
            typer.echo(for_stdout(f"{label} {command}"))


def check_inputs(verb: str, settings: RunConfig) -> None:
    """Raise UnmaskError for a model, data or a task that is not there, or a first row without the columns of
    the verb, before what takes seconds to import."""
    check_model(settings.model.path, weights=not settings.model.from_scratch)
    if reference := settings.training.get("ref_model"):
        check_model(str(reference))
    for path in map(Path, inputs_of(settings)):
        if path.suffix in (".json", ".jinja", ".jinja2") and not path.exists():
            raise ConfigError("no such file", where=str(path), remedy=near_path(path))
    # loading a task registers its rewards
    task = None if settings.data.task is None else get_task(settings.data.task)
    for target in settings.rewards:
        file, mark, _ = target.partition(".py:")
        if mark and not Path(f"{file}.py").is_file():
            load_module(f"{file}.py", target)  # raises: it cannot be loaded
        elif target.startswith("model:") or (":" not in target and names_reward_model(target)):
            check_model(target.removeprefix("model:"))
        elif ":" not in target and not target.endswith(".py"):
            get_rewards(target)
    if settings.data.train is None:
        if task is None:
            raise ConfigError(
                "no training data", where="data.train", remedy="Give --data FILE_OR_ID or --task NAME"
            )
        if task.needs_data:
            task.generate("train", 0, seed=0)  # raises: it generates none
    if verb == "grpo" and task is None and not settings.rewards:
        remedy = "Name your own, as 'rewards=[my_rewards.py:FUNCTION]', or a task (docs/tasks.md)"
        raise ConfigError("there is neither a reward function nor a task", where="rewards", remedy=remedy)
    for name, off in (("eval_strategy", "no"), ("eval_on_start", False)):
        if (settings.training.get(name) or off) != off and task is None and settings.data.eval is None:
            raise ConfigError(
                "there is nothing to evaluate on",
                where=f"training.{name}",
                remedy="Set data.eval, or leave it out",
            )
    for source in (settings.data.train, settings.data.eval):
        for each in [DataSource(path=source)] if isinstance(source, str) else source or ():
            check_source(each.path)
            check_first_row(verb, settings, task, each)


def check_first_row(verb: str, settings: RunConfig, task: Task | None, source: DataSource) -> None:
    training: Any = settings.training
    with closing(first_records(source.path)) as records:
        if task is not None:
            next(task.rows(records), None)
        elif training.get("bad_rows") != "skip":
            column = source.text_column or training.get("text_column") or settings.data.text_column
            try:
                for _, row in islice(records, 1):
                    check_row(
                        verb,
                        row,
                        f"{source.path}, row 0",
                        text_column=column,
                        loss_type=training.get("loss_type"),
                        completes=verb == "grpo" or training.get("states") == "sampler",
                    )
            except DataError as error:
                raise (error.skippable() if verb in ("sft", "dpo") else error) from error


def enable_debug_output(ctx: typer.Context) -> None:
    """Show tracebacks, and name the operation that produces a NaN."""
    from unmask.training.hardware_checks import watch_for_anomalies

    ctx.find_root().obj = True
    watch_for_anomalies()


def show_config(verb: str, settings: RunConfig) -> None:
    from unmask.cli.inputs import read_pattern
    from unmask.cli.run import planned_arguments, resolved

    args = planned_arguments(verb, settings)
    if Path(settings.model.path).is_dir():  # what its attention ignores is left out
        with suppress(UnmaskError):
            args.check_model(partial(read_pattern, settings.model), settings)
    typer.echo(for_stdout(to_yaml(resolved(settings, args))), nl=False)


def show_profile(verb: str, settings: RunConfig, steps: int, trace: Path | None) -> None:
    from unmask.cli.profile import profile_run

    trace = trace or Path(settings.output_dir, TRACE)
    for title, lines in profile_run(verb, settings, trace, steps).items():
        show_table([line.values() for line in lines], f"{verb}: {title}", head=lines[0])
    typer.echo(f"{shown(str(trace))}: open it in https://ui.perfetto.dev")


def show_dry_run(verb: str, settings: RunConfig) -> None:
    from unmask.cli.dry_run import dry_run

    lines = dry_run(verb, settings)
    by_stage = [(name, *(line[name] for line in lines)) for name in lines[0]]
    made = (
        "two steps of every stage"
        if lines[0]["seconds a step"] != "-"
        else "the plan; a launcher starts the processes that make steps"
    )
    show_table(by_stage, f"{verb}: {made}", head=["", *map(str, range(1, len(lines) + 1))])


def show_variance(settings: RunConfig) -> None:
    from unmask.cli.margin_variance import as_table, measure_run

    measured = measure_run(settings)
    head, rows = as_table(measured)
    show_table(rows, f"variance of the margin in nats squared, {measured['pairs']} pairs", head)
    typer.echo(json.dumps(measured))
