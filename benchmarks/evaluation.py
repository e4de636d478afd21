"""Time of an evaluation with the engine's batches, compared with one puzzle after another.

    python -m benchmarks.evaluation [--rows 500] [--rounds 1] [--model runs/demo/grpo] [--dtype float32]

4x4 Sudoku, one token per step. Without `--model`: a bidirectional model of the demo's size with random
weights. The answers of all are compared, and of the engine also verdicts, steps and passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import unmask
from benchmarks.harness import report, timed
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_model
from unmask.demo import DemoSettings
from unmask.evaluation.tasks import evaluate_task
from unmask.generation import naive
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.tasks import Puzzle, as_puzzle, get_task

BAR = 3.0
BATCH = 64


def random_model(task: Puzzle, dtype: torch.dtype) -> DiffusionLM:
    lm = character_model(
        task.alphabet, hidden=DemoSettings.hidden, layers=DemoSettings.layers, context=128, seed=0
    )
    return make_diffusion(lm.model.to(dtype), lm.tokenizer, attention="bidirectional", logit_shift=False)


class Contender:
    """A way to evaluate; keeps the items, or the texts, of its last call."""

    def __init__(self, call: Callable[[], Any]):
        self.call = call
        self.found: Any = None

    def __call__(self) -> None:
        self.found = self.call()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = as_puzzle(get_task("sudoku"))
    rows = task.generate("test", options.rows, 0)
    lm = (
        unmask.load(options.model, dtype=options.dtype)
        if options.model
        else random_model(task, getattr(torch, options.dtype))
    )
    prompts, sampler = [row["prompt"] for row in rows], SamplerConfig(max_new_tokens=task.max_completion)
    batches, alone, plain = (
        Contender(lambda: evaluate_task(lm, task, rows, SamplerConfig(batch_size=BATCH)).items),
        Contender(lambda: evaluate_task(lm, task, rows, SamplerConfig(batch_size=1)).items),
        Contender(lambda: naive.generate(lm, prompts, sampler).texts),
    )
    evaluate_task(lm, task, rows[:BATCH])  # warms up
    seconds = timed(
        {f"batches of {BATCH}": batches, "engine, one by one": alone, "naive sampler": plain},
        options.rounds,
        warm=True,
    )
    same = sum(
        one == other and one.completions == [text]
        for one, other, text in zip(batches.found, alone.found, plain.found, strict=True)
    )
    figures = [("the same answers", f"{same} of {len(rows)}", f"all ({options.dtype})")]
    figures += [(name, f"{spent:.1f} s", "") for name, spent in seconds.items()]
    (_, ours), *others = seconds.items()
    figures += [
        (f"{name} / batches of {BATCH}", f"{spent / ours:.2f}", f"at least {BAR}") for name, spent in others
    ]
    report(f"evaluation of {len(rows)} puzzles", figures)


if __name__ == "__main__":
    main()
