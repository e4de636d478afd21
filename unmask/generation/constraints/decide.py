"""Tokens for the hidden positions of a decoding block, given that every gap can still meet its constraint.

Within the block, tokens have the model's distribution given that the gap is accepted. Of later blocks the
model has said nothing yet: there it only counts whether some text fits.

Shapes: N hidden positions of the block or of a window, V vocabulary, C classes, S states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.errors import GenerationError
from unmask.generation.constraints.automaton import TokenAutomaton
from unmask.generation.constraints.distribution import ClassWeights, Paths, class_weights
from unmask.generation.constraints.gaps import Gap
from unmask.generation.policies import (
    Decision,
    GivenTokens,
    best,
    decide,
    draw,
    keep_likely,
    penalize_and_ban,
    weights,
)

OUTSIDE = 1e9
"""Nats by which tokens that top_k, top_p or min_p leave out fall behind: they are used only where no text
fits without them."""


@dataclass(frozen=True)
class Window:
    """The hidden positions of a gap in a block, and how the tokens between them lead from state to state."""

    automaton: TokenAutomaton
    state: int  # before the first of them
    end_S: np.ndarray  # the states after the last of them from which the rest of the gap can be completed
    runs: list[np.ndarray | None]  # of given tokens after each but the last, as of `Paths`
    row_N: Tensor  # of the logits

    @property
    def class_V(self) -> Tensor:
        return torch.from_numpy(self.automaton.class_V).long().to(self.row_N.device)

    def paths(self, log_NC: np.ndarray) -> Paths:
        """The paths for weights of the classes."""
        return Paths(self.automaton, log_NC, self.state, self.end_S, self.runs)

    def possible(self, log_NC: np.ndarray) -> Paths:
        """The same. Raises GenerationError if none has a probability."""
        paths = self.paths(log_NC)
        if not paths.possible:
            raise _impossible()
        return paths

    def by_class(self, logits_NV: Tensor) -> ClassWeights:
        """The weights of the classes."""
        mine_NV = logits_NV if len(self.row_N) == len(logits_NV) else logits_NV[self.row_N]
        return class_weights(mine_NV, self.class_V, self.automaton.next_SC.shape[1])

    def by_token(self, value_NC: np.ndarray, like: Tensor) -> Tensor:
        """The entries of every token's class."""
        return torch.from_numpy(value_NC).to(like)[:, self.class_V]


def decide_given(
    logits_NV: Tensor,
    config: SamplerConfig,
    key_N: Tensor,
    step_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None,
    windows: Sequence[Window],
) -> Decision:
    """Decide like `decide`, for all hidden positions of one sequence's block: tokens that fit together,
    and confidences given the constraint.

    Temperature 0: the most probable text of each window (Suresh et al. 2025, "DINGO"). Else one drawn from
    the model's distribution given that it is accepted. The log-probabilities are the model's own; those of a
    trace, and entropies, are given the constraint.
    """
    if logits_NV.isnan().any():
        return decide(logits_NV, config, key_N, step_N, position_N, present_NV)  # the error
    adjusted_NV = penalize_and_ban(logits_NV, config, present_NV)
    temperature = config.temperature or 1.0
    scaled_NV = adjusted_NV if temperature == 1 else adjusted_NV / temperature
    filtered = config.filters
    ranks_by_rows = config.remasking in ("entropy", "margin") or config.early_commit is not None
    believed_NV = logits_NV.clone() if config.trace or ranks_by_rows else None
    forbidden_NV = torch.zeros_like(logits_NV, dtype=torch.bool) if config.top_forbidden else None
    drawn_from_NV = adjusted_NV.clone() if config.trace or config.filtered_confidence or filtered else None
    token_N = torch.zeros_like(position_N)
    log_prob_N = torch.full(token_N.shape, torch.nan, dtype=torch.float64, device=token_N.device)
    uniform_N = uniform(config.seed, key_N, step=step_N, position=position_N, stream=RngStream.TOKEN)
    for window in windows:
        row_N = window.row_N
        predicted = window.by_class(logits_NV)
        raw = window.possible(predicted.log_prob_WC)
        ratio_NC = raw.log_ratios()
        if believed_NV is not None:
            believed_NV[row_N] += window.by_token(ratio_NC, logits_NV)
        if forbidden_NV is not None:
            forbidden_NV[row_N] = window.by_token(ratio_NC, logits_NV) == -torch.inf
        drawn = raw
        if scaled_NV is not logits_NV and (config.temperature > 0 or drawn_from_NV is not None):
            drawn = window.possible(window.by_class(scaled_NV).log_prob_WC)
        if drawn_from_NV is not None:
            ratios_NC = ratio_NC if drawn is raw else drawn.log_ratios()
            drawn_from_NV[row_N] += temperature * window.by_token(ratios_NC, logits_NV)
        if config.temperature == 0:
            largest_NC = (predicted if adjusted_NV is logits_NV else window.by_class(adjusted_NV)).largest_WC
            token_N[row_N] = _best_tokens(window, adjusted_NV[row_N], largest_NC)
        elif drawn_from_NV is not None and filtered:
            given_NV = drawn_from_NV[row_N]
            weight_NV = weights(given_NV, given_NV.amax(-1, keepdim=True), temperature)
            token_N[row_N] = _draw_filtered(window, scaled_NV[row_N], weight_NV, uniform_N[row_N], config)
        else:
            token_N[row_N] = _draw_tokens(window, drawn, adjusted_NV[row_N], uniform_N[row_N], temperature)
        class_N = window.class_V[token_N[row_N]].cpu().numpy()
        ratio_N = ratio_NC[np.arange(len(class_N)), class_N]
        # of the same sums: they cancel where one token is left
        shift_N = np.where(ratio_N == 0, np.nan, ratio_N - predicted.normalizer_W)
        log_prob_N[row_N] = logits_NV[row_N, token_N[row_N]].double() + torch.from_numpy(shift_N).to(
            log_prob_N.device
        )
    given = GivenTokens(token_N, log_prob_N, believed_NV, drawn_from_NV, forbidden_NV)
    return decide(logits_NV, config, key_N, step_N, position_N, given=given)


class GivenTexts(NamedTuple):
    """What the positions of a window have, given that their text is accepted."""

    best_N: Tensor  # the most probable text
    drawn_N: Tensor  # one that is drawn
    logits_NV: Tensor  # of each position, float64


def texts_given(window: Window, logits_NV: Tensor, uniform_N: Tensor, config: SamplerConfig) -> GivenTexts:
    """The texts of a window, from logits at its positions that temperature and bans have changed already.

    In float64, since positions whose tokens decide one another have equal entropies, which rounding must not
    order.

    Raises:
        GenerationError: no text that is accepted has a probability.
    """
    predicted = window.by_class(logits_NV)
    paths = window.possible(predicted.log_prob_WC)
    exact_NV = logits_NV.double()
    given_NV = exact_NV + window.by_token(paths.log_ratios(), exact_NV)
    if config.filters:
        weight_NV = weights(given_NV, given_NV.amax(-1, keepdim=True))
        drawn_N = _draw_filtered(window, logits_NV, weight_NV, uniform_N, config)
    else:
        drawn_N = _draw_tokens(window, paths, logits_NV, uniform_N, 1.0)
    return GivenTexts(_best_tokens(window, logits_NV, predicted.largest_WC), drawn_N, given_NV)


def windows_of(
    gaps: Sequence[Gap],
    block: tuple[int, int],
    ids: Sequence[int],
    hidden: Sequence[bool],
    device: torch.device,
) -> list[Window]:
    """The windows of the gaps in a block. Their rows, on the device of the logits, are those of the block's
    hidden positions, in order."""
    start, stop = block
    row = {
        position: number
        for number, position in enumerate(position for position in range(start, stop) if hidden[position])
    }
    windows = []
    for gap in gaps:
        inside = [
            position for position in range(max(gap.start, start), min(gap.stop, stop)) if hidden[position]
        ]
        if not inside:
            continue
        last, end = inside[-1], min(gap.stop, stop)
        state = gap.automaton.after(ids[gap.start : inside[0]])
        runs = [
            gap.automaton.through(ids[one + 1 : other]) if other > one + 1 else None
            for one, other in pairwise(inside)
        ]
        end_S = gap.completable(end)[gap.automaton.through(ids[last + 1 : end])]
        row_N = torch.tensor([row[position] for position in inside], device=device)
        windows.append(Window(gap.automaton, state, end_S, runs, row_N))
    return windows


def _impossible() -> GenerationError:
    what = "the model gives no text that meets it any probability"
    return GenerationError(
        what, where="constraint", remedy="Change the constraint, or the tokens that are allowed"
    )


def _best_tokens(window: Window, logits_NV: Tensor, largest_NC: np.ndarray) -> Tensor:
    """The tokens of the most probable text."""
    paths, class_V = window.paths(largest_NC), window.class_V

    def first_token(at: int, one: int) -> int:
        return int(best(logits_NV[at][None].masked_fill(class_V != one, -torch.inf)))

    if (class_N := paths.best(first_token)) is None:
        raise _impossible()
    return best(
        torch.where(class_V == torch.from_numpy(class_N).to(class_V.device)[:, None], logits_NV, -torch.inf)
    )


def _draw_tokens(
    window: Window, paths: Paths, logits_NV: Tensor, uniform_N: Tensor, temperature: float
) -> Tensor:
    """The tokens of a text that is drawn from left to right: each as without a constraint, with the logits of
    its class moved by how likely the rest is accepted after it."""
    class_V, tokens = window.class_V, list[Tensor]()

    def pick(at: int, rest_C: np.ndarray) -> int:
        row = slice(at, at + 1)
        moved_1V = logits_NV[row] + temperature * torch.from_numpy(rest_C).to(logits_NV)[class_V]
        tokens.append(draw(weights(moved_1V, moved_1V.amax(-1, keepdim=True), temperature), uniform_N[row]))
        return int(class_V[tokens[-1]])

    paths.draw(pick)
    return torch.cat(tokens)


def _draw_filtered(
    window: Window, scaled_NV: Tensor, weight_NV: Tensor, uniform_N: Tensor, config: SamplerConfig
) -> Tensor:
    """Draw like `_draw_tokens`, when top_k, top_p and min_p have cut each position's distribution given the
    constraint, which is proportional to the weights. Tokens that they leave out are drawn only where no text
    fits without them."""
    class_V = window.class_V
    keep_NV = keep_likely(weight_NV, config.top_k, config.top_p, config.min_p) > 0
    keep_NC = (
        torch.zeros(len(keep_NV), window.automaton.next_SC.shape[1], device=keep_NV.device).index_add(
            1, class_V, keep_NV.float()
        )
        > 0
    )
    cut_NV = scaled_NV.double()
    cut_NV = torch.where(keep_NV, cut_NV, torch.where(keep_NC[:, class_V], -torch.inf, cut_NV - OUTSIDE))
    log_NC = class_weights(cut_NV, class_V, keep_NC.shape[1]).log_prob_WC
    return _draw_tokens(window, window.possible(log_NC), cut_NV, uniform_N, 1.0)
