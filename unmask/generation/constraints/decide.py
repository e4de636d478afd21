"""Tokens for the hidden positions of a decoding block, given that every gap can still meet its constraint.

Within the block, tokens have the model's distribution given that the gap is accepted. Of later blocks the model has said nothing yet: there
it only counts whether some text fits.

Shapes: N hidden positions of the block, W positions of a window, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import Stream, uniform
from unmask.errors import GenerationError
from unmask.generation.constraints.automaton import TokenAutomaton
from unmask.generation.constraints.distribution import Paths, class_log_probs, class_maxima
from unmask.generation.constraints.gaps import Gap
from unmask.generation.policies import Decision, Given, best, decide, draw, keep_likely, normaliser, penalise_and_ban, weights

OUTSIDE = 1e9
"""Nats by which tokens that top_k or top_p leave out fall behind: they are used only where no text fits without them."""


@dataclass(frozen=True)
class Window:
    """The part of a gap from its first hidden position in a block to the end of the block."""

    automaton: TokenAutomaton
    state: int  # before the first position
    end_S: np.ndarray  # the states from which the rest of the gap can be completed
    tokens: list[int | None]  # None: hidden
    row_N: Tensor  # of the logits at its hidden positions

    @property
    def class_V(self) -> Tensor:
        return torch.from_numpy(self.automaton.class_V).long().to(self.row_N.device)

    def paths(self, log_NC: np.ndarray) -> Paths:
        """The paths for weights of the classes at the hidden positions. Raises GenerationError if none has a probability."""
        log_WC = np.full((len(self.tokens), self.automaton.next_SC.shape[1]), -np.inf)
        hidden_W = np.array([token is None for token in self.tokens])
        log_WC[hidden_W] = log_NC
        for at in np.nonzero(~hidden_W)[0]:
            log_WC[at, self.automaton.class_V[self.tokens[at]]] = 0.0
        paths = Paths(self.automaton, log_WC, self.state, self.end_S)
        if not paths.possible:
            what = "the model gives no text that meets it any probability"
            raise GenerationError(what, where="constraint", remedy="Change the constraint, or the tokens that are allowed")
        return paths

    def log_probs(self, logits_NV: Tensor) -> np.ndarray:
        return class_log_probs(logits_NV[self.row_N], self.class_V, self.automaton.next_SC.shape[1])

    def hidden(self, value_W: np.ndarray) -> np.ndarray:
        """The entries of hidden positions."""
        return value_W[[token is None for token in self.tokens]]


def decide_given(
    logits_NV: Tensor,
    config: SamplerConfig,
    key_N: Tensor,
    step_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None,
    windows: Sequence[Window],
) -> Decision:
    """As `decide`, for all hidden positions of one sequence's block: tokens that fit together, and confidences given the constraint.

    Temperature 0: the most probable text of each window (Suresh et al. 2025, "DINGO"). Else one drawn from the model's distribution given
    that it is accepted. The log-probabilities are the model's own; those of a trace, and entropies, are given the constraint.
    """
    if logits_NV.isnan().any():
        return decide(logits_NV, config, key_N, step_N, position_N, present_NV)  # the error
    adjusted_NV = penalise_and_ban(logits_NV, config, present_NV)
    temperature = config.temperature or 1.0
    scaled_NV = adjusted_NV if temperature == 1 else adjusted_NV / temperature
    filtered = config.top_k > 0 or config.top_p < 1
    needs_drawn_from = config.trace or config.filtered_confidence or filtered
    given_NV, drawn_from_NV = logits_NV.clone(), adjusted_NV.clone() if needs_drawn_from else adjusted_NV
    allowed_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    left_N = torch.zeros(len(logits_NV), dtype=torch.float64, device=logits_NV.device)
    uniform_N = uniform(config.seed, key_N, step=step_N, position=position_N, stream=Stream.TOKEN)
    for window in windows:
        row_N, class_V = window.row_N, window.class_V
        raw = window.paths(window.log_probs(logits_NV))
        ratio_NV = _by_token(window, raw.log_ratios(), class_V, logits_NV)
        given_NV[row_N] += ratio_NV
        drawn = raw if scaled_NV is logits_NV else window.paths(window.log_probs(scaled_NV))
        if needs_drawn_from:
            drawn_from_NV[row_N] += temperature * (ratio_NV if drawn is raw else _by_token(window, drawn.log_ratios(), class_V, logits_NV))
        keep_NV = torch.ones_like(allowed_NV[row_N])
        if config.temperature == 0:
            class_N = _best_classes(window, adjusted_NV, class_V)
        else:
            if filtered:
                drawn, keep_NV = _filtered(window, scaled_NV, drawn_from_NV, class_V, config)
            class_W, left_W = drawn.draw(_spread(window, uniform_N))
            class_N = torch.from_numpy(window.hidden(class_W)).to(row_N.device)
            left_N[row_N] = torch.from_numpy(window.hidden(left_W)).to(row_N.device)
        of_class_NV = class_V == class_N[:, None]
        inside_NV = of_class_NV & keep_NV
        allowed_NV[row_N] = torch.where(inside_NV.any(1, keepdim=True), inside_NV, of_class_NV)
    token_N = _tokens(adjusted_NV.masked_fill(~allowed_NV, -torch.inf), left_N, config.temperature)
    decision = decide(given_NV, config, key_N, step_N, position_N, present_NV, Given(drawn_from_NV, token_N))
    log_prob_N = logits_NV.gather(1, token_N[:, None]).squeeze(1) - normaliser(logits_NV)
    return decision._replace(log_prob_N=log_prob_N)


def windows_of(gaps: Sequence[Gap], block: tuple[int, int], ids: Sequence[int], hidden: Sequence[bool]) -> list[Window]:
    """The windows of the gaps in a block. Their rows are those of the block's hidden positions, in order."""
    start, stop = block
    row = {position: number for number, position in enumerate(position for position in range(start, stop) if hidden[position])}
    windows = []
    for gap in gaps:
        inside = [position for position in range(max(gap.start, start), min(gap.stop, stop)) if hidden[position]]
        if not inside:
            continue
        state = gap.automaton.after(ids[gap.start : inside[0]])
        end = min(gap.stop, stop)
        tokens = [None if hidden[position] else ids[position] for position in range(inside[0], end)]
        end_S = gap.automaton.completable(gap.stop - end, gap.live_C)
        windows.append(Window(gap.automaton, state, end_S, tokens, torch.tensor([row[position] for position in inside])))
    return windows


def _by_token(window: Window, ratio_WC: np.ndarray, class_V: Tensor, like: Tensor) -> Tensor:
    """The entries of hidden positions, by token."""
    return torch.from_numpy(window.hidden(ratio_WC)).to(like)[:, class_V]


def _spread(window: Window, uniform_N: Tensor) -> np.ndarray:
    """The uniform numbers of the hidden positions at their places in the window; 0 at the others."""
    value_W = np.zeros(len(window.tokens))
    value_W[[token is None for token in window.tokens]] = uniform_N[window.row_N].cpu().numpy()
    return value_W


def _best_classes(window: Window, logits_NV: Tensor, class_V: Tensor) -> Tensor:
    logits_NV = logits_NV[window.row_N]
    paths = window.paths(class_maxima(logits_NV, class_V, window.automaton.next_SC.shape[1]))
    row_W = np.cumsum([token is None for token in window.tokens]) - 1

    def first_token(at: int, one: int) -> int:
        token = window.tokens[at]
        return int(best(logits_NV[row_W[at]][None].masked_fill(class_V != one, -torch.inf))) if token is None else token

    return torch.from_numpy(window.hidden(paths.best(first_token))).to(class_V.device)


def _filtered(window: Window, scaled_NV: Tensor, drawn_from_NV: Tensor, class_V: Tensor, config: SamplerConfig) -> tuple[Paths, Tensor]:
    """The paths when top_k and top_p have cut each position's distribution given the constraint, and what they keep."""
    drawn_from_NV = drawn_from_NV[window.row_N]
    weight_NV = weights(drawn_from_NV, drawn_from_NV.amax(-1, keepdim=True), config.temperature)
    kept_NV = keep_likely(weight_NV, config.top_k, config.top_p) > 0
    count = window.automaton.next_SC.shape[1]
    all_NC = window.log_probs(scaled_NV)
    inside_NC = class_log_probs(scaled_NV[window.row_N].masked_fill(~kept_NV, -torch.inf), class_V, count)
    return window.paths(np.where(inside_NC > -np.inf, inside_NC, all_NC - OUTSIDE)), kept_NV


def _tokens(logits_NV: Tensor, left_N: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return best(logits_NV)
    return draw(weights(logits_NV, logits_NV.amax(-1, keepdim=True), temperature), left_N)
