"""Constraints as automata over tokens: what they accept, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from threading import Barrier, Lock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.constraints.vocabularies import END, PAD, SMALL, TEXT, text_of, walks
from tests.helpers import examples
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError
from unmask.generation.constraints import bounded_process, compiled
from unmask.generation.constraints.automaton import MOST_KEPT
from unmask.generation.constraints.compiled import compile_constraint, escape, regex_of
from unmask.generation.constraints.vocabulary import Vocabulary

pytest.importorskip("outlines_core")

PATTERNS = [
    "(ab)*c?",
    "a{2,4}|b+",
    "é+a?",
    "[^a]b.",
    "(a|b)*a(a|b){2}",
    "",
    r"\{[a-c]*\}",
    "(?s:.*)",
    "a(b|é)*|cc",
    "a|ab|abb",
    "a*?",
    "(?:ab)*b",
]


def token_of(written: bytes) -> int:
    return 2 + TEXT.index(written)


@pytest.mark.parametrize("pattern", PATTERNS)
@examples(60)
@given(tokens=st.lists(st.integers(2, 11), max_size=5))
def test_exactly_the_texts_that_match_are_accepted(pattern, tokens):
    stops, filled = (
        compile_constraint(ConstraintConfig(regex=pattern), SMALL, end=end) for end in ("stops", "filled")
    )
    try:
        matches = re.fullmatch(pattern, text_of(tokens).decode()) is not None
    except UnicodeDecodeError:
        matches = False
    assert filled.accepts(tokens) == stops.accepts(tokens) == matches
    for after, allowed in (([END], True), ([END, PAD, END], True), ([PAD], False), ([END, 2], False)):
        assert filled.accepts([*tokens, *after]) == (matches and allowed)
        assert stops.accepts([*tokens, *after]) == (matches and after[0] == END)


def test_the_mask_token_is_never_produced():
    vocabulary = replace(SMALL, bytes_V=(*SMALL.bytes_V, None), never_token_ids=(len(SMALL.bytes_V),))
    automaton = compile_constraint(ConstraintConfig(regex="a"), vocabulary)
    assert automaton.accepts([2, END, 3]) and not automaton.accepts([2, END, len(SMALL.bytes_V)])


def test_a_gap_holds_no_end_token():
    automaton = compile_constraint(ConstraintConfig(regex="a+"), SMALL, end="none")
    assert automaton.accepts([2, 2]) and not automaton.accepts([2, END])


def test_tokens_that_act_alike_are_one_class():
    automaton = compile_constraint(ConstraintConfig(regex="[a-z]+[0-9]"), SMALL, end="filled")
    letters, digits, end = (automaton.class_V[token_of(text)] for text in (b"a", b"7", b"a"))
    assert automaton.class_V[token_of(b"abb")] == letters == end and digits != letters
    # nothing, letters, digits, END, PAD
    assert automaton.class_V[token_of(b"{")] == 0 and len(set(automaton.class_V)) == 5


def test_a_space_that_decoding_removes_may_come_first():
    vocabulary = Vocabulary((b" a", b"a", b" "), strips_space=True)
    automaton = compile_constraint(ConstraintConfig(regex="aa? ?a?"), vocabulary, end="none")
    assert (
        automaton.accepts([0])
        and automaton.accepts([1])
        and automaton.accepts([0, 0])
        and not automaton.accepts([2, 0])
    )
    inside = compile_constraint(ConstraintConfig(regex="a"), vocabulary, end="none", at_start=False)
    assert inside.accepts([1]) and not inside.accepts([0])


@pytest.mark.parametrize("text", ["a.b|c", "x{2}", "^a$", "#&~-", "[]()*+?\\", "é\n\t ", '"'])
def test_a_choice_is_its_text(text):
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
    automaton = compile_constraint(ConstraintConfig(choice=[text, "other"]), vocabulary, end="none")
    assert (
        automaton.accepts(text.encode())
        and automaton.accepts(b"other")
        and not automaton.accepts(text.encode()[:-1])
    )
    assert re.fullmatch(escape(text), text)


SCHEMAS = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1, None]}},
        "required": ["b"],
        "title": "t",
    },
    {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}]},
    {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1},
    {"anyOf": [{"const": "é"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"type": ["integer", "null"]}}},
    {"type": "string", "pattern": r"^[^b]\d.\w|a$"},
    {"type": "string", "format": "date"},
    {"properties": {"a": {"minLength": 1, "maxLength": 2.0}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", [*SCHEMAS, None], ids=str)
def test_all_that_is_accepted_is_json(schema):
    constraint = ConstraintConfig(json=True) if schema is None else ConstraintConfig(json_schema=schema)
    automaton = compile_constraint(constraint, SMALL, end="filled")
    shortest = automaton.shortest(automaton.live_classes())
    found = [
        json.loads(text_of(tokens))
        for length in (shortest, shortest + 9)
        for tokens in walks(automaton, length, 20)
    ]
    assert len({json.dumps(one) for one in found}) > 1
    if schema == SCHEMAS[0]:
        assert all(one.keys() <= {"a", "b"} and one["b"] in ("x", 1, None) for one in found)
    if schema == SCHEMAS[-1]:
        assert all(1 <= len(one["a"]) <= 2 for one in found)
    if schema == SCHEMAS[5]:
        assert all(re.fullmatch(r"[^b]\d.\w|a", one) for one in found)


@pytest.mark.parametrize(
    "schema, where",
    [
        ({"type": "integer", "multipleOf": 3}, ".multipleOf"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, ""),
        ({"type": "integer", "exclusiveMinimum": True}, ".exclusiveMinimum"),
        ({"type": "number", "minimum": 10**41}, ".minimum"),
        ({"type": "string", "minimum": 3}, ".minimum"),
        (
            {"type": "object", "properties": {"x": {"type": "string", "contentEncoding": "a"}}},
            ".properties.x.contentEncoding",
        ),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ".oneOf"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, ".allOf"),
        ({"not": {"type": "null"}}, ""),
        ({"prefixItems": [{"type": "null"}], "minItems": 2}, ".minItems"),
        ({}, ""),
        ({"type": {}}, ".type"),
        ({"format": ["a"]}, ".format"),
        ({"maxLength": 1e20}, ".maxLength"),
        ({"type": "strng"}, ".type"),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/t"},
                "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
            },
            ".$defs.t.items.$ref",
        ),
        ({"$ref": "#/$defs/absent"}, ".$ref"),
        ({"type": "array"}, ""),
        ({"type": "array", "items": True}, ".items"),
        ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, ".minProperties"),
        ({"type": "object", "properties": {}, "required": ["x"]}, ".required"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, ".minLength"),
        ({"type": "string", "pattern": "a[b"}, ".pattern"),
        ({"type": "string", "pattern": 'say "'}, ".pattern"),
        ({"type": "string", "pattern": "a(b"}, ".pattern"),
        ({"type": "string", "format": "iri"}, ".format"),
        ({"enum": [[1]]}, ".enum"),
        ({"type": "string", "const": 1}, ".const"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema, where):
    with raises(GenerationError, where=f"constraint.json_schema{where}"):
        compile_constraint(ConstraintConfig(json_schema=schema), SMALL)


@pytest.mark.parametrize(
    "pattern",
    [
        "a)(b",
        "a(b",
        "a[z-a]",
        r"(a)\1",
        "a(?=b)",
        r"a\b",
        "^a$",
        r"[^\s\S]",
        "日",
    ],
)
def test_a_pattern_that_is_invalid_is_refused_with_its_place(pattern):
    with raises(GenerationError, where="constraint.regex"):
        compile_constraint(ConstraintConfig(regex=pattern), SMALL)


@pytest.mark.parametrize(
    "given, where",
    [
        ({}, ""),
        ({"regex": "\ud800"}, "regex"),
        ({"json": True, "regex": "a"}, "json"),
        ({"choice": []}, "choice"),
        ({"json_schema": "{"}, "json_schema"),
    ],
)
def test_a_constraint_is_one_setting(given, where):
    with pytest.raises(ConfigError) as error:
        ConstraintConfig(**given)
    assert error.value.where == where


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"constraint": each}
            for each in (
                {"regex": "a"},
                {"choice": ["a"]},
                {"json": True, "depth": 3},
                {"grammar": 'start: "a"'},
            )
        ),
        *({"revise": each} for each in ({}, {"eta": 0.5}, {"schedule": "loop", "t_on": 0.6})),
    ],
)
def test_settings_survive_their_own_record(given):
    """As a request to a server, or a run's config.yaml, holds them: with all defaults."""
    config = SamplerConfig(**given)
    assert (
        SamplerConfig(**config.model_dump())
        == SamplerConfig.model_validate_json(config.model_dump_json())
        == config
    )


def test_a_pattern_whose_automaton_is_too_large_is_refused_in_time(monkeypatch):
    monkeypatch.setattr(bounded_process, "SECONDS", 3)
    with raises(GenerationError, where="constraint.regex"):
        compile_constraint(ConstraintConfig(regex="a{100000}"), SMALL)


def test_compiled_constraints_are_kept_by_content_and_bounded(monkeypatch):
    first = compile_constraint(ConstraintConfig(regex="a+b"), SMALL)
    assert compile_constraint(ConstraintConfig(regex="a+b"), SMALL) is first
    assert (
        compile_constraint(ConstraintConfig(regex="a+b"), Vocabulary((b"a", b"b")), end="none") is not first
    )
    monkeypatch.setattr(compiled, "CACHE_BYTES", first.nbytes)
    compile_constraint(ConstraintConfig(regex="a+c"), SMALL)
    assert len(compiled.cached_automata) == 1


def test_the_shortest_length_that_fits():
    automaton = compile_constraint(ConstraintConfig(regex="(abb){2}c|a{40}"), SMALL, end="none")
    live_C = automaton.live_classes()
    assert (
        automaton.shortest(live_C) == 3
        and automaton.shortest(live_C, 21) == 40
        and automaton.shortest(live_C, 41) is None
    )
    assert automaton.shortest(automaton.live_classes([token_of(b"abb")])) == 5
    assert regex_of(ConstraintConfig(choice=["a", "b"]), "") == "(?:a)|(?:b)"


def test_what_is_kept_of_lengths_is_bounded():
    """Every request may forbid other tokens, and ask for as many as it likes."""
    automaton = compile_constraint(ConstraintConfig(regex="(a|b)*é?"), SMALL, end="filled")
    tables = automaton.nbytes
    classes = range(automaton.next_SC.shape[1])
    choices = [
        np.array([one in chosen for one in classes])
        for size in classes
        for chosen in combinations(classes, size)
    ]
    expected = [automaton.completable(5, live_C) for live_C in choices]
    assert len(choices) > 2 * MOST_KEPT and all(
        map(np.array_equal, expected, [automaton.completable(5, live_C) for live_C in choices])
    )
    automaton.completable(10**6, automaton.live_classes())
    assert tables < automaton.nbytes <= tables + MOST_KEPT * 10 * len(automaton.accepts_S)


def test_lengths_that_repeat_themselves_are_kept_once():
    pairs = compile_constraint(ConstraintConfig(regex="c?((a|b){3})*"), SMALL, end="none")
    live_C = pairs.live_classes(
        [token for token, written in enumerate(SMALL.bytes_V) if written is not None and len(written) > 1]
    )
    expected, source_E, target_E = [pairs.accepts_S], *pairs.edges(live_C)
    for _ in range(40):
        before_S = np.zeros_like(pairs.accepts_S)
        before_S[source_E[expected[-1][target_E]]] = True
        expected.append(before_S)
    order = [40, 3, *range(41)]
    assert all(np.array_equal(pairs.completable(length, live_C), expected[length]) for length in order)
    assert pairs.reach(live_C).nbytes == len({each.tobytes() for each in expected}) * len(pairs.accepts_S)


def test_lengths_are_the_same_for_those_who_ask_at_once():
    """The threads of a server share an automaton."""
    config, count = ConstraintConfig(regex="(ab){1,200}|(aab)+c"), 8
    alone, interval = compile_constraint(config, SMALL, end="none"), sys.getswitchinterval()
    live_C = alone.live_classes()
    expected = [alone.completable(length, live_C) for length in range(400)]
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            shared, begin = replace(alone, _reach={}, _lock=Lock()), Barrier(count)

            def ask(length, shared=shared, begin=begin):
                begin.wait()
                return shared.completable(length, live_C)

            with ThreadPoolExecutor(count) as threads:
                lengths = [399 - 7 * number for number in range(count)]
                found = list(threads.map(ask, lengths))
            assert all(map(np.array_equal, found, [expected[length] for length in lengths]))
            assert all(
                np.array_equal(shared.completable(length, live_C), each)
                for length, each in enumerate(expected)
            )
    finally:
        sys.setswitchinterval(interval)
