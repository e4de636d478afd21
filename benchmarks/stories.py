"""The likelihood of a converted model compared with that of its causal model, by recipe and number of steps.

    torchrun --nproc-per-node 2 -m benchmarks.stories MODEL STORIES.txt --recipes block-sdar --steps 2000

Two processes of one thread each train half of every batch: faster than one process of two threads (plain
`python -m`), at the same steps. The figure is the ratio of two averages over the same held-out stories: the
converted model's bound on the negative log-likelihood (an ELBO) and the causal model's
exact negative log-likelihood before conversion. `--held-out` stories are measured, with `--samples` passes
each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import unmask
from benchmarks.harness import heading
from unmask.data.sources import load_rows
from unmask.models.load import with_pattern

RANK, WORLD = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
HELD_OUT = 400
SETTINGS = {
    "max_length": 128,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": not torch.cuda.is_available(),
}


def nats_per_token(lm: unmask.DiffusionLM, stories: Sequence[str], samples: int) -> float:
    """Negative log-likelihood per token, without the first of each story: exact for a causal model, else an
    upper bound."""
    documents = [ids[: lm.context_length] for ids in lm.tokenizer(list(stories)).input_ids]
    prompts, completions = [ids[:1] for ids in documents], [ids[1:] for ids in documents]
    log_probs = unmask.log_likelihood(
        lm, prompts, completions, estimator="exact" if lm.autoregressive else "elbo", samples=samples
    )
    return -float(log_probs.sum()) / sum(map(len, completions))


class Clock(TrainerCallback):
    """The time spent in optimizer steps."""

    def __init__(self) -> None:
        self.seconds, self.started = 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds += time.perf_counter() - self.started


def train(
    model: str, recipe: str, texts: Sequence[str], steps: int, batch: int, rate: float
) -> tuple[unmask.DiffusionLM, float]:
    """The model after `steps` steps of a recipe, and their seconds (on this rank)."""
    clock, sizes = (
        Clock(),
        {"max_steps": steps, "per_device_train_batch_size": batch // WORLD, "learning_rate": rate},
    )
    with tempfile.TemporaryDirectory() as folder:
        args = unmask.ConvertConfig.for_recipe(recipe, output_dir=folder, **SETTINGS | sizes)
        trainer = unmask.ConvertTrainer(
            model, args, train_dataset=[{"text": text} for text in texts], callbacks=[clock]
        )
        trainer.train()
    return trainer.lm, clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("stories", help="a text file; blank lines separate its documents")
    parser.add_argument(
        "--recipes", nargs="+", default=["block-sdar", "block", "full", "growing", "distilled"]
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[2000],
        help="of a run each; what they take in minutes is printed",
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=max(1, 2 // WORLD))
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--save", help="a folder for the models: RECIPE-STEPS")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = load_rows(options.stories)["text"]
    trained, held_out = texts[: -options.held_out], texts[-options.held_out :]
    causal = unmask.load(options.model)
    exact = nats_per_token(causal, held_out, 1) if RANK == 0 else 0.0
    if RANK == 0:
        print(
            f"{heading()}\ncausal: {exact:.4f} nats per token, exact, of {len(held_out)} held-out documents",
            flush=True,
        )
        shifted = with_pattern(unmask.load(options.model), "block_causal", 1, True)
        ids_BT = torch.tensor([causal.tokenizer(held_out[0]).input_ids])
        same = torch.equal(shifted.logits(ids_BT), causal.logits(ids_BT))
        print(f"block 1 with shift equals the causal model: {same}", flush=True)
    for recipe in options.recipes:
        for steps in options.steps:
            lm, seconds = train(options.model, recipe, trained, steps, options.batch, options.rate)
            if RANK == 0:
                if options.save:
                    lm.save(Path(options.save) / f"{recipe}-{steps}")
                bound = nats_per_token(lm, held_out, options.samples)
                now = nats_per_token(lm.as_causal(), held_out, 1)
                figures = (
                    f"at most {bound:.4f} nats per token, {bound / exact:.3f} x the causal model; read as "
                    f"causal {now / exact:.3f} x"
                )
                print(f"{recipe:>10}: {steps:>6} steps, {seconds / 60:5.1f} minutes: {figures}", flush=True)


if __name__ == "__main__":
    main()
