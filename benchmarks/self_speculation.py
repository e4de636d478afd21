"""Tokens per forward pass and seconds of mode self-speculative, beside plain causal decoding with a cache by
the same weights.

    python -m benchmarks.self_speculation MODEL STORIES.txt --length 64 --drafts 2 3 --candidates 1 4 8

MODEL: a block-causal model with a causal context (`unmask convert --recipe block`). The prompts are the
beginnings of the last stories, which a training by `benchmarks.stories` does not see. Greedy completions are
first checked to be equal, in float64; then all alternate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

import unmask
from benchmarks.harness import report, timed
from unmask.data.sources import load_rows
from unmask.generation.output import Generation


def settings(length: int, temperature: float, batch: int) -> dict[str, int | float]:
    return {"max_new_tokens": length, "temperature": temperature, "batch_size": batch}


def equal(lm: unmask.DiffusionLM, prompts: list[list[int]], length: int, trees: list[dict[str, int]]) -> str:
    """How many greedy completions are those of causal decoding, in float64, for every number of drafts and
    candidates."""
    lm = lm.frozen_copy()
    lm.model.double()
    same = settings(length, 0.0, len(prompts))
    expected = unmask.generate(lm.as_causal(), prompts, unmask.SamplerConfig(**same)).tokens
    made = [
        unmask.generate(lm, prompts, unmask.SamplerConfig(mode="self-speculative", **each, **same)).tokens
        for each in trees
    ]
    return (
        f"{sum(all(tokens[i] == expected[i] for tokens in made) for i in range(len(prompts)))} of "
        f"{len(prompts)} greedy texts equal"
    )


def rates(generation: Generation) -> str:
    """Tokens per forward pass, and the fraction of drafts that were kept."""
    rate = sum(map(len, generation.tokens)) / sum(generation.forward_passes)
    return f"{rate:.2f} tokens per pass" + (
        f", {generation.accepted_drafts:.0%} of drafts kept" if generation.accepted_drafts else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("stories", help="a text file; blank lines separate its documents")
    for name, value in {
        "prompts": 100,
        "prompt": 16,
        "length": 64,
        "batch": 1,
        "rounds": 3,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3], help="tokens drafted ahead")
    parser.add_argument(
        "--candidates", type=int, nargs="+", default=[1, 8], help="of each drafted token, on average"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lm = unmask.load(options.model)
    texts = load_rows(options.stories)["text"][-options.prompts :]
    prompts = [lm.tokenizer(text).input_ids[: options.prompt] for text in texts]
    trees = [
        {"num_speculative_tokens": drafts, "num_branches": candidates}
        for drafts in options.drafts
        for candidates in options.candidates
    ]
    print(equal(lm, prompts, options.length, trees))
    for temperature in options.temperatures:
        same = settings(options.length, temperature, options.batch)
        contenders: dict[str, Callable[[], Generation]] = {
            "plain causal decoding": partial(
                unmask.generate, lm.as_causal(), prompts, unmask.SamplerConfig(**same)
            )
        }
        for tree in trees:
            config = unmask.SamplerConfig(mode="self-speculative", **tree, **same)
            name = f"self-speculative, {tree['drafts']} drafts x {tree['candidates']} candidates"
            contenders[name] = partial(unmask.generate, lm, prompts, config)
        made = {name: call() for name, call in contenders.items()}
        seconds = timed(contenders, options.rounds, warm=True)
        plain = seconds["plain causal decoding"]
        rows = [
            (name, f"{seconds[name]:.2f} s, {plain / seconds[name]:.2f} x", rates(made[name]))
            for name in contenders
        ]
        report(
            (
                f"{len(prompts)} prompts, {options.length} tokens, batches of {options.batch}, temperature "
                f"{temperature}"
            ),
            rows,
        )


if __name__ == "__main__":
    main()
