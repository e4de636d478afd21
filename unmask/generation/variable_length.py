"""Filling gaps whose length a trained model finds while it fills them (`unmask.models.length_tokens`).

The positions of a gap after its last revealed token are open; at first all are. An open position may be
deleted, which ends the gap before it, and the last one may become two. As the model was trained
(`unmask.supervised.variable_length`), p(delete at i) is the probability that the gap has fewer than i tokens,
and p(expand) that it has more tokens than positions.

A gap that has expanded is not deleted from, and one that was deleted from does not expand: it was decided
that it has at least, or at most, that many tokens. From left to right, drawn gaps of up to `FIRST_POSITIONS`
tokens then have exactly the model's distribution; in other cases the tokens before are drawn without this
knowledge.

At temperature 0 an event is taken if it is more probable than not, thus at first the median length. A length
with a probability of `SETTLED` is settled before any token is revealed: the gap then shows mask tokens, of
which the model is surer than of open positions.

`naive.fill_gaps` defines the tokens. Shapes: N hidden positions of the running texts, B texts, T positions, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import sequence_keys
from unmask.errors import GenerationError
from unmask.generation.engine.forward import predict
from unmask.generation.engine.host import moved
from unmask.generation.engine.slots import BatchEntry, BatchState
from unmask.generation.gap_lengths import DEFAULT_MAX_GAP, checked_segments
from unmask.generation.output import FoundGap, Generation, Trace, make_generation
from unmask.generation.policies import (
    Decision,
    GivenTokens,
    decide,
    first_by_priority,
    num_accepted,
    penalize_and_ban,
)
from unmask.generation.requests import Request, checked_keys
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.length_tokens import predicting_lengths
from unmask.models.model_state import evaluating

FIRST_POSITIONS = 16
"""Positions that a gap has at first, if it may have that many. More cost wider passes; a longer gap costs a
pass for each further position."""
SETTLED = 0.9
UNSUPPORTED = (
    "steps",
    "schedule",
    "block_size",
    "remask_fraction",
    "revise",
    "cfg_scale",
    "constraint",
    "cache",
    "refresh_interval",
    "early_commit",
    "num_speculative_tokens",
    "mode",
    "sub_block_size",
    "top_log_probs",
    "top_forbidden",
)
"""Settings that plan for a number of tokens, or for positions that stay where they are."""
Decided = dict[int, tuple[int, tuple[float, ...], bool]]
"""The token at each hidden position, its records, and whether it is chosen."""
RECORDS = ("log_prob_N", "sampled_log_prob_N", "entropy_N")


@dataclass(eq=False)
class OpenText:
    """A text whose gaps have no length yet. All lists have an entry for each position."""

    key: int  # of its random numbers
    ids: list[int]  # of visible tokens; any id at hidden positions
    hidden: list[bool]
    gap: list[int]  # the number of the position's gap, from 0; -1: none
    steps: list[int]
    records: list[tuple[float, ...]]  # of `RECORDS`
    passes: int = 0
    grown: set[int] = field(default_factory=set)  # gaps that have expanded
    shrunk: set[int] = field(default_factory=set)  # gaps that were deleted from
    settled: set[int] = field(default_factory=set)  # gaps whose length is known

    def span(self, position: int) -> tuple[int, int]:
        """The start and stop of the position's gap."""
        start = self.gap.index(self.gap[position])
        return start, start + self.gap.count(self.gap[position])

    def is_open(self, position: int) -> bool:
        """Whether the position is in a gap of open length, with no revealed token from it on."""
        is_gap = self.gap[position] >= 0 and self.gap[position] not in self.settled
        return is_gap and all(self.hidden[position : self.span(position)[1]])

    def may(self, position: int, max_gap: int) -> tuple[bool, bool]:
        """Whether a position may expand, and whether it may be deleted. A gap has 1 to `max_gap`
        positions."""
        if not self.is_open(position):
            return False, False
        (start, stop), number = self.span(position), self.gap[position]
        expands = position == stop - 1 and stop - start < max_gap and number not in self.shrunk
        return expands, stop - start > 1 and number not in self.grown

    def shown(self, mask: int, expand: int) -> list[int]:
        """The ids that the model sees."""
        places = range(len(self.ids))
        return [(expand if self.is_open(p) else mask) if self.hidden[p] else self.ids[p] for p in places]

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return self.ids, self.hidden, self.gap, self.steps, self.records

    def expand(self, position: int) -> None:
        """Make two hidden positions of one."""
        self.grown.add(self.gap[position])
        for values in self._columns:
            values.insert(position, values[position])

    def delete(self, position: int) -> None:
        """Remove a position, and those after it in the gap."""
        self.shrunk.add(self.gap[position])
        self._cut(position, self.span(position)[1])

    def _cut(self, start: int, stop: int) -> None:
        for values in self._columns:
            del values[start:stop]

    def settle(self, events: dict[int, tuple[float, float]]) -> bool:
        """Give gaps the length that is all but certain, by the probabilities of expand and delete at each
        position. Returns whether any was."""
        cuts = list[tuple[int, int, int]]()
        for gap in {self.gap[position] for position in events if self.is_open(position)}:
            opened = [position for position in events if self.gap[position] == gap and self.is_open(position)]
            missing = settled_length([events[position][1] for position in opened], events[opened[-1]][0])
            if missing is not None:
                start = self.gap.index(gap)
                cuts.append((max(opened[0] + missing, start + 1), opened[-1] + 1, gap))
        for start, stop, gap in sorted(cuts, reverse=True):
            self._cut(start, stop)
            self.settled.add(gap)
        return bool(cuts)


def fill_gaps(
    lm: DiffusionLM,
    texts: Sequence[Any],
    config: SamplerConfig,
    keys: Sequence[int] | None,
    max_gap: int,
    gap_mark: str,
) -> Generation:
    """Texts with their gaps filled, and the lengths that were found. Arguments and errors are those of
    `unmask.infill`."""
    opened, config = open_texts(lm, texts, config, keys, max_gap, gap_mark)
    with evaluating(lm):
        while running := _running(opened, config):
            _step(lm, running, config, max_gap)
    return make_filled(lm, opened, config)


def trained_max_gap(lm: DiffusionLM, max_gap: int | None) -> int:
    """The longest gap to fill: that of the model's training if none is given. Raises GenerationError for a
    longer one, on which the model was not trained."""
    if max_gap is None:
        return lm.max_gap or DEFAULT_MAX_GAP
    if lm.max_gap is not None and max_gap > lm.max_gap:
        what = f"{max_gap} tokens, but the model was trained on gaps of up to {lm.max_gap}"
        remedy = (
            f"Lower it, train with training.max_gap={max_gap}, or search for the lengths (length='search', "
            "--search)"
        )
        raise GenerationError(what, where="max_gap", remedy=remedy)
    return max_gap


def open_texts(
    lm: DiffusionLM,
    texts: Sequence[Any],
    config: SamplerConfig,
    keys: Sequence[int] | None,
    max_gap: int,
    gap_mark: str,
) -> tuple[list[OpenText], SamplerConfig]:
    """The texts before the first pass, and the settings with which they are filled."""
    for name in UNSUPPORTED:
        if getattr(config, name) != SamplerConfig.model_fields[name].default:
            remedy = "Leave it out, or search for the lengths (length='search', --search)"
            raise GenerationError(
                "has no meaning while the lengths of gaps are open", where=name, remedy=remedy
            )
    both = [token for token in (lm.expand_token_id, lm.delete_token_id) if token is not None]
    first, opened = min(max_gap, FIRST_POSITIONS), []
    for index, segments in enumerate(checked_segments(lm, texts, config, max_gap, gap_mark)):
        ids, gap = list(segments[0]), [-1] * len(segments[0])
        for number, segment in enumerate(segments[1:]):
            ids += [lm.mask_token_id] * first + segment
            gap += [number] * first + [-1] * len(segment)
        hidden, nothing = [token == lm.mask_token_id for token in ids], (0.0,) * len(RECORDS)
        opened.append(OpenText(0, ids, hidden, gap, [-1] * len(ids), [nothing] * len(ids)))
        longest = len(ids) + (len(segments) - 1) * (max_gap - first)
        if config.max_batch_tokens is not None and longest > config.max_batch_tokens:
            what = f"text {index} may have {longest} tokens, which exceed {config.max_batch_tokens}"
            raise GenerationError(what, where="max_batch_tokens", remedy="Raise it, or lower max_gap")
    keys = sequence_keys([text.ids for text in opened]) if keys is None else checked_keys(texts, keys)
    for text, key in zip(opened, keys, strict=True):
        text.key = key
    allowed = [*config.allowed_tokens, *both] if config.allowed_tokens else None
    return opened, config.model_copy(update={"allowed_tokens": allowed})


def _running(texts: Sequence[OpenText], config: SamplerConfig) -> list[OpenText]:
    """The texts of the next pass: the first ones that are not finished, as many as batch_size and
    max_batch_tokens allow."""
    running = [text for text in texts if any(text.hidden)][: config.batch_size]
    bound, count = config.max_batch_tokens or math.inf, len(running)
    while count > 1 and count * max(len(text.ids) for text in running[:count]) > bound:
        count -= 1
    return running[:count]


@torch.no_grad()
def _step(lm: DiffusionLM, texts: Sequence[OpenText], config: SamplerConfig, max_gap: int) -> None:
    """One forward pass, and what it reveals."""
    assert lm.expand_token_id is not None
    slots = BatchState(lm.device, lm.mask_token_id)
    slots.reserve(len(texts), max(len(text.ids) for text in texts))
    added = slots.add_all([(text.shown(lm.mask_token_id, lm.expand_token_id), text.hidden) for text in texts])
    entries = [
        BatchEntry(slot, len(text.ids), 0, len(text.ids), sum(text.hidden))
        for slot, text in zip(added, texts, strict=True)
    ]
    seen = predict(predicting_lengths(lm), slots, entries, alone=config.deterministic)
    places = [
        (member, position)
        for member, text in enumerate(texts)
        for position, hidden in enumerate(text.hidden)
        if hidden
    ]
    member_N = moved(seen.member_N, lm.device)
    may_N2 = torch.tensor(
        [texts[member].may(position, max_gap) for member, position in places], device=lm.device
    )
    of_text_B2 = torch.tensor([(text.key, text.passes) for text in texts], device=lm.device)
    key_N, passes_N = of_text_B2[member_N].unbind(1)
    present_NV = None
    if config.repetition_penalty != 1:
        every_B = torch.arange(len(texts), device=lm.device)
        present_NV = slots.present(every_B, seen.logits_NV.shape[1])[member_N]
    decision, event_N2 = decide_open(
        lm, seen.logits_NV, may_N2, config, key_N, passes_N, seen.position_N, present_NV
    )
    settled = set() if event_N2 is None else _settle(texts, places, event_N2)
    priority_BT = torch.full(slots.ids_SC.shape, -torch.inf, device=lm.device)
    priority_BT[member_N, seen.position_N] = decision.priority_N
    count_B = torch.full((len(texts),), config.tokens_per_step or 1, device=lm.device)
    count_B = num_accepted(priority_BT, config) if config.parallel else count_B
    chosen_BT = first_by_priority(priority_BT, count_B)
    chosen, tokens = chosen_BT[member_N, seen.position_N].tolist(), decision.token_N.tolist()
    records = zip(*(_column(decision, name) for name in RECORDS), strict=True)
    decided: list[Decided] = [{} for _ in texts]
    for (member, position), token, record, is_chosen in zip(places, tokens, records, chosen, strict=True):
        decided[member][position] = token, record, is_chosen
    for member, text in enumerate(texts):
        if member not in settled:
            _reveal(lm, text, decided[member], config, max_gap)
        text.passes += 1


def _settle(texts: Sequence[OpenText], places: Sequence[tuple[int, int]], event_N2: Tensor) -> set[int]:
    """Settle the lengths that are all but certain. Returns the texts with any: they reveal nothing in this
    step."""
    events: list[dict[int, tuple[float, float]]] = [{} for _ in texts]
    for (member, position), (expand, delete) in zip(places, event_N2.tolist(), strict=True):
        events[member][position] = expand, delete
    return {member for member, text in enumerate(texts) if text.settle(events[member])}


def settled_length(delete_K: Sequence[float], expand: float) -> int | None:
    """How many tokens are missing, if a number has a probability of `SETTLED`, by the probabilities of delete
    at each of K open positions, p(fewer than i are missing), and of expand at the last one, p(more than K
    are)."""
    below = [0.0, *delete_K, 1 - expand]
    return next(
        (number for number, (less, more) in enumerate(pairwise(below)) if more - less >= SETTLED), None
    )


def decide_open(
    lm: DiffusionLM,
    logits_NV: Tensor,
    may_N2: Tensor,
    config: SamplerConfig,
    key_N: Tensor,
    step_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None,
) -> tuple[Decision, Tensor | None]:
    """The token that would be revealed at each position: expand or delete only where `may_N2` says so, and at
    temperature 0 only if more probable than all else together. Then the probabilities [N, 2] of the two among
    all that is allowed are returned too, else None."""
    both, where = [lm.expand_token_id, lm.delete_token_id], (key_N, step_N, position_N, present_NV)
    possible_NV = logits_NV.clone()
    possible_NV[:, both] = logits_NV[:, both].masked_fill(~may_N2, -torch.inf)
    if config.temperature > 0:
        return decide(possible_NV, config, *where), None
    allowed_NV = penalize_and_ban(possible_NV, config, present_NV)
    event_N2 = (allowed_NV[:, both] - allowed_NV.logsumexp(1, keepdim=True)).exp()
    taken_NV = logits_NV.clone()
    taken_NV[:, both] = logits_NV[:, both].masked_fill(event_N2 <= 0.5, -torch.inf)
    token_N = decide(taken_NV, config, *where).token_N
    return decide(possible_NV, config, *where, given=GivenTokens(token_N, None, None, None)), event_N2


def _reveal(
    lm: DiffusionLM,
    text: OpenText,
    decided: Decided,
    config: SamplerConfig,
    max_gap: int,
) -> None:
    """Reveal what was decided at the chosen positions, from right to left. What an edit further right
    excludes stays hidden, such as a deletion before a token. At temperature 0 a deletion also makes those
    right before it that were decided: the gap ends at the first."""
    gone = len(text.ids)  # chosen positions from here on were removed, or are done
    for position in sorted(decided, reverse=True):
        token, record, is_chosen = decided[position]
        if position >= gone or not is_chosen:
            continue
        expands, deletes = text.may(position, max_gap)
        if token == lm.expand_token_id:
            if expands:
                text.expand(position)
        elif token == lm.delete_token_id:
            if deletes:
                first = text.span(position)[0] + 1  # a gap keeps a position
                before = decided if config.temperature == 0 else {}
                while position > first and before.get(position - 1, (None,))[0] == token:
                    position -= 1
                gone = max(position, first)
                text.delete(gone)
        else:
            text.ids[position], text.hidden[position] = token, False
            text.steps[position], text.records[position] = text.passes, record


def _column(decision: Decision, name: str) -> list[float]:
    values_N = getattr(decision, name)
    return [0.0] * len(decision.token_N) if values_N is None else values_N.double().tolist()


def make_filled(lm: DiffusionLM, texts: Sequence[OpenText], config: SamplerConfig) -> Generation:
    """The result, as of texts with as many mask tokens as the gaps turned out to have."""
    requests, traces, gaps = [], [], []
    for text in texts:
        filled = [step >= 0 for step in text.steps]
        ids = [lm.mask_token_id if was else token for token, was in zip(text.ids, filled, strict=True)]
        requests.append(Request(ids, ids, filled, 0, text.key, [], None, stop_at_eos=False))
        log_probs, sampled, entropies = (list(column) for column in zip(*text.records, strict=True))
        traces.append(Trace(list(text.ids), text.steps, log_probs, forward_passes=text.passes))
        if config.trace:
            traces[-1].sampled_log_probs, traces[-1].entropies = sampled, entropies
        starts = [text.gap.index(number) for number in range(max(text.gap) + 1)]
        gaps.append([FoundGap(start, text.gap.count(number), {}, 0) for number, start in enumerate(starts)])
    generation = make_generation(lm, requests, traces, config)
    return replace(generation, gaps=gaps)
