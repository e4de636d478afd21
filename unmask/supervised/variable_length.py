"""Training on gaps of unknown length, with the expand and delete tokens of `unmask.models.length_tokens`
(after DreamOn, Wu et al. 2026, arXiv 2602.01326).

In an open gap some tokens are known to be there, and r tokens are missing after the last revealed one. Hidden
tokens before that one show the mask token. After it there are K positions, whatever r is, which show the
expand token. The i-th has as its target the i-th missing token; delete, if i > r; and expand, if i = K < r:
the rest, merged into one position. A model cannot tell revealed tokens of a gap from the text before it. So r
is uniform from 0 to max_gap, however many are revealed, and no length is favoured beforehand at any step:

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
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.data.rows import pad_rows
from unmask.diffusion.rng import Stream
from unmask.diffusion.views import Draw, columns
from unmask.errors import ConfigError, ModelError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.length_tokens import add_length_tokens, predicting_lengths
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


def with_length_tokens(lm: DiffusionLM, max_gap: int, *, adapters: bool = False) -> DiffusionLM:
    """The model with the two tokens, to be trained on gaps of up to `max_gap` tokens, which is saved with it.

    Raises:
        ModelError: it does not see the text after a gap.
        ConfigError: adapters, which do not train the tokens' embeddings.
    """
    if lm.attention != "bidirectional":
        what = f"a model with {lm.attention.replace('_', '-')} attention does not see the text after a gap"
        raise ModelError(what, where="max_gap", remedy="Convert it with `unmask convert --recipe full`")
    if adapters:
        what = "is not trained with lora, which does not train the embeddings of new tokens"
        raise ConfigError(what, where="max_gap", remedy="Train without adapters")
    lm = add_length_tokens(lm)
    lm.max_gap = max_gap
    return lm


def make_canvases(lm: DiffusionLM, batch: Mapping[str, Any], draw: Draw, max_gap: int) -> Canvases:
    """A canvas of each row, with a gap for every 2 * max_gap learnt tokens, at least one. The first token of
    the row and end tokens are in no gap.

    Args:
        batch: `input_ids` and `documents` (0 is padding), integers, and `maskable`, boolean: the learnt
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
    number_BN = draw.uniform(number_1N, 1, Stream.GAP)[:, 0]
    order_BT = draw.uniform(columns(ids_BT), 1, Stream.MASK)[:, 0]
    rows = []
    for row in zip(
        *(each.tolist() for each in (ids_BT, batch["documents"], inside_BT, number_BN, order_BT)), strict=True
    ):
        rows.append(_Row(lm, max_gap, *row).cells())
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
    """The mean cross-entropy of each row's hidden positions, times the row's items (its learnt tokens),
    summed over rows, in nats."""
    check_tensors(hidden_BT=canvases.hidden_BT, items_B=items_B)
    hidden_BT = canvases.hidden_BT
    weight_B1 = (items_B.to(log_prob_N) / hidden_BT.sum(1).clamp_min(1))[:, None]
    weight_N = weight_B1.expand_as(hidden_BT)[hidden_BT]
    check_tensors(weight_N=weight_N, log_prob_N=log_prob_N)
    return -(weight_N * log_prob_N).sum()


Cell = tuple[int, int, bool, int]
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
        self.lm, self.max_gap, (self.drops_end, *self.numbers), self.order = lm, max_gap, numbers, order
        self.ids, self.documents = ids, documents
        self.length = sum(document > 0 for document in documents)
        self.places = [place for place, learnt in enumerate(inside) if learnt]
        # positions that the canvas may add
        self.room = max(0, (lm.context_length or self.length + 2 * max_gap * len(ids)) - self.length)

    def cells(self) -> list[Cell]:
        """The canvas."""
        parts, last = list[list[Cell]](), 0
        for gap, missing, numbers in self._gaps():
            cells = self._gap(gap, missing, numbers)
            self.room -= max(0, len(cells) - len(gap))
            parts += [self._text(last, gap[0]), cells]
            last = gap[-1] + 1
        rest = self._text(last, self.length)
        # some text must follow a gap
        unended = self.drops_end < 0.5 and len(rest) > 1 and rest[-1][0] in self.lm.eos_token_ids
        return [*chain.from_iterable(parts), *rest[: len(rest) - unended]]

    def _text(self, start: int, stop: int) -> list[Cell]:
        return [
            (self.ids[place], self.ids[place], False, self.documents[place]) for place in range(start, stop)
        ]

    def _gaps(self) -> Iterator[tuple[list[int], int | None, Numbers]]:
        """The places of each gap, in order; how many of its tokens are missing at the end (None: its length
        is given); and its random numbers. Each gap is in a stretch of its own, whose last token stays visible
        if another stretch follows."""
        count = max(1, len(self.places) // (2 * self.max_gap))
        for gap in range(count):
            first, stop = len(self.places) * gap // count, len(self.places) * (gap + 1) // count
            stretch = self.places[first : stop - (gap < count - 1)]
            if not stretch:
                continue
            width = len(Numbers._fields)
            numbers = Numbers(*self.numbers[width * gap : width * (gap + 1)])
            given = numbers.keeps_length < KEEPS_LENGTH
            missing = 0 if given else int(numbers.num_missing * (self.max_gap + 1))
            known = (
                1 + int(numbers.num_known * self.max_gap)
                if given
                else int(numbers.num_known * (self.max_gap - missing + 1))
            )
            size = min(max(1, missing + known), len(stretch))
            start = int(numbers.start * (len(stretch) - size + 1))
            places = stretch[start : start + size]
            together = [self._follows(one, other) for one, other in pairwise(places)]
            places = places[: together.index(False) + 1 if False in together else None]
            yield places, None if given else min(missing, len(places)), numbers

    def _follows(self, one: int, other: int) -> bool:
        return other == one + 1 and self.documents[one] == self.documents[other]

    def _gap(self, places: Sequence[int], missing: int | None, numbers: Numbers) -> list[Cell]:
        """The positions of a gap of which so many tokens are missing at the end."""
        lm, length, document = self.lm, len(places), self.documents[places[0]]
        tokens = [self.ids[place] for place in places]
        # tokens that are there for sure, the last of them revealed
        known = length if missing is None else length - missing
        # of these that are hidden
        count = 1 + int(numbers.num_hidden * length) if missing is None else int(numbers.num_hidden * known)
        if numbers.in_order < 0.5:  # as when they were revealed from left to right
            ranked = list(reversed(range(known)))
            count = count if missing is None else 0
        else:
            ranked = sorted(range(known - (missing is not None)), key=lambda index: self.order[places[index]])
        hidden = set(ranked[:count])
        cells = [
            (lm.mask_token_id if n in hidden else token, token, n in hidden, document)
            for n, token in enumerate(tokens[:known])
        ]
        longest = 0 if missing is None else min(self.max_gap, missing + self.room)
        if longest == 0:
            return cells
        assert missing is not None and lm.expand_token_id is not None and lm.delete_token_id is not None
        positions = 1 + int(numbers.num_positions * longest)
        targets = [*tokens[known : known + positions], *[lm.delete_token_id] * (positions - missing)]
        if missing > positions:
            targets[-1] = lm.expand_token_id
        return cells + [(lm.expand_token_id, target, True, document) for target in targets]
