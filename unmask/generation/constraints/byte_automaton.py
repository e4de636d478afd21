"""A regular expression as a minimal deterministic automaton over bytes, built by outlines-core.

Its index (0.2.14) follows Rust's leftmost-first matches: of `a|ab` it accepts `a` alone, and from an
accepting state it keeps transitions to accepting ones only. Therefore a character that no text has, a
noncharacter of Unicode, is appended to the pattern; a state accepts if this character leads to the end.

Shapes: S states, of which the last is dead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unmask.errors import GenerationError, require
from unmask.generation.constraints.bounded_process import run_bounded

MAX_STATES = 20_000
MAX_ROUNDS = 300
"""Rounds of splitting states; an automaton that needs more is long, and is not made smaller."""
EOS = 256
FIRST, LAST = chr(0x10FFFE), chr(0x10FFFF)
"""The characters that are put before a pattern and after it."""
UNSUPPORTED = [
    (r"\(\?<?[=!]", "look-around, which is not supported", "Write out what may stand there"),
    (r"\\[1-9]", "a backreference, which is not regular", "Write out the alternatives"),
    (r"\\[bB]", "a word boundary, which is not supported", "Write out what may stand there"),
    (r"(?<!\\)(?<!\[)\^|(?<!\\)\$|\\[AzZ]", "an anchor", "Leave it out: the whole text has to match"),
]
BUILD = """
import re, warnings
from outlines_core import Index, Vocabulary
vocabulary = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
result = []
def reason(pattern):
    warnings.simplefilter("ignore")
    try:
        re.compile(re.sub(r"[\\]x[{][0-9A-Fa-f]+[}]", lambda found: "x" * len(found[0]), pattern))
    except re.error as error:
        return error.msg + ("" if error.pos is None else f" at character {error.pos + 1}")
    except (RecursionError, OverflowError):
        return "is nested too deep, or repeated too often"
first, patterns = given
for pattern in patterns:
    try:
        index = Index(first + "(?:" + pattern + ")" + chr(0x10FFFF), vocabulary)
    except ValueError as error:
        result.append([str(error), reason(pattern)])
    else:
        rows = index.get_transitions().items()
        edges = [[state, token, end] for state, row in rows for token, end in row.items()]
        result.append([index.get_initial_state(), sorted(index.get_final_states()), edges])
"""


@dataclass(frozen=True)
class ByteAutomaton:
    """A deterministic automaton over bytes, in which every state but the last can reach an accepting one."""

    next_S256: np.ndarray
    start: int
    accepts_S: np.ndarray


def byte_automata(
    patterns: Sequence[str],
    where: str,
    *,
    names: Sequence[str] = (),
    plain: bool = False,
) -> list[ByteAutomaton]:
    """The automata of regular expressions in Rust's syntax.

    Args:
        plain: whether they match no `FIRST`. The library also builds an automaton of all texts that end with
            a match, which then is as small: else `[1-9][0-9]{20,}` has millions of states, since any digit
            but 0 may be where it begins.
        names: what each adds to `where` in errors.

    Raises:
        ConfigError: outlines-core is not installed.
        GenerationError: a pattern is invalid, not regular, or too large to build.
    """
    if not patterns:
        return []
    require("outlines_core", where=where)
    places = [f"{where}.{name}" for name in names] or [where] * len(patterns)
    for pattern, place in zip(patterns, places, strict=True):
        _refuse_unopened(pattern, place)
    too_large = "Bound its repetitions, or split it"
    first = FIRST if plain else ""
    built = run_bounded(BUILD, [first, list(patterns)], where, remedy=too_large)
    automata = []
    for pattern, place, result in zip(patterns, places, built, strict=True):
        if isinstance(result[0], str):
            what, remedy = _reason(pattern, *result)
            raise GenerationError(what, where=place, remedy=remedy)
        automata.append(_read(first, *result))
        if len(automata[-1].next_S256) > MAX_STATES:
            raise GenerationError(
                f"its automaton has more than {MAX_STATES} states", where=place, remedy=too_large
            )
    return automata


def _refuse_unopened(pattern: str, where: str) -> None:
    """Refuse a closing parenthesis that nothing opened: it would close the group that the pattern is put
    into."""
    depth = 0
    for found in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|[()]", pattern, flags=re.S):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth < 0:
            what = f"unbalanced parenthesis at character {found.start() + 1}"
            raise GenerationError(what, where=where, remedy="Open it, or write a backslash before it")


def _reason(pattern: str, message: str, of_python: str | None) -> tuple[str, str]:
    """What is wrong with a pattern, and the remedy. The library does not say where, so Python's parser is
    asked before."""
    if "incompatible" in message:
        return "no text matches it", "Correct the pattern"
    if of_python is not None:
        return of_python, "Correct the pattern; its syntax is that of Rust's regex crate"
    for form, name, remedy in UNSUPPORTED:
        if found := re.search(form, re.sub(r"\\\\", "  ", pattern)):
            return f"{name} at character {found.start() + 1}", remedy
    what = "Rust's regex crate does not accept it, or it is nested deeper than 250 levels"
    return what, "Correct the pattern, or write it flatter"


def _read(first: str, start: int, accepting: Sequence[int], edges: Sequence[Sequence[int]]) -> ByteAutomaton:
    """The smallest automaton of what the library has built, without the characters that were added."""
    names = {
        state: number
        for number, state in enumerate(sorted({start, *accepting, *(edge[0] for edge in edges)}))
    }
    dead = len(names)
    next_S256 = np.full((dead + 1, 256), dead, dtype=np.int32)
    for state, byte, target in edges:
        if byte != EOS:
            next_S256[names[state], byte] = names.get(target, dead)
    begin = names[start]
    for byte in first.encode():
        begin = int(next_S256[begin, byte])
    last_S = np.arange(dead + 1)
    for byte in LAST.encode():
        last_S = next_S256[last_S, byte]
    accepts_S = np.isin(last_S, [names[state] for state in accepting])
    next_S256[:, LAST.encode()[0]] = dead  # with it the other private characters of the last plane
    return minimal(next_S256, begin, accepts_S)


def minimal(next_S256: np.ndarray, start: int, accepts_S: np.ndarray) -> ByteAutomaton:
    """The smallest equal automaton: states are split until those of one group act alike (Moore 1956). The
    last state has to be dead."""
    dead = len(next_S256) - 1
    # one of each group of bytes that act alike
    byte_C = np.unique(number_rows(next_S256.T), return_index=True)[1]
    group_S: np.ndarray = accepts_S.astype(np.int32)
    for _ in range(MAX_ROUNDS):
        count = len(np.unique(group_S))
        group_S = number_rows(np.column_stack([group_S, group_S[next_S256[:, byte_C]]]))
        if group_S.max() + 1 == count:
            break
    else:
        group_S = np.arange(dead + 1)
    first_G = np.unique(group_S, return_index=True)[1]
    # the dead state last
    order_G = np.concatenate([np.delete(np.arange(len(first_G)), group_S[dead]), group_S[[dead]]])
    place_G = np.argsort(order_G).astype(np.int32)
    kept_G = first_G[order_G]
    return ByteAutomaton(place_G[group_S[next_S256[kept_G]]], int(place_G[group_S[start]]), accepts_S[kept_G])


def number_rows(rows: np.ndarray) -> np.ndarray:
    """The number of each row among the distinct ones, in the order of their first occurrence."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], dtype=np.int32)
