"""Training on gaps of unknown length, with the expand and delete tokens of `unmask.models.length_tokens`
(after DreamOn, Wu et al. 2026, arXiv 2602.01326).

In an open gap some tokens are known to be there, and r tokens are missing after the last revealed one. Hidden
tokens before that one show the mask token. After it there are K positions, whatever r is, which show the
expand token. The i-th has as its target the i-th missing token; delete, if i > r; and expand, if i = K < r:
the rest, merged into one position. A model cannot tell revealed tokens of a gap from the text before it. So r
is uniform from 0 to max_gap, however many are revealed, and no length is favored beforehand at any step:

    p(delete at i) = p(r < i),    p(expand at K) = p(r > K),    given what is visible.

A sampler that expands the last position, or deletes the positions after the end, reaches only such canvases.
In a quarter of the gaps the length is given: all hidden tokens show the mask token. Half of the rows are
shown without the end token at their end, as texts to fill have none.

The loss of a row is -mean log p(target) over its hidden positions, times its tokens: the masked-diffusion
loss with exact counts.

Shapes: B batch, T positions of the canvases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.data.rows import pad_rows
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, columns
from unmask.errors import ModelError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.length_tokens import add_length_tokens, predicting_lengths
from unmask.supervised.extra_objective import Objective, ObjectiveLoss, Plan, row_weights
from unmask.tensor_checks import check_tensors

KEEPS_LENGTH = 0.25  # of the gaps


class Numbers(NamedTuple):
    """The uniform random numbers of a gap, by what each decides."""

    keeps_length: float
    num_known: float  # tokens that are known to be there
    num_missing: float
    start: float
    num_hidden: float  # of the known ones
    in_order: float  # whether those were revealed from left to right
    num_positions: float  # of what is missing


@dataclass(frozen=True)
class Canvases:
    """Rows whose gaps have as many positions as a sampler may have."""

    ids_BT: Tensor  # with the mask token or the expand token at hidden positions
    target_BT: Tensor  # what each hidden position stands for; elsewhere the same ids
    hidden_BT: Tensor
    document_BT: Tensor  # 0 at padding


def with_length_tokens(lm: DiffusionLM, max_gap: int) -> DiffusionLM:
    """The model with the two tokens, to be trained on gaps of up to `max_gap` tokens, which is saved with it.
    Raises ModelError if it does not see the text after a gap."""
    if lm.attention != "bidirectional":
        what = f"a model with {lm.attention.replace('_', '-')} attention does not see the text after a gap"
        raise ModelError(what, where="max_gap", remedy="Convert it with `unmask convert --recipe full`")
    lm = add_length_tokens(lm)
    lm.max_gap = max_gap
    return lm


class GapObjective(Objective):
    """Gaps of unknown length, of up to `max_gap` tokens, in place of the masked loss."""

    def prepared(self, lm: DiffusionLM) -> DiffusionLM:
        return with_length_tokens(lm, self.args.max_gap)

    def loss(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG, plan: Plan) -> ObjectiveLoss:
        canvases = make_canvases(lm, batch, draw, self.args.max_gap)
        log_prob_N = canvas_log_probs(lm, canvases)
        count = len(log_prob_N)
        metrics = {"cross_entropy": (-log_prob_N.detach().mean(), float(count))} if count else {}
        return ObjectiveLoss(canvas_loss(log_prob_N, canvases, batch["maskable"].sum(1)), metrics=metrics)


def make_canvases(lm: DiffusionLM, batch: Mapping[str, Any], draw: MaskRNG, max_gap: int) -> Canvases:
    """A canvas of each row, with a gap for every 2 * max_gap learned tokens, at least one. The first token of
    the row and end tokens are in no gap.

    Args:
        batch: `input_ids` and `documents` (0 is padding), integers, and `maskable`, boolean: the learned
            tokens; [B, T] each.
        draw: the source of randomness.
        max_gap: the longest gap, in tokens, with which the model was made (`with_length_tokens`).

    Raises:
        ModelError: the model has no expand and delete token.
    """
    if lm.expand_token_id is None:
        raise ModelError(
            "the model has no expand token", where="max_gap", remedy="Add it with with_length_tokens"
        )
    check_tensors(
        ids_BT=batch["input_ids"],
        document_BT=batch["documents"],
        maskable_BT=batch["maskable"],
        key_B=draw.key_B,
    )
    ids_BT, device = batch["input_ids"], batch["input_ids"].device
    ends = torch.tensor(lm.eos_token_ids, dtype=torch.long, device=device)
    inside_BT = batch["maskable"] & ~torch.isin(ids_BT, ends)
    number_1N = torch.arange(
        1 + len(Numbers._fields) * (ids_BT.shape[1] // (2 * max_gap) + 1), device=device
    )[None]
    number_BN = draw.uniform(number_1N, 1, RngStream.GAP)[:, 0]
    order_BT = draw.uniform(columns(ids_BT), 1, RngStream.MASK)[:, 0]
    columns_of = (each.tolist() for each in (ids_BT, batch["documents"], inside_BT, number_BN, order_BT))
    rows = [_Row(lm, max_gap, *row).cells() for row in zip(*columns_of, strict=True)]
    parts = [
        pad_rows([[cell[part] for cell in row] for row in rows], fill)
        for part, fill in enumerate((lm.pad_token_id, 0, False, 0))
    ]
    return Canvases(*(part.to(device) for part in parts))


def canvas_log_probs(lm: DiffusionLM, canvases: Canvases) -> Tensor:
    """The log-probabilities [N] of the targets at the hidden positions, in the order of rows, in nats."""
    lm, hidden_BT = predicting_lengths(lm), canvases.hidden_BT
    inputs = lm.noised_inputs(canvases.ids_BT, canvases.document_BT, hidden_BT, hidden_BT)
    return lm.log_probs(inputs, canvases.target_BT[hidden_BT])


def canvas_loss(log_prob_N: Tensor, canvases: Canvases, items_B: Tensor) -> Tensor:
    """The mean cross-entropy of each row's hidden positions, times the row's items (its learned tokens),
    summed over rows, in nats."""
    check_tensors(hidden_BT=canvases.hidden_BT, items_B=items_B)
    weight_N = row_weights(canvases.hidden_BT, items_B.to(log_prob_N))
    check_tensors(weight_N=weight_N, log_prob_N=log_prob_N)
    return -(weight_N * log_prob_N).sum()


CanvasCell = tuple[int, int, bool, int]
"""A position of a canvas: its id, target, whether it is hidden, and its document."""


class _Row:
    """A row of a batch, and the random numbers that make a canvas of it."""

    def __init__(
        self,
        lm: DiffusionLM,
        max_gap: int,
        ids: Sequence[int],
        documents: Sequence[int],
        inside: Sequence[bool],
        numbers: Sequence[float],
        order: Sequence[float],
    ):
        self.lm, self.max_gap, self.ids, self.documents, self.order = lm, max_gap, ids, documents, order
        self.drops_end, *self.numbers = numbers
        self.length = sum(document > 0 for document in documents)
        self.places = [place for place, is_inside in enumerate(inside) if is_inside]
        # positions that the canvas may add
        self.room = max(0, (lm.context_length or self.length + 2 * max_gap * len(ids)) - self.length)

    def cells(self) -> list[CanvasCell]:
        """The canvas."""
        cells, last = list[CanvasCell](), 0
        for gap, missing, numbers in self._gaps():
            positions = self._gap(gap, missing, numbers)
            self.room -= max(0, len(positions) - len(gap))
            cells += [*self._text(last, gap[0]), *positions]
            last = gap[-1] + 1
        rest = self._text(last, self.length)
        # some text must follow a gap
        unended = self.drops_end < 0.5 and len(rest) > 1 and rest[-1][0] in self.lm.eos_token_ids
        return cells + rest[: len(rest) - unended]

    def _text(self, start: int, stop: int) -> list[CanvasCell]:
        return [(self.ids[n], self.ids[n], False, self.documents[n]) for n in range(start, stop)]

    def _gaps(self) -> Iterator[tuple[list[int], int | None, Numbers]]:
        """The places of each gap, in order; how many of its tokens are missing at the end (None: its length
        is given); and its random numbers. Each gap is in a stretch of its own, whose last token stays visible
        if another stretch follows."""
        count, width = max(1, len(self.places) // (2 * self.max_gap)), len(Numbers._fields)
        for gap in range(count):
            first, stop = len(self.places) * gap // count, len(self.places) * (gap + 1) // count
            stretch = self.places[first : stop - (gap < count - 1)]
            if not stretch:
                continue
            numbers = Numbers(*self.numbers[width * gap : width * (gap + 1)])
            given = numbers.keeps_length < KEEPS_LENGTH
            missing = 0 if given else int(numbers.num_missing * (self.max_gap + 1))
            # at least one of a gap whose length is given, which misses none
            known = given + int(numbers.num_known * (self.max_gap - missing + (not given)))
            size = min(max(1, missing + known), len(stretch))
            start = int(numbers.start * (len(stretch) - size + 1))
            places = stretch[start : start + size]
            together = [
                other == one + 1 and self.documents[one] == self.documents[other]
                for one, other in pairwise(places)
            ]
            places = places[: together.index(False) + 1 if False in together else None]
            yield places, None if given else min(missing, len(places)), numbers

    def _gap(self, places: Sequence[int], missing: int | None, numbers: Numbers) -> list[CanvasCell]:
        """The positions of a gap; `missing` as in `_gaps`."""
        lm, document, given = self.lm, self.documents[places[0]], missing is None
        tokens = [self.ids[place] for place in places]
        known = len(places) - (missing or 0)  # tokens that are certain; unless given, the last is revealed
        num_hidden = given + int(numbers.num_hidden * known)
        if numbers.in_order >= 0.5:
            ranked = sorted(range(known - (not given)), key=lambda index: self.order[places[index]])
        else:  # as when they were revealed from left to right
            ranked = [*reversed(range(known))] if given else []
        hidden = set(ranked[:num_hidden])
        cells = [
            (lm.mask_token_id if n in hidden else token, token, n in hidden, document)
            for n, token in enumerate(tokens[:known])
        ]
        if missing is None or (longest := min(self.max_gap, missing + self.room)) == 0:
            return cells
        assert lm.expand_token_id is not None and lm.delete_token_id is not None
        positions = 1 + int(numbers.num_positions * longest)
        targets = [*tokens[known : known + positions], *[lm.delete_token_id] * (positions - missing)]
        if missing > positions:
            targets[-1] = lm.expand_token_id
        return cells + [(lm.expand_token_id, target, True, document) for target in targets]
