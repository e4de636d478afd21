"""The distribution of hidden tokens given that a text is accepted: the model predicts each position by itself, and an automaton ties them.

Sums and maxima over the paths of the automaton, in logarithms and float64, so that an improbable text is never lost to underflow.

Shapes: W positions, V vocabulary, S states, C classes, E edges (state, class, next state), P pairs (state, next state) of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unmask.generation.constraints.automaton import TokenAutomaton
from unmask.generation.policies import CPU_LOGITS_AT_ONCE


def class_log_probs(logits_WV: Tensor, class_V: Tensor, count: int) -> np.ndarray:
    """The log-probability [W, C] of each class of tokens."""
    rows = max(1, CPU_LOGITS_AT_ONCE // len(class_V)) if logits_WV.device.type == "cpu" else max(1, len(logits_WV))
    if len(logits_WV) > rows:
        return np.concatenate([class_log_probs(part_WV, class_V, count) for part_WV in logits_WV.split(rows)])
    class_WV = class_V.expand_as(logits_WV)
    largest_WC = logits_WV.new_full((len(logits_WV), count), -torch.inf).scatter_reduce(1, class_WV, logits_WV, "amax")
    offset_WC = largest_WC.masked_fill(largest_WC == -torch.inf, 0.0)
    weight_WV = (logits_WV - offset_WC.gather(1, class_WV)).exp_()
    sum_WC = torch.zeros(largest_WC.shape, dtype=torch.float64, device=logits_WV.device).scatter_add(1, class_WV, weight_WV.double())
    log_WC = offset_WC.double() + sum_WC.log()
    return (log_WC - log_WC.logsumexp(-1, keepdim=True)).cpu().numpy()


def class_maxima(logits_WV: Tensor, class_V: Tensor, count: int) -> np.ndarray:
    """The largest logit [W, C] of each class of tokens."""
    largest_WC = logits_WV.new_full((len(logits_WV), count), -torch.inf)
    return largest_WC.scatter_reduce(1, class_V.expand_as(logits_WV), logits_WV, "amax").double().cpu().numpy()


class Paths:
    """All paths of an automaton over some positions, weighted by what a model predicts there.

    Args:
        log_WC: the weight of each class at each position; -inf: it cannot stand there. A revealed token has weight 0, all others -inf.
        start: the state before the first position.
        end_S: the states that are allowed after the last position.
    """

    def __init__(self, automaton: TokenAutomaton, log_WC: np.ndarray, start: int, end_S: np.ndarray):
        self.automaton, self.log_WC, self.start = automaton, log_WC, start
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
            total[at, edges.source_with_pairs] = sums(self.pair_WP[at] + total[at + 1, edges.pair_target_P], edges.source_start)
        return total

    @cached_property
    def from_start(self) -> np.ndarray:
        """[W + 1, S]: the summed weight of all paths from the start to a state before a position."""
        total = np.full((len(self.log_WC) + 1, len(self.end_S)), -np.inf)
        total[0, self.start], edges = 0.0, self.edges
        for at in range(len(self.log_WC)):
            step_P = (total[at, edges.pair_source_P] + self.pair_WP[at])[edges.by_target_P]
            total[at + 1, edges.target_with_pairs] = sums(step_P, edges.target_start)
        return total

    def log_ratios(self) -> np.ndarray:
        """[W, C]: the log of how much likelier each class is given that the text is accepted than without this condition."""
        edges = self.edges
        path_WE = self.from_start[:-1, edges.source_E] + self.to_end[1:, edges.target_E]
        ratio_WC = np.full(self.log_WC.shape, -np.inf)
        ratio_WC[:, edges.class_with_edges] = sums(path_WE[:, edges.by_class_E], edges.class_start)
        return ratio_WC - self.to_end[0, self.start]

    def draw(self, uniform_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A path, drawn by its weight: the class [W] at each position, and uniform numbers [W] with which to draw tokens of the classes.

        Each position's number first picks a class, given the classes before it, and what is left of it is uniform again.
        """
        state, edges = self.start, self.edges
        classes, left_W = np.zeros(len(self.log_WC), dtype=np.int64), np.zeros(len(self.log_WC))
        for at, uniform in enumerate(uniform_W):
            edge_E = slice(edges.first_S[state], edges.first_S[state + 1])
            class_E, target_E = edges.class_E[edge_E], edges.target_E[edge_E]
            log_E = self.log_WC[at, class_E] + self.to_end[at + 1, target_E]
            weight_E = np.exp(log_E - log_E.max())
            sum_E = weight_E.cumsum()
            goal = uniform * sum_E[-1]
            picked = min(int(sum_E.searchsorted(goal, "right")), int(sum_E.searchsorted(sum_E[-1])))  # never one of weight 0
            before = sum_E[picked - 1] if picked else 0.0
            classes[at] = class_E[picked]
            left_W[at] = min(max((goal - before) / weight_E[picked], 0.0), 1 - 2.0**-53)
            state = int(target_E[picked])
        return classes, left_W

    def best(self, first_token: Callable[[int, int], int]) -> np.ndarray:
        """The class [W] at each position of the path of the largest weight (Viterbi 1967), where weights are those of best tokens. Among
        equal ones the lower token comes first: `first_token` is the lowest of the best tokens at a position and of a class."""
        edges, steps = self.edges, len(self.log_WC)
        most = np.full((steps + 1, len(self.end_S)), -np.inf)
        most[-1] = self.end_S
        for at in reversed(range(steps)):
            step_E = self.log_WC[at, edges.class_E] + most[at + 1, edges.target_E]
            most[at, edges.source_with_pairs] = np.maximum.reduceat(step_E, edges.first_S[edges.source_with_pairs])
        state, classes = self.start, np.zeros(steps, dtype=np.int64)
        for at in range(steps):
            edge_E = np.arange(edges.first_S[state], edges.first_S[state + 1])
            step_E = self.log_WC[at, edges.class_E[edge_E]] + most[at + 1, edges.target_E[edge_E]]
            equal = edge_E[step_E == step_E.max()]
            edge = equal[0] if len(equal) == 1 else min(equal, key=lambda one: first_token(at, int(edges.class_E[one])))
            classes[at], state = edges.class_E[edge], int(edges.target_E[edge])
        return classes


def sums(log_E: np.ndarray, start: np.ndarray) -> np.ndarray:
    """log(sum(exp)) over segments of the last axis, each from one start to the next."""
    largest = np.maximum.reduceat(log_E, start, axis=-1)
    offset = np.where(largest == -np.inf, 0.0, largest)
    length = np.diff(np.append(start, log_E.shape[-1]))
    with np.errstate(divide="ignore"):
        return offset + np.log(np.add.reduceat(np.exp(log_E - np.repeat(offset, length, axis=-1)), start, axis=-1))
