"""A tiny model of random tokens learns to sort letters from rewards.

    python -m benchmarks.canvas_rewards [--methods agrpo espo] [--seeds 3]

It is first fine-tuned on few demonstrations, until it sorts some of the texts. Then a method trains it with
the fraction of right letters as the reward, for each seed. Measured are the right letters of held-out texts,
of canvases denoised with the same settings. The interval is Student's over the seeds.

By agrpo they rise from 72.1 % to 77.4 ± 1.9 % in 250 updates (76.9, 77.1, 78.3), in two minutes each.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import heading
from benchmarks.methods import interval
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_model
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer

LETTERS, LENGTH = "abcdef", 6
CANVAS = LENGTH + 1  # with the end token
SETTINGS: dict[str, Any] = {"max_denoising_steps": 6, "entropy_bound": 1.0}


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Texts to sort."""
    chance = random.Random(seed)
    texts = ["".join(chance.choices(LETTERS, k=LENGTH)) for _ in range(count)]
    answers = ["".join(sorted(text)) for text in texts]
    pairs = zip(texts, answers, strict=True)
    return [{"prompt": f"{text}=", "completion": answer, "answer": answer} for text, answer in pairs]


def right_letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The fraction of letters that are right."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, text, right)) / LENGTH for text, right in pairs]


def measured(lm: DiffusionLM, held_out: list[dict[str, str]]) -> float:
    """The percentage of letters that are right."""
    config = SamplerConfig(max_new_tokens=CANVAS, batch_size=256, **SETTINGS)
    texts = generate(lm, [row["prompt"] for row in held_out], config).texts
    right = right_letters(texts, [row["answer"] for row in held_out])
    return 100 * sum(right) / len(right)


def arguments(folder: Path, steps: int, rate: float, batch: int, seed: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": rate,
        "per_device_train_batch_size": batch,
        "seed": seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["agrpo", "espo"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demonstrated", type=int, default=200, help="steps of fine-tuning")
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held_out = rows(256, seed=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lm = character_model(
            LETTERS + "=", hidden=32, layers=2, context=32, seed=0, attention="bidirectional"
        )
        tuning = SFTConfig(
            **arguments(folder, options.demonstrated, 3e-3, 64, 0), noise="uniform", canvas_length=CANVAS
        )
        tuned = SFTTrainer(lm, tuning, train_dataset=rows(4096, seed=0))
        tuned.train()
        tuned.lm.save(folder / "start")
        print(heading(), f"\nright letters at first: {measured(tuned.lm, held_out):.1f} %", flush=True)
        for method in options.methods:
            after = []
            for seed in range(options.seeds):
                began = time.monotonic()
                args = GRPOConfig(
                    **arguments(folder, options.updates, 3e-4, 128, seed),
                    method=method,
                    num_generations=8,
                    max_completion_length=CANVAS,
                    after_eos="train",
                    generation_kwargs=SETTINGS,
                )
                trainer = GRPOTrainer(load(folder / "start"), right_letters, args, rows(4096, seed=2 + seed))
                trainer.train()
                after.append(measured(trainer.lm, held_out))
                log = [line["reward"] for line in trainer.state.log_history if "reward" in line]
                tenth = max(1, len(log) // 10)
                curve = [f"{sum(log[at : at + tenth]) / tenth:.2f}" for at in range(0, len(log), tenth)]
                took = time.monotonic() - began
                print(
                    f"{method} seed {seed}: {after[-1]:.1f} %, rewards {' '.join(curve)} ({took:.0f} s)",
                    flush=True,
                )
            print(f"{method}: {interval(after)} % of letters right", flush=True)


if __name__ == "__main__":
    main()
