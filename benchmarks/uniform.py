"""Cost of a denoising step on DiffusionGemma's canvases, compared with `generate` of transformers on the same
model, with the same prompts and as many steps.

    python -m benchmarks.uniform [--threads 1] [--rounds 3] [--only 1 8 32]

The tokens of few steps are compared first, with Unmask's random numbers in place of those of transformers.
(In many steps of a random model, whose next canvas depends on every token of the last one, a draw at the edge
of rounding changes all that follows.)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaGenerationConfig, PreTrainedModel
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

import unmask
from benchmarks.harness import ratio, report, turns
from tests.diffusion_gemma import ALPHABET, generated, save_published
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 64,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 1024,
    "vocab_size": 8192,
}
CANVAS, CANVASES, STEPS, COMPARED = 64, 2, 12, 4
PROMPTS = (32, 48, 64, 96)
"""Lengths of prompts, one after another."""
GOALS = {1: 1.0, 8: 1.5, 32: 2.0}


def settings(**more: Any) -> SamplerConfig:
    """Every canvas takes all its steps."""
    given: dict[str, Any] = {"max_denoising_steps": STEPS, "confidence_threshold": 1e-9, "stop_at_eos": False}
    return SamplerConfig(max_new_tokens=CANVAS * CANVASES, **given | more)


class Theirs:
    """`generate` of transformers, with left padding."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]]):
        longest = max(map(len, prompts))
        self.ids_BT, self.mask_BT = torch.zeros(2, len(prompts), longest, dtype=torch.long)
        for row, ids in enumerate(prompts):
            self.ids_BT[row, longest - len(ids) :] = torch.tensor(ids)
            self.mask_BT[row, longest - len(ids) :] = 1
        self.model = model
        model.generation_config.eos_token_id = None
        self.config = DiffusionGemmaGenerationConfig(
            max_new_tokens=CANVAS * CANVASES,
            max_denoising_steps=STEPS,
            t_min=0.4,
            t_max=0.8,
            stability_threshold=1,
            confidence_threshold=1e-9,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
            pad_token_id=0,
        )

    def __call__(self) -> None:
        self.model.generate(input_ids=self.ids_BT, attention_mask=self.mask_BT, generation_config=self.config)


class Ours:
    """The engine."""

    def __init__(self, lm: DiffusionLM, prompts: list[list[int]]):
        self.lm, self.prompts = lm, prompts

    def __call__(self) -> unmask.Generation:
        return sampler.generate(self.lm, self.prompts, settings())


def compare(size: int, rounds: int) -> tuple[str, str, str]:
    """A line of the report for a batch of this size."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_published(Path(folder), ALPHABET, canvas=CANVAS, gain=0.05, **SHAPE)
        lm = unmask.load(folder)
    few, generator = settings(max_denoising_steps=COMPARED), torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(4, SHAPE["vocab_size"], (PROMPTS[n % len(PROMPTS)],), generator=generator).tolist()
        for n in range(size)
    ]
    expected = generated(model, lm, make_requests(lm, prompts, few), few)
    ours, theirs = Ours(lm, prompts), Theirs(model, prompts)
    pairs = zip(sampler.generate(lm, prompts, few).tokens, expected, strict=True)
    equal = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
    seconds = turns({"theirs": theirs, "ours": ours}, rounds)
    steps = STEPS * CANVASES / 1e3
    figure = (
        f"{min(seconds['theirs']) / steps:.1f} / {min(seconds['ours']) / steps:.1f} = "
        f"{ratio(seconds, 'theirs', 'ours'):.2f}"
    )
    return (
        f"batch {size}, ms a step",
        figure,
        f"goal {GOALS[size]}; {equal:,} of {size * CANVAS * CANVASES:,} tokens equal",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="+", choices=[*GOALS], default=[*GOALS])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report("transformers / engine", [compare(size, options.rounds) for size in options.only])


if __name__ == "__main__":
    main()
