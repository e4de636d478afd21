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
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from typer.core import TyperGroup

from unmask import __version__
from unmask.config.layers import check_hardware
from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig, check_output_folder, refuse_existing
from unmask.config.user_code import error_of_named_code
from unmask.console import first_to_report, for_stdout, is_first_process, show_table
from unmask.errors import ConfigError, DataError, LostProcessError, RunStopped, UnmaskError, first_line
from unmask.models.model_paths import check_model, near_path, refuse_other_model
from unmask.redaction import shell_line, shown
from unmask.sandbox.cli import app as sandbox
from unmask.tasks import get_task

if TYPE_CHECKING:
    from unmask.models.diffusion_lm import DiffusionLM
from unmask.cli.chat import chat
from unmask.cli.compare import compare
from unmask.cli.doctor import doctor
from unmask.cli.evaluate import EvaluateCommand, evaluate
from unmask.cli.generate import generate
from unmask.cli.help_tables import keep_names_whole
from unmask.cli.new import new
from unmask.cli.quiet import debugging, silence_libraries
from unmask.cli.serve import serve
from unmask.cli.settings import config
from unmask.cli.threads import use_two_threads
from unmask.cli.train import PROFILE, TRAINING_EPILOG, VERB_HELP, TrainingCommand, train

PANELS = TRAIN, USE, LOOK, BEGIN, MORE = (
    "The pipeline",
    "Use a model",
    "Measure and look",
    "Begin",
    "Everything else",
)
"""The groups of verbs on the help page."""
Layout = Literal["llada", "llada_moe", "llada2", "dream", "sdar", "fast_dllm_v2", "hf"]
"""The formats of `unmask export`."""
PATH_ERRORS = {
    errno.ENAMETOOLONG: ("the name of the file is too long", "Check the path"),
    errno.EACCES: ("permission denied", "Permit reading and writing, or choose another path"),
    errno.ENOENT: ("there is no such file or folder, and none can be made there", "Check the path"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "Check the path"),
    errno.EROFS: ("the file system is read-only", "Choose another path"),
    errno.ENOSPC: ("no space is left on the device", "Free some, or choose another path"),
}
"""What is said of errors of the system that a path of the user causes."""


keep_names_whole()


class Commands(TyperGroup):
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
            if ctx.obj or (found := _error_of_user(error)) is None:
                raise
            _report(found)
            raise typer.Exit(2) from error


def _error_of_user(error: Exception) -> UnmaskError | None:
    """What the user can mend, in their code too; None: a fault of Unmask or a library, whose traceback is
    shown."""
    if isinstance(error, UnmaskError):
        return error
    if type(error).__module__.startswith("huggingface_hub."):
        remedy = "Check the network, the name and `hf auth login`, or leave the hub out"
        return ConfigError(first_line(error), where="the hub", remedy=remedy)
    if (
        (own := error_of_named_code(error))
        or not isinstance(error, OSError)
        or error.errno not in PATH_ERRORS
    ):
        return own
    # unknown where a file that is open cannot grow
    path = None if error.filename is None else str(error.filename)
    what, remedy = PATH_ERRORS[error.errno]
    return ConfigError(
        what, where=path if path is None or len(path) < 1000 else f"{path[:60]}...", remedy=remedy
    )


def _report(error: UnmaskError) -> None:
    """Print an error, of several processes once."""
    first = first_to_report()
    if first_to_report(str(error)) and (first or not isinstance(error, LostProcessError)):
        typer.echo("error: " + shown(" ".join(str(error).splitlines())), err=True)


app = typer.Typer(
    cls=Commands,
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
    """As Python's, for a terminal: warnings quote data and names."""
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
    ctx.obj = debug  # read by Commands.invoke


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


def load_model(model: ModelConfig) -> DiffusionLM:
    import unmask

    return unmask.load(model.path, **model.load_arguments())


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


@app.command(
    epilog=(
        "Example: unmask inspect runs/pretrain/model --hardware cpu --hardware h100-80gb --sequence-length "
        "512 --measure"
    ),
    rich_help_panel=LOOK,
)
@spread_configs
def inspect(
    model: ModelConfig,
    hardware: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A recipe, or all; repeatable; unset: likely ones."),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a training row; unset: 512, or the context.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows per device and step; unset: the most that fit.")
    ] = None,
    copies: Annotated[
        int, typer.Option(min=1, max=2, help="Noised copies of a row: 2 for complementary masks.")
    ] = 1,
    max_memory_gb: Annotated[
        float | None, typer.Option(min=0.001, help="Memory to use on each device at most, in 1e9 bytes.")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Train LoRA adapters of this rank; unset: all weights.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also time steps here, of at most 4 rows unless --batch-size is set."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe a model, what conversion would change, and what training takes on each machine.

    That is the memory and time of a training step, the time of a pass of generation, and what bounds both.
    The weights are not read."""
    check_model(model.path, weights=False)
    for name in {*(hardware or [])} - {"all"}:
        check_hardware(name)
    from unmask.planning.blueprint import Blueprint
    from unmask.planning.hardware import GENERATION_BATCHES, MEASURED_ROWS, StepEstimator, recipes_to_show
    from unmask.planning.step_time import BOUNDS

    dtype = None if model.dtype == "float32" else model.dtype  # None: as in the recipe
    recipes = recipes_to_show(
        hardware or [], max_memory_gb=max_memory_gb, dtype=dtype, device_map=model.device_map
    )
    blueprint = Blueprint.read(model)
    work = blueprint.workload(
        model.attention, sequence_length, copies, lora_rank, quantization=model.quantization
    )
    estimator = StepEstimator(blueprint, work)
    facts, changes = blueprint.facts(), blueprint.changes()
    # without names: only recipes of this machine
    to_measure = [recipe for recipe in recipes if measure and (recipe.device or hardware)]
    for recipe in to_measure:
        estimator.device_to_measure(recipe)  # first: estimates for the CPU take seconds
    estimates = {recipe.name: estimator.estimate(recipe, batch_size) for recipe in recipes}
    generation = {recipe.name: times for recipe in recipes if (times := estimator.generation(recipe))}
    measured = {}
    for recipe in to_measure:
        rows = batch_size or min(estimates[recipe.name].workload.batch, MEASURED_ROWS)
        measured[recipe.name] = estimator.compare(recipe, rows)
    if as_json:
        estimate_dicts = {name: estimate.to_dict() for name, estimate in estimates.items()}
        passes = {
            name: {batch: time.to_dict() for batch, time in times.items()}
            for name, times in generation.items()
        }
        found = {"plans": estimate_dicts, "generation": passes, "measured": measured}
        typer.echo(json.dumps({"model": model.path, "facts": facts, "conversion": changes} | found))
        return
    show_table(facts.items(), title=model.path)
    show_table(changes.items(), title="what conversion would change")
    lines = [estimate.describe(name) for name, estimate in estimates.items()]
    show_table(
        [line.values() for line in lines],
        title=f"a training step: {estimator.work.describe()}",
        head=lines[0],
    )
    if generation:
        title = (
            f"ms of a pass of generation, by batch: {estimator.work.sequence_length} tokens, bfloat16 "
            "weights, temperature 0"
        )
        head = ["hardware", *map(str, GENERATION_BATCHES)]
        show_table(
            [[name, *(time.describe() for time in times.values())] for name, times in generation.items()],
            title=title,
            head=head,
        )
    bounds = {estimate.bound for estimate in estimates.values()} | {
        time.bound for times in generation.values() for time in times.values()
    }
    show_table(
        [(bound, words) for bound, words in BOUNDS.items() if bound in bounds],
        title="what bounds them, and what helps",
    )
    for name, figures in measured.items():
        show_table([(key, f"{value:,.4g}") for key, value in figures.items()], title=f"measured: {name}")
    if facts["attention"] == "causal":
        words = [
            "unmask",
            "convert",
            "--model",
            model.path,
            "--data",
            "TEXT.txt",
            "--recipe",
            "block",
            "--output",
            "runs/convert",
        ]
        typer.echo(for_stdout(f"next: {shell_line(words)} --dry-run"))


@app.command(
    epilog="Example: unmask export runs/convert/model --layout sdar --output sdar", rich_help_panel=USE
)
@spread_configs
def export(
    model: ModelConfig,
    layout: Annotated[
        Layout,
        typer.Option(metavar="NAME", help=f"{', '.join(get_args(Layout)[:-1])}, or hf for a causal model."),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into an output folder that is not empty.")
    ] = False,
) -> None:
    """Write a model in the format of a released family, or a causal one as a stock model, for serving
    engines."""
    check_model(model.path)
    check_output_folder(output, overwrite=overwrite, inputs=[model.path])
    refuse_other_model(output)
    from unmask.models.export import export as export_model

    export_model(load_model(model), output, layout)


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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output file if it exists.")
    ] = False,
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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into an output folder that is not empty.")
    ] = False,
) -> None:
    """Run the whole pipeline on a small task: pretrain, convert, SFT, DPO, GRPO, evaluate, report."""
    get_task(task)
    use_two_threads()
    from unmask.demo import QUICK, run_demo

    run_demo(task=task, output=output, seed=seed, overwrite=overwrite, settings=QUICK if quick else None)


app.command(epilog="Example: unmask doctor > doctor.txt", rich_help_panel=MORE)(doctor)
