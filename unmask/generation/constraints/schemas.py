"""JSON schemas as outlines-core reads them. It ignores keywords that it does not know, and some that it does: these are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from unmask.errors import GenerationError, did_you_mean
from unmask.generation.constraints.string_patterns import FORMATS, string_pattern

NOTES = {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
"""Keywords that restrict nothing."""
DEFINITIONS = {"$defs", "definitions"}
BY_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties"},
}
"""Keywords that are enforced beside `type`."""
ALONE = ("$ref", "const", "enum", "anyOf")
"""Keywords that decide without `type`."""
MOST = 10**6
"""Of what is counted: far more than automata can hold."""
NOT_ENFORCED = "Leave it out, and check the text afterwards"


class Reader:
    """Rewrites a schema: references resolved, notes left out, formats and patterns as patterns of JSON strings.

    Raises:
        GenerationError: a part is invalid or cannot be enforced; `where` is its path.
    """

    def __init__(self, schema: Any, where: str):
        self.root, self.where = schema, where

    def read(self, schema: Any, where: str, within: tuple[str, ...] = ()) -> dict[str, Any]:
        """One schema; `within`: the references that led to it."""
        if not isinstance(schema, dict):
            refuse(f"{json.dumps(schema)} is not a schema that can be enforced", where, "Give an object")
        used = schema.keys() - NOTES - DEFINITIONS
        for name in (name for name in ALONE if name in used):
            only(used, {name, "type"} if name in ("const", "enum") else {name}, where)
            return self._read_alone(schema, name, where, within)
        types = schema.get("type", self._implied(used))
        if types is None:
            what = f"{sorted(used)[0]} without a type cannot be enforced" if used else "allows everything"
            refuse(what, where, "Set type, enum, const, anyOf or $ref")
        if isinstance(types, list):
            if len(used) > 1 or not types or {"array", "object"} & {*map(str, types)}:
                refuse("several types cannot be enforced here", f"{where}.type", "Write them as anyOf")
            return {"anyOf": [self.read({"type": name}, f"{where}.type", within) for name in types]}
        if not isinstance(types, str) or types not in BY_TYPE:
            refuse(f"{json.dumps(types)} is not a type", f"{where}.type", did_you_mean(str(types), BY_TYPE))
        only(used, {"type"} | BY_TYPE[types], where)
        match types:
            case "string":
                return self._read_string(schema, where)
            case "array":
                return self._read_array(schema, where, within)
            case "object":
                return self._read_object(schema, where, within)
        return {"type": types}

    @staticmethod
    def _implied(used: set[str]) -> str | None:
        """The type that all these keywords belong to. JSON Schema would also allow other types, which no keyword then restricts."""
        return next((name for name, keywords in BY_TYPE.items() if used and used <= keywords), None)

    def _read_alone(self, schema: dict[str, Any], name: str, where: str, within: tuple[str, ...]) -> dict[str, Any]:
        value = schema[name]
        if name == "$ref":
            if value in within:
                refuse(f"{value!r} contains itself, which no regular expression can enforce", f"{where}.$ref", "Write out some levels")
            return self.read(self._resolve(value, f"{where}.$ref"), f"{self.where}{str(value)[1:].replace('/', '.')}", (*within, value))
        if name in ("enum", "anyOf") and not (isinstance(value, list) and value):
            refuse("is not a list with entries", f"{where}.{name}", "Give at least one")
        if name == "anyOf":
            return {"anyOf": [self.read(one, f"{where}.anyOf.{index}", within) for index, one in enumerate(value)]}
        for one in value if name == "enum" else [value]:
            if isinstance(one, (dict, list)):
                refuse(f"{json.dumps(one)} cannot be enforced", f"{where}.{name}", "Describe it by its type")
            if "type" in schema and not is_of_type(one, schema["type"]):
                refuse(f"{json.dumps(one)} is not of type {json.dumps(schema['type'])}", f"{where}.{name}", "Change one of them")
        return {name: value}

    def _resolve(self, reference: Any, where: str) -> Any:
        found = self.root
        parts = reference.split("/") if isinstance(reference, str) else [""]
        for part in parts[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        if parts[0] != "#" or found is None or len(parts) == 1:
            what = "contains itself, which no regular expression can enforce" if reference == "#" else "is not in this schema"
            refuse(f"{json.dumps(reference)} {what}", where, "Use a reference such as #/$defs/NAME")
        return found

    def _read_string(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        low, high = bounds(schema, "minLength", "maxLength", where)
        given = [name for name in ("format", "pattern") if name in schema]
        if not given:
            return {"type": "string", **low, **high}
        only(schema.keys() & BY_TYPE["string"], {given[0]}, where)
        if given == ["pattern"]:
            return {"type": "string", "pattern": string_pattern(schema["pattern"], f"{where}.pattern")}
        if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
            refuse(f"{schema['format']!r} cannot be enforced", f"{where}.format", f"Use one of {', '.join(FORMATS)}, or a pattern")
        return {"type": "string", "pattern": FORMATS[schema["format"]]}

    def _read_array(self, schema: dict[str, Any], where: str, within: tuple[str, ...]) -> dict[str, Any]:
        if "prefixItems" in schema:
            only(schema.keys() & BY_TYPE["array"], {"prefixItems"} | ({"items"} if schema.get("items") is False else set()), where)
            if not (isinstance(schema["prefixItems"], list) and schema["prefixItems"]):
                refuse("is not a list with entries", f"{where}.prefixItems", "Give at least one")
            parts = [self.read(one, f"{where}.prefixItems.{index}", within) for index, one in enumerate(schema["prefixItems"])]
            return {"type": "array", "prefixItems": parts}
        if "items" not in schema:
            refuse("does not say what its items are", where, "Set items")
        low, high = bounds(schema, "minItems", "maxItems", where)
        return {"type": "array", "items": self.read(schema["items"], f"{where}.items", within), **low, **high}

    def _read_object(self, schema: dict[str, Any], where: str, within: tuple[str, ...]) -> dict[str, Any]:
        others = schema.get("additionalProperties")
        if "properties" in schema:
            free = {"additionalProperties"} if isinstance(others, bool) else set()
            only(schema.keys() & BY_TYPE["object"], {"properties", "required", *free}, where)
            properties, required = schema["properties"], schema.get("required", [])
            if not isinstance(properties, dict):
                refuse("is not an object of schemas", f"{where}.properties", "Give one schema per name")
            for name in (name for name in properties if json.dumps(name, ensure_ascii=False)[1:-1] != name):
                refuse(f"the name {name!r} cannot be enforced", f"{where}.properties", "Use names that JSON writes without a backslash")
            if not isinstance(required, list) or not properties.keys() >= {*map(str, required)}:
                refuse(f"{json.dumps(required)} are not all among the properties", f"{where}.required", "Describe them there")
            inside = {name: self.read(one, f"{where}.properties.{name}", within) for name, one in properties.items()}
            return {"type": "object", "properties": inside, "required": required}
        if not isinstance(others, dict):
            refuse("does not say what its properties are", where, "Set properties, or additionalProperties to a schema")
        only(schema.keys() & BY_TYPE["object"], {"additionalProperties", "minProperties"}, where)
        low, _ = bounds(schema, "minProperties", "", where)
        if low.get("minProperties", 0) > 1:
            refuse(f"{low['minProperties']} cannot be enforced", f"{where}.minProperties", "Use 0 or 1, or name the properties")
        return {"type": "object", "additionalProperties": self.read(others, f"{where}.additionalProperties", within), **low}


def patterns(schema: Any) -> Iterator[str]:
    """All patterns of strings in a schema that `Reader` has rewritten."""
    if isinstance(schema, dict) and schema.get("type") == "string" and "pattern" in schema:
        yield schema["pattern"]
    elif isinstance(schema, (dict, list)):
        for one in schema.values() if isinstance(schema, dict) else schema:
            yield from patterns(one)


def refuse(what: str, where: str, remedy: str) -> NoReturn:
    raise GenerationError(what, where=where, remedy=remedy)


def only(used: set[str], enforced: set[str], where: str) -> None:
    """Refuse the first keyword that would be ignored."""
    for name in sorted(used - enforced):
        beside = " and ".join(sorted(enforced & used))
        refuse(f"cannot be enforced{f' beside {beside}' if beside else ''}", f"{where}.{name}", NOT_ENFORCED)


def is_of_type(value: Any, types: Any) -> bool:
    """Whether a value that is no list or object has one of the types."""
    kinds = {str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}}
    return bool(kinds[type(value)] & {*map(str, types if isinstance(types, list) else [types])})


def bounds(schema: dict[str, Any], low: str, high: str, where: str) -> tuple[dict[str, int], dict[str, int]]:
    """The lower and the upper bound of a count, each as an object that is empty without one. A whole number may be written as 2.0."""
    counts = {name: schema[name] for name in (low, high) if name in schema}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST or value % 1 != 0:
            refuse(f"{json.dumps(value)} is not a count", f"{where}.{name}", f"Give a whole number from 0 to {MOST:,}")
    if high in counts and counts.get(low, 0) > counts[high]:
        refuse(f"{schema[low]} exceeds {high}", f"{where}.{low}", "Change one of them")
    return tuple({name: int(counts[name])} if name in counts else {} for name in (low, high))  # type: ignore[return-value]
