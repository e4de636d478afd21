"""Context-free grammars in Lark's syntax, as automata over bytes.

Recursion at the beginning or at the end of a rule is regular and not bounded (Chomsky 1959). Any other
recursion is unrolled to a depth: what is accepted is then the part of the language that is nested no deeper,
so all of it is in the language.

Shapes: C groups of bytes that act alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from unmask.errors import GenerationError, require
from unmask.generation.constraints.bounded_process import bounded, check_time, run_bounded
from unmask.generation.constraints.byte_automaton import (
    MAX_STATES,
    ByteAutomaton,
    byte_automata,
    minimal,
    number_rows,
)

MAX_FRAGMENTS = 200_000
"""States of the automaton before it is made deterministic."""
MAX_CLOSED = 10_000_000
"""States that these reach without a byte, each counted for itself: up to 1 GB."""
TOO_LARGE = "Lower its depth, or split it"
REGULAR = {r'".*?(?<!\\)(\\\\)*?"': r'"(?:[^"\\\n]|\\.)*"'}
"""Patterns of Lark's own `common` grammar that look behind (ESCAPED_STRING), without it."""
CLASSES = {
    r"\w": r"[\p{L}\p{N}_]",
    r"\W": r"[^\p{L}\p{N}_]",
    r"\s": r"[\s\x1C-\x1F]",
    r"\S": r"[^\s\x1C-\x1F]",
}
"""Python's, in Rust's syntax, where they differ."""
PARTS = r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"
"""A character after a backslash, or a class in brackets."""
READ = """
import lark
try:
    read = lark.Lark(given, parser="earley", lexer="dynamic", keep_all_tokens=True, maybe_placeholders=False)
    rules = [[rule.origin.name, [[a.name, a.is_term] for a in rule.expansion]] for rule in read.rules]
    patterns = {one.name: one.pattern.to_regexp() for one in read.terminals if one.pattern}
    result = {"rules": rules, "patterns": patterns, "ignored": list(read.ignore_tokens)}
except MemoryError:
    raise
except Exception as error:
    result = {"error": str(error) or "is no grammar"}
"""
"""What Lark makes of a grammar."""
JSON = r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
array: "[" (value (COMMA value)*)? "]"
object: "{" (pair (COMMA pair)*)? "}"
pair: STRING COLON value
COMMA: /, ?/
COLON: /: ?/
STRING: /"(?:[^"\\\x00-\x1F]|\\["\\\/bfnrt])*"/
NUMBER: /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/
"""
"""Any JSON value (RFC 8259), with a space or none after commas and colons, and without characters written as
numbers."""


class Symbol(NamedTuple):
    """A symbol of a production.

    Attributes:
        deeper: whether it is nested in the rule that it is a part of.
    """

    name: str
    terminal: bool
    deeper: bool = False


Productions = dict[str, list[list[Symbol]]]


@bounded()
def grammar_automaton(text: str, depth: int, where: str) -> ByteAutomaton:
    """The automaton of a grammar whose rules stand within themselves `depth` times at most.

    Raises:
        ConfigError: lark or outlines-core is not installed.
        GenerationError: the grammar is invalid, a terminal is not regular, or the automaton is too large.
    """
    productions, patterns, ignored = _read(text, where)
    if not patterns:
        raise GenerationError("no text but the empty one can be of it", where=where, remedy="Add a terminal")
    rust = [_rust(pattern, f"{where}.{name}") for name, pattern in patterns.items()]
    built = byte_automata(rust, where, names=[*patterns])
    automata = dict(zip(patterns, built, strict=True))
    for name in (
        name for name, automaton in automata.items() if automaton.start == len(automaton.next_S256) - 1
    ):
        raise GenerationError(
            "no text matches it",
            where=f"{where}.{name}",
            remedy="Leave out private-use characters of the last plane",
        )
    builder = _Builder(_with_depth(productions), automata, ignored, depth, where)
    try:
        enter, leave = builder.whole()
    except RecursionError:
        raise GenerationError("its rules are nested too deep", where=where, remedy=TOO_LARGE) from None
    found = builder.deterministic(enter, leave)
    if not found.accepts_S.any():
        what = f"no text of it is nested only {depth} deep"
        raise GenerationError(what, where=where, remedy="Raise its depth")
    return found


def _read(text: str, where: str) -> tuple[Productions, dict[str, str], list[str]]:
    """The productions of each rule, the pattern of each terminal, and the terminals that may stand between
    others."""
    require("lark", where=where)
    read = run_bounded(READ, text, where, remedy=TOO_LARGE)
    if "error" in read:
        remedy = "Correct the grammar; its syntax is Lark's, and it begins with the rule start"
        raise GenerationError(" ".join(read["error"].split()), where=where, remedy=remedy)
    productions: Productions = {}
    for rule, symbols in read["rules"]:
        productions.setdefault(rule, []).append([Symbol(*symbol) for symbol in symbols])
    used = {
        symbol.name for rules in productions.values() for rule in rules for symbol in rule if symbol.terminal
    }
    patterns, ignored = read["patterns"], read["ignored"]
    for name in sorted({*used, *ignored} - patterns.keys()):
        raise GenerationError(
            "is declared, but matches no text", where=f"{where}.{name}", remedy="Write what it matches"
        )
    return (
        productions,
        {name: REGULAR.get(patterns[name], patterns[name]) for name in [*sorted(used), *ignored]},
        ignored,
    )


def _rust(pattern: str, where: str) -> str:
    """A pattern of Python's, which Lark's are, in Rust's syntax. Raises GenerationError for what has another
    meaning there."""

    def written(found: re.Match[str]) -> str:
        if found[0][0] == "\\":
            return CLASSES.get(found[0], found[0])
        return "[" + re.sub(
            r"\\.|[\[&~# ]",
            lambda one: written(one) if one[0][0] == "\\" else f"\\{one[0]}",
            found[0][1:],
            flags=re.S,
        )

    if any("--" in part for part in re.findall(PARTS, pattern, flags=re.S)):
        raise GenerationError(
            "has -- in a class, which Rust reads as a difference",
            where=where,
            remedy=r"Write \- for a hyphen",
        )
    if re.search(r"[*+?}]\+", re.sub(PARTS, "x", pattern, flags=re.S)):
        raise GenerationError(
            "has a possessive repetition", where=where, remedy="Leave out the second + of a++"
        )
    return re.sub(PARTS, written, pattern, flags=re.S)


def _with_depth(productions: Productions) -> Productions:
    """Mark the symbols that are nested in their own rule, so that all other recursion is at the beginning of
    rules, or at their end."""
    while True:
        components = _components(productions)
        marked = _marked(productions, components, last=False)
        if marked == productions:
            mixed = {
                rule: rules
                for rule, rules in productions.items()
                if len({*_sides(productions, components[rule])}) > 1
            }
            if not mixed:
                return productions
            marked = productions | _marked(mixed, components, last=True)
        productions = marked


def _components(productions: Productions) -> dict[str, frozenset[str]]:
    """For each rule, the rules that it stands in and that stand in it, with itself."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(productions)
    for rule, rules in productions.items():
        graph.add_edges_from(
            (rule, symbol.name)
            for symbols in rules
            for symbol in symbols
            if not symbol.terminal and not symbol.deeper
        )
    return {
        rule: frozenset(component)
        for component in networkx.strongly_connected_components(graph)
        for rule in component
    }


def _recursive(symbol: Symbol, component: frozenset[str]) -> bool:
    return not symbol.terminal and not symbol.deeper and symbol.name in component


def _marked(productions: Productions, components: Mapping[str, frozenset[str]], *, last: bool) -> Productions:
    """Mark recursion that is neither at the beginning nor at the end of a production, or with `last` also
    that at the end."""
    found: Productions = {}
    for rule, rules in productions.items():
        found[rule] = []
        for symbols in rules:
            places = range(1, len(symbols) - (not last))
            deeper = [
                at in places and _recursive(symbol, components[rule]) for at, symbol in enumerate(symbols)
            ]
            found[rule].append(
                [
                    symbol._replace(deeper=symbol.deeper or more)
                    for symbol, more in zip(symbols, deeper, strict=True)
                ]
            )
    return found


def _sides(productions: Productions, component: frozenset[str]) -> Iterator[str]:
    """Where the rules of a component stand in one another's productions; a production that is one rule alone
    has both sides."""
    for rule in component:
        for symbols in productions[rule]:
            if len(symbols) > 1:
                yield from (
                    side
                    for side, symbol in (("left", symbols[0]), ("right", symbols[-1]))
                    if _recursive(symbol, component)
                )


@dataclass
class _Builder:
    """Fragments of an automaton with empty steps, each from one state to another."""

    productions: Productions
    automata: Mapping[str, ByteAutomaton]
    ignored: Sequence[str]
    depth: int
    where: str
    empty: list[list[int]] = field(default_factory=list)
    """The states that each state reaches without a byte."""
    read: list[tuple[str, int, int]] = field(default_factory=list)
    """For each state the terminal that it is in ("": none), its state there, and what to add to that for the
    number of the state."""

    def __post_init__(self) -> None:
        self.components, self.closed = _components(self.productions), 0

    def state(self) -> int:
        self._refuse_large(len(self.empty) + 1, MAX_FRAGMENTS)
        self.empty.append([])
        self.read.append(("", 0, 0))
        return len(self.empty) - 1

    def _refuse_large(self, states: int, most: int) -> None:
        check_time(self.where, TOO_LARGE)
        if states > most:
            what = f"its automaton has more than {most:,} states"
            raise GenerationError(what, where=self.where, remedy=TOO_LARGE)

    def whole(self) -> tuple[int, int]:
        enter = self._with_ignored(self.state())
        inside, leave = self._rule("start", self.depth)
        self.empty[enter].append(inside)
        return enter, leave

    def _terminal(self, name: str) -> tuple[int, int]:
        automaton = self.automata[name]
        leave, first = self.state(), len(self.empty)
        for state in range(len(automaton.next_S256) - 1):
            self.state()
            self.read[-1] = (name, state, first)
            if automaton.accepts_S[state]:
                self.empty[-1].append(leave)
        return first + automaton.start, leave

    def _with_ignored(self, state: int) -> int:
        """Let ignored terminals stand at a state."""
        for name in self.ignored:
            enter, leave = self._terminal(name)
            self.empty[state].append(enter)
            self.empty[leave].append(state)
        return state

    def _rule(self, rule: str, depth: int) -> tuple[int, int]:
        component = self.components[rule]
        if "left" in _sides(self.productions, component):
            enter, ends = self.state(), {name: self.state() for name in sorted(component)}
            # before what productions of a rule have in common
            begins: dict[tuple[str, tuple[Symbol, ...]], int] = {}
            for name, symbols in self._possible(component, depth):
                first = bool(symbols) and _recursive(symbols[0], component)
                key = name, tuple(symbols[first:])
                if key not in begins:
                    begins[key] = self.state()
                    self.empty[self._sequence(begins[key], key[1], depth)].append(ends[name])
                self.empty[ends[symbols[0].name] if first else enter].append(begins[key])
            return enter, ends[rule]
        leave = self.state()
        after: dict[tuple[str, tuple[Symbol, ...]], int] = {
            (name, ()): self.state() for name in sorted(component)
        }
        for name, symbols in self._possible(component, depth):
            last = bool(symbols) and _recursive(symbols[-1], component)
            known: tuple[Symbol, ...] = ()
            # productions of a rule that begin alike share the beginning
            for symbol in symbols[: len(symbols) - last]:
                longer = (*known, symbol)
                if (name, longer) not in after:
                    after[name, longer] = self._sequence(after[name, known], [symbol], depth)
                known = longer
            self.empty[after[name, known]].append(after[symbols[-1].name, ()] if last else leave)
        return after[rule, ()], leave

    def _possible(self, component: Iterable[str], depth: int) -> Iterator[tuple[str, list[Symbol]]]:
        """The productions of rules that need no more than a depth."""
        for name in sorted(component):
            yield from (
                (name, symbols)
                for symbols in self.productions[name]
                if depth or not any(symbol.deeper for symbol in symbols)
            )

    def _sequence(self, at: int, symbols: Sequence[Symbol], depth: int) -> int:
        """The state after symbols."""
        for symbol in symbols:
            enter, leave = (
                self._terminal(symbol.name)
                if symbol.terminal
                else self._rule(symbol.name, depth - symbol.deeper)
            )
            self.empty[at].append(enter)
            at = self._with_ignored(leave) if symbol.terminal else leave
        return at

    def deterministic(self, enter: int, leave: int) -> ByteAutomaton:
        """The smallest deterministic automaton, by the sets of states that a text may lead to (Rabin and
        Scott 1959)."""
        group_256 = number_rows(np.vstack([automaton.next_S256 for automaton in self.automata.values()]).T)
        byte_C = np.unique(group_256, return_index=True)[1]
        next_of = {name: automaton.next_S256[:, byte_C].tolist() for name, automaton in self.automata.items()}
        dead_of = {name: len(automaton.next_S256) - 1 for name, automaton in self.automata.items()}
        known: dict[int, frozenset[int]] = {}
        start = self._closed([enter], leave, known)
        numbers, waiting, rows = {start: 0}, [start], list[list[int]]()
        while len(rows) < len(waiting):
            self._refuse_large(len(waiting), MAX_STATES)
            target_C: list[set[int]] = [set() for _ in byte_C]
            for state in waiting[len(rows)]:
                name, local, first = self.read[state]
                if name:
                    for one, target in enumerate(next_of[name][local]):
                        if target != dead_of[name]:
                            target_C[one].add(first + target)
            row = []
            for targets in target_C:
                found = self._closed(targets, leave, known)
                if found not in numbers:
                    numbers[found] = len(numbers)
                    waiting.append(found)
                row.append(numbers[found])
            rows.append(row)
        dead = len(rows)
        next_S256 = np.array([*rows, [dead] * len(byte_C)], dtype=np.int32)[:, group_256]
        return minimal(next_S256, 0, np.array([*(leave in states for states in waiting), False]))

    def _closed(self, states: Iterable[int], leave: int, known: dict[int, frozenset[int]]) -> frozenset[int]:
        """The states that read a byte, or are the end, and that are reached without one; `known`: those of
        single states."""
        found: set[int] = set()
        for state in states:
            if state not in known:
                seen, waiting = {state}, [state]
                while waiting:
                    more = [each for each in self.empty[waiting.pop()] if each not in seen]
                    seen.update(more)
                    waiting += more
                known[state] = frozenset(each for each in seen if self.read[each][0] or each == leave)
                self.closed += len(seen)
                self._refuse_large(self.closed, MAX_CLOSED)
            found |= known[state]
        return frozenset(found)
