"""A dry run: the estimated cost of a run, and two measured steps of every stage."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from unmask.cli.run import check_together, make_trainer, planned_arguments, training_arguments
from unmask.config.run import RunConfig
from unmask.console import Progress
from unmask.errors import ConfigError
from unmask.planning.blueprint import ModelSpec
from unmask.planning.estimates import StepEstimate
from unmask.planning.hardware import HardwareRecipe, StepEstimator
from unmask.training.config import Part, TrainingConfig
from unmask.training.hardware_checks import bounded_memory
from unmask.training.memory import memory_metrics
from unmask.training.sharding import launched, weight_sharding_setting

STEPS = 2


def estimate_run(config: RunConfig, args: TrainingConfig) -> StepEstimate | None:
    """The estimate of the run's training step on the machine of its `hardware` section (unset: this
    computer), for rows of `max_length` tokens; None: there is no formula for this verb.

    Raises:
        ConfigError: a step does not fit that machine.
    """
    if weight_sharding_setting(args) == "deepspeed":
        config = config.model_copy(update={"training": config.training | {"deepspeed": "zero3"}})
    blueprint = ModelSpec.read(config.model)
    work = args.workload(blueprint, config)
    if work is None:
        return None
    estimate = StepEstimator(blueprint, work).estimate(HardwareRecipe.of(config), work.batch)
    if config.hardware is not None and not estimate.fits:
        rows = args.per_device_train_batch_size
        what = (
            f"a step of {rows} rows needs {estimate.peak / 1e9:.3g} GB, but only "
            f"{estimate.limit / 1e9:.3g} may be used"
        )
        raise ConfigError(what, where="hardware", remedy=f"Use {estimate.advice}")
    return estimate


def dry_run(verb: str, config: RunConfig) -> list[dict[str, str]]:
    """Make two steps of every stage, in a temporary folder; of a run that is sharded over processes, where no
    launcher started them, none.

    Returns:
        A table row per stage: what it trains, its number of steps, and the predicted and measured time of a
        step; "-": unknown.

    Raises:
        UnmaskError: the errors that the run itself would raise before its third step.
    """
    if not launched() and (config.training.get("fsdp") or config.training.get("deepspeed")):
        args = planned_arguments(verb, config)
        check_together(config, args, planned=True)
        estimate, steps = estimate_run(config, args), args.max_steps if args.max_steps > 0 else None
        return [_row(part, args, estimate, None, steps) for part in args.parts()]
    args = training_arguments(verb, config)
    estimate, timer = estimate_run(config, args), StepTimes()
    with short_trainer(verb, config, args, STEPS, callbacks=[timer]) as trainer:
        steps, setup_seconds = trainer.planned_steps(args), trainer.setup_seconds(args)
        trainer.train()
    measured = timer.seconds[STEPS - 1 :: STEPS]
    return [
        _row(part, args, estimate, seconds, steps, setup_seconds)
        for part, seconds in zip(args.parts(), measured, strict=True)
    ]


@contextlib.contextmanager
def short_trainer(
    verb: str, config: RunConfig, args: TrainingConfig, steps: int, **rest: Any
) -> Iterator[Any]:
    """The run's trainer, with `steps` steps of every stage in a temporary folder; `rest` is passed to it."""
    display = Progress([(verb, 1.0)], stream=None if args.should_save else io.StringIO())
    memory = bounded_memory(config.hardware, args.device)
    with tempfile.TemporaryDirectory() as folder, memory, display, display.phase(verb) as phase:
        short_config = config.model_copy(
            update={"training": config.training | args.shortened(steps), "output_dir": folder}
        )
        short_args = training_arguments(verb, short_config)
        yield make_trainer(
            verb, short_config, short_args, **short_args.shortened_arguments(steps) | rest, progress=phase
        )


class StepTimes(TrainerCallback):
    """The seconds of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def _row(
    part: Part,
    args: TrainingConfig,
    estimate: StepEstimate | None,
    seconds: float | None,
    steps: int | None,
    setup_seconds: float = 0.0,
) -> dict[str, str]:
    """The row of a stage. `seconds` None: no step was made. `steps` of the run; None: unknown. The time of
    sampling is not predicted."""
    predicted = hours = None
    if estimate and estimate.seconds and not args.generates:
        predicted = estimate.seconds * args.gradient_accumulation_steps
    step_seconds = predicted if seconds is None else seconds
    if steps is not None and step_seconds is not None:
        hours = (setup_seconds + step_seconds * part.fraction * steps) / 3600
    return {
        **part.described,
        "steps": "-" if steps is None else f"{part.fraction * steps:,.0f}",
        "rate": f"{args.learning_rate * part.rate:.3g}",
        "predicted seconds a step": _shown(predicted),
        "seconds a step": _shown(seconds),
        "hours in all": _shown(hours),
        "predicted peak GB": _shown(None if estimate is None else estimate.peak / 1e9),
        "peak GB so far": _shown(None if seconds is None else memory_metrics(args.device)["memory_gb"]),
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
