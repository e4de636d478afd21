"""Sudoku learnt with masks and with random tokens: the demo's puzzles, one causal model, and for each kind of
noise the same conversion and fine-tuning at equal steps.

    python -m benchmarks.noise [--noises masked uniform] [--convert 280] [--sft 280]

Solved puzzles are those of the demo's held-out ones: models of masked and hybrid noise reveal a token a step,
uniform ones denoise a canvas by entropy. The bound is on the negative log-likelihood of the right answers.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

import unmask
from benchmarks.harness import heading
from unmask.config.run import NoiseName
from unmask.convert.trainer import ConvertTrainer
from unmask.demo import QUICK, Demo, Phase
from unmask.evaluation.tasks import evaluate_task
from unmask.supervised.sft import SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noises", nargs="+", default=["masked", "uniform"], choices=get_args(NoiseName))
    parser.add_argument("--convert", type=int, default=280)
    parser.add_argument("--sft", type=int, default=280)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo("sudoku", Path(folder), 0, replace(QUICK, mistakes=0.0, text_mistakes=0.0))
        demo.pretrain(Phase("pretrain", lambda: None))
        demo.lm.save(Path(folder) / "causal")
        print(f"{heading()}\nconversion {options.convert} steps, fine-tuning {options.sft}", flush=True)
        for noise in options.noises:
            print(f"{noise:>8}: {learned(demo, Path(folder) / 'causal', noise, options)}", flush=True)


def learned(demo: Demo, causal: Path, noise: NoiseName, options: Any) -> str:
    """What a model has learned from one kind of noise."""
    canvas: dict[str, Any] = {"canvas_length": demo.task.max_completion, "noise": noise}
    arguments = demo.arguments("convert", options.convert, 2e-3, **canvas)
    trainer = ConvertTrainer(unmask.load(causal), unmask.ConvertConfig(**arguments), train_dataset=demo.text)
    trainer.train()
    arguments = demo.arguments("sft", options.sft, 1e-3, **canvas)
    tuned = SFTTrainer(trainer.lm, SFTConfig(**arguments), train_dataset=demo.demonstrations)
    tuned.train()
    prompts, answers = ([row[name] for row in demo.test] for name in ("prompt", "completion"))
    bounds = unmask.log_likelihood(tuned.lm, prompts, answers, estimator="elbo", samples=16)
    tokens = sum(len(ids) for ids in tuned.lm.tokenizer(answers).input_ids)
    figures = f"at most {-float(bounds.sum()) / tokens:.4f} nats per token of the answer"
    found = evaluate_task(tuned.lm, demo.task, demo.test)
    return f"{found.metrics['solved'].mean:.1%} solved, {figures}"


if __name__ == "__main__":
    main()
