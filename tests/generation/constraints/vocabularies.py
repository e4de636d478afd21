"""Small vocabularies, and walks through automata."""

from __future__ import annotations

import random
from collections.abc import Iterator

from unmask.generation.constraints.automaton import TokenAutomaton
from unmask.generation.constraints.vocabulary import Vocabulary

END, PAD = 0, 1
TEXT = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"abb",
    b"c",
    b" ",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
]
TEXT += [bytes([digit]) for digit in b"0123456789"] + [
    bytes([letter]) for letter in b"defghijklmnopqrstuvwxyz."
]
SMALL = Vocabulary((None, None, *TEXT), end_token_ids=(END,), fill_token_ids=(END, PAD))


def text_of(tokens: list[int], vocabulary: Vocabulary = SMALL) -> bytes:
    return b"".join(vocabulary.bytes_V[token] or b"" for token in tokens)


def walks(automaton: TokenAutomaton, length: int, count: int) -> Iterator[list[int]]:
    """Random sequences of tokens that are accepted."""
    chance = random.Random(0)
    live_C = automaton.live_classes()
    for _ in range(count):
        state, tokens = automaton.start, []
        for left in reversed(range(length)):
            fits_S = automaton.completable(left, live_C)
            classes = [c for c in live_C.nonzero()[0] if fits_S[automaton.next_SC[state, c]]]
            token = chance.choice([t for t, c in enumerate(automaton.class_V) if c in classes])
            state = int(automaton.next_SC[state, automaton.class_V[token]])
            tokens.append(token)
        yield tokens
