"""`unmask inspect`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from unmask.cli.options import AsJson
from unmask.config.layers import check_hardware
from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig
from unmask.console import for_stdout, show_table
from unmask.models.model_paths import check_model
from unmask.redaction import shell_line


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
    as_json: AsJson = False,
) -> None:
    """Describe a model, what conversion would change, and what training takes on each machine.

    That is the memory and time of a training step, the time of a pass of generation, and what bounds both.
    The weights are not read."""
    check_model(model.path, weights=False)
    for name in {*(hardware or [])} - {"all"}:
        check_hardware(name)
    from unmask.planning.blueprint import ModelSpec
    from unmask.planning.hardware import GENERATION_BATCHES, MEASURED_ROWS, StepEstimator, recipes_to_show
    from unmask.planning.step_time import BOUNDS

    recipes = recipes_to_show(
        hardware or [],
        max_memory_gb=max_memory_gb,
        dtype=None if model.dtype == "auto" else model.dtype,  # None: as in the recipe
        device_map=model.device_map,
    )
    blueprint = ModelSpec.read(model)
    work = blueprint.workload(
        model.attention, sequence_length, copies, lora_rank, quantization=model.quantization, canvases=1
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
        found = {
            "model": model.path,
            "facts": facts,
            "conversion": changes,
            "plans": {name: estimate.to_dict() for name, estimate in estimates.items()},
            "generation": {
                name: {batch: time.to_dict() for batch, time in times.items()}
                for name, times in generation.items()
            },
            "measured": measured,
        }
        typer.echo(json.dumps(found))
        return
    show_table(facts.items(), title=model.path)
    if changes:
        show_table(changes.items(), title="what conversion would change")
    lines = [estimate.describe(name) for name, estimate in estimates.items()]
    title = f"a training step: {estimator.work.describe()}"
    show_table([line.values() for line in lines], title=title, head=lines[0])
    if generation:
        tokens = f"{estimator.work.sequence_length} tokens, bfloat16 weights"
        tokens += ", temperature 0" if estimator.work.noise != "uniform" else ""
        show_table(
            [[name, *(time.describe() for time in times.values())] for name, times in generation.items()],
            title=f"ms of a pass of generation, by batch: {tokens}",
            head=["hardware", *map(str, GENERATION_BATCHES)],
        )
    bounds = {estimate.bound for estimate in estimates.values()}
    bounds |= {time.bound for times in generation.values() for time in times.values()}
    helps = [(bound, words) for bound, words in BOUNDS.items() if bound in bounds]
    show_table(helps, title="what bounds them, and what helps")
    for name, figures in measured.items():
        show_table([(key, f"{value:,.4g}") for key, value in figures.items()], title=f"measured: {name}")
    if facts["attention"] == "causal":
        words = ["unmask", "convert", "--model", model.path, "--data", "TEXT.txt", "--recipe", "block"]
        typer.echo(for_stdout(f"next: {shell_line([*words, '--output', 'runs/convert'])} --dry-run"))
