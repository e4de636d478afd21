"""A constraint as an automaton over tokens, in which tokens that act alike are one class.

Shapes: S states, of which the last is dead; C classes, of which the first is dead; V vocabulary; E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock
from typing import Literal

import numpy as np

from unmask.errors import GenerationError
from unmask.generation.constraints.bounded_process import check_time
from unmask.generation.constraints.byte_automaton import ByteAutomaton, number_rows
from unmask.generation.constraints.vocabulary import Vocabulary

End = Literal["stops", "filled", "none"]
"""How a text ends before the canvas does: with an end token, after which nothing is read; with end tokens and
padding up to the end of the canvas; or not at all."""
MAX_CELLS = 2**25
"""Entries of the tables that a constraint may have, states times classes: 128 MB."""
MOST_KEPT = 8
"""Sets of tokens that may be produced, for each of which it is kept what they lead to: every request may have
another one."""


class EdgeTable:
    """The edges of an automaton, by source and class, and how to group them.

    Attributes:
        source_E, class_E, target_E: of every edge that is not dead.
        first_S: the first edge of every state, and the number of edges.
        by_pair_E, pair_start_P: the edges by (source, target), and the first of each pair.
        pair_source_P, pair_target_P: of every pair, by source.
        source_with_pairs, source_start: the states that have any, and the first pair of each.
        by_target_P, target_with_pairs, target_start: the pairs by target, the targets, and the first pair of
            each in this order.
        by_class_E, class_with_edges, class_start: the same for edges by class.
    """

    def __init__(self, next_SC: np.ndarray):
        dead = len(next_SC) - 1
        self.source_E, self.class_E = np.nonzero(next_SC != dead)
        self.target_E = next_SC[self.source_E, self.class_E].astype(np.int64)
        self.first_S = np.searchsorted(self.source_E, np.arange(len(next_SC) + 1))
        self.by_pair_E = np.lexsort((self.target_E, self.source_E))
        pair_E = (self.source_E * len(next_SC) + self.target_E)[self.by_pair_E]
        pairs, self.pair_start_P = np.unique(pair_E, return_index=True)
        self.pair_source_P, self.pair_target_P = pairs // len(next_SC), pairs % len(next_SC)
        self.source_with_pairs, self.source_start = np.unique(self.pair_source_P, return_index=True)
        self.by_target_P = np.argsort(self.pair_target_P, kind="stable")
        self.target_with_pairs, self.target_start = np.unique(
            self.pair_target_P[self.by_target_P], return_index=True
        )
        self.by_class_E = np.argsort(self.class_E, kind="stable")
        self.class_with_edges, self.class_start = np.unique(self.class_E[self.by_class_E], return_index=True)


class Reach:
    """The states from which a number of tokens lead to an accepting one, for each number up to the first at
    which they repeat themselves. Threads may share it."""

    def __init__(self, accepts_S: np.ndarray, edges: Callable[[], tuple[np.ndarray, np.ndarray]]):
        self._edges, self._lock = edges, Lock()
        self._found = [accepts_S]
        # the number of tokens with which they are these first
        self._first = {np.packbits(accepts_S).tobytes(): 0}
        self._again: int | None = None  # the number of tokens that the one after the last repeats

    @property
    def nbytes(self) -> int:
        """The memory of what has been found."""
        return len(self._found) * self._found[0].nbytes

    def states(self, length: int) -> np.ndarray:
        """The states [S] for a number of tokens."""
        if length >= len(self._found):
            with self._lock:
                self._find(length)
        if length < len(self._found):
            return self._found[length]
        assert self._again is not None
        return self._found[self._again + (length - self._again) % (len(self._found) - self._again)]

    def _find(self, length: int) -> None:
        if self._again is not None:
            return
        source_E, target_E = self._edges()
        while length >= len(self._found) and self._again is None:
            check_time("constraint")
            reach_S = np.zeros_like(self._found[0])
            reach_S[source_E[self._found[-1][target_E]]] = True
            self._again = self._first.setdefault(np.packbits(reach_S).tobytes(), len(self._found))
            if self._again == len(self._found):
                self._again = None
                self._found.append(reach_S)


@dataclass(eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens, in which every state but the dead one can reach an accepting
    one.

    Attributes:
        next_SC: the state after a token of a class.
        class_V: of every token.
        start: the state before the first token.
        accepts_S: whether a text may stop in a state.
    """

    next_SC: np.ndarray
    class_V: np.ndarray
    start: int
    accepts_S: np.ndarray
    # the one that was asked for last is the last one
    _reach: dict[bytes, Reach] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def dead(self) -> int:
        """The state from which nothing is accepted."""
        return len(self.next_SC) - 1

    @cached_property
    def edge_table(self) -> EdgeTable:
        """Its edges."""
        return EdgeTable(self.next_SC)

    @property
    def nbytes(self) -> int:
        """The memory of its tables, and of what is kept of them."""
        tables = self.next_SC.nbytes + self.class_V.nbytes + self.accepts_S.nbytes
        return tables + sum(reach.nbytes for reach in list(self._reach.values()))

    def after(self, tokens: Iterable[int]) -> int:
        """The state after tokens, from the start."""
        state = self.start
        for token in tokens:
            state = int(self.next_SC[state, self.class_V[token]])
        return state

    def through(self, tokens: Iterable[int]) -> np.ndarray:
        """The state [S] after tokens, from each state."""
        state_S = np.arange(len(self.next_SC))
        for token in tokens:
            state_S = self.next_SC[state_S, self.class_V[token]]
        return state_S

    def accepts(self, tokens: Iterable[int]) -> bool:
        """Whether these tokens, all of them, meet the constraint."""
        return bool(self.accepts_S[self.after(tokens)])

    def live_classes(self, banned: Iterable[int] = ()) -> np.ndarray:
        """The classes [C] with a token that may be produced, without the banned ones."""
        may_V = np.ones(len(self.class_V), dtype=bool)
        may_V[list(banned)] = False
        live_C = np.bincount(self.class_V, weights=may_V, minlength=self.next_SC.shape[1]) > 0
        live_C[0] = False
        return live_C

    def reach(self, live_C: np.ndarray) -> Reach:
        """What tokens of the live classes lead to."""
        key = np.packbits(live_C).tobytes()
        with self._lock:
            reach = self._reach.pop(key, None) or Reach(self.accepts_S, partial(self.edges, live_C))
            self._reach[key] = reach
            if len(self._reach) > MOST_KEPT:
                del self._reach[next(iter(self._reach))]
        return reach

    def completable(self, length: int, live_C: np.ndarray) -> np.ndarray:
        """The states [S] from which exactly `length` tokens of the live classes lead to an accepting one."""
        return self.reach(live_C).states(length)

    def edges(self, live_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states that one token of a live class joins: each pair once, without the dead state."""
        source_E, class_E = np.nonzero((self.next_SC != self.dead) & live_C)
        pair_E = np.unique(source_E * len(self.next_SC) + self.next_SC[source_E, class_E])
        return pair_E // len(self.next_SC), pair_E % len(self.next_SC)

    def shortest(self, live_C: np.ndarray, at_least: int = 0) -> int | None:
        """The smallest length, from `at_least` on, of texts that are accepted; None: there is none. Lengths
        beyond the number of states past `at_least` are not tried, as they fit only if a shorter one does."""
        limit = at_least + len(self.next_SC)
        return next(
            (length for length in range(at_least, limit + 1) if self.completable(length, live_C)[self.start]),
            None,
        )


def token_automaton(
    automaton: ByteAutomaton, vocabulary: Vocabulary, *, end: End, at_start: bool, where: str
) -> TokenAutomaton:
    """The automaton over tokens of an automaton over bytes.

    Args:
        end: how the text ends before the canvas does.
        at_start: whether the text is at the start of what is decoded, where a tokenizer may remove a space.
        where: the constraint's name in errors.

    Raises:
        GenerationError: its tables would be too large, or nothing in the vocabulary meets it.
    """
    next_S256, start, accepts_S = automaton.next_S256, automaton.start, automaton.accepts_S
    if at_start and vocabulary.strips_space:  # a state before the first byte
        first_256 = next_S256[start].copy()
        first_256[ord(" ")] = start
        start, next_S256, accepts_S = (
            0,
            np.vstack([first_256, next_S256]) + 1,
            np.concatenate([accepts_S[[start]], accepts_S]),
        )
    function_CS, class_V = _classes(next_S256, vocabulary.bytes_V, where)
    next_SC = function_CS.T
    if end != "none":
        next_SC, class_V, accepts_S = _with_ends(
            next_SC, class_V, accepts_S, vocabulary, stops=end == "stops"
        )
    trimmed = _trimmed(next_SC, class_V, start, accepts_S)
    if trimmed is None:
        what = "no sequence of this model's tokens meets it"
        raise GenerationError(what, where=where, remedy="Use characters that the tokenizer can write")
    return trimmed


def _classes(
    next_S256: np.ndarray, bytes_V: Sequence[bytes | None], where: str
) -> tuple[np.ndarray, np.ndarray]:
    """The function [C, S] from state to state of each class of tokens, and the class of each token. The
    function of a token is composed from those of its bytes; equal functions of prefixes are one."""
    size = len(next_S256)
    dead_S = np.full(size, size - 1, dtype=np.int32)
    functions, numbers = [dead_S, np.arange(size, dtype=np.int32)], {dead_S.tobytes(): 0}
    numbers[functions[1].tobytes()] = 1
    after: dict[tuple[int, int], int] = {}
    class_V = np.zeros(len(bytes_V), dtype=np.int64)
    for token, written in enumerate(bytes_V):
        if written is None:
            continue
        check_time(where)
        function = 1
        for byte in written:
            step = (function, byte)
            if step not in after:
                composed_S = next_S256[functions[function], byte]
                after[step] = numbers.setdefault(composed_S.tobytes(), len(functions))
                if after[step] == len(functions):
                    functions.append(composed_S)
                    if size * len(functions) > MAX_CELLS:
                        what = f"its table of states and tokens has more than {MAX_CELLS} entries"
                        remedy = "Bound its repetitions, or split it"
                        raise GenerationError(what, where=where, remedy=remedy)
            function = after[step]
            if function == 0:
                break
        class_V[token] = function
    used_C, class_V = np.unique(np.concatenate([[0], class_V]), return_inverse=True)
    return np.stack([functions[number] for number in used_C]), class_V.reshape(-1)[1:]


def _with_ends(
    next_SC: np.ndarray, class_V: np.ndarray, accepts_S: np.ndarray, vocabulary: Vocabulary, *, stops: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """With a state after the end (the last but one), and two classes: end tokens, and others that are no text
    but may follow these."""
    dead, classes = next_SC.shape[0] - 1, next_SC.shape[1]
    ended = dead  # the dead state moves behind it
    next_SC = np.where(next_SC == dead, dead + 1, next_SC)
    rows = [next_SC[:dead], np.full((2, classes), dead + 1, dtype=next_SC.dtype)]
    next_SC = np.pad(np.vstack(rows), ((0, 0), (0, 2)), constant_values=dead + 1)
    next_SC[:dead, classes] = np.where(accepts_S[:dead], ended, dead + 1)
    next_SC[ended, 1 if stops else classes :] = ended
    class_V = class_V.copy()
    class_V[class_V == 0 if stops else list(vocabulary.fill_token_ids)] = classes + 1
    class_V[list(vocabulary.end_token_ids)] = classes
    class_V[list(vocabulary.never_token_ids)] = 0
    return next_SC, class_V, np.concatenate([accepts_S[:dead], [True, False]])


def _trimmed(
    next_SC: np.ndarray, class_V: np.ndarray, start: int, accepts_S: np.ndarray
) -> TokenAutomaton | None:
    """Without states that no tokens reach or that reach no end, and without classes that act alike; None:
    nothing is accepted."""
    dead = len(next_SC) - 1
    used_C = np.unique(np.concatenate([[0], class_V]))  # class 0 may have no token
    source_E, index_E = np.nonzero(next_SC[:, used_C] != dead)
    target_E = next_SC[source_E, used_C[index_E]]
    keep_S = _reached(np.arange(len(next_SC)) == start, source_E, target_E) & _reached(
        accepts_S, target_E, source_E
    )
    if not keep_S[start]:
        return None
    keep_S[dead] = False
    name_S = np.full(len(next_SC), keep_S.sum(), dtype=np.int32)
    name_S[keep_S] = np.arange(keep_S.sum())
    order_S = np.append(np.nonzero(keep_S)[0], dead)
    named_SC = name_S[next_SC[order_S]]
    named_SC[:, 0] = keep_S.sum()
    class_C = number_rows(named_SC.T)  # that of the dead class is 0
    table_SC = named_SC[:, np.unique(class_C, return_index=True)[1]]
    return TokenAutomaton(table_SC, class_C[class_V], int(name_S[start]), accepts_S[order_S])


def _reached(from_S: np.ndarray, source_E: np.ndarray, target_E: np.ndarray) -> np.ndarray:
    """The states that can be reached along edges."""
    reached_S = from_S.copy()
    while True:
        check_time("constraint")
        before = reached_S.sum()
        reached_S[target_E[reached_S[source_E]]] = True
        if reached_S.sum() == before:
            return reached_S
