"""Gaps of unknown length in held-out texts: how often the length is found, and the gap filled as it was.

    python -m benchmarks.gaps MODEL STORIES.txt --gaps 400

The model is bidirectional (`unmask convert --recipe full`). A gap of 1 to 16 tokens is cut out at random of each text. The table compares
`unmask.infill(length="auto")` with the same model told the length, and with other rules for choosing a length, for which every length was
tried and filled in: they read the log-probability of the gap as filled in.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import unmask
from benchmarks.harness import heading
from unmask.data.sources import load_rows
from unmask.generation.gap_lengths import ROUNDS, GapScorer, find_lengths

LONGEST = 16
BUCKETS = ((1, 2), (3, 4), (5, 8), (9, 16))


class Gap(NamedTuple):
    """Token ids before, in and after a gap."""

    before: list[int]
    missing: list[int]
    after: list[int]


class Filled(NamedTuple):
    """A gap as filled in, and the sum of its tokens' log-probabilities."""

    tokens: list[int]
    log_prob: float


def cut(lm: unmask.DiffusionLM, texts: Sequence[str], count: int, context: int) -> list[Gap]:
    """A gap in each of the first `count` texts that are long enough, with at least 8 tokens on either side."""
    chosen, gaps = random.Random(0), []
    for text in texts:
        ids = lm.tokenizer(text).input_ids[:context]
        length = chosen.randint(1, LONGEST)
        if len(ids) >= LONGEST + 16 and len(gaps) < count:
            start = chosen.randint(8, len(ids) - length - 8)
            gaps.append(Gap(ids[:start], ids[start : start + length], ids[start + length :]))
    return gaps


def filled(lm: unmask.DiffusionLM, gaps: Sequence[Gap], lengths: Sequence[int], config: unmask.SamplerConfig) -> list[Filled]:
    """Each gap, filled with this many tokens."""
    canvases = [[*gap.before, *[lm.mask_token_id] * length, *gap.after] for gap, length in zip(gaps, lengths, strict=True)]
    generation, out = unmask.infill(lm, canvases, config), []
    for gap, length, tokens, log_probs in zip(gaps, lengths, generation.tokens, generation.log_probs, strict=True):
        inside = slice(len(gap.before), len(gap.before) + length)
        out.append(Filled(tokens[inside], sum(log_probs[inside])))
    return out


@torch.no_grad()
def all_scores(lm: unmask.DiffusionLM, gap: Gap, max_gap: int) -> dict[int, float]:
    """The score of every length."""
    lengths = range(1, max_gap + 1)
    scorer = GapScorer(lm, gap.before, gap.after, (len(gap.before), len(gap.after)))
    return dict(zip(lengths, scorer.scores(lengths, 0, ROUNDS[-1]), strict=True))


def row(name: str, gaps: Sequence[Gap], found: Sequence[Filled]) -> str:
    """The figures of a rule, in all and by length."""

    def share(hits: Sequence[bool]) -> str:
        return f"{100 * statistics.mean(hits):5.1f}%" if hits else "     -"

    same_length = [len(gap.missing) == len(each.tokens) for gap, each in zip(gaps, found, strict=True)]
    same = [gap.missing == each.tokens for gap, each in zip(gaps, found, strict=True)]
    error = statistics.mean(abs(len(gap.missing) - len(each.tokens)) for gap, each in zip(gaps, found, strict=True))
    parts = [[n for n, gap in enumerate(gaps) if low <= len(gap.missing) <= high] for low, high in BUCKETS]
    by_length = "  ".join(f"{share([same_length[n] for n in part])} {share([same[n] for n in part])}" for part in parts)
    return f"{name:<42} {share(same_length)} {share(same)} {error:5.2f}  {by_length}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("stories", help="a text file; blank lines separate its documents, of which the last 400 are held out")
    parser.add_argument("--gaps", type=int, default=400, help="documents to cut a gap out of, at most")
    parser.add_argument("--max-gap", type=int, default=24)
    parser.add_argument("--context", type=int, default=128, help="tokens of a document")
    parser.add_argument("--rules", action="store_true", help="also try every length, for other rules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm, config = unmask.load(options.model), unmask.SamplerConfig()
    gaps = cut(lm, load_rows(options.stories)["text"][-400:], options.gaps, options.context)
    print(
        f"{heading()}\n{len(gaps)} gaps of 1 to {LONGEST} tokens; lengths up to {options.max_gap}; length found, gap as it was, mean error"
    )
    print(f"{'':<42} {'':>20}  " + "  ".join(f"{f'{low} to {high}':>13}" for low, high in BUCKETS))
    print(row("length told", gaps, filled(lm, gaps, [len(gap.missing) for gap in gaps], config)), flush=True)
    searched = find_lengths(lm, [[gap.before, gap.after] for gap in gaps], config, options.max_gap, "<gap>")
    print(row("length searched", gaps, filled(lm, gaps, [text.gaps[0].length for text in searched], config)))
    passes = statistics.mean(text.gaps[0].forward_passes for text in searched)
    print(f"  the search: {passes:.0f} passes a gap; all lengths: {2 * ROUNDS[-1] * options.max_gap}", flush=True)
    if options.rules:
        compare_rules(lm, gaps, options.max_gap, config)


def compare_rules(lm: unmask.DiffusionLM, gaps: Sequence[Gap], max_gap: int, config: unmask.SamplerConfig) -> None:
    """A row for each rule, with every length tried."""
    scores = [all_scores(lm, gap, max_gap) for gap in gaps]
    fills = {length: filled(lm, gaps, [length] * len(gaps), config) for length in range(1, max_gap + 1)}
    rules: dict[str, Callable[[float, float, int], float]] = {
        "every length scored in full": lambda score, fill, length: score,
        "score + log-probability of the gap": lambda score, fill, length: score + fill,
        "the same per token": lambda score, fill, length: (score + fill) / (length + ROUNDS[-1]),
        "log-probability of the gap per token": lambda score, fill, length: fill / length,
    }
    for name, rule in rules.items():
        chosen = [max(fills, key=lambda length, n=n: rule(scores[n][length], fills[length][n].log_prob, length)) for n in range(len(gaps))]
        print(row(name, gaps, [fills[length][n] for n, length in enumerate(chosen)]), flush=True)


if __name__ == "__main__":
    main()
