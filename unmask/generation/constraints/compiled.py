"""Constraints compiled for a model, and kept by their content as far as memory allows."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from unmask.config.constraint import ConstraintConfig
from unmask.generation.constraints.automaton import End, TokenAutomaton, token_automaton
from unmask.generation.constraints.byte_automaton import byte_automata
from unmask.generation.constraints.grammars import JSON, grammar_automaton
from unmask.generation.constraints.schemas import escape, schema_pattern
from unmask.generation.constraints.vocabulary import Vocabulary

CACHE_BYTES = 2**28
cached_automata: OrderedDict[tuple, TokenAutomaton] = OrderedDict()
"""Automata by their constraint and vocabulary, the last used one last."""
_lock = Lock()


def compile_constraint(
    constraint: ConstraintConfig,
    vocabulary: Vocabulary,
    *,
    end: End = "stops",
    at_start: bool = True,
) -> TokenAutomaton:
    """The automaton of a constraint over the tokens of a vocabulary; `end` and `at_start` as for
    `token_automaton`.

    Raises:
        ConfigError: outlines-core is not installed.
        GenerationError: the constraint is invalid, cannot be enforced, is too large, or nothing in the
            vocabulary meets it.
    """
    key = (constraint.model_dump_json(), vocabulary.digest, end, at_start and vocabulary.strips_space)
    where = f"constraint.{constraint.kind}"
    with _lock:
        if key in cached_automata:
            cached_automata.move_to_end(key)
            return cached_automata[key]
    if (grammar := JSON if constraint.json else constraint.grammar) is not None:
        automaton = grammar_automaton(grammar, constraint.depth, where)
    else:
        plain = constraint.json_schema is not None
        (automaton,) = byte_automata([regex_of(constraint, where)], where, plain=plain)
    compiled = token_automaton(automaton, vocabulary, end=end, at_start=at_start, where=where)
    with _lock:
        cached_automata[key] = compiled
        while (
            len(cached_automata) > 1 and sum(each.nbytes for each in cached_automata.values()) > CACHE_BYTES
        ):
            cached_automata.popitem(last=False)
    return compiled


def regex_of(constraint: ConstraintConfig, where: str) -> str:
    """The regular expression of a choice, a pattern or a schema. Errors as in `compile_constraint`."""
    if constraint.regex is not None:
        return constraint.regex
    if constraint.choice is not None:
        return "|".join(f"(?:{escape(text)})" for text in constraint.choice)
    return schema_pattern(constraint.schema_object(), where)
