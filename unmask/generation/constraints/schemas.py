"""JSON schemas as regular expressions in Rust's syntax. Keywords that these cannot enforce are refused by
name.

What is written always fits its schema. Not all that fits is written: objects have their properties in the
schema's order and no others, and there is at most one space beside a bracket, comma or colon.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple, NoReturn

from unmask.errors import GenerationError, did_you_mean
from unmask.generation.constraints.string_patterns import FORMATS, string_pattern

NOTES = {
    "$comment",
    "$id",
    "$schema",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
}
"""Keywords that restrict nothing."""
DEFINITIONS = {"$defs", "definitions"}
LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
BY_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": LIMITS,
    "number": LIMITS,
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties"},
}
"""Keywords that are enforced beside `type`."""
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that decide without `type`."""
BESIDE = {"const": {"type"}, "enum": {"type"}, "anyOf": {"discriminator"}, "oneOf": {"discriminator"}}
"""Keywords that may stand beside these: a discriminator only says which entry to look at."""
MOST = 10**6
"""The largest count: far more than automata can hold."""
MOST_WRITTEN = 2**22
"""Characters of the patterns of all parts, each with those in it: what references that double one another may
come to."""
MOST_COMPARED = 20_000
"""Pairs of schemas of which it is asked whether a value may fit both."""
MOST_DIGITS = 40
"""Digits of a number with a limit: the pattern of a longer one is nested too deep."""
POINT = r"\."
NOT_ENFORCED = "Leave it out, and check the text afterwards"
CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F\x{100000}-\x{10FFFF}]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
INTEGER = "-?(?:0|[1-9][0-9]*)"
SIMPLE = {
    "boolean": "(?:true|false)",
    "null": "null",
    "integer": INTEGER,
    "number": rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-][0-9]+)?",
}


def escape(text: str) -> str:
    """A pattern that matches this text alone, in Rust's syntax."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", lambda found: "\\" + found[0], text)


def schema_pattern(schema: Any, where: str) -> str:
    """The pattern of JSON that fits a schema.

    Raises:
        GenerationError: a part is invalid or cannot be enforced; `where` is its path.
    """
    try:
        return SchemaReader(schema, where).read(schema, where)
    except RecursionError:
        refuse("is nested too deep", where, "Write it flatter")


class SchemaReader:
    """Reads the parts of a schema. Each part that is referred to is read once."""

    def __init__(self, schema: Any, where: str):
        self.root, self.where = schema, where
        self.known: dict[str, str] = {}  # the patterns of references
        self.within: list[str] = []  # the references that lead to what is read
        self.written = self.compared = 0

    def read(self, schema: Any, where: str) -> str:
        """The pattern of one schema, which stands beside others."""
        pattern = self._read(schema, where)
        self.written += len(pattern)
        if self.written > MOST_WRITTEN:
            refuse("is too large with all references written out", where, "Refer to less, or less often")
        return pattern

    def _read(self, schema: Any, where: str) -> str:
        if not isinstance(schema, dict):
            refuse(f"{json.dumps(schema)} is not a schema that can be enforced", where, "Give an object")
        if "$id" in schema and schema is not self.root:
            refuse("below the root changes what references mean", f"{where}.$id", "Leave it out")
        used = schema.keys() - NOTES - DEFINITIONS
        for name in (name for name in ALONE if name in used):
            only(used, {name} | BESIDE.get(name, set()), where)
            return self._read_alone(schema, name, where)
        types = schema.get("type", implied(used))
        if types is None:
            what = f"{sorted(used)[0]} without a type cannot be enforced" if used else "allows everything"
            refuse(what, where, "Set type, enum, const, anyOf or $ref")
        for name in types if isinstance(types, list) and types else [types]:
            if not isinstance(name, str) or name not in BY_TYPE:
                refuse(f"{json.dumps(name)} is not a type", f"{where}.type", did_you_mean(str(name), BY_TYPE))
        types = [types] if isinstance(types, str) else types
        only(used, {"type"}.union(*(BY_TYPE[name] for name in types)), where)
        return union(self._read_type(schema, name, where) for name in dict.fromkeys(types))

    def _read_type(self, schema: dict[str, Any], name: str, where: str) -> str:
        """The values of one type that fit; keywords of others restrict none of them."""
        schema = {keyword: value for keyword, value in schema.items() if keyword in BY_TYPE[name]}
        match name:
            case "string":
                return self._read_string(schema, where)
            case "array":
                return self._read_array(schema, where)
            case "object":
                return self._read_object(schema, where)
        if not schema:
            return SIMPLE[name]
        found = (integer_patterns if name == "integer" else decimal_patterns)(limits(schema, where))
        return (
            union(found)
            if found
            else refuse(f"no {name} is within {' and '.join(sorted(schema))}", where, "Change one of them")
        )

    def _read_alone(self, schema: dict[str, Any], name: str, where: str) -> str:
        value = schema[name]
        if name == "$ref":
            if value in self.within:
                what = f"{value!r} contains itself, which no regular expression can enforce"
                refuse(what, f"{where}.$ref", "Write out some levels")
            target = self._resolve(value, f"{where}.$ref")
            if value not in self.known:
                self.within.append(value)
                self.known[value] = self.read(target, f"{self.where}{value[1:].replace('/', '.')}")
                self.within.pop()
            return self.known[value]
        values = [value] if name == "const" else value
        if not (isinstance(values, list) and values):
            refuse("is not a list with entries", f"{where}.{name}", "Give at least one")
        if name in ("anyOf", "oneOf", "allOf"):
            if name == "allOf" and len(value) > 1:
                refuse("of several schemas cannot be enforced", f"{where}.allOf", "Write them as one")
            found = union([self.read(one, f"{where}.{name}.{index}") for index, one in enumerate(value)])
            if name == "oneOf":
                self._check_apart(value, f"{where}.oneOf")
            return found
        for one in values:
            if isinstance(one, (dict, list)):
                refuse(f"{json.dumps(one)} cannot be enforced", f"{where}.{name}", "Describe it by its type")
            if "type" in schema and not is_of_type(one, schema["type"]):
                what = f"{json.dumps(one)} is not of type {json.dumps(schema['type'])}"
                refuse(what, f"{where}.{name}", "Change one of them")
        return union(escape(json.dumps(one, ensure_ascii=False)) for one in values)

    def _resolve(self, reference: Any, where: str) -> Any:
        found = self.root
        parts = reference.split("/") if isinstance(reference, str) else [""]
        for part in parts[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
            if isinstance(found, dict) and isinstance(found.get("$id"), str):
                refuse(
                    f"{reference!r} leads into a schema with its own $id, which changes what references mean",
                    where,
                    "Leave the $id out",
                )
        if parts[0] != "#" or found is None or len(parts) == 1:
            what = (
                "contains itself, which no regular expression can enforce"
                if reference == "#"
                else "is not in this schema"
            )
            refuse(f"{json.dumps(reference)} {what}", where, "Use a reference such as #/$defs/NAME")
        return found

    def _read_string(self, schema: dict[str, Any], where: str) -> str:
        low, high = bounds(schema, "minLength", "maxLength", where)
        given = [name for name in ("format", "pattern") if name in schema]
        if not given:
            return f'"{CHARACTER}{times(low, high)}"' if schema else STRING
        only(schema.keys(), {given[0]}, where)
        if given == ["pattern"]:
            return f'"{string_pattern(schema["pattern"], f"{where}.pattern")}"'
        if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
            refuse(
                f"{schema['format']!r} cannot be enforced",
                f"{where}.format",
                f"Use one of {', '.join(FORMATS)}, or a pattern",
            )
        return f'"{FORMATS[schema["format"]]}"'

    def _read_array(self, schema: dict[str, Any], where: str) -> str:
        low, high = bounds(schema, "minItems", "maxItems", where)
        first, more, place = schema.get("prefixItems", []), schema.get("items"), f"{where}.prefixItems"
        if isinstance(more, list) and "prefixItems" not in schema:  # as before the draft of 2020
            first, more, place = more, None, f"{where}.items"
        if not isinstance(first, list) or ("prefixItems" in schema and not first):
            refuse("is not a list with entries", place, "Give at least one")
        if not first and "items" not in schema:
            refuse("does not say what its items are", where, "Set items")
        parts = [self.read(one, f"{place}.{index}") for index, one in enumerate(first)]
        if first and (more is None or isinstance(more, bool)):
            parts = parts[:high]
            if len(parts) < low:
                refuse(
                    f"{low} exceeds the {len(first)} that are described",
                    f"{where}.minItems",
                    "Describe them, or set items to a schema",
                )
            return rf"\[ ?{' ?, ?'.join(parts)} ?\]"
        more = self.read(more, f"{where}.items")
        if not first:
            if high == 0:
                return r"\[ ?\]"
            following = f"{more}(?:, ?{more}){times(max(low - 1, 0), None if high is None else high - 1)}"
            return rf"\[ ?{following if low else f'(?:{following})?'} ?\]"
        if high is not None and high < len(first):
            refuse(
                f"{high} is below the {len(first)} entries",
                f"{where}.maxItems",
                "Raise it, or describe fewer",
            )
        count = times(max(low - len(first), 0), None if high is None else high - len(first))
        return rf"\[ ?{' ?, ?'.join(parts)}(?: ?, ?{more}){count} ?\]"

    def _read_object(self, schema: dict[str, Any], where: str) -> str:
        others = schema.get("additionalProperties")
        if "properties" in schema:
            free = {"additionalProperties"} if isinstance(others, bool) else set()
            only(schema.keys(), {"properties", "required", *free}, where)
            properties, required = schema["properties"], schema.get("required", [])
            if not isinstance(properties, dict):
                refuse("is not an object of schemas", f"{where}.properties", "Give one schema per name")
            if not isinstance(required, list) or not properties.keys() >= {*map(str, required)}:
                refuse(
                    f"{json.dumps(required)} are not all among the properties",
                    f"{where}.required",
                    "Describe them there",
                )
            inside = {name: self.read(one, f"{where}.properties.{name}") for name, one in properties.items()}
            written = [
                f" ?{escape(json.dumps(name, ensure_ascii=False))} ?: ?{pattern}"
                for name, pattern in inside.items()
            ]
            return rf"\{{{ordered(written, [name in required for name in properties])} ?\}}"
        if not isinstance(others, dict):
            refuse(
                "does not say what its properties are",
                where,
                "Set properties, or additionalProperties to a schema",
            )
        only(schema.keys(), {"additionalProperties", "minProperties"}, where)
        low, _ = bounds(schema, "minProperties", "", where)
        if low > 1:
            refuse(
                f"{low} cannot be enforced", f"{where}.minProperties", "Use 0 or 1, or name the properties"
            )
        pair = f"{STRING} ?: ?{self.read(others, f'{where}.additionalProperties')}"
        pairs = f"{pair}(?: ?, ?{pair})*"
        return rf"\{{ ?{pairs if low else f'(?:{pairs})?'} ?\}}"

    def _check_apart(self, schemas: Sequence[Any], where: str) -> None:
        """Refuse schemas of which a value may fit several."""
        for (index, one), (other_index, other) in combinations(enumerate(schemas), 2):
            if not self._apart(one, other, where):
                what = f"a value may fit both entry {index} and entry {other_index}"
                remedy = (
                    "Use anyOf, if it may fit several. Else tell them apart by a property with a const "
                    "that one of them requires"
                )
                refuse(what, where, remedy)

    def _apart(self, one: Any, other: Any, where: str) -> bool:
        """Whether no value fits both, as far as types, values, limits and required properties tell."""
        self.compared += 1
        if self.compared > MOST_COMPARED:
            refuse("has too many entries to tell apart", where, "Use anyOf")
        for first, second in ((one, other), (other, one)):
            if "$ref" in first:
                return self._apart(self._resolve(first["$ref"], where), second, where)
            for name in ("anyOf", "oneOf", "allOf"):
                if name in first:
                    return all(self._apart(part, second, where) for part in first[name])
        for first, second in ((one, other), (other, one)):
            if (values := enumerated(first)) is not None:
                return not any(may_be(value, second) for value in values)
        shared = kinds(one) & kinds(other)
        return all(self._apart_of_kind(kind, one, other, where) for kind in shared)

    def _apart_of_kind(self, kind: str, one: dict[str, Any], other: dict[str, Any], where: str) -> bool:
        if kind == "number":
            found = [limits(schema, where) for schema in (one, other)]
            if not all("number" in types_of(schema) for schema in (one, other)):  # what fits both is whole
                found = [each.whole() for each in found]
            return found[0].below(found[1]) or found[1].below(found[0])
        if kind != "object":
            return False
        for first, second in ((one, other), (other, one)):
            properties, others = first.get("properties", {}), second.get("properties", {})
            for name in first.get("required", []):
                if name in others and self._apart(properties[name], others[name], where):
                    return True
                if name not in others and second.get("additionalProperties") is False:
                    return True
        return False


def refuse(what: str, where: str, remedy: str) -> NoReturn:
    raise GenerationError(what, where=where, remedy=remedy)


def only(used: Iterable[str], enforced: set[str], where: str) -> None:
    """Refuse the first keyword that would be ignored."""
    for name in sorted(set(used) - enforced):
        beside = " and ".join(sorted(enforced & set(used)))
        refuse(f"cannot be enforced{f' beside {beside}' if beside else ''}", f"{where}.{name}", NOT_ENFORCED)


def implied(used: set[str]) -> str | None:
    """The type that all these keywords belong to. JSON Schema would also allow other types, which no keyword
    then restricts."""
    return next((name for name, keywords in BY_TYPE.items() if used and used <= keywords), None)


def types_of(schema: dict[str, Any]) -> list[str]:
    """The types of values that may fit a schema: without a type all do, of which its keywords restrict
    some."""
    types = schema.get("type", [*BY_TYPE])
    return types if isinstance(types, list) else [str(types)]


def kinds(schema: dict[str, Any]) -> set[str]:
    """Types of which no two share a value."""
    return {"number" if name == "integer" else name for name in types_of(schema)}


def enumerated(schema: dict[str, Any]) -> list[Any] | None:
    """The values of an enumeration."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def may_be(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value may fit a schema, of which patterns and lengths are not looked at."""
    if (values := enumerated(schema)) is not None:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
    if not is_of_type(value, types_of(schema)):
        return False
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    mine, point = limits(schema, ""), SchemaLimits(value, value)
    return not (mine.below(point) or point.below(mine))


def is_of_type(value: Any, types: Any) -> bool:
    """Whether a value that is no list or object has one of the types."""
    kinds = {
        str: {"string"},
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        type(None): {"null"},
    }
    found = kinds[type(value)] | ({"integer"} if isinstance(value, float) and value.is_integer() else set())
    return bool(found & {*map(str, types if isinstance(types, list) else [types])})


def bounds(schema: dict[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    """The lower and the upper bound of a count; None: there is none. A whole number may be written as 2.0."""
    counts = {name: schema[name] for name in (low, high) if name in schema}
    for name, value in counts.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value <= MOST
            or value % 1 != 0
        ):
            refuse(
                f"{json.dumps(value)} is not a count",
                f"{where}.{name}",
                f"Give a whole number from 0 to {MOST:,}",
            )
    if high in counts and counts.get(low, 0) > counts[high]:
        refuse(f"{schema[low]} exceeds {high}", f"{where}.{low}", "Change one of them")
    return int(counts.get(low, 0)), int(counts[high]) if high in counts else None


def times(low: int, high: int | None) -> str:
    """How often something is repeated."""
    return f"{{{low},{'' if high is None else high}}}"


def union(patterns: Iterable[str]) -> str:
    """Any of the patterns."""
    found = list(dict.fromkeys(patterns))
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def ordered(pairs: Sequence[str], required: Sequence[bool]) -> str:
    """Pairs in their order, with commas between them, of which only some are required."""
    if not any(required):
        return f"(?:{_some(pairs)})?" if pairs else ""
    first = required.index(True)
    before = [f"(?:{pair} ?,)?" for pair in pairs[:first]]
    after = [
        f" ?,{pair}" if needed else f"(?: ?,{pair})?"
        for pair, needed in zip(pairs[first + 1 :], required[first + 1 :], strict=True)
    ]
    return "".join([*before, pairs[first], *after])


def _some(pairs: Sequence[str]) -> str:
    """One or more of the pairs. Halves share what follows them, so that each pair is written as often as they
    are halved."""
    if len(pairs) == 1:
        return pairs[0]
    half = len(pairs) // 2
    following = "".join(f"(?: ?,{pair})?" for pair in pairs[half:])
    return f"(?:{_some(pairs[:half])}{following}|{_some(pairs[half:])})"


class SchemaLimits(NamedTuple):
    """Limits of numbers. None: there is none; `above`, `under`: whether the number itself is outside."""

    low: Decimal | float | None
    high: Decimal | float | None
    above: bool = False
    under: bool = False

    def whole(self) -> SchemaLimits:
        """The limits of whole numbers."""
        low = None if self.low is None else math.floor(self.low) + 1 if self.above else math.ceil(self.low)
        high = (
            None if self.high is None else math.ceil(self.high) - 1 if self.under else math.floor(self.high)
        )
        return SchemaLimits(low, high)

    def below(self, other: SchemaLimits) -> bool:
        """Whether all numbers within are smaller than those of the other."""
        if self.high is None or other.low is None:
            return False
        return self.high < other.low or (self.high == other.low and (self.under or other.above))


def limits(schema: dict[str, Any], where: str) -> SchemaLimits:
    """The limits in a schema of numbers, the strictest where there are two on a side."""
    given = {}
    for name in sorted(LIMITS & schema.keys()):
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(f"{json.dumps(value)} is not a number", f"{where}.{name}", "Give a number")
        given[name] = Decimal(value)
        if (-given[name] if "aximum" in name else given[name]) > 10**MOST_DIGITS:
            refuse(
                f"numbers of more than {MOST_DIGITS} digits cannot be enforced",
                f"{where}.{name}",
                "Give a number with fewer",
            )
    lows = [
        (given[name], name == "exclusiveMinimum") for name in ("minimum", "exclusiveMinimum") if name in given
    ]
    highs = [(given[name], name == "maximum") for name in ("maximum", "exclusiveMaximum") if name in given]
    (low, above), (high, closed) = max(lows, default=(None, False)), min(highs, default=(None, True))
    return SchemaLimits(low, high, above, not closed)


def integer_patterns(within: SchemaLimits) -> list[str]:
    """Patterns of the whole numbers within limits; with a limit on a side they have at most `MOST_DIGITS`
    digits there."""
    low, high, _, _ = within.whole()
    return _signed(
        _whole, None if low is None else int(low), None if high is None else int(high), 10**MOST_DIGITS, 1
    )


def decimal_patterns(within: SchemaLimits) -> list[str]:
    """Patterns of the numbers without exponents within limits, which are rounded to `MOST_DIGITS` places."""
    scale = 10**MOST_DIGITS
    low, high = _as_float(within.low, within.above, math.inf), _as_float(within.high, within.under, -math.inf)
    least = None if low is None else math.ceil(Fraction(low) * scale)
    most = None if high is None else math.floor(Fraction(high) * scale)
    return _signed(_decimals, least, most, scale * scale, 0)


def _signed(
    patterns: Callable[[int, int | None], list[str]],
    low: int | None,
    high: int | None,
    largest: int,
    least: int,
) -> list[str]:
    """Patterns of numbers within limits from those of numbers that are not negative; of limits beyond the
    largest number so much as is within. `least`: the smallest one that may have a minus."""
    if (low is not None and low > largest) or (high is not None and high < -largest):
        return []
    low, high = None if low is None else max(low, -largest), None if high is None else min(high, largest)
    found = [] if high is not None and high < 0 else patterns(max(low or 0, 0), high)
    if low is None or low < 0:
        found += [f"-{each}" for each in patterns(max(least, -(high or 0)), None if low is None else -low)]
    return found


def _as_float(limit: Decimal | float | None, outside: bool, towards: float) -> Decimal | None:
    """The first number of double precision within a limit, as readers of JSON round to these."""
    if limit is None:
        return None
    found = float(limit)
    while (outside and Decimal(found) == limit) or (
        Decimal(found) < limit if towards > 0 else Decimal(found) > limit
    ):
        found = math.nextafter(found, towards)
    return Decimal(repr(found)) if math.isfinite(found) else Decimal(limit)


def _whole(low: int, high: int | None) -> list[str]:
    """Patterns of whole numbers that are not negative, by their number of digits."""
    if high is not None and low > high:
        return []
    if low == 0:
        return ["0", *_whole(1, high)]
    count = len(str(low))
    if high is None:
        return [_as_many(str(low), None), f"[1-9][0-9]{times(count, None)}"]
    counts = range(count, len(str(high)) + 1)
    return [_as_many(str(max(low, 10 ** (n - 1))), str(min(high, 10**n - 1))) for n in counts]


def _decimals(low: int, high: int | None) -> list[str]:
    """Patterns of numbers that are not negative; the limits are in units of the last of `MOST_DIGITS`
    places."""
    if high is not None and low > high:
        return []
    (first, low_places), (last, high_places) = (divmod(each, 10**MOST_DIGITS) for each in (low, high or 0))
    low_digits, high_digits = (f"{each:0{MOST_DIGITS}}".rstrip("0") for each in (low_places, high_places))
    if first == last and high is not None:
        return [f"{first}{_places(low_digits, high_digits, POINT)}"]
    found = [f"{first}{_places(low_digits, None, POINT)}"]
    between = _whole(first + 1, None if high is None else last - 1)
    found += [f"{each}{_places('', None, POINT)}" for each in between]
    return found + ([] if high is None else [f"{last}{_places('', high_digits, POINT)}"])


def _as_many(low: str, high: str | None) -> str:
    """Digits from `low` to `high`, as many as these have."""
    if high is not None and not high.strip("9"):
        high = None
    if high is None and not low.strip("0"):
        return f"[0-9]{times(len(low), len(low))}"
    return _first_digit(low, high, _as_many)


def _places(low: str, high: str | None, point: str = "") -> str:
    """Digits of a fraction from `low` to `high`, of which zeros at the end may be absent."""
    low = low.rstrip("0")
    found = "0+" if high == "" else "[0-9]+"
    if low or high:
        found = _first_digit(low, high, _places)
    return f"{point}{found}" if low else f"(?:{point}{found})?"


def _first_digit(low: str, high: str | None, rest: Callable[[str, str | None], str]) -> str:
    """Digits from `low` to `high`: a first one, and the `rest` for what that leaves of the limits."""
    first, last = int(low[:1] or 0), 9 if high is None else int(high[0])
    after, zeros = None if high is None else high[1:], "0" * len(low[1:])
    if first == last:
        return f"{first}{rest(low[1:], after)}"
    found = [f"{first}{rest(low[1:], None)}"]
    if high is not None:
        found.append(f"{last}{rest(zeros, after)}")
        last -= 1
    if first < last:
        found.append(f"[{first + 1}-{last}]{rest(zeros, None)}")
    return union(found)
