"""Gaps of unknown length in held-out texts: how often the length is found, and the gap filled as it was.

    python -m benchmarks.gaps MODEL STORIES.txt --gaps 400

The model is bidirectional (`unmask convert --recipe full`). A gap of 1 to 16 tokens is cut out at random of
each text. The table compares `unmask.infill(length="auto")` with the same model told the length, and with
other rules for choosing a length, for which every length was tried and filled in: they read the
log-probability of the gap as filled in. A model of `unmask sft --recipe variable-length` finds lengths while
it fills the gaps; then the search is a row of its own.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import unmask
from benchmarks.harness import heading
from unmask.data.sources import load_rows
from unmask.diffusion.log_probs import view_log_probs
from unmask.diffusion.views import Views
from unmask.generation.gap_lengths import ROUNDS, GapScorer, find_lengths
from unmask.generation.output import Generation

LONGEST = 16
BUCKETS = ((1, 2), (3, 4), (5, 8), (9, 16))


class Gap(NamedTuple):
    """Token ids before, in and after a gap."""

    before: list[int]
    missing: list[int]
    after: list[int]


class Filled(NamedTuple):
    """A gap as filled in, the sum of its tokens' log-probabilities, and the forward passes that this took."""

    tokens: list[int]
    log_prob: float
    forward_passes: int


def cut(lm: unmask.DiffusionLM, texts: Sequence[str], count: int, context: int) -> list[Gap]:
    """A gap in each of the first `count` texts that are long enough, with at least 8 tokens on either
    side."""
    chosen, gaps = random.Random(0), []
    for text in texts:
        ids = lm.tokenizer(text).input_ids[:context]
        length = chosen.randint(1, LONGEST)
        if len(ids) >= LONGEST + 16 and len(gaps) < count:
            start = chosen.randint(8, len(ids) - length - 8)
            gaps.append(Gap(ids[:start], ids[start : start + length], ids[start + length :]))
    return gaps


def filled(
    lm: unmask.DiffusionLM, gaps: Sequence[Gap], lengths: Sequence[int], config: unmask.SamplerConfig
) -> list[Filled]:
    """Each gap, filled with this many tokens."""
    canvases = [
        [*gap.before, *[lm.mask_token_id] * length, *gap.after]
        for gap, length in zip(gaps, lengths, strict=True)
    ]
    return insides(gaps, unmask.infill(lm, canvases, config))


def insides(gaps: Sequence[Gap], generation: Generation) -> list[Filled]:
    """What is between the texts on both sides."""
    out = []
    for gap, tokens, log_probs, passes in zip(
        gaps, generation.tokens, generation.log_probs, generation.forward_passes, strict=True
    ):
        inside = slice(len(gap.before), len(tokens) - len(gap.after))
        out.append(Filled(tokens[inside], sum(log_probs[inside]), passes))
    return out


@torch.no_grad()
def likelihood(lm: unmask.DiffusionLM, gaps: Sequence[Gap], found: Sequence[Filled]) -> float:
    """The geometric mean of the probability of a token of the filled gaps, each given the text on both sides
    and the tokens before it in the gap, by the model that is told the length."""
    total = 0.0
    for gap, each in zip(gaps, found, strict=True):
        ids_1T = torch.tensor([[*gap.before, *each.tokens, *gap.after]])
        column_T, place_M1 = (
            torch.arange(ids_1T.shape[1]),
            len(gap.before) + torch.arange(len(each.tokens))[:, None],
        )
        target_1MT = (column_T == place_M1)[None]
        hidden_1MT = ((column_T >= place_M1) & (column_T < len(gap.before) + len(each.tokens)))[None]
        total += float(
            view_log_probs(lm, ids_1T, None, Views(hidden_1MT, target_1MT, target_1MT.float())).sum()
        )
    return math.exp(total / sum(len(each.tokens) for each in found))


@torch.no_grad()
def all_scores(lm: unmask.DiffusionLM, gap: Gap, max_gap: int) -> dict[int, float]:
    """The score of every length."""
    lengths = range(1, max_gap + 1)
    scorer = GapScorer(lm, gap.before, gap.after, (len(gap.before), len(gap.after)))
    return dict(zip(lengths, scorer.scores(lengths, 0, ROUNDS[-1]), strict=True))


def row(name: str, gaps: Sequence[Gap], found: Sequence[Filled], likelihood: float | None = None) -> str:
    """The figures of a rule, in all and by length."""

    def share(hits: Sequence[bool]) -> str:
        return f"{100 * statistics.mean(hits):5.1f}%" if hits else "     -"

    same_length = [len(gap.missing) == len(each.tokens) for gap, each in zip(gaps, found, strict=True)]
    same = [gap.missing == each.tokens for gap, each in zip(gaps, found, strict=True)]
    error = statistics.mean(
        abs(len(gap.missing) - len(each.tokens)) for gap, each in zip(gaps, found, strict=True)
    )
    parts = [[n for n, gap in enumerate(gaps) if low <= len(gap.missing) <= high] for low, high in BUCKETS]
    by_length = "  ".join(
        f"{share([same_length[n] for n in part])} {share([same[n] for n in part])}" for part in parts
    )
    measured = "" if likelihood is None else f"  {100 * likelihood:5.1f}% a token"
    return f"{name:<42} {share(same_length)} {share(same)} {error:5.2f}  {by_length}{measured}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument(
        "stories", help="a text file; blank lines separate its documents, of which the last 400 are held out"
    )
    parser.add_argument("--gaps", type=int, default=400, help="documents to cut a gap out of, at most")
    parser.add_argument("--max-gap", type=int, default=24)
    parser.add_argument("--context", type=int, default=128, help="tokens of a document")
    parser.add_argument("--rules", action="store_true", help="also try every length, for other rules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm, config = unmask.load(options.model), unmask.SamplerConfig()
    gaps = cut(lm, load_rows(options.stories)["text"][-400:], options.gaps, options.context)
    print(
        f"{heading()}\n{len(gaps)} gaps of 1 to {LONGEST} tokens; lengths up to {options.max_gap}; "
        "length found, gap as it was, mean error"
    )
    print(f"{'':<42} {'':>20}  " + "  ".join(f"{f'{low} to {high}':>13}" for low, high in BUCKETS))
    told = filled(lm, gaps, [len(gap.missing) for gap in gaps], config)
    print(row("length told", gaps, told, likelihood(lm, gaps, told)), flush=True)
    if lm.expand_token_id is not None:
        compare_trained(lm, gaps, told, config, options.max_gap)
    searched = find_lengths(lm, [[gap.before, gap.after] for gap in gaps], config, options.max_gap, "<gap>")
    fills = filled(lm, gaps, [text.gaps[0].length for text in searched], config)
    print(row("length searched", gaps, fills, likelihood(lm, gaps, fills)))
    passes = statistics.mean(text.gaps[0].forward_passes for text in searched)
    print(
        f"  the search: {passes:.0f} passes a gap; all lengths: {2 * ROUNDS[-1] * options.max_gap}",
        flush=True,
    )
    if options.rules:
        compare_rules(lm, gaps, options.max_gap, config)


def compare_trained(
    lm: unmask.DiffusionLM,
    gaps: Sequence[Gap],
    told: Sequence[Filled],
    config: unmask.SamplerConfig,
    max_gap: int,
) -> None:
    """A row for the length that the model finds while it fills the gap, and the paired difference of exact
    matches from the length told."""
    found = insides(
        gaps,
        unmask.infill(lm, [[gap.before, gap.after] for gap in gaps], config, length="auto", max_gap=max_gap),
    )
    print(row("length found while filling", gaps, found, likelihood(lm, gaps, found)))
    differences = [
        (gap.missing == one.tokens) - (gap.missing == other.tokens)
        for gap, one, other in zip(gaps, found, told, strict=True)
    ]
    error = 196 * statistics.stdev(differences) / math.sqrt(len(differences))
    passes = ", ".join(
        f"{statistics.mean(each.forward_passes for each in fills):.1f}" for fills in (told, found)
    )
    print(
        (
            f"  exact matches: {100 * statistics.mean(differences):+.1f} +- {error:.1f} points; passes "
            f"told, found: {passes}"
        ),
        flush=True,
    )


def compare_rules(
    lm: unmask.DiffusionLM, gaps: Sequence[Gap], max_gap: int, config: unmask.SamplerConfig
) -> None:
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
        chosen = [
            max(fills, key=lambda length, n=n: rule(scores[n][length], fills[length][n].log_prob, length))
            for n in range(len(gaps))
        ]
        print(row(name, gaps, [fills[length][n] for n, length in enumerate(chosen)]), flush=True)


if __name__ == "__main__":
    main()
