"""Runs and results as a report reads them."""

from __future__ import annotations

import math
import random
import re
from typing import Any

from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.content import Commands, Denoising, Notes, Report, Section
from unmask.evaluation.report.scores import Result
from unmask.evaluation.report.training import Run
from unmask.evaluation.result_file import EvaluationResult, Item, ItemTrace, Metric, TaskScores
from unmask.evaluation.statistics import mean_interval

WORDS = re.findall(
    r"\S+", "Once upon a time there was a little girl who liked to play in the park with her dog ."
)


def convert_run(name: str, color: int, seed: int) -> Run:
    """A conversion in two stages, with held-out losses."""
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for step in range(10, 610, 10):
        loss = 1.2 + 3 * math.exp(-step / 120) + rng.gauss(0, 0.06) + 0.1 * color
        line = {
            "step": step,
            "stage": 1 if step <= 200 else 2,
            "loss": 1.4 * loss,
            "cross_entropy": loss,
            "learning_rate": 1e-3 / step,
        }
        lines.append(
            line
            | {
                "grad_norm": 2 + rng.random(),
                "memory_gb": 1.4,
                "tokens_per_second": 5000 + 100 * rng.random(),
            }
        )
        if step % 100 == 0:
            lines.append(
                {"step": step, "stage": line["stage"], "eval_cross_entropy": loss + 0.1, "eval_runtime": 1.0}
            )
    lines.append({"step": 600, "stage": 2, "train_loss": 1.7, "train_runtime": 331.0 + 20 * color})
    return Run(
        name=name,
        verb="convert",
        color=color,
        lines=lines,
        state="finished",
        steps=600,
        settings={"seed": seed, "verb": "convert"},
    )


def rl_run(name: str, color: int, seed: int) -> Run:
    """Reinforcement learning with two reward functions, and times and memory by phase."""
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for step in range(1, 81):
        right = 0.9 - 0.5 * math.exp(-step / 30) + rng.gauss(0, 0.03)
        line = {
            "step": step,
            "reward": right + 0.1,
            "rewards/correct": right,
            "rewards/format": 0.1 + rng.gauss(0, 0.01),
            "kl": 1e-4 * step,
        }
        times = {"generation": 4.2, "forward": 1.4, "backward": 2.1, "reward": 0.05, "other": 0.3}
        line |= {f"time/{phase}": seconds * (1 + 0.1 * color) for phase, seconds in times.items()}
        lines.append(
            line
            | {f"memory/{phase}_gb": 1 + 0.2 * seconds for phase, seconds in times.items()}
            | {"completion_length": 16 + rng.random()}
        )
    return Run(
        name=name, verb="grpo", color=color, lines=lines, state="running", steps=200, settings={"seed": seed}
    )


def result(name: str, color: int, skill: float, steps: int | None = None, items: int = 60) -> Result:
    """An evaluation on two tasks; with `steps` the answers are denoised in fewer passes."""
    rng = random.Random(7)
    used = steps or len(WORDS)
    scored = [_item(rng, number, skill, used) for number in range(items)]
    solved = mean_interval([item.scores["solved"] for item in scored], [item.group for item in scored])
    metrics = {
        "solved": Metric(mean=solved.mean, low=solved.low, high=solved.high, standard_error=None),
        "perplexity": Metric(
            mean=14.2 - 4 * skill, low=13.0 - 4 * skill, high=15.6 - 4 * skill, higher_is_better=False
        ),
        "distinct-2": Metric(mean=0.61),
    }
    protocol = {"sampler": {"steps": steps, "remasking": "low_confidence", "temperature": 0.0}, "seed": 0}
    told = TaskScores(
        task="stories",
        protocol=protocol,
        metrics=metrics,
        statuses={"ok": items - 2, "timeout": 2},
        items=scored,
    )
    choice = TaskScores(
        task="arc_easy",
        protocol={},
        metrics={"acc": Metric(mean=0.3 + skill / 4, low=0.27, high=0.6, standard_error=0.004)},
    )
    return Result(
        name,
        color,
        EvaluationResult(
            model={"path": name}, arguments={"task": ["stories"]}, tasks=[told] if steps else [told, choice]
        ),
    )


def _item(rng: random.Random, number: int, skill: float, used: int) -> Item:
    order = sorted(range(len(WORDS)), key=lambda place: place + rng.uniform(-5, 5))
    steps = [0] * len(WORDS)
    for rank, place in enumerate(order):
        steps[place] = rank * used // len(WORDS)
    return Item(
        id=str(number),
        group=str(number // 2),
        scores={"solved": float(rng.random() < skill * min(1, 0.5 + used / 20))},
        prompt="Tell me a story.\n",
        completions=[" ".join(WORDS)],
        tokens=len(WORDS),
        steps=used,
        passes=used,
        traces=[ItemTrace(tokens=[f"{word} " for word in WORDS], steps=steps)],
    )


def sudoku() -> Denoising:
    """A grid in three frames."""
    start = ["3", "1", "", "2", "2", "", "", "", "", "2", "1", "", "", "3", "2", ""]
    middle = [*start[:2], "4", *start[3:]]
    return Denoising(
        prompt="310220000210 0320",
        frames=[start, middle, list("3142243142131324")],
        revealed=[{}, {2: 0.875}, {5: 0.5, 6: 0.25, 7: 1.0, 8: 0.5, 11: 0.5, 12: 0.5, 15: 0.5}],
        columns=4,
        clues={0, 1, 3, 4, 9, 10, 13, 14},
    )


def example() -> Report:
    """A report with a block of every kind, of two conversions, two runs of reinforcement learning, and a
    model at four speeds."""
    names = ["convert-block", "convert-full", "grpo-spg", "grpo-trajectory"]
    runs = [
        convert_run(names[0], 0, 1),
        convert_run(names[1], 1, 2),
        rl_run(names[2], 2, 3),
        rl_run(names[3], 3, 4),
    ]
    results = [result(names[0], 0, 0.4), result(names[1], 1, 0.55)]
    results += [result(names[2], 2, 0.9, steps) for steps in (2, 4, 9)] + [
        result(names[2], 2, 0.9),
        result(names[3], 3, 0.97, 4),
    ]
    grid = Section(title="One grid, step by step", blocks=[sudoku()])
    commands = Commands(
        lines=[
            (
                "unmask sft --model runs/convert-full/model --data stories.jsonl --output runs/sft",
                "train it on",
            )
        ]
    )
    following = Section(
        title="What to type next", blocks=[commands, Notes(lines=["There are more commands."])]
    )
    return make_report(
        title="Stories",
        subtitle="Two conversions, and what rewards add.",
        entries=names,
        runs=runs,
        results=results,
        more=[grid, following],
    )
