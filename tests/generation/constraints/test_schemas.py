"""JSON schemas as patterns: what they write fits, by jsonschema and by counting, and what is not excluded is
written."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.constraints.test_string_patterns import accepts, walk
from tests.helpers import examples
from unmask.config.constraint import ConstraintConfig
from unmask.errors import ConfigError, GenerationError
from unmask.generation.constraints.byte_automaton import ByteAutomaton, byte_automata
from unmask.generation.constraints.compiled import regex_of

pytest.importorskip("outlines_core")
TEXTS = st.text(st.characters(codec="utf-8", max_codepoint=0xFFFFF))
LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
VALUES = [
    *range(-130, 130),
    *range(190, 1210, 7),
    *range(-1210, -190, 7),
    *range(-1002, -997),
    *range(997, 1003),
]
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["kind"],
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "name": {"type": "string", "maxLength": 3}},
    "required": ["kind"],
}


def automaton_of(schema: dict[str, Any]) -> ByteAutomaton:
    return automata_of([schema])[0]


def automata_of(schemas: list[dict[str, Any]]) -> list[ByteAutomaton]:
    return byte_automata(
        [regex_of(ConstraintConfig(json_schema=schema), "constraint") for schema in schemas],
        "constraint",
        plain=True,
    )


def fits(value: Any, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def random_limits(draw: random.Random, values: list[Any]) -> dict[str, Any]:
    names = draw.sample(LIMITS, draw.choice([1, 1, 2, 2, 3]))
    return {name: draw.choice(values) for name in names}


def taken(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schemas that are not refused for having no value."""
    found = []
    for schema in schemas:
        try:
            regex_of(ConstraintConfig(json_schema=schema), "constraint")
        except GenerationError as error:
            assert "is within" in str(error) or "more than 40 digits" in str(error)
            assert not any(fits(value, schema) for value in VALUES)
        else:
            found.append(schema)
    return found


def test_whole_numbers_are_those_within_their_limits():
    draw = random.Random(0)
    values = [
        *range(-12, 13),
        -1000,
        -999,
        -101,
        -100,
        -99,
        99,
        100,
        101,
        109,
        110,
        199,
        200,
        999,
        1000,
        1001,
        2.5,
        -2.5,
        1e3,
        0.5,
        -0.5,
    ]
    schemas = taken([{"type": "integer", **random_limits(draw, values)} for _ in range(60)])
    assert len(schemas) > 30
    for schema, automaton in zip(schemas, automata_of(schemas), strict=True):
        for value in VALUES:
            assert accepts(automaton, str(value)) == fits(value, schema), (schema, value)
        assert not any(accepts(automaton, text) for text in ("-0", "00", "01", "-01", "1.0", "", "-"))


def test_numbers_are_within_their_limits():
    draw = random.Random(0)
    values = [
        0,
        1,
        -1,
        0.5,
        -0.5,
        0.25,
        1.125,
        9.99,
        10,
        10.01,
        99.5,
        100,
        -3.75,
        1e-3,
        1e22,
        -1e22,
        5e-324,
        2**53 + 1,
        1e308,
    ]
    schemas = taken([{"type": "number", **random_limits(draw, values)} for _ in range(60)])
    assert len(schemas) > 30
    texts = [
        f"{sign}{whole}{places}"
        for sign in ("", "-")
        for whole in (0, 1, 3, 9, 10, 11, 99, 100, 101, 10**22)
        for places in PLACES
    ]
    for schema, automaton in zip(schemas, automata_of(schemas), strict=True):
        for text in [*texts, *(walk(automaton, draw, 8).decode(errors="replace") for _ in range(40))]:
            if accepts(automaton, text):
                assert fits(json.loads(text), schema), (schema, text)
            elif text in texts and 0 < abs(float(text)) < 1e20:  # larger ones may be rounded to the limit
                assert not fits(json.loads(text), schema), (schema, text)


PLACES = (
    "",
    ".0",
    ".00",
    ".1",
    ".124",
    ".125",
    ".1250",
    ".1251",
    ".2",
    ".24999",
    ".25",
    ".5",
    ".50",
    ".51",
    ".75",
    ".9",
    ".99",
    ".990",
    ".999",
)


@pytest.mark.parametrize(
    "schema, yes, no",
    [
        ({"type": "integer", "minimum": 0}, ["0", "7", "1" * 60], ["-1", "-0"]),
        ({"type": "integer", "maximum": 2**64}, [str(2**64), "-1" + "0" * 60], [str(2**64 + 1)]),
        ({"type": "integer", "minimum": 10**22 + 1}, [str(10**22 + 1), "9" * 60], [str(10**22), "1"]),
        ({"type": "integer", "maximum": 1e308}, ["9" * 40, "-" + "9" * 60], ["9" * 309]),
        (
            {"type": "number", "minimum": 0, "maximum": 1},
            ["0", "1", "1.0", "0.5", "0.0001"],
            ["1.1", "-0.1", "2", "01", "1e0", "0."],
        ),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "1", "1e3"[:1]], ["0", "0.0", "-1"]),
        ({"type": ["integer", "null"], "minimum": 5}, ["5", "null"], ["4"]),
        ({"type": ["string", "integer"], "maximum": 5, "maxLength": 1}, ["5", '"a"', '""'], ["6", '"ab"']),
        ({"minimum": 3}, ["3"], ["2"]),
        (
            {"const": 12345678901234567890123},
            ["12345678901234567890123"],
            ["12345678901234567890124", "1.2345678901234568e+22"],
        ),
        (
            {"enum": [2**64, -(2**64), 1e22, 1.5]},
            [str(2**64), str(-(2**64)), "1e+22", "1.5"],
            [str(float(2**64)), "1"],
        ),
        ({"type": "integer", "const": 2.0}, ["2.0"], ["2"]),
        (
            {"allOf": [{"$ref": "#/$defs/n"}], "description": "x", "$defs": {"n": {"type": "null"}}},
            ["null"],
            ["1"],
        ),
        (
            {"$id": "http://x/r", "$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}, "o": {"$id": "o"}}},
            ["null"],
            ["1"],
        ),
        (
            {"type": "object", "properties": {"$id": {"type": "null"}}, "required": ["$id"]},
            ['{"$id": null}'],
            ["{}"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2, "maxItems": 2},
            ["[1, 2]"],
            ["[1]", "[1,2,2]"],
        ),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1}, ["[1]"], ["[1,2]"]),
        (
            {"type": "array", "items": [{"const": 1}, {"const": 2}], "minItems": 2, "maxItems": 2},
            ["[1,2]"],
            ["[1]"],
        ),
        (
            {"prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 3},
            ["[1]", "[1, 2]", "[1,2,2]"],
            ["[]", "[2]", "[1,2,2,2]"],
        ),
        (
            {"prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 3},
            ["[1,2,2]", "[1,2,2,2]"],
            ["[1]", "[1,2]"],
        ),
        (
            {
                "oneOf": [
                    {"type": "null"},
                    {"type": "integer", "maximum": 3},
                    {"type": "integer", "minimum": 4},
                ]
            },
            ["null", "3", "4"],
            ["x"],
        ),
        (
            {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
            ['{"kind":"cat","lives":9}', '{"kind":"dog"}'],
            ['{"kind":"cow"}'],
        ),
        ({"properties": {'a"\\é\n': {"type": "null"}}}, [r'{"a\"\\é\n":null}', "{}"], ["{,}"]),
    ],
    ids=str,
)
def test_what_is_written_and_what_is_not(schema, yes, no):
    automaton = automaton_of(schema)
    assert [text for text in (*yes, *no) if accepts(automaton, text)] == yes
    draft = (
        jsonschema.Draft7Validator
        if isinstance(schema.get("items"), list)
        else jsonschema.Draft202012Validator
    )
    assert all(draft(schema).is_valid(json.loads(text)) for text in yes)


PARTS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "integer", "minimum": 2},
    {"type": "integer", "exclusiveMaximum": 2},
    {"type": "number"},
    {"type": "number", "maximum": 1.5},
    {"type": "number", "exclusiveMinimum": 1.5},
    {"const": 2},
    {"const": 2.0},
    {"const": True},
    {"enum": [1, "a", None]},
    {"type": "string"},
    {"type": "string", "pattern": "a|b"},
    {"type": ["boolean", "null"]},
    {"type": "array", "items": {"type": "null"}},
    CAT,
    DOG,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"b": {"type": "integer"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"b": {"type": "string", "maxLength": 1}, "a": {"type": "null"}}},
    {"anyOf": [{"const": "c"}, {"type": "null"}]},
    {"allOf": [{"type": "boolean"}]},
    {"oneOf": [{"const": "d"}, {"const": 5}]},
    {"minimum": 3},
    {"maxLength": 1},
    {"properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
]


def test_of_one_of_several_schemas_exactly_one_fits():
    """Whatever pair is taken: it is refused, or what is written fits one and only one by jsonschema."""
    draw, schemas, refused = random.Random(0), [], 0
    for one, other in itertools.product(PARTS, PARTS):
        schema = {"oneOf": [one, other]}
        try:
            regex_of(ConstraintConfig(json_schema=schema), "constraint")
        except GenerationError as error:
            assert "a value may fit both" in str(error)
            refused += 1
        else:
            schemas.append(schema)
    assert len(PARTS) <= refused < len(schemas)
    for schema, automaton in zip(schemas, automata_of(schemas), strict=True):
        for _ in range(6):
            text = walk(automaton, draw, 10)
            assert b"\xff" in text or fits(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize(
    "names, required", [("abcdefg", ""), ("abcdefg", "d"), ("abcdefg", "ag"), ("a", ""), ("", "")]
)
def test_objects_have_any_of_their_optional_properties_in_order(names, required):
    schema = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": [*required]}
    automaton = automaton_of(schema)
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(len(names) + 1)
    ):
        assert accepts(automaton, json.dumps(dict.fromkeys(chosen, 1))) == ({*required} <= {*chosen})
    if len(names) > 1:
        assert not accepts(automaton, json.dumps({"b": 1, "a": 1, "d": 1, "g": 1}))


def doubling(levels: int, *, wide: int = 2) -> dict[str, Any]:
    """A schema whose references double what they refer to at each level."""
    defs: dict[str, Any] = {"d0": {"type": "integer"}}
    for level in range(levels):
        refs = {f"p{number}": {"$ref": f"#/$defs/d{level}"} for number in range(wide)}
        defs[f"d{level + 1}"] = {"type": "object", "properties": refs, "required": [*refs]}
    return {"$ref": f"#/$defs/d{levels}", "$defs": defs}


def chain(length: int) -> dict[str, Any]:
    """A schema whose references lead from one to the next."""
    defs: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "null"}}}


def nested(depth: int, name: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", name: schema} if name == "items" else {name: [schema]}
    return schema


HOSTILE = {
    "doubling": doubling(30),
    "much wider": doubling(12, wide=40),
    "a chain": chain(3000),
    "deep": nested(60),
    "deeper": nested(900),
    "deep alternatives": nested(900, "anyOf"),
    "many apart": {"oneOf": [{"const": number} for number in range(3000)]},
    "doubling apart": {"oneOf": [doubling(30), doubling(30)], "$defs": doubling(30)["$defs"]},
    "optional": {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(2500)},
    },
    "digits": {"type": "integer", "minimum": -(10**4000), "maximum": 10**4000},
    "a long pattern": {"type": "string", "pattern": "[a" * 20_000},
    "many groups": {"type": "string", "pattern": "(" * 60_000},
    "escapes": {"type": "string", "pattern": "\\" * 60_001},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_is_read_in_a_time_that_its_length_bounds(name):
    """Whether it is taken or refused."""
    begin = time.process_time()
    try:
        assert len(regex_of(ConstraintConfig(json_schema=HOSTILE[name]), "constraint")) < 2**22
    except (ConfigError, GenerationError) as error:
        assert (error.where or "").startswith(("constraint", "json_schema"))
    assert time.process_time() - begin < 5


def test_a_schema_with_references_that_are_used_often_is_taken():
    assert accepts(automaton_of(doubling(4)), json.dumps(example(4)))


def example(levels: int) -> Any:
    return {"p0": example(levels - 1), "p1": example(levels - 1)} if levels else 1


@pytest.mark.parametrize(
    "given",
    [
        {"const": float("inf")},
        {"enum": [1, float("nan")]},
        '{"const": 1e999}',
        '{"const": NaN}',
        '{"const": "\\ud800"}',
    ],
)
def test_what_json_has_no_text_for_is_refused(given):
    with pytest.raises(ConfigError) as error:
        ConstraintConfig(json_schema=given)
    assert error.value.where == "json_schema"


@examples(5)
@given(
    values=st.lists(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
        min_size=1,
    )
)
def test_constants_are_written_as_they_are(values):
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    for text, automaton in zip(texts, automata_of([{"const": value} for value in values]), strict=True):
        assert [one for one in texts if accepts(automaton, one)] == [text] * texts.count(text)


@pytest.mark.parametrize(
    "schema, where",
    [
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "b": {"type": "null"},
                    "a": {"$id": "a", "type": "array", "items": {"$ref": "#/$defs/b"}},
                },
            },
            "$ref",
        ),
        (
            {"type": "object", "properties": {"x": {"$id": "http://x/a", "type": "null"}}, "required": ["x"]},
            "properties.x.$id",
        ),
        (
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"$id": "a", "type": "integer"}]}},
            "items.anyOf.1.$id",
        ),
        (
            {
                "$ref": "#/$defs/a/$defs/b",
                "$defs": {"a": {"$id": "a", "$defs": {"b": {"$ref": "#/$defs/c"}}}, "c": {"type": "null"}},
            },
            "$ref",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "a", "$ref": "#/$defs/b"}, "b": {"type": "null"}}},
            "$ref",
        ),
    ],
)
@pytest.mark.parametrize("root", [{}, {"$id": "http://x/root"}])
def test_a_name_below_the_root_is_refused(schema, where, root):
    """References within such a schema lead elsewhere."""
    with raises(GenerationError, where=f"constraint.{where}") as error:
        regex_of(ConstraintConfig(json_schema=schema | root), "constraint")
    assert "$id" in str(error.value)
