"""The variance of a likelihood difference between two choices, with common and with independent masks.

    python -m benchmarks.common_masks MODEL STORIES.txt --choices piqa.jsonl

A causal model is converted first. The choices are continuations of held-out stories that differ in one word,
drawn from the stories, which may have another number of tokens; and the first two choices of multiple-choice
questions (`query`, `choices`), which may have no word in common. Every choice is estimated with many seeds,
and variances are added over the pairs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import unmask
from benchmarks.harness import heading
from benchmarks.stories import HELD_OUT, train
from unmask.data.sources import load_rows
from unmask.diffusion.likelihood import elbo
from unmask.diffusion.views import MaskRNG
from unmask.evaluation.likelihood import common_length

CONTEXT, CONTINUATION = 20, 16  # words
LONGEST = 120  # tokens of a choice, and of what is left of its context

Pair = tuple[list[int], list[int], list[int]]
"""A context and two choices."""


def one_word_apart(lm: unmask.DiffusionLM, stories: Sequence[str], count: int) -> list[Pair]:
    """Continuations of stories, and the same with one word replaced."""
    rng, pairs = random.Random(0), []
    words = sorted({word for story in stories for word in story.split() if word.isalpha()})
    for story in [words for words in map(str.split, stories) if len(words) >= CONTEXT + CONTINUATION][:count]:
        choice = story[CONTEXT : CONTEXT + CONTINUATION]
        other, place = list(choice), rng.randrange(CONTINUATION)
        other[place] = rng.choice([word for word in words if word != choice[place]])
        pairs.append(
            (
                lm.tokenizer(" ".join(story[:CONTEXT])).input_ids,
                *(tokens(lm, " ".join(text)) for text in (choice, other)),
            )
        )
    return pairs


def questions(lm: unmask.DiffusionLM, path: str, count: int) -> list[Pair]:
    """The first two choices of each question of a file."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    pairs = [
        (
            lm.tokenizer(row["query"]).input_ids[-LONGEST:],
            *(tokens(lm, choice) for choice in row["choices"][:2]),
        )
        for row in rows
    ]
    return [pair for pair in pairs if max(map(len, pair[1:])) <= LONGEST][:count]


def tokens(lm: unmask.DiffusionLM, text: str) -> list[int]:
    return list(lm.tokenizer(" " + text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def estimates(
    lm: unmask.DiffusionLM, context: list[int], choice: list[int], shared: int, samples: int, seeds: int
) -> Tensor:
    """Estimates of a choice's bound, one for each key of the masks; `shared`: its first tokens that the other
    choice has too."""
    ids_BT = torch.tensor([*context, *choice]).expand(seeds, -1)
    maskable_BT = (torch.arange(ids_BT.shape[1]) >= len(context)).expand(seeds, -1)
    return elbo(
        lm,
        ids_BT,
        None,
        maskable_BT,
        MaskRNG(0, torch.arange(seeds)),
        samples=samples,
        chunk=256,
        shared=shared,
    ).value_B.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="converted, or a causal model to convert")
    parser.add_argument("stories", help="a text file; blank lines separate its documents")
    parser.add_argument("--choices", nargs="*", default=[], help="files of questions")
    parser.add_argument("--steps", type=int, default=300, help="of the conversion of a causal model")
    parser.add_argument("--samples", type=int, nargs="+", default=[17, 65])
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = load_rows(options.stories)["text"]
    lm = unmask.load(options.model)
    if lm.autoregressive:
        lm, _ = train(options.model, "full", texts[:-HELD_OUT], options.steps, 16, 3e-3)
    lm.model.eval()
    print(heading(), flush=True)
    pairs_of = {"one word apart": one_word_apart(lm, texts[-HELD_OUT:], options.pairs)}
    pairs_of |= {Path(path).stem: questions(lm, path, options.pairs) for path in options.choices}
    for samples in options.samples:
        for name, pairs in pairs_of.items():
            common = independent = 0.0
            for context, *choices in pairs:
                shared = common_length(choices)
                one_B, other_B = (
                    estimates(lm, context, choice, shared, samples, options.seeds) for choice in choices
                )
                common += float((one_B - other_B).var()) / len(pairs)
                independent += float(one_B.var() + other_B.var()) / len(pairs)
            figures = (
                f"{common:.3f} with common masks, {independent:.3f} with independent ones: "
                f"{common / independent:.2f}"
            )
            print(f"{samples} samples, {len(pairs)} pairs, {name}: variance {figures}", flush=True)


if __name__ == "__main__":
    main()
