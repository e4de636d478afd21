"""The whole pipeline on a small task: pretrain, convert, SFT, DPO and GRPO, an evaluation after each, and one
report.

Data and model are generated here, and the training is real. Some demonstrations contain mistakes, so that
preferences and rewards have something to improve (docs/demo.md).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unmask.artifacts import plain, read_file, write_atomic, write_manifest
from unmask.config.run import check_output_folder
from unmask.config.sampler import SamplerConfig
from unmask.console import Phase, Progress, for_stdout, show_line
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.data.characters import character_model
from unmask.data.decoding import token_texts
from unmask.errors import ConfigError, RunStopped, TrainingError
from unmask.evaluation.provenance import EVALUATION, write_result_of_run
from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.content import (
    Answer,
    Commands,
    Denoising,
    Notes,
    PageBlock,
    Problem,
    Record,
    Report,
    Section,
    Table,
    TableCell,
)
from unmask.evaluation.report.page import write_page
from unmask.evaluation.report.scores import Result, entries_by_task, in_words
from unmask.evaluation.report.sources import read_run
from unmask.evaluation.report.training import Run
from unmask.evaluation.result_file import read_result
from unmask.evaluation.tasks import evaluate_task
from unmask.generation.sampler import generate
from unmask.models.load import load
from unmask.models.model_paths import RUN_MANIFEST as MANIFEST
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.records import RowSequence
from unmask.redaction import shell_line
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.pretrain import PretrainConfig, PretrainTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.tasks import Puzzle, as_puzzle, get_task
from unmask.tasks.grids import GridPuzzle
from unmask.training.memory import peak_memory_bytes


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The sizes of data, model and training.

    Attributes:
        rows: number of training problems.
        test_rows: number of held-out problems; none shares its solution with a training problem.
        text_mistakes: fraction of the answers in the text that contain a mistake.
        mistakes: the same fraction in the demonstrations for SFT.
        empty: fewest and most empty cells of a puzzle of grids; None: the task's own.
        hidden, layers: width and depth of the model.
        batch: rows per step.
        supervised_rate, policy_rate: factors of the learning rates of pretraining, conversion and SFT, and of
            DPO and GRPO.
        pretrain, convert, sft, dpo, grpo: optimizer steps of each verb.
        seconds: duration of each verb on two cores, for the first estimate of the time left.
        remark: what the report and the summary say of the sizes.
    """

    rows: int = 20_000
    test_rows: int = 800
    text_mistakes: float = 0.5
    mistakes: float = 0.465
    empty: tuple[int, int] | None = None
    hidden: int = 128
    layers: int = 4
    batch: int = 128
    supervised_rate: float = 1.0
    policy_rate: float = 1.0
    pretrain: int = 280
    convert: int = 360
    sft: int = 140
    dpo: int = 30
    grpo: int = 45
    seconds: tuple[tuple[str, float], ...] = (
        ("pretrain", 70),
        ("convert", 120),
        ("sft", 36),
        ("dpo", 42),
        ("grpo", 70),
    )
    remark: str = ""


QUICK = DemoSettings(
    rows=4000,
    test_rows=200,
    empty=(2, 5),
    hidden=64,
    batch=32,
    supervised_rate=1.5,
    policy_rate=3.0,
    pretrain=280,
    convert=280,
    sft=120,
    dpo=12,
    grpo=8,
    seconds=(("pretrain", 10), ("convert", 15), ("sft", 7), ("dpo", 4), ("grpo", 6)),
    remark="This was the quick demo: a small model that has just begun to learn, on easy puzzles.",
)
"""Every stage in seconds: long enough that what each teaches is seen."""


class Stage(NamedTuple):
    """What the report says of a stage, and the page that explains it."""

    description: str
    sentence: str
    """With fields of `DemoSettings` in braces."""
    page: str


STAGES = {
    "pretrain": Stage(
        "causal, next token",
        (
            "A causal model learns to continue {rows:,} problems with answers, {text_mistakes:.1%} of them "
            "with a mistake"
        ),
        "docs/pretrain.md",
    ),
    "convert": Stage(
        "to bidirectional diffusion, three stages",
        "Conversion teaches it, on the same text, to fill in hidden tokens in any order",
        "docs/conversion.md",
    ),
    "sft": Stage(
        "on demonstrations", "SFT on demonstrations, {mistakes:.1%} of them with a mistake", "docs/sft.md"
    ),
    "dpo": Stage(
        "correct against corrupted answers",
        "DPO prefers right answers to corrupted ones",
        "docs/preferences.md",
    ),
    "grpo": Stage(
        "on the reward alone",
        "GRPO rewards the right parts of answers that the model samples; it is shown no answer",
        "docs/rl.md",
    ),
}
EXAMPLES = 1000
"""Rows of each kind of data that are kept as examples."""


class Demo:
    """State of the demonstration: the current model and the results so far.

    Args:
        target: a task, as `get_task` takes it.
        output: where the models and figures go.
        seed: of the data, the weights and the training.
        settings: the sizes.

    Raises:
        ConfigError: the task is unknown, generates too few problems or none, or lacks what a model is made
            from.
    """

    def __init__(self, target: str, output: Path, seed: int, settings: DemoSettings):
        self.target, self.output, self.seed, self.settings = target, output, seed, settings
        self.task = task = task_of(target, settings.empty)
        self.train = task.generate("train", settings.rows, seed)
        self.test = task.generate("test", settings.test_rows, seed + 1)
        self.text = answered(task, self.train, settings.text_mistakes, seed)
        self.demonstrations = answered(task, self.train, settings.mistakes, seed + 2)
        self.max_length = (
            max(len(row["prompt"]) for row in (*self.train, *self.test)) + task.max_completion + 1
        )
        context = max(128, self.max_length)
        self.lm = character_model(
            task.alphabet, hidden=settings.hidden, layers=settings.layers, context=context, seed=seed
        )
        self.runs: list[Run] = []

    def arguments(self, name: str, steps: int, rate: float, **more: Any) -> dict[str, Any]:
        """The TrainingArguments that all verbs share; `rate` is the learning rate of the full demo."""
        factor = self.settings.policy_rate if name in ("dpo", "grpo") else self.settings.supervised_rate
        return {
            "output_dir": str(self.output / name),
            "max_steps": steps,
            "learning_rate": rate * factor,
            "per_device_train_batch_size": self.settings.batch,
            "logging_steps": 5,
            "save_strategy": "no",
            "lr_scheduler_type": "cosine",
            "warmup_steps": min(50, steps // 5),
            "max_length": self.max_length,
            "seed": self.seed,
            "use_cpu": True,
            **more,
        }

    def run(self, name: str, description: str, progress: Progress, train: Callable[[Phase], None]) -> None:
        """Train with one verb, save the model and evaluate it, unless that was done before the demo was
        stopped."""
        if (self.output / name / EVALUATION).exists():
            self.lm = load(self.output / name)
        else:
            with progress.phase(name) as phase:
                train(phase)
                self.lm.save(self.output / name)
            with progress.phase(f"{name}: evaluate") as phase:
                result = evaluate_task(self.lm, self.task, self.test, progress=phase)
                phase.update(1.0, solved=result.metrics["solved"].mean)
            write_result_of_run(self.output / name, self.lm, self.output / name, result)
        self.runs.append(read_run(self.output / name, name, len(self.runs), description=description))

    def pretrain(self, phase: Phase) -> None:
        rows = [{"text": row["prompt"] + row["completion"]} for row in self.text]
        args = PretrainConfig(**self.arguments("pretrain", self.settings.pretrain, 2e-3, packing=False))
        PretrainTrainer(self.lm, args, train_dataset=rows, progress=phase).train()

    def convert(self, phase: Phase) -> None:
        args = ConvertConfig(
            **self.arguments("convert", self.settings.convert, 2e-3, canvas_length=self.task.max_completion)
        )
        trainer = ConvertTrainer(self.lm, args, train_dataset=self.text, progress=phase)
        trainer.train()
        self.lm = trainer.lm

    def sft(self, phase: Phase) -> None:
        args = SFTConfig(
            **self.arguments("sft", self.settings.sft, 1e-3, canvas_length=self.task.max_completion)
        )
        SFTTrainer(self.lm, args, train_dataset=self.demonstrations, progress=phase).train()

    def preferences(self, count: int) -> RowSequence:
        """The first `count` training problems, each with its right answer and a corrupted one."""
        rng = random.Random(self.seed + 3)
        rows = self.train[:count]
        return [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": self.task.corrupt(row, rng)}
            for row in rows
        ]

    def write_data(self, folder: Path) -> None:
        """RowSequence of the data of each verb, as files in its format."""
        pairs = [
            {"prompt": row["prompt"], "completion": row["completion"]}
            for row in self.demonstrations[:EXAMPLES]
        ]
        text = [{"text": row["prompt"] + row["completion"]} for row in self.text[:EXAMPLES]]
        for name, rows in {"text": text, "pairs": pairs, "preferences": self.preferences(EXAMPLES)}.items():
            write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def dpo(self, phase: Phase) -> None:
        pairs = self.preferences(self.settings.dpo * self.settings.batch // 4)
        arguments = self.arguments("dpo", self.settings.dpo, 1e-5, canvas_length=self.task.max_completion)
        arguments |= {"per_device_train_batch_size": self.settings.batch // 4, "beta": 0.2}
        DPOTrainer(self.lm, args=DPOConfig(**arguments), train_dataset=pairs, progress=phase).train()

    def grpo(self, phase: Phase) -> None:
        args = GRPOConfig(
            **self.arguments(
                "grpo", self.settings.grpo, 5e-5, logging_steps=1, lr_scheduler_type="constant_with_warmup"
            )
            | {"per_device_train_batch_size": 256},
            max_completion_length=self.task.max_completion,
            steps=min(6, self.task.max_completion),
            prompt_mask_rate=0.0,
        )
        GRPOTrainer(self.lm, self.task.rewards("partial"), args, self.train, progress=phase).train()

    def denoising(self) -> PageBlock:
        """How one held-out problem is denoised, token by token: a grid for Sudoku, else a text."""
        row = self.test[0]
        sampler = SamplerConfig(max_new_tokens=self.task.max_completion, trace=True)
        made = generate(self.lm, [row["prompt"]], sampler)
        trace = made.trace[0]  # type: ignore[index]
        puzzle = row["puzzle"] if isinstance(self.task, GridPuzzle) else None
        length = len(puzzle) if puzzle else self.task.max_completion
        cells = [
            text or "␄" for text in token_texts(self.lm.tokenizer, made.prompts[0], trace.canvas[:length])
        ]
        if not puzzle:
            answer = Answer(
                name=self.runs[-1].name, color=self.runs[-1].color, tokens=cells, steps=trace.steps[:length]
            )
            return Problem(title=self.task.name, prompt=row["prompt"], answers=[answer])
        frames: list[list[str]] = [[""] * length]
        revealed: list[dict[int, float]] = [{}]
        for step in range(max(trace.steps) + 1):
            new = {
                i: float(torch.tensor(trace.log_probs[i]).exp())
                for i in range(length)
                if trace.steps[i] == step
            }
            if new:
                frames.append(
                    [
                        cell if i in new else old
                        for i, (cell, old) in enumerate(zip(cells, frames[-1], strict=True))
                    ]
                )
                revealed.append(new)
        clues = frozenset(i for i, cell in enumerate(puzzle) if cell != "0")
        return Denoising(
            prompt=row["prompt"], frames=frames, revealed=revealed, columns=math.isqrt(length), clues=clues
        )


def run_demo(
    *,
    task: str = "sudoku",
    output: str | Path = "runs/demo",
    seed: int = 0,
    overwrite: bool = False,
    settings: DemoSettings | None = None,
) -> Report:
    """Run the demonstration and write `report.html`, models, figures and examples of data under `output`.
    Print a short summary.

    A demo that was stopped continues with the stage that it was in.

    Raises:
        ConfigError: the task cannot be demonstrated, or `output` cannot be written to.
        TrainingError: the folder is not empty and `overwrite` is not given, or holds files that are not a
            demo's.
        RunStopped: Ctrl-C has ended the demo.
    """
    output = Path(output)
    settings = settings or DemoSettings()
    wanted = {"task": task, "seed": seed, "settings": plain(vars(settings))}
    earlier = earlier_demo(output)
    if overwrite or earlier != (wanted, "running"):
        check_output_folder(output, overwrite=overwrite)
        refuse_other_files(output, earlier)
        for name in STAGES:  # what a later stage, or a demo that continues, would read
            for path in (output / name / EVALUATION, *(output / name).glob("*.safetensors")):
                path.unlink(missing_ok=True)
    demo = Demo(task, output, seed, settings)
    write_manifest(output / MANIFEST, wanted, state="running")
    demo.write_data(output / "data")
    phases = [
        phase
        for name, seconds in settings.seconds
        for phase in ((name, seconds), (f"{name}: evaluate", 7 * settings.test_rows / 800))
    ]
    with Progress(phases) as progress:
        for name, stage in STAGES.items():
            try:
                demo.run(name, stage.description, progress, getattr(demo, name))
            except KeyboardInterrupt as error:
                options = [
                    "--task",
                    task,
                    "--output",
                    str(output),
                    "--seed",
                    str(seed),
                    *(["--quick"] if settings == QUICK else []),
                ]
                command = ["unmask", "demo", *options]
                raise RunStopped(
                    f"stopped in {name}. Continue with {shell_line(command)}", code=130
                ) from error
    manifest = write_manifest(output / MANIFEST, wanted, state="finished")
    report = report_of(demo, manifest)
    write_page(report, output / "report.html")
    for line in summary(demo):
        show_line(for_stdout(line))
    return report


def earlier_demo(output: Path) -> tuple[dict[str, Any], str] | None:
    """The settings and the state of the demo whose folder this is; None: it is no demo's."""
    try:
        found = json.loads(read_file(output / MANIFEST))
        return (
            (found["config"], found["state"])
            if found["config"].keys() == {"task", "seed", "settings"}
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def refuse_other_files(output: Path, earlier: object) -> None:
    """Raise TrainingError if the folder holds what the demo writes, and no demo has written it."""
    found = [name for name in (*STAGES, "data", MANIFEST, "report.html") if (output / name).exists()]
    if found and earlier is None:
        raise TrainingError(
            f"holds a {found[0]} that no demo has written",
            where=str(output),
            remedy="Choose another output folder",
        )


def results_of(demo: Demo) -> list[Result]:
    """The evaluation of each stage that has run."""
    return [
        Result(run.name, run.color, read_result(demo.output / run.name / "evaluation.json"))
        for run in demo.runs
    ]


def report_of(demo: Demo, manifest: Mapping[str, Any]) -> Report:
    """The report of a finished demonstration."""
    settings, results = demo.settings, results_of(demo)
    notes = Notes(lines=[f"Peak memory {peak_memory_bytes() / 1e9:.1f} GB."])
    report = make_report(
        title=f"Unmask: the whole pipeline on {demo.task.name}",
        subtitle=(
            f"{len(demo.test)} held-out problems, whose solutions are not in the training data. "
            f"{settings.remark}"
        ).strip(),
        entries=[run.name for run in demo.runs],
        runs=demo.runs,
        results=results,
        more=[Section(title="One answer, step by step", blocks=[demo.denoising()])],
        last=[notes, Record(title="The demo", values=manifest)],
    )
    return replace(report, sections=[what_happened(settings, results), *report.sections, what_next(demo)])


def what_happened(settings: DemoSettings, results: Sequence[Result]) -> Section:
    """A sentence for each stage, with its figures, and the page that explains it."""
    [entries] = entries_by_task(results).values()
    rows = []
    for entry, figures in zip(entries, in_words(entries), strict=True):
        stage = STAGES[entry.model]
        sentence = f"{stage.sentence.format(**vars(settings))}: {figures}."
        rows.append(
            [
                TableCell(text=entry.model, color=entry.color),
                TableCell(text=sentence),
                TableCell(text=stage.page),
            ]
        )
    intro = "The pages are in the folder docs of Unmask's source; docs/demo.md explains the whole."
    table = Table(
        caption="What each stage did", header=["Stage", "What it did", "Explained in"], groups=[("", rows)]
    )
    return Section(title="What happened", blocks=[table], intro=intro)


def what_next(demo: Demo) -> Section:
    """The commands to type next."""
    intro = (
        "With the demo's own models and examples of its data, in a minute or two each. To use yours, "
        "replace --model by a causal model (a "
        "folder or a name on the hub) and --data by a file of the same format, and leave max_steps out."
    )
    more = (
        "docs/data.md has all formats, docs/configuration.md all settings, docs/evaluation.md how to "
        "measure your model."
    )
    return Section(
        title="What to type next",
        blocks=[Commands(lines=next_commands(demo)), Notes(lines=[more])],
        intro=intro,
    )


def next_commands(demo: Demo) -> list[tuple[str, str]]:
    """Commands that can be given now, each with what it does: on the demo's models and data, into folders
    beside it."""
    words = (demo.output, demo.output.parent, demo.test[0]["prompt"], demo.target)
    made, beside, prompt, task = (shell_line([str(word)]) for word in words)
    length, short = demo.task.max_completion, "training.max_steps=50"
    few = (
        f"data.max_rows={min(EXAMPLES, len(demo.train))} training.max_completion_length={length} "
        "training.max_steps=5"
    )
    return [
        (
            f"unmask generate {made}/grpo --prompt {prompt} --max-new-tokens {length}",
            "let the demo's last model answer",
        ),
        (
            (
                f"unmask convert --model {made}/pretrain --data {made}/data/text.jsonl --output "
                f"{beside}/my-convert {short}"
            ),
            "causal to diffusion",
        ),
        (
            (
                f"unmask sft --model {beside}/my-convert/model --data {made}/data/pairs.jsonl --output "
                f"{beside}/my-sft {short}"
            ),
            "answers to prompts",
        ),
        (
            (
                f"unmask dpo --model {beside}/my-sft/model --data {made}/data/preferences.jsonl --output "
                f"{beside}/my-dpo {short}"
            ),
            "preferences",
        ),
        (
            f"unmask grpo --model {beside}/my-dpo/model --task {task} --output {beside}/my-grpo {few}",
            "rewards of a task",
        ),
    ]


def summary(demo: Demo) -> list[str]:
    """Where the report is, the score, and the next command."""
    first, *_, last = (
        result.content.tasks[0].metrics["solved"].shown("solved") for result in results_of(demo)
    )
    remark = [f"note:   {demo.settings.remark}"] if demo.settings.remark else []
    return [
        f"report: {demo.output / 'report.html'}",
        f"score:  {last} of {len(demo.test)} held-out problems solved",
        f"before: {first}, by the causal model that was converted",
        *remark,
        f"next:   {next_commands(demo)[0][0]}",
    ]


def task_of(target: str, empty: tuple[int, int] | None) -> Puzzle:
    """The task to demonstrate; a grid with `empty` cells. ConfigError if no model of its characters can be
    made."""
    task = as_puzzle(get_task(target))
    if empty and isinstance(task, GridPuzzle):
        task.min_empty, task.max_empty = empty
    if missing := [name for name in ("alphabet", "max_completion") if not getattr(task, name, None)]:
        remedy = "Define them (docs/tasks.md has an example)"
        raise ConfigError(
            f"lacks {', '.join(missing)}, which the demo's model is made from", where=target, remedy=remedy
        )
    return task


def answered(task: Puzzle, rows: RowSequence, mistakes: float, seed: int) -> RowSequence:
    """The rows with demonstrated answers, of which the fraction `mistakes` is wrong."""
    rng = random.Random(seed)
    return [{**row, "completion": task.demonstrate(row, rng, mistakes)} for row in rows]
