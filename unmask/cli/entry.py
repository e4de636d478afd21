"""The entry point of the command line, and the verbs that do not train."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import typing
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
import typer.rich_utils
from rich.table import Table
from typer.core import TyperGroup

from unmask import __version__
from unmask.cli.chat import chat
from unmask.cli.compare import compare
from unmask.cli.doctor import doctor
from unmask.cli.evaluate import EvaluateCommand, evaluate
from unmask.cli.generate import generate
from unmask.cli.inspect import inspect
from unmask.cli.new import new
from unmask.cli.options import OverwriteFile, OverwriteFolder
from unmask.cli.quiet import debugging, silence_libraries
from unmask.cli.serve import serve
from unmask.cli.settings import config
from unmask.cli.threads import use_two_threads
from unmask.cli.train import PROFILE, TRAINING_EPILOG, VERB_HELP, TrainingCommand, train
from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig, check_output_folder, refuse_existing
from unmask.config.user_code import error_of_named_code
from unmask.console import first_to_report, for_stdout, is_first_process, show_table
from unmask.errors import (
    ConfigError,
    DataError,
    LostProcessError,
    RunStopped,
    UnmaskError,
    first_line,
    missing_library,
)
from unmask.models.model_paths import check_model, near_path, refuse_other_model
from unmask.redaction import shown
from unmask.sandbox.cli import app as sandbox
from unmask.tasks import get_task

PANELS = TRAIN, USE, LOOK, BEGIN, MORE = (
    "The pipeline",
    "Use a model",
    "Measure and look",
    "Begin",
    "Everything else",
)
"""The groups of verbs on the help page."""
ExportLayout = Literal["llada", "llada_moe", "llada2", "dream", "sdar", "fast_dllm_v2", "hf"]
"""The formats of `unmask export`."""
PATH_ERRORS = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.ENOENT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EROFS,
    errno.ENOSPC,
)
"""Errors of the system that a path of the user causes."""


class WholeNames(Table):
    """A table of a help page whose last column, of descriptions, is narrowed before any other one. Typer's
    own cut the names of options that have no room on a narrow terminal."""

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*cells, **more)
        for column in self.columns:
            column.overflow, column.no_wrap = "fold", column is not self.columns[-1]


setattr(typer.rich_utils, "Table", WholeNames)  # noqa: B010 (mypy takes no other form)


class CommandGroup(TyperGroup):
    """Exits with one line and status 2 for an `UnmaskError` or an error in the user's own code, with status
    130 for Ctrl-C, and 75 for a run that another signal has stopped with a checkpoint."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the groups on the help page."""
        return sorted(
            super().list_commands(ctx),
            key=lambda name: PANELS.index(getattr(self.commands[name], "rich_help_panel", MORE)),
        )

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RunStopped as stopped:
            if is_first_process():
                first_to_report()
                typer.echo(str(stopped), err=True)
            raise typer.Exit(stopped.code) from stopped
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error
        except Exception as error:  # user code, too
            if ctx.obj or (found := _error_of_user(error, ctx.invoked_subcommand)) is None:
                raise
            _report(found)
            raise typer.Exit(2) from error


def _error_of_user(error: Exception, verb: str) -> UnmaskError | None:
    """What the user can fix, in their code too; None: a fault of Unmask or a library, whose traceback is
    shown."""
    if isinstance(error, UnmaskError):
        return error
    if isinstance(error, ModuleNotFoundError) and (missing := missing_library(error, where=f"unmask {verb}")):
        return missing
    if type(error).__module__.startswith(("huggingface_hub.", "httpx")):
        remedy = "Check the network, the name and `hf auth login`, or leave the hub out"
        return ConfigError(first_line(error).rstrip("."), where="the hub", remedy=remedy)
    own = error_of_named_code(error)
    if own or not isinstance(error, OSError) or error.errno not in PATH_ERRORS:
        return own
    path = str(error.filename or "")  # unknown where a file that is open cannot grow
    where = path if len(path) < 1000 else f"{path[:60]}..."
    return ConfigError(str(error.strerror), where=where or None, remedy="Correct it, or choose another path")


def _report(error: UnmaskError) -> None:
    """Print an error, of several processes once."""
    first = first_to_report()
    if first_to_report(str(error)) and (first or not isinstance(error, LostProcessError)):
        typer.echo("error: " + shown(" ".join(str(error).splitlines())), err=True)


app = typer.Typer(
    cls=CommandGroup,
    help="Turn a causal language model into a diffusion language model, and train it further.",
    epilog="Start with `unmask demo`: the whole pipeline on a small task, in minutes, on a laptop.",
    no_args_is_help=True,
    # `--max_new_tokens` is `--max-new-tokens`
    context_settings={"token_normalize_func": lambda option: option.replace("_", "-")},
    pretty_exceptions_enable=False,
)
app.add_typer(sandbox, name="sandbox", rich_help_panel=MORE)


def main() -> None:
    """The entry point. Of several processes only the first prints; errors of all are shown."""
    if not debugging(sys.argv):
        silence_libraries()
    warnings.formatwarning = _format_warning
    logging.setLogRecordFactory(_Record)
    with contextlib.ExitStack() as stack:
        if not is_first_process():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        app(prog_name="unmask")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Python's format, safe for a terminal: warnings quote data and names."""
    return f"{filename}:{lineno}: {category.__name__}: {shown(str(message))}\n"


class _Record(logging.LogRecord):
    """A line of a log, for a terminal."""

    def getMessage(self) -> str:  # noqa: N802 (as in logging)
        return shown(super().getMessage())


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def common(
    ctx: typer.Context,
    debug: Annotated[
        bool,
        typer.Option(
            envvar="UNMASK_DEBUG",
            help="Show the traceback of an error, and what libraries print and warn of.",
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    ctx.obj = debug  # read by CommandGroup.invoke


for _verb, _help in VERB_HELP.items():
    app.command(_verb, cls=TrainingCommand, help=_help, epilog=TRAINING_EPILOG, rich_help_panel=TRAIN)(train)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=(
        "Example: unmask profile sft --model runs/convert/model --task sudoku --output runs/profile "
        "--steps 5 training.max_length=64"
    ),
    rich_help_panel=MORE,
)
def profile(
    ctx: typer.Context,
    verb: Annotated[
        str, typer.Argument(metavar="VERB", help=f"{', '.join(VERB_HELP)}; its own options follow.")
    ],
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps to record, after one warm-up (grpo: rollouts, each with all its updates)."
        ),
    ] = 3,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the trace; unset: trace.json in the output folder."),
    ] = None,
) -> None:
    """Record a few steps of a training verb: a trace for Perfetto, and tables of where the time goes."""
    if verb not in VERB_HELP:
        raise ConfigError(
            f"{verb} is not a training verb",
            where="profile",
            remedy=f"Begin with one of {', '.join(VERB_HELP)}",
        )
    ctx.meta[PROFILE] = steps, trace
    command = typing.cast(TyperGroup, ctx.find_root().command).commands[verb]
    with command.make_context(verb, ctx.args, parent=ctx) as inner:
        command.invoke(inner)


app.command(epilog="Example: unmask config sft learning_rate", rich_help_panel=BEGIN)(config)


app.command(
    epilog=(
        "Example: unmask generate runs/sft/model --prompt 'Once upon a time' --max-new-tokens 64 --steps 32"
    ),
    rich_help_panel=USE,
)(generate)


app.command(
    epilog="Example: unmask chat runs/sft/model --max-new-tokens 256 --threshold 0.9 --temperature 0.7",
    rich_help_panel=USE,
)(chat)


app.command(
    cls=EvaluateCommand,
    epilog="Example: unmask evaluate runs/sft/model --task sudoku --rows 200 --output sudoku.json",
    rich_help_panel=LOOK,
)(evaluate)


app.command(
    epilog="Example: unmask compare before.json after.json --picture differences.png", rich_help_panel=LOOK
)(compare)


app.command(
    epilog=(
        "Example: unmask inspect runs/pretrain/model --hardware cpu --hardware h100-80gb --sequence-length "
        "512 --measure"
    ),
    rich_help_panel=LOOK,
)(inspect)


@app.command(
    epilog="Example: unmask export runs/convert/model --layout sdar --output sdar", rich_help_panel=USE
)
@spread_configs
def export(
    model: ModelConfig,
    layout: Annotated[
        ExportLayout,
        typer.Option(
            metavar="NAME", help=f"{', '.join(get_args(ExportLayout)[:-1])}, or hf for a causal model."
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID", help="hf: the model that it was part of, whose other towers are kept."
        ),
    ] = None,
    overwrite: OverwriteFolder = False,
) -> None:
    """Write a model in the format of a released family, or a causal one as a stock model, for serving
    engines."""
    inputs = [model.path, *([base] if base else [])]
    for path in inputs:
        check_model(path)
    check_output_folder(output, overwrite=overwrite, inputs=inputs)
    refuse_other_model(output)
    import unmask
    from unmask.models.export import export as export_model

    export_model(unmask.load(model.path, **model.load_arguments()), output, layout, base)


app.command(
    epilog=(
        "Example: unmask serve runs/sft/model --device cuda --port 8000. If UNMASK_API_KEY is set, clients "
        "must send it."
    ),
    rich_help_panel=USE,
)(serve)


@app.command(
    epilog="Example: unmask migrate train.yaml gsm_base.sbatch --output gsm.yaml", rich_help_panel=MORE
)
def migrate(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Configurations that belong together; later ones win."),
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the config goes; unset: to stdout.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="The format, if the keys do not identify it."),
    ] = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Convert configurations of d1, dLLM, TRL and others into Unmask's; a table on stderr lists the
    changes."""
    if output:
        refuse_existing(
            output, "Choose another, or replace it with --overwrite", overwrite=overwrite, inputs=files
        )
    from unmask.artifacts import write_atomic
    from unmask.migration.migrate import migrate as migrate_files

    found = migrate_files(files, form)
    with contextlib.redirect_stdout(sys.stderr):
        show_table(found.table(), title=found.titles, head=["old", "", "new", "why"])
    command = f"unmask {found.verb or 'VERB'} --config {output or 'FILE'}"
    typer.echo(f"for: {' '.join([command, *found.missing])}", err=True)
    if output:
        write_atomic(output, found.to_yaml())
    else:
        typer.echo(for_stdout(found.to_yaml()), nl=False)


@app.command(epilog="Example: unmask runs runs --json", rich_help_panel=LOOK)
def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER...]", help="Folders of runs; unset: this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one per run.")] = False,
) -> None:
    """List runs: state, steps, last metric, and the command that resumes an unfinished one."""
    from unmask.training.runs import as_rows, find_runs

    found = find_runs(folders or [Path()])
    if as_json:
        for run in found:
            typer.echo(json.dumps(run))
        return
    show_table(
        as_rows(found),
        title="1 run" if len(found) == 1 else f"{len(found)} runs",
        head=["folder", "verb", "state", "step", "last metric"],
    )
    for run in found:
        if run["command"]:
            typer.echo(run["command"])


@app.command(
    epilog="Example: unmask report runs/sft runs/grpo sudoku.json --output report.html", rich_help_panel=LOOK
)
def report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|RESULT...", help="Folders of runs, and result files of evaluate."),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the page goes.")] = Path("report.html"),
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each chart and heat map as PNG into this folder."),
    ] = None,
    title: Annotated[
        str, typer.Option(metavar="TEXT", help="The heading of the page.")
    ] = "Unmask: runs and evaluations",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output files if they exist.")
    ] = False,
) -> None:
    """Write one page of runs and evaluations: curves, scores, speed against quality, decoding order,
    answers."""
    remedy = "Choose another, or replace it with --overwrite"
    refuse_existing(
        output, remedy, overwrite=overwrite, inputs=sources, own=lambda path: path.suffix == ".html"
    )
    if png:
        check_output_folder(png, overwrite=overwrite, inputs=sources)
    for source in sources:
        if not source.exists():
            raise DataError("no such file or folder", where=str(source), remedy=near_path(source))
    from unmask.evaluation.report.page import write_page
    from unmask.evaluation.report.pictures import write_pictures
    from unmask.evaluation.report.sources import report_of

    content = report_of(sources, title)
    write_page(content, output)
    typer.echo(for_stdout(f"{output}: {', '.join(section.title for section in content.sections)}"))
    if png:
        typer.echo(for_stdout(f"{png}: {len(write_pictures(content, png))} pictures"))


app.command(
    epilog="Example: unmask new my-run --kind rewards --model runs/sft/model, then make in the folder my-run",
    rich_help_panel=BEGIN,
)(new)


@app.command(rich_help_panel=BEGIN)
def demo(
    task: Annotated[
        str, typer.Option(metavar="NAME", help="sudoku, countdown, or a Puzzle of your own as file.py:NAME.")
    ] = "sudoku",
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where models, metrics and report.html go.")
    ] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The random seed.")] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="All stages in about a minute: a smaller model, on easier puzzles."),
    ] = False,
    overwrite: OverwriteFolder = False,
) -> None:
    """Run the whole pipeline on a small task: pretrain, convert, SFT, DPO, GRPO, evaluate, report."""
    get_task(task)
    use_two_threads()
    from unmask.demo import QUICK, run_demo

    run_demo(task=task, output=output, seed=seed, overwrite=overwrite, settings=QUICK if quick else None)


app.command(epilog="Example: unmask doctor > doctor.txt", rich_help_panel=MORE)(doctor)
