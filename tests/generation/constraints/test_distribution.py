"""The distribution given a constraint, against the list of all texts."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers import partly_slow
from unmask.generation.constraints.automaton import TokenAutomaton, token_automaton
from unmask.generation.constraints.byte_automaton import ByteAutomaton
from unmask.generation.constraints.distribution import Paths, class_weights
from unmask.generation.constraints.vocabulary import Vocabulary

WIDTH = 5
VOCABULARY = Vocabulary((None, b"a", b"b", b"ab", b"a", None), end_token_ids=(0,), fill_token_ids=(0, 5))


def automaton(kind: str) -> TokenAutomaton:
    """Texts with an even number of `a`, texts of three characters at most, or any text."""
    rows = {
        "even": ([(1, 0), (0, 1), (2, 2)], [True, False, False]),
        "short": ([(1, 1), (2, 2), (3, 3), (4, 4), (4, 4)], [True, True, True, True, False]),
        "any": ([(0, 0), (1, 1)], [True, False]),
    }[kind]
    next_S256 = np.full((len(rows[0]), 256), len(rows[0]) - 1, dtype=np.int32)
    next_S256[:, [ord("a"), ord("b")]] = rows[0]
    return token_automaton(
        ByteAutomaton(next_S256, 0, np.array(rows[1])),
        VOCABULARY,
        end="none" if kind == "any" else "filled",
        at_start=True,
        where="",
    )


def case(
    kind: str, spread: float, revealed: dict[int, int], seed: int = 0
) -> tuple[TokenAutomaton, torch.Tensor, Paths, dict]:
    """An automaton, the logits, the paths with some tokens revealed, and the log-probability of every text
    that is accepted."""
    machine = automaton(kind)
    logits_WV = spread * torch.randn(
        WIDTH, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    log_WC = class_weights(
        logits_WV, torch.from_numpy(machine.class_V).long(), machine.next_SC.shape[1]
    ).log_prob_WC
    for at, token in revealed.items():
        log_WC[at] = -np.inf
        log_WC[at, machine.class_V[token]] = 0.0
    log_prob_WV = logits_WV.log_softmax(-1)
    texts = {}
    for text in itertools.product(range(6), repeat=WIDTH):
        if machine.accepts(text) and all(text[at] == token for at, token in revealed.items()):
            texts[text] = sum(
                float(log_prob_WV[at, token]) for at, token in enumerate(text) if at not in revealed
            )
    return machine, logits_WV, Paths(machine, log_WC, machine.start, machine.accepts_S), texts


CASES = [
    (kind, spread, revealed)
    for kind in ("even", "short")
    for spread in (1.0, 30.0)
    for revealed in ({}, {2: 1}, {4: 0})
]


@pytest.mark.parametrize("kind, spread, revealed", CASES)
def test_the_sum_and_the_marginals_are_those_of_all_texts(kind, spread, revealed):
    machine, logits_WV, paths, texts = case(kind, spread, revealed)
    total = np.logaddexp.reduce(list(texts.values()))
    assert paths.to_end[0, machine.start] == pytest.approx(total, rel=1e-12)
    ratio_WC, log_prob_WV = paths.log_ratios(), logits_WV.log_softmax(-1)
    for at in set(range(WIDTH)) - revealed.keys():
        for token in range(6):
            expected = (
                np.logaddexp.reduce([-np.inf, *(p for text, p in texts.items() if text[at] == token)]) - total
            )
            found = float(log_prob_WV[at, token]) + ratio_WC[at, machine.class_V[token]]
            assert found == pytest.approx(expected, abs=1e-9) or (expected == found == -math.inf)


@pytest.mark.parametrize("kind, spread, revealed", CASES)
def test_the_best_path_is_the_best_of_all_texts(kind, spread, revealed):
    machine, logits_WV, paths, texts = case(kind, spread, revealed)
    class_V = torch.from_numpy(machine.class_V).long()
    best_WC = class_weights(logits_WV.log_softmax(-1), class_V, machine.next_SC.shape[1]).largest_WC
    paths.log_WC = np.where(np.isfinite(paths.log_WC) & (paths.log_WC != 0), best_WC, paths.log_WC)
    classes = paths.best(lambda at, one: 0)
    assert machine.class_V[list(max(texts, key=texts.__getitem__))].tolist() == classes.tolist()


@pytest.mark.parametrize("kind", ["even", "short"])
@pytest.mark.parametrize("revealed", [{2: 1}, {1: 2, 2: 4}, {1: 1, 3: 2}, {2: 0, 3: 0}])
def test_given_tokens_between_positions_say_what_their_weights_say(kind, revealed):
    machine, _, weighted, _ = case(kind, 1.0, revealed)
    hidden = [at for at in range(WIDTH) if at not in revealed]
    runs = [
        machine.through(revealed[at] for at in range(one + 1, other)) if other > one + 1 else None
        for one, other in pairwise(hidden)
    ]
    paths = Paths(machine, weighted.log_WC[hidden], machine.start, machine.accepts_S, runs)
    assert paths.possible == weighted.possible
    if not paths.possible:
        return
    assert paths.to_end[0, machine.start] == pytest.approx(weighted.to_end[0, machine.start], rel=1e-12)
    np.testing.assert_allclose(paths.log_ratios(), weighted.log_ratios()[hidden], atol=1e-12)
    assert paths.best(lambda at, one: 0).tolist() == weighted.best(lambda at, one: 0)[hidden].tolist()
    drawn, expected = (
        each.draw(lambda at, rest_C, each=each: int((each.log_WC[at] + rest_C).argmax()))
        for each in (paths, weighted)
    )
    assert drawn.tolist() == expected[hidden].tolist()


def test_among_equal_paths_the_lower_token_comes_first():
    machine = automaton("even")
    log_WC = np.zeros((2, machine.next_SC.shape[1]))
    paths = Paths(machine, log_WC, machine.start, machine.accepts_S)
    lowest = {one: list(machine.class_V).index(one) for one in set(machine.class_V)}
    for sign in (1, -1):
        classes = paths.best(lambda at, one, sign=sign: sign * lowest[one])
        valid = [pair for pair in itertools.product(lowest.values(), repeat=2) if machine.accepts(pair)]
        expected = min(valid, key=lambda pair, sign=sign: [sign * token for token in pair])
        assert classes.tolist() == machine.class_V[list(expected)].tolist()


@partly_slow("kind, revealed", [("even", {}), ("short", {}), ("even", {2: 1}), ("short", {4: 5})], 1, 2)
def test_paths_are_drawn_from_the_distribution_given_that_they_are_accepted(kind, revealed):
    """A chi-square test over whole texts, by class."""
    machine, _, paths, texts = case(kind, 1.0, revealed)
    count, chance = 6000, np.random.default_rng(0)
    expected: dict[tuple, float] = {}
    total = np.logaddexp.reduce(list(texts.values()))
    for text, log_prob in texts.items():
        key = tuple(machine.class_V[list(text)])
        expected[key] = expected.get(key, 0.0) + math.exp(log_prob - total)
    drawn = dict.fromkeys(expected, 0)
    for _ in range(count):
        drawn[tuple(paths.draw(by_class(paths, chance)))] += 1  # a KeyError: it is not accepted
    chi_square = sum((drawn[key] - count * p) ** 2 / (count * p) for key, p in expected.items())
    assert abs(chi_square - (len(expected) - 1)) < 5 * math.sqrt(2 * (len(expected) - 1))


def test_a_constraint_that_allows_everything_changes_no_bit():
    machine, logits_WV, paths, _ = case("any", 1.0, {})
    logits_WV[:, [0, 5]] = -torch.inf
    class_V = torch.from_numpy(machine.class_V).long()
    log_WC = class_weights(logits_WV.float(), class_V, machine.next_SC.shape[1]).log_prob_WC
    paths = Paths(machine, log_WC, machine.start, machine.accepts_S)
    assert (paths.log_ratios()[:, 1:] == 0).all()
    rests = []
    paths.draw(lambda at, rest_C: rests.append(rest_C) or 1)
    assert (np.array(rests)[:, 1:] == 0).all()


def test_no_text_is_lost_to_underflow():
    machine = automaton("short")
    logits_WV = torch.full((WIDTH, 6), -3000.0)
    logits_WV[:, 3] = 3000.0  # "ab" at every position would be too long
    log_WC = class_weights(
        logits_WV, torch.from_numpy(machine.class_V).long(), machine.next_SC.shape[1]
    ).log_prob_WC
    paths = Paths(machine, log_WC, machine.start, machine.accepts_S)
    assert paths.possible and np.isfinite(paths.log_ratios()).any(1).all()
    assert machine.accepts_S[paths_end(machine, paths.draw(by_class(paths, np.random.default_rng(0))))]


def by_class(paths: Paths, chance: np.random.Generator):
    """Draws a class by its weight."""

    def pick(at: int, rest_C: np.ndarray) -> int:
        log_C = paths.log_WC[at] + rest_C
        weight_C = np.exp(log_C - log_C.max())
        return int(chance.choice(len(log_C), p=weight_C / weight_C.sum()))

    return pick


def paths_end(machine: TokenAutomaton, classes: np.ndarray) -> int:
    state = machine.start
    for one in classes:
        state = int(machine.next_SC[state, one])
    return state
