"""The distribution of hidden tokens given that a text is accepted: the model predicts each position by
itself, and an automaton ties them.

Sums and maxima over the paths of the automaton, in logarithms and float64, so that an improbable text is
never lost to underflow.

Between the positions there may be given tokens. They are no positions: a run of them leads from each state to
one, at once.

Shapes: W positions, V vocabulary, S states, C classes, E edges (state, class, next state), P pairs (state,
next state) of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.generation.constraints.automaton import TokenAutomaton
from unmask.generation.policies import CPU_LOGITS_AT_ONCE

ROUNDING = 1e-12
"""What sums of log-probabilities differ by where they are equal: a constraint that allows everything then
changes no bit."""


class ClassWeights(NamedTuple):
    """What a model predicts at some positions, by class.

    Attributes:
        log_prob_WC: the log of the summed probability of the tokens of each class.
        largest_WC: their largest logit.
        normalizer_W: the log of the sum of the exponentials of all logits.
    """

    log_prob_WC: np.ndarray
    largest_WC: np.ndarray
    normalizer_W: np.ndarray


def class_weights(logits_WV: Tensor, class_V: Tensor, count: int) -> ClassWeights:
    """The weights of each class of tokens."""
    rows = (
        max(1, CPU_LOGITS_AT_ONCE // len(class_V))
        if logits_WV.device.type == "cpu"
        else max(1, len(logits_WV))
    )
    if len(logits_WV) > rows:
        parts = [class_weights(part_WV, class_V, count) for part_WV in logits_WV.split(rows)]
        return ClassWeights(*map(np.concatenate, zip(*parts, strict=True)))
    class_WV = class_V.expand_as(logits_WV)
    largest_WC = logits_WV.new_full((len(logits_WV), count), -torch.inf).scatter_reduce(
        1, class_WV, logits_WV, "amax"
    )
    offset_WC = largest_WC.masked_fill(largest_WC == -torch.inf, 0.0)
    weight_WV = (logits_WV - offset_WC.gather(1, class_WV)).exp_()
    sum_WC = torch.zeros(largest_WC.shape, dtype=torch.float64, device=logits_WV.device).scatter_add(
        1, class_WV, weight_WV.double()
    )
    log_WC = offset_WC.double() + sum_WC.log()
    normalizer_W = log_WC.logsumexp(-1)
    return ClassWeights(
        *(each.cpu().numpy() for each in (log_WC - normalizer_W[:, None], largest_WC.double(), normalizer_W))
    )


class Paths:
    """All paths of an automaton over some positions, weighted by what a model predicts there.

    Args:
        log_WC: the weight of each class at each position; -inf: it cannot stand there.
        start: the state before the first position.
        end_S: the states that are allowed after the last position.
        runs: of given tokens after each position but the last: the state [S] that follows each state; None:
            there are none.
    """

    def __init__(
        self,
        automaton: TokenAutomaton,
        log_WC: np.ndarray,
        start: int,
        end_S: np.ndarray,
        runs: Sequence[np.ndarray | None] | None = None,
    ):
        self.automaton, self.log_WC, self.start = automaton, log_WC, start
        self.runs = [None] * len(log_WC) if runs is None else [*runs, None]
        self.end_S = np.where(end_S, 0.0, -np.inf)
        self.edges = automaton.edge_table

    @property
    def possible(self) -> bool:
        """Whether any path is accepted."""
        return bool(self.to_end[0, self.start] > -np.inf)

    @cached_property
    def pair_WP(self) -> np.ndarray:
        """The weights of steps from state to state, whatever the class."""
        edges = self.edges
        return sums(self.log_WC[:, edges.class_E[edges.by_pair_E]], edges.pair_start_P)

    @cached_property
    def to_end(self) -> np.ndarray:
        """[W + 1, S]: the summed weight of all paths from a state before a position to an end."""
        total = np.full((len(self.log_WC) + 1, len(self.end_S)), -np.inf)
        total[-1], edges = self.end_S, self.edges
        for at in reversed(range(len(self.log_WC))):
            rest_S = self._before_run(at, total[at + 1])
            total[at, edges.source_with_pairs] = sums(
                self.pair_WP[at] + rest_S[edges.pair_target_P], edges.source_start
            )
        return total

    @cached_property
    def rest_WS(self) -> np.ndarray:
        """The summed weight of all paths from a state after the token at a position to an end."""
        return np.stack([self._before_run(at, self.to_end[at + 1]) for at in range(len(self.log_WC))])

    def _before_run(self, at: int, value_S: np.ndarray) -> np.ndarray:
        """What holds for the states before the run of given tokens after a position, from what holds for
        those after it."""
        run_S = self.runs[at]
        return value_S if run_S is None else value_S[run_S]

    def _step(self, at: int, state: int, one: int) -> int:
        """The state before the next position, after a class at this one."""
        after, run_S = int(self.automaton.next_SC[state, one]), self.runs[at]
        return after if run_S is None else int(run_S[after])

    @cached_property
    def from_start(self) -> np.ndarray:
        """[W + 1, S]: the summed weight of all paths from the start to a state before a position."""
        total = np.full((len(self.log_WC) + 1, len(self.end_S)), -np.inf)
        total[0, self.start], edges = 0.0, self.edges
        for at in range(len(self.log_WC)):
            step_P = (total[at, edges.pair_source_P] + self.pair_WP[at])[edges.by_target_P]
            step_T, run_S = sums(step_P, edges.target_start), self.runs[at]
            if run_S is None:
                total[at + 1, edges.target_with_pairs] = step_T
            else:
                np.logaddexp.at(total[at + 1], run_S[edges.target_with_pairs], step_T)
        return total

    def log_ratios(self) -> np.ndarray:
        """[W, C]: the log of how much likelier each class is given that the text is accepted than without
        this condition."""
        edges = self.edges
        path_WE = self.from_start[:-1, edges.source_E] + self.rest_WS[:, edges.target_E]
        ratio_WC = np.full(self.log_WC.shape, -np.inf)
        ratio_WC[:, edges.class_with_edges] = sums(path_WE[:, edges.by_class_E], edges.class_start)
        ratio_WC -= self.to_end[0, self.start]
        return np.where(np.abs(ratio_WC) < ROUNDING, 0.0, ratio_WC)

    def draw(self, pick: Callable[[int, np.ndarray], int]) -> np.ndarray:
        """The class [W] at each position of a path that is drawn by its weight, from left to right.

        Args:
            pick: draws the class at a position, from its weights there times what their logarithms [C] are
                given for: how likely the rest is accepted after each, relative to the likeliest.
        """
        state, classes = self.start, np.zeros(len(self.log_WC), dtype=np.int64)
        for at, log_C in enumerate(self.log_WC):
            rest_C = np.where(log_C > -np.inf, self.rest_WS[at, self.automaton.next_SC[state]], -np.inf)
            rest_C = rest_C - rest_C.max()
            classes[at] = pick(at, np.where(rest_C > -ROUNDING, 0.0, rest_C))
            state = self._step(at, state, classes[at])
        return classes

    def best(self, first_token: Callable[[int, int], int]) -> np.ndarray | None:
        """The class [W] at each position of the path of the largest weight (Viterbi 1967), where weights are
        those of best tokens. Among equal ones the lower token comes first: `first_token` is the lowest of the
        best tokens at a position and of a class. None: no path is accepted."""
        edges, steps = self.edges, len(self.log_WC)
        most = np.full((steps + 1, len(self.end_S)), -np.inf)
        most[-1] = self.end_S
        for at in reversed(range(steps)):
            step_E = self.log_WC[at, edges.class_E] + self._before_run(at, most[at + 1])[edges.target_E]
            most[at, edges.source_with_pairs] = np.maximum.reduceat(
                step_E, edges.first_S[edges.source_with_pairs]
            )
        if most[0, self.start] == -np.inf:
            return None
        state, classes = self.start, np.zeros(steps, dtype=np.int64)
        for at in range(steps):
            edge_E = np.arange(edges.first_S[state], edges.first_S[state + 1])
            step_E = (
                self.log_WC[at, edges.class_E[edge_E]]
                + self._before_run(at, most[at + 1])[edges.target_E[edge_E]]
            )
            equal = edge_E[step_E == step_E.max()]
            edge = (
                equal[0]
                if len(equal) == 1
                else min(equal, key=lambda one: first_token(at, int(edges.class_E[one])))
            )
            classes[at] = edges.class_E[edge]
            state = self._step(at, state, classes[at])
        return classes


def sums(log_E: np.ndarray, start: np.ndarray) -> np.ndarray:
    """log(sum(exp)) over segments of the last axis, each from one start to the next."""
    found: np.ndarray = np.logaddexp.reduceat(log_E, start, axis=-1)
    return found
