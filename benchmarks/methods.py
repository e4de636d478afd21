"""Reinforcement learning from one start: each method compared with the same number of supervised updates.

    python -m benchmarks.methods starts/            # makes the starts where they are missing, then every
    method and seed; resumes python -m benchmarks.methods starts/ --compare temperature      # settings of one
    method: see COMPARISONS

The start is the demo's, trained for longer: a small model pre-trained, converted and fine-tuned on
demonstrations with mistakes. All runs make the same number of updates on the same number of completions
(supervised training: rows). The figure is the fraction of held-out puzzles that are solved greedily.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import heading
from unmask.artifacts import write_atomic
from unmask.console import Progress
from unmask.demo import Demo, DemoSettings
from unmask.evaluation.tasks import evaluate_task
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.rewards.verdict import MALFORMED, Verdict
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.tasks import Puzzle
from unmask.tasks.base import Row
from unmask.tasks.countdown import Countdown
from unmask.tasks.sudoku import Sudoku


class ShortSudoku(Sudoku):
    """4x4 Sudoku whose answers are only the empty cells: 6 to 11 digits."""

    max_completion = 12

    def posing(self, puzzle: str, solution: str) -> Row:
        return super().posing(puzzle, solution) | {"completion": self.of_empty(puzzle, solution)}

    @staticmethod
    def of_empty(puzzle: str, grid: str) -> str:
        return "".join(digit for clue, digit in zip(puzzle, grid, strict=True) if clue == "0")

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        return self.of_empty(
            row["puzzle"], super().demonstrate({**row, "completion": row["solution"]}, rng, mistake_rate)
        )

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        if len(completion) != row["puzzle"].count("0"):
            return MALFORMED
        digits = iter(completion)
        return super().verify("".join(next(digits) if clue == "0" else clue for clue in row["puzzle"]), row)


METHODS: dict[str, dict[str, Any]] = {
    "sft": {},
    "diffu-grpo": {"prompt_mask_rate": 0.0},
    "wd1": {"prompt_mask_rate": 0.0},
    "spg": {"eubo_beta": 1.0, "prompt_mask_rate": 0.0},
    "espo": {"samples": 2},
    "cj-grpo": {},
    "trace-rl": {},
}
"""With what differs from a method's own settings."""
SCORED = {
    f"{method}, T 0.3, scored at {scored:g}": {
        "method": method,
        **METHODS[method],
        "temperature": 0.3,
        "logprob_temperature": scored,
    }
    for method in ("diffu-grpo", "cj-grpo")
    for scored in (0.3, 1.0)
}
BEYOND = {
    f"{method}, {end}": {"method": method, **METHODS.get(method, {}), "after_eos": end, "stop_at_eos": False}
    for method, ends in {
        "coupled-grpo": ("mask", "noise", "train"),
        "cj-grpo": ("mask", "train"),
        "espo": ("mask", "train"),
    }.items()
    for end in ends
}
COMPARISONS: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    "methods": {
        "sudoku": METHODS,
        "countdown": {name: METHODS[name] for name in ("sft", "diffu-grpo", "cj-grpo")},
    },
    "temperature": {"sudoku": SCORED, "short-sudoku": SCORED},
    "ratio": {
        "sudoku": {
            f"gdpo, {ratio}": {"method": "gdpo", "ratio": ratio, "num_iterations": 4}
            for ratio in ("sequence", "product")
        }
    },
    "beyond": {"short-sudoku": BEYOND, "countdown": BEYOND},
}
"""What is compared, by task: contenders with their settings, `method` where it is not their name."""
TASKS: dict[str, Puzzle] = {
    "sudoku": Sudoku(),
    "short-sudoku": ShortSudoku(),
    "countdown": Countdown(max_number=12, max_target=50),
}
"""Countdown with numbers that so small a model can learn to reckon with."""
START = DemoSettings(text_mistakes=0.4, mistakes=0.46, pretrain=400, convert=900)
"""The demo's, trained for longer, on text with fewer mistakes."""
STARTS = {"sudoku": START, "short-sudoku": START, "countdown": replace(START, rows=10_000)}
COMPLETIONS, GROUP = 256, 8


def make_start(task: str, folder: Path, seed: int = 0) -> None:
    """Pre-train, convert and fine-tune the demo's model."""
    demo = Demo(TASKS[task], folder, seed, STARTS[task])
    with Progress([("pretrain", 70.0), ("convert", 120.0), ("sft", 36.0)]) as progress:
        for name in ("pretrain", "convert", "sft"):
            with progress.phase(name) as phase:
                getattr(demo, name)(phase)
    demo.lm.save(folder / "model")


def shared(folder: Path, updates: int, seed: int, rate: float) -> dict[str, Any]:
    """The training arguments of every run."""
    return {
        "output_dir": str(folder),
        "max_steps": updates,
        "per_device_train_batch_size": COMPLETIONS,
        "learning_rate": rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": seed,
        "use_cpu": True,
        "disable_tqdm": True,
    }


def train(
    settings: dict[str, Any], lm: DiffusionLM, demo: Demo, folder: Path, updates: int, seed: int, rate: float
) -> list[dict[str, float]]:
    """Make one run; its log."""
    task = demo.task
    arguments = shared(folder, updates, seed, rate)
    if settings["method"] == "sft":
        args: Any = SFTConfig(**arguments, canvas_length=task.max_completion, max_length=128)
        trainer: Any = SFTTrainer(lm, args, train_dataset=demo.demonstrations)
    else:
        shape = {"num_generations": GROUP, "max_completion_length": task.max_completion, "steps": 6}
        args = GRPOConfig(**arguments, **shape | settings)
        trainer = GRPOTrainer(lm, task.rewards("partial"), args, demo.train)
    trainer.train()
    return trainer.state.log_history


def run(
    task: str, name: str, settings: dict[str, Any], seed: int, start: Path, updates: int, rate: float
) -> dict[str, Any]:
    """Train a contender from the start, and measure; `start` itself is only measured."""
    demo = Demo(TASKS[task], start, 0, STARTS[task])
    lm = load(start / "model")
    began = time.monotonic()
    folder = start / f"{name.replace(' ', '-')}-{seed}"
    log = [] if name == "start" else train({"method": name} | settings, lm, demo, folder, updates, seed, rate)
    seconds = time.monotonic() - began
    result = evaluate_task(lm, demo.task, demo.test)
    rewards = [line["reward"] for line in log if "reward" in line]
    return {
        "task": task,
        "method": name,
        "seed": seed,
        "updates": updates,
        "rate": rate,
        **{name: round(result.metrics[name].mean, 4) for name in ("solved", "value")},
        "rewards": [round(sum(part) / len(part), 4) for part in (rewards[:5], rewards[-5:]) if part],
        "seconds": round(seconds, 1),
    }


STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Of a 95% interval of the mean of so many runs, in standard errors."""


def interval(values: list[float]) -> str:
    """The mean, with the half width of its 95% interval (Student's t)."""
    runs = len(values)
    return f"{statistics.fmean(values):.1f}" + (
        f" ± {STUDENT[runs] * statistics.stdev(values) / runs**0.5:.1f}" if runs in STUDENT else ""
    )


def show(lines: list[dict[str, Any]]) -> None:
    """Print a table of means over seeds, and of paired differences to supervised training with the same
    seed."""
    for task in dict.fromkeys(line["task"] for line in lines):
        solved: dict[str, dict[int, float]] = {}
        for line in lines:
            if line["task"] == task:
                solved.setdefault(line["method"], {})[line["seed"]] = 100 * line["solved"]
        supervised = solved.get("sft", {})
        print(f"\n{task}: solved %, mean over seeds; each seed; ahead of sft")
        for method, by_seed in solved.items():
            ahead = [value - supervised[seed] for seed, value in by_seed.items() if seed in supervised]
            each = ", ".join(f"{value:.1f}" for value in by_seed.values())
            print(
                f"  {method:32} {interval([*by_seed.values()]):12} {each:18} "
                f"{interval(ahead) if ahead else ''}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", choices=list(COMPARISONS), default="methods")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--starts", action="store_true", help="make the starts alone")
    options = parser.parse_args()
    results = options.folder / "results.jsonl"
    contenders = {
        task: COMPARISONS[options.compare][task] for task in options.tasks or COMPARISONS[options.compare]
    }
    for task in contenders:
        if not (options.folder / task / "model").exists():
            make_start(task, options.folder / task)
    if options.starts:
        return
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for seed in range(options.seeds):
        for task, settings in contenders.items():
            for name in ["start", *(options.methods or settings)]:
                key = {
                    "task": task,
                    "method": name,
                    "seed": seed,
                    "updates": options.updates,
                    "rate": options.rate,
                }
                if any(key.items() <= line.items() for line in done) or (name == "start" and seed > 0):
                    continue
                own = settings.get(name, {})
                done.append(run(task, name, own, seed, options.folder / task, options.updates, options.rate))
                print(json.dumps(done[-1]), flush=True)
                write_atomic(results, "".join(json.dumps(line) + "\n" for line in done))
    print(heading())
    shown = [{"start", *(options.methods or settings)} for settings in contenders.values()]
    wanted = {(task, name) for task, names in zip(contenders, shown, strict=True) for name in names}
    done = [line for line in done if (line["task"], line["method"]) in wanted]
    show([line for line in done if line["updates"] == options.updates and line["rate"] == options.rate])


if __name__ == "__main__":
    main()
