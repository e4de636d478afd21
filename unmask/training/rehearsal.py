"""A run before it is paid for: what it will take by formula, and two steps of every stage, really made."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from unmask.config import RunConfig
from unmask.diffusion.score import passes
from unmask.errors import ConfigError
from unmask.models.blueprint import Blueprint
from unmask.models.planning import Plan, Workload
from unmask.monitor import Progress
from unmask.training.convert import ConvertConfig
from unmask.training.dpo import DPOTrainer, plans
from unmask.training.dpo_config import WIDEST_EXACT, DPOConfig
from unmask.training.memory import memory_metrics
from unmask.training.presets import Planner, Preset
from unmask.training.run import make_trainer, training_arguments
from unmask.training.stage_config import StageConfig, rows_per_step, total_steps
from unmask.training.stages import stage_ends

STEPS = 2
PLANNED = ("pretrain", "convert", "sft", "dpo")
"""The verbs whose step is made of passes over a batch of rows alone; grpo also generates."""


def plan_run(verb: str, config: RunConfig, args: StageConfig) -> Plan | None:
    """The plan of the run's training step on the machine that its `hardware` section describes (unset: this computer); None for a
    verb that has no formula. Rows are taken to be `max_length` long.

    Raises:
        ConfigError: it does not fit that machine.
    """
    if verb not in PLANNED:
        return None
    blueprint = Blueprint.read(config.model)
    attention = "causal" if verb == "pretrain" else args.attention if isinstance(args, ConvertConfig) else config.model.attention
    copies = 2 if isinstance(args, ConvertConfig) and args.complementary else getattr(args, "views", 1)
    length = min(args.max_length, blueprint.context or args.max_length)
    rank = config.lora.r if config.lora else None
    work = blueprint.workload(attention, length, copies, rank, quantization=config.model.quantization)
    teacher = isinstance(args, ConvertConfig) and bool(args.distillation or args.alignment)
    work = replace(work, batch=args.per_device_train_batch_size, teacher=teacher)
    if isinstance(args, DPOConfig):
        work = preference_workload(work, args, blueprint)
    plan = Planner(blueprint, work).plan(Preset.of(config), work.batch)
    if config.hardware is not None and not plan.fits:
        rows = args.per_device_train_batch_size
        what = f"a step of {rows} rows needs {plan.peak / 1e9:.3g} GB, but only {plan.limit / 1e9:.3g} may be used"
        raise ConfigError(what, where="hardware", remedy=f"Use {plan.advice}")
    return plan


def preference_workload(work: Workload, args: DPOConfig, blueprint: Blueprint) -> Workload:
    """The largest pass of a step of `dpo`, and how many there are: chosen and rejected response stand in one row, and each view is gone
    through by itself, once for the loss and once for its gradient. Where the reference is not stored, it scores every view too; KTO's
    baseline scores as many other responses."""
    block = (work.attention == "block_causal" and blueprint.pattern(work.attention)["block_size"]) or None
    exact = args.bound == "exact" or (args.bound is None and (work.attention == "causal" or (block or math.inf) <= WIDEST_EXACT))
    views = 1 if work.attention == "causal" else 2**block - 1 if exact and block else args.samples
    pattern: Any = work  # of a model the passes read nothing else
    made = list(passes(pattern, work.batch, views, args.score_chunk or work.batch))
    rows, copies = made[0]
    paired, compared = args.loss_type != "kto", args.needs_reference and args.reference != "stored"
    scorings = (len(made) if len(made) > 1 else 0) + compared * len(made)
    return replace(
        work,
        batch=min(work.batch, rows.stop),
        copies=copies.stop,
        sequence_length=work.sequence_length * (2 if paired else 1),
        documents=2 if paired else 1,
        reference=compared and args.reference == "frozen",
        passes=len(made),
        scorings=scorings if paired else scorings + (1 + compared) * len(made),
    )


def rehearse(verb: str, config: RunConfig) -> list[dict[str, str]]:
    """Make two steps of every stage, in a folder that is removed again.

    Returns:
        A line of a table per stage: what it trains, its share of the steps, and what a step was predicted to take and took.

    Raises:
        UnmaskError: all that the run itself would raise before its third step.
    """
    args = training_arguments(verb, config)
    plan = plan_run(verb, config, args)
    watch, scoring = Watch(), 0.0
    display = Progress([(verb, 1.0)], stream=None if args.should_save else io.StringIO())
    with display, display.stage(verb) as stage, short_trainer(verb, config, args, STEPS, callbacks=[watch], progress=stage) as trainer:
        if isinstance(args, ConvertConfig):
            steps = total_steps(args, trainer.train_rows)
            stage_ends(args.stages, steps)  # those of the run itself
        elif isinstance(trainer, DPOTrainer):
            rows = range(trainer.rows_given)
            steps = total_steps(args, rows)
            scoring = trainer.scoring_seconds * len(rows) / len(trainer.train_dataset) * plans(args, rows, exact=trainer.exact)
        else:
            steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
        trainer.train()
    return [_line(number, args, plan, seconds, steps, scoring) for number, seconds in enumerate(watch.seconds[STEPS - 1 :: STEPS])]


@contextlib.contextmanager
def short_trainer(verb: str, config: RunConfig, args: StageConfig, steps: int, **rest: Any) -> Iterator[Any]:
    """The run's trainer, set to make so many steps of every stage in a folder that is removed again; `rest` goes to it."""
    count = len(args.stages) if isinstance(args, ConvertConfig) else 1
    short: dict[str, Any] = {"max_steps": steps * count, "save_strategy": "no", "eval_strategy": "no", "logging_steps": 1}
    short |= {"report_to": "none", "logging_dir": None}
    if isinstance(args, DPOConfig):
        short |= {"judge": None, "log_variance_steps": 0}
    if isinstance(args, ConvertConfig):
        short["stages"] = [stage.model_copy(update={"share": 1.0}).model_dump() for stage in args.stages]
    with tempfile.TemporaryDirectory() as folder:
        training = config.training | short
        if "warmup_steps" in training:
            training["warmup_steps"] = 0
        shortened = config.model_copy(update={"training": training, "output_dir": folder})
        made = training_arguments(verb, shortened)
        if isinstance(made, DPOConfig):
            rest.setdefault("rehearsed", steps * rows_per_step(made))
        yield make_trainer(verb, shortened, made, **rest)


class Watch(TrainerCallback):
    """The seconds of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def _line(number: int, args: StageConfig, plan: Plan | None, seconds: float, steps: int, before: float) -> dict[str, str]:
    line: dict[str, str] = {}
    share, rate = 1.0, 1.0
    if isinstance(args, ConvertConfig):
        stage = args.stages[number]
        share, rate = stage.share / sum(other.share for other in args.stages), stage.rate
        size = stage.block_size or (args.block_size if stage.attention in (None, args.attention) else None)
        line |= {"attention": f"{stage.attention or args.attention} {size or ''}".strip()}
        line |= {"trains": stage.train if isinstance(stage.train, str) else ", ".join(stage.train)}
    micro_batches = args.gradient_accumulation_steps
    predicted = plan.seconds * micro_batches if plan and plan.seconds else None
    return line | {
        "steps": f"{share * steps:,.0f}",
        "rate": f"{args.learning_rate * rate:.3g}",
        "predicted seconds a step": "-" if predicted is None else f"{predicted:.3g}",
        "seconds a step": f"{seconds:.3g}",
        "hours in all": f"{(before + seconds * share * steps) / 3600:.3g}",
        "predicted peak GB": "-" if plan is None else f"{plan.peak / 1e9:.3g}",
        "peak GB so far": f"{memory_metrics(args.device)['memory_gb']:.3g}",
    }
