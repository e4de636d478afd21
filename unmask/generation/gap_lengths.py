"""How many tokens a gap is missing: found without training, by how well the texts on both sides of it fit a
distance.

Let a gap of L tokens stand between the texts a and b. With all lengths equally likely beforehand,

    p(L | a, b)  is proportional to  p_L(a, b) = sum over all gaps g of L tokens of p(a g b),

the probability of the text that is known, whatever the gap holds. A masked diffusion model predicts a token
given the visible ones, whatever the hidden ones are: with L mask tokens in the gap that are never predicted,
its predictions of a and b have just these probabilities. So a length is scored by

    log p_L(window | rest of the text), with the gap hidden,

where the window is the tokens next to the gap, which are the same for all lengths; the rest of the text is
taken to fit all of them alike. Its tokens are predicted one by one from the gap on, given those before them
and the text beyond the window. Both sides are scored, each given the other one, and the mean counts.

Short gaps are not favored, though each token of a filled gap costs probability: log p(g, b | a) = log p_L(b
| a) + log p(g | a, b), and the second term, the log-probability of the gap as it is filled in, is left out.
It is what a calibration would have to subtract.

Shapes: L lengths, M views, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import has_text
from unmask.data.encoding import encode_completion, encode_prompt
from unmask.data.formats import is_ids
from unmask.diffusion.log_probs import view_log_probs
from unmask.diffusion.views import Views
from unmask.errors import GenerationError
from unmask.generation.constraints.gaps import fitting_lengths
from unmask.generation.output import FoundGap
from unmask.generation.requests import check_ids, check_settings
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating

DEFAULT_MAX_GAP = 64
"""The longest gap that is tried, in tokens, where nobody says otherwise."""
WINDOW = 8
"""Tokens on either side of a gap whose probability is compared."""
ROUNDS = (2, 4, WINDOW)
"""Tokens on either side that are predicted by the end of each round of a search."""
TOKENS_PER_PASS = 8192
"""The most tokens of a forward pass: the same for every text, so that a length does not depend on others, and
no more than a step of a server takes, which makes such passes between its steps."""
LengthPass = Callable[[], list[float]]
"""A forward pass, and what it finds."""
LengthRun = Callable[[LengthPass], list[float]]
"""Makes a forward pass, when and where the model is free."""


def run_now(forward_pass: LengthPass) -> list[float]:
    return forward_pass()


@dataclass(frozen=True)
class FoundText:
    """A text whose gaps have the lengths that were found."""

    ids: list[int]  # with a mask token for every missing token
    gaps: list[FoundGap]


def find_lengths(
    lm: DiffusionLM,
    texts: Sequence[Any],
    config: SamplerConfig,
    max_gap: int,
    gap_mark: str,
    run: LengthRun = run_now,
) -> list[FoundText]:
    """The most likely length of each gap. The gaps of a text are searched from left to right; the earlier
    ones have the lengths that were found, and the later ones a short one. All gaps are hidden throughout.

    The other arguments and errors are those of `unmask.infill`.

    Args:
        run: makes a forward pass, when and where the model is free.
    """
    parted = checked_segments(lm, texts, config, max_gap, gap_mark)
    return [
        _find(lm, segments, config, max_gap, f"text {index}", run) for index, segments in enumerate(parted)
    ]


def checked_segments(
    lm: DiffusionLM, texts: Sequence[Any], config: SamplerConfig, max_gap: int, gap_mark: str
) -> list[list[list[int]]]:
    """The ids between the gaps of each text. Arguments and errors are those of `unmask.infill`."""
    if lm.noise != "masked":
        what = f"the length of a gap is found with masks, and the model's noise is {lm.noise}"
        raise GenerationError(what, where="length", remedy="Write a mask token for every missing token")
    if lm.attention != "bidirectional":
        what = f"a model with {lm.attention.replace('_', '-')} attention does not see the text after a gap"
        remedy = (
            "Use a bidirectional model (unmask convert --recipe full), or unmask.fim_prompt for a causal "
            "model that knows such prompts"
        )
        raise GenerationError(what, where="length", remedy=remedy)
    if max_gap < 1:
        raise GenerationError(f"{max_gap} tokens", where="max_gap", remedy="Use 1 or more")
    check_settings(lm, config)
    if isinstance(texts, (str, bytes)):
        raise GenerationError("texts is one string", where="texts", remedy="Give a list of texts")
    if gap_mark in lm.tokenizer.mask_token:
        what = "it is in the mask token, which stands for one token" if gap_mark else "it is empty"
        raise GenerationError(what, where="gap_mark", remedy="Use a text that occurs only where a gap is")
    parted = [_segments(lm, text, gap_mark, f"text {index}") for index, text in enumerate(texts)]
    for index, segments in enumerate(parted):
        _check(lm, segments, max_gap, f"text {index}")
    return parted


def search(
    choices: Sequence[int], score: Callable[[Sequence[int], int, int], Sequence[float]]
) -> dict[int, float]:
    """The scores of the lengths that are left in the last of `ROUNDS`. After each round before it the better
    half is kept, so that most lengths cost few passes. No length is left out beforehand: likely ones need not
    be neighbors, as in text with a period.

    Args:
        choices: lengths.
        score: the log-probabilities of lengths, for the tokens next to the gap from one number to another.
    """
    scores, done = dict.fromkeys(choices, 0.0), 0
    for tokens in ROUNDS:
        if done:
            ranked = sorted(scores, key=lambda length: (-scores[length], length))
            scores = {length: scores[length] for length in sorted(ranked[: (len(ranked) + 1) // 2])}
        added = score(list(scores), done, tokens)
        scores = {length: scores[length] + more for length, more in zip(scores, added, strict=True)}
        done = tokens
    return scores


def best(scores: Mapping[int, float]) -> int:
    """The length of the highest score; of equal ones the shortest."""
    return max(sorted(scores), key=lambda length: scores[length])


def _find(
    lm: DiffusionLM,
    segments: list[list[int]],
    config: SamplerConfig,
    max_gap: int,
    where: str,
    run: LengthRun,
) -> FoundText:
    begun = lm.mask_token_id in segments[0] or has_text(lm.tokenizer, segments[0])
    possible = [
        fitting_lengths(lm, config, max_gap, where, at_start=gap == 0 and not begun)
        for gap in range(len(segments) - 1)
    ]
    lengths, found = [choices[(len(choices) - 1) // 8] for choices in possible], list[FoundGap]()
    for gap, choices in enumerate(possible):
        before = _canvas(lm, segments[: gap + 1], lengths[:gap])
        after = _canvas(lm, segments[gap + 1 :], lengths[gap + 1 :])
        scorer = GapScorer(lm, before, after, (len(segments[gap]), len(segments[gap + 1])), run)
        scores = search(choices, scorer.scores)
        lengths[gap] = best(scores)
        found.append(FoundGap(len(before), lengths[gap], scores, scorer.forward_passes))
    return FoundText(_canvas(lm, segments, lengths), found)


class GapScorer:
    """Log-probabilities of the tokens next to a gap, for lengths of the gap.

    Args:
        before, after: the ids on either side of the gap, with the mask token where something is hidden.
        sizes: the tokens on either side up to the next gap, beyond which none is compared.
        run: as of `find_lengths`.
    """

    def __init__(
        self,
        lm: DiffusionLM,
        before: list[int],
        after: list[int],
        sizes: tuple[int, int],
        run: LengthRun = run_now,
    ):
        self.lm, self.before, self.after, self.run = lm, before, after, run
        # nothing predicts the first token of a shifted model
        first = max(int(lm.logit_shift), len(before) - min(WINDOW, sizes[0]))
        left = [index for index in reversed(range(first, len(before))) if before[index] != lm.mask_token_id]
        right = [index for index in range(min(WINDOW, sizes[1])) if after[index] != lm.mask_token_id]
        self.sides = left, right  # from the gap on
        self.forward_passes = 0

    def scores(self, lengths: Sequence[int], first: int, last: int) -> list[float]:
        """The log-probabilities of the tokens first, ..., last - 1 from the gap on, in nats: the mean of both
        sides. Views of all lengths share forward passes."""
        views = [(length, *view) for length in lengths for view in self.views(length, first, last)]
        self.forward_passes += len(views)
        longest, totals = max(lengths), dict.fromkeys(lengths, 0.0)
        chunk = max(1, TOKENS_PER_PASS // (len(self.before) + longest + len(self.after)))
        for start in range(0, len(views), chunk):
            part = views[start : start + chunk]
            found = self.run(partial(self._log_probs, part, longest))
            for (length, _, _), log_prob in zip(part, found, strict=True):
                totals[length] += log_prob
        return [totals[length] / max(1, sum(map(bool, self.sides))) for length in lengths]

    @torch.no_grad()
    def _log_probs(self, views: Sequence[tuple[int, list[int], int]], longest: int) -> list[float]:
        """The log-probability of the token to predict in each view, a gap of some length with its hidden
        tokens, by one forward pass."""
        lm = self.lm
        rows = [
            [*self.before, *[lm.mask_token_id] * n, *self.after, *[lm.pad_token_id] * (longest - n)]
            for n, _, _ in views
        ]
        ids_MT = torch.tensor(rows, device=lm.device)
        length_M1 = torch.tensor([length for length, _, _ in views], device=lm.device)[:, None]
        end_M1 = ids_MT.shape[1] - longest + length_M1
        real_MT = torch.arange(ids_MT.shape[1], device=lm.device) < end_M1
        hidden_MT, target_MT = (ids_MT == lm.mask_token_id) & real_MT, torch.zeros_like(real_MT)
        for row, (_, hidden, target) in enumerate(views):
            hidden_MT[row, hidden] = True
            target_MT[row, target] = True
        each = Views(hidden_MT[:, None], target_MT[:, None], target_MT[:, None].float())
        with evaluating(lm):
            log_prob_M1T = view_log_probs(lm, ids_MT, real_MT.long(), each)
        return log_prob_M1T.double().sum((1, 2)).tolist()

    def views(self, length: int, first: int, last: int) -> Iterator[tuple[list[int], int]]:
        """The hidden tokens of the window, and the one to predict."""
        for side, offset in zip(self.sides, (0, len(self.before) + length), strict=True):
            places = [offset + index for index in side]
            for number, place in enumerate(places[first:last], start=first):
                yield places[number:], place


def _segments(lm: DiffusionLM, text: Any, mark: str, where: str) -> list[list[int]]:
    """The ids between the gaps, each part tokenized apart: no token reaches over a mark."""
    if isinstance(text, str):
        first, *others = text.split(mark)
        keep = [lm.tokenizer.mask_token]
        segments = [
            encode_prompt(lm.tokenizer, first, keep),
            *(encode_completion(lm.tokenizer, mark, part, keep) for part in others),
        ]
    elif isinstance(text, Sequence) and all(is_ids(part) for part in text):
        segments = [list(part) for part in text]
    else:
        remedy = f"Give a string with {mark}, or the lists of ids between the gaps"
        raise GenerationError("neither a string nor lists of token ids", where=where, remedy=remedy)
    if len(segments) < 2:
        remedy = f"Write {mark} where tokens are missing, or give the lists of ids before and after"
        raise GenerationError("has no gap", where=where, remedy=remedy)
    return segments


def _check(lm: DiffusionLM, segments: list[list[int]], max_gap: int, where: str) -> None:
    for number, after in enumerate(segments[1:], start=1):
        check_ids(lm, after, where)
        if all(token == lm.mask_token_id for token in after[:WINDOW]):
            what = f"gap {number} has no text after it, by which its length could be found"
            raise GenerationError(
                what, where=where, remedy="Write more text, or a mask token for every missing token"
            )
    check_ids(lm, segments[0], where)
    if lm.logit_shift and (not segments[0] or segments[0][0] == lm.mask_token_id):
        raise GenerationError(
            "the first token is hidden, and no token before it predicts it",
            where=where,
            remedy="Begin with BOS",
        )
    known, gaps, context = sum(map(len, segments)), len(segments) - 1, lm.context_length
    if context is not None and known + gaps * max_gap > context:
        longest = (context - known) // gaps
        what = (
            f"{known} tokens and {gaps} gap{'s' * (gaps > 1)} of up to {max_gap} exceed the context of "
            f"{context}"
        )
        remedy = f"Set max_gap to at most {longest}" if longest > 0 else "Shorten the text"
        raise GenerationError(what, where=where, remedy=remedy)


def _canvas(lm: DiffusionLM, segments: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """The text, with as many mask tokens in its gaps as these lengths."""
    pairs = zip(segments, [*lengths, 0], strict=True)
    return [token for segment, length in pairs for token in [*segment, *[lm.mask_token_id] * length]]
