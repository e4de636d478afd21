"""`unmask evaluate`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from unmask.cli.compare import show_retention
from unmask.cli.options import OverwriteFile, Unsandboxed
from unmask.cli.threads import choose_threads
from unmask.config.evaluation import EvaluationConfig
from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig, refuse_existing
from unmask.config.sampler import SamplerConfig
from unmask.console import for_stdout, show_table
from unmask.data.sources import check_source, first_records
from unmask.errors import ConfigError, DataError
from unmask.models.model_paths import check_model, near_path
from unmask.redaction import shell_line
from unmask.tasks import get_task

if TYPE_CHECKING:
    from unmask.evaluation.result_file import TaskScores


class EvaluateCommand(TyperCommand):
    """With `--rerun FILE` the file has all options: others are an error, and a model is not needed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, given = self.make_parser(ctx).parse_args(list(args))
        others = [
            param
            for param in given
            if param.name not in ("rerun", "accept_unsandboxed") and values.get(param.name) is not None
        ]
        if values.get("rerun") and others and not ctx.resilient_parsing:
            what, remedy = "is not read with --rerun, whose file has the options", "Leave it out"
            raise ConfigError(what, where=others[0].opts[0], remedy=remedy)
        return super().parse_args(ctx, args)


def is_result(path: Path) -> bool:
    """Whether a file is the result of an evaluation, or a part of one."""
    try:
        return {"arguments", "tasks"} <= json.loads(path.read_bytes()).keys()
    except (ValueError, AttributeError):
        return False


def rerun_and_exit(path: Path | None) -> None:
    """Show how the evaluation of a result file differs today; status 1 if its scores do."""
    if path is None:
        return
    if not path.is_file():
        raise DataError("no such file", where=str(path), remedy=near_path(path))
    from unmask.cli.evaluation import differences, import_harness, rerun

    scores, circumstances = differences(*rerun(path, import_harness))
    if scores:
        show_table(scores, title="what differs", head=["", "in the file", "now"])
    if circumstances:
        show_table(circumstances, title="under what", head=["", "in the file", "now"])
    typer.echo(f"{path}: the scores differ" if scores else f"{path}: the same scores and items")
    raise typer.Exit(1 if scores else 0)


@spread_configs
def evaluate(
    model: ModelConfig,
    evaluation: EvaluationConfig,
    sampler: SamplerConfig,
    accept_unsandboxed: Unsandboxed = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write the result to this file, as JSON; a killed evaluation continues."
        ),
    ] = None,
    overwrite: OverwriteFile = False,
    rerun: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=rerun_and_exit,
            help="Run a result file again, and say what differs; takes no other options.",
        ),
    ] = None,
) -> None:
    """Measure a model on tasks of Unmask or of lm-eval, or the likelihood of a text."""
    sources = list(filter(None, (*evaluation.sources.values(), evaluation.likelihood)))
    if output:
        inputs = [*sources, *filter(None, (model.path, evaluation.against, evaluation.judge))]
        remedy = "Choose another, or replace it with --overwrite"
        refuse_existing(output, remedy, overwrite=overwrite, inputs=inputs, own=is_result)
    for path in filter(None, (model.path, evaluation.against)):
        check_model(path)
    tasks = {name: get_task(name) for name in evaluation.tasks}
    for name, task in tasks.items():
        if task.needs_data and name not in evaluation.sources:
            task.generate("test", 0, seed=0)  # says that it generates none
    for source in sources:
        check_source(source)
    for name, source in evaluation.sources.items():
        with closing(first_records(source)) as records:
            next(tasks[name].rows(records), None)
    choose_threads(model.path)
    from unmask.cli.evaluation import Processes, import_harness, refuse_unread
    from unmask.cli.evaluation import evaluate as run_evaluation

    refuse_unread(evaluation, sampler)
    processes = Processes.of_launcher(model.device)
    if evaluation.against is not None:
        from unmask.cli.retention import measure_retention, model_against

        found = measure_retention(
            model_against(model, evaluation.against),
            model,
            evaluation,
            sampler,
            output,
            import_harness,
            processes,
            reuse=not overwrite,
            replace=overwrite,
        )
        if found is not None:
            show_retention(found, f"{model.path} against {evaluation.against}")
        return
    result = run_evaluation(model, evaluation, sampler, output, import_harness, processes, replace=overwrite)
    if evaluation.curve:
        show_curves(result.tasks, model.path)
    else:
        for scores in result.tasks:
            speed = result.times["tasks"][scores.task]["tokens_per_second"]
            show_scores(scores, f"{model.path}: {scores.task}", speed)
    if output:
        typer.echo(for_stdout(f"next: {shell_line(['unmask', 'report', str(output)])}"))


def show_scores(scores: TaskScores, title: str, tokens_per_second: float | None) -> None:
    """Print the metrics of a task, its statuses, and what an item cost."""
    from unmask.evaluation.curve import SPEEDS

    figures = {name: metric.shown(name) for name, metric in scores.metrics.items() if name not in SPEEDS}
    figures |= {f"items: {name}": f"{count:,}" for name, count in scores.statuses.items()}
    if scores.task == "likelihood":
        figures |= {name: str(scores.protocol[name]) for name in ("estimator", "documents", "tokens")}
    elif scores.total("passes"):
        figures |= {
            f"{name} per item": f"{scores.total(name) / len(scores.items):,.4g}"
            for name in ("tokens", "steps", "passes")
        }
        figures["tokens per second"] = "unknown" if tokens_per_second is None else f"{tokens_per_second:,.4g}"
    elif scores.protocol.get("log_likelihoods_are_lower_bounds"):
        figures["likelihoods"] = f"lower bounds, of {scores.protocol['samples']} views"
    show_table(figures.items(), title=title)


def show_curves(tasks: list[TaskScores], title: str) -> None:
    """Print the points of each task's curve, and the area under it."""
    from unmask.evaluation.comparison import labels
    from unmask.evaluation.curve import AUP, SPEEDS

    areas = {
        scores.protocol["task"]: f"{scores.metrics[AUP].mean:,.1f}"
        for scores in tasks
        if AUP in scores.metrics
    }
    for task in dict.fromkeys(scores.task for scores in tasks if AUP not in scores.metrics):
        points = [scores for scores in tasks if scores.task == task]
        rows = [
            [
                name.removeprefix(f"{task}, "),
                point.metrics["solved"].shown("solved"),
                *(f"{point.metrics[speed].mean:.4g}" for speed in SPEEDS),
                ", ".join(f"{count} {status}" for status, count in point.statuses.items()),
            ]
            for name, point in zip(labels(points), points, strict=True)
        ]
        show_table(
            rows,
            title=f"{title}: {task}, AUP {areas.get(task, 'unknown')}",
            head=["", "solved", *SPEEDS, "answers"],
        )
