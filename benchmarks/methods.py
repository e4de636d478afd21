"""Reinforcement learning from one start: does each method get further than as many updates of supervised training?

    python -m benchmarks.methods starts/            # makes the starts where they are missing, then every method and seed; resumes

The start is the demo's, trained for longer: a small model pre-trained, converted and fine-tuned on demonstrations that hold
mistakes. Each run makes the same number of updates from there on as many completions (or, of supervised training, rows); what is
compared is the share of held-out puzzles that are solved greedily.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import heading
from unmask.demo import Demo, DemoSettings
from unmask.evaluation.tasks import evaluate_task
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.monitor import Progress, write_atomic
from unmask.tasks import Puzzle
from unmask.tasks.countdown import Countdown
from unmask.tasks.sudoku import Sudoku
from unmask.training.grpo import GRPOTrainer
from unmask.training.grpo_config import GRPOConfig
from unmask.training.sft import SFTConfig, SFTTrainer

METHODS = {
    "sudoku": ["sft", "diffu-grpo", "wd1", "spg", "espo", "cj-grpo", "trace-rl"],
    "countdown": ["sft", "diffu-grpo", "cj-grpo"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "diffu-grpo": {"prompt_mask_rate": 0.0},
    "wd1": {"prompt_mask_rate": 0.0},
    "spg": {"eubo_beta": 1.0, "prompt_mask_rate": 0.0},
    "espo": {"samples": 2},
}
"""What differs from a method's own settings."""
TASKS: dict[str, Puzzle] = {"sudoku": Sudoku(), "countdown": Countdown(max_number=12, max_target=50)}
"""Countdown with numbers that so small a model can learn to reckon with."""
START = {
    "sudoku": DemoSettings(pretrain=400, convert=900),
    "countdown": DemoSettings(pretrain=400, convert=900, rows=10_000),
}
"""The demo's, trained for longer."""
COMPLETIONS, GROUP = 256, 8


def make_start(task: str, folder: Path, seed: int = 0) -> None:
    """Pre-train, convert and fine-tune the demo's model."""
    demo = Demo(TASKS[task], folder, seed, START[task])
    with Progress([("pretrain", 70.0), ("convert", 120.0), ("sft", 36.0)]) as progress:
        for name in ("pretrain", "convert", "sft"):
            with progress.stage(name) as stage:
                getattr(demo, name)(stage)
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


def train(method: str, lm: DiffusionLM, demo: Demo, folder: Path, updates: int, seed: int, rate: float) -> list[dict[str, float]]:
    """One run; the log of it."""
    task = demo.task
    arguments = shared(folder, updates, seed, rate)
    if method == "sft":
        args: Any = SFTConfig(**arguments, canvas_length=task.max_completion, max_length=128)
        trainer: Any = SFTTrainer(lm, args, demo.demonstrations)
    else:
        own = {"num_generations": GROUP, "max_completion_length": task.max_completion, "steps": 6} | SETTINGS.get(method, {})
        args = GRPOConfig(**arguments, method=method, **own)
        trainer = GRPOTrainer(lm, task.rewards("partial"), args, demo.train)
    trainer.train()
    return trainer.state.log_history


def run(task: str, method: str, seed: int, start: Path, updates: int, rate: float) -> dict[str, Any]:
    """Train from the start, and measure."""
    demo = Demo(TASKS[task], start, 0, START[task])
    lm = load(start / "model")
    began = time.monotonic()
    log = [] if method == "start" else train(method, lm, demo, start / f"{method}-{seed}", updates, seed, rate)
    seconds = time.monotonic() - began
    result = evaluate_task(lm, demo.task, demo.test)
    rewards = [line["reward"] for line in log if "reward" in line]
    return {
        "task": task,
        "method": method,
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
    return f"{statistics.fmean(values):.1f}" + (f" ± {STUDENT[runs] * statistics.stdev(values) / runs**0.5:.1f}" if runs in STUDENT else "")


def show(lines: list[dict[str, Any]]) -> None:
    """A table of means over seeds, and of what each is ahead of supervised training with the same seed."""
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
            print(f"  {method:12} {interval([*by_seed.values()]):12} {each:18} {interval(ahead) if ahead else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(METHODS))
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--starts", action="store_true", help="make the starts alone")
    options = parser.parse_args()
    results = options.folder / "results.jsonl"
    for task in options.tasks:
        if not (options.folder / task / "model").exists():
            make_start(task, options.folder / task)
    if options.starts:
        return
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for seed in range(options.seeds):
        for task in options.tasks:
            for method in ["start", *(options.methods or METHODS[task])]:
                key = {"task": task, "method": method, "seed": seed, "updates": options.updates, "rate": options.rate}
                if any(key.items() <= line.items() for line in done) or (method == "start" and seed > 0):
                    continue
                done.append(run(task, method, seed, options.folder / task, options.updates, options.rate))
                print(json.dumps(done[-1]), flush=True)
                write_atomic(results, "".join(json.dumps(line) + "\n" for line in done))
    print(heading())
    show([line for line in done if line["updates"] == options.updates and line["rate"] == options.rate])


if __name__ == "__main__":
    main()
