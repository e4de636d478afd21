"""Inputs like given ones: of the same kinds and sizes, with what all of the given have in common."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import permutations, product
from typing import Any

NUMBERS, ORDERED = (int, float), (list, tuple)


class Draws(random.Random):
    """Random numbers, and whether lists stay sorted where all the given ones are. Otherwise one in four does
    not."""

    ordered = False


def similar_inputs(
    given: Sequence[tuple[Any, ...]], seed: int, ordered: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Arguments, without end. Nothing if an argument is not plain data."""
    rng = Draws(seed)
    rng.ordered = ordered
    given = [arguments for arguments in given if len(arguments) == len(given[0])]
    columns = list(zip(*given, strict=True))
    if not all(map(_is_plain, columns)):
        return
    ties = _ties(columns)
    while True:
        base = deepcopy(rng.choice(given))
        drawn = [
            _like(rng, column, base[at]) if rng.random() < 0.8 else base[at]
            for at, column in enumerate(columns)
        ]
        for tie in ties:
            with contextlib.suppress(TypeError):
                tie(rng, drawn)
        yield tuple(drawn)


def _is_plain(values: Any) -> bool:
    if isinstance(values, dict):
        return all(map(_is_plain, [*values, *values.values()]))
    if isinstance(values, list | tuple | set):
        return all(map(_is_plain, values))
    return values is None or isinstance(values, bool | int | float | str)


Tie = Callable[[Draws, list[Any]], None]


def _ties(columns: Sequence[Sequence[Any]]) -> list[Tie]:
    """What restores the relations of arguments: lengths given beside a list, equal lengths, numbers in order,
    members."""
    ties: list[Tie] = []
    sized = [at for at, column in enumerate(columns) if all(hasattr(value, "__len__") for value in column)]
    whole = [at for at, column in enumerate(columns) if all(type(value) is int for value in column)]
    for a, b in permutations(sized, 2):
        both = list(zip(columns[a], columns[b], strict=True))
        if a < b and all(len(x) == len(y) for x, y in both) and not _are(columns[a], dict, set):
            ties.append(partial(_same_length, a=a, b=b))
        if any(_holds(x, y) for x, y in both):
            ties.append(partial(_part, a=a, b=b))
    for a, number in product(sized, range(len(columns))):
        if number not in sized and any(
            _holds(x, [y]) for x, y in zip(columns[a], columns[number], strict=True)
        ):
            ties.append(partial(_member, a=a, b=number))
    for number, a in product(whole, sized):
        differences = {y - len(x) for x, y in zip(columns[a], columns[number], strict=True)}
        if differences in ({0}, {-1}):
            ties.append(partial(_as_long, a=a, b=number, difference=differences.pop()))
        elif max(differences) <= 0 <= min(columns[number]):
            ties.append(partial(_at_most_as_long, a=a, b=number, difference=max(-1, max(differences))))
    for a, b in permutations(whole, 2):
        if all(x <= y for x, y in zip(columns[a], columns[b], strict=True)):
            ties.append(partial(_in_order, a=a, b=b))
    return ties


def _are(values: Sequence[Any], *types: type) -> bool:
    return any(isinstance(value, types) for value in values)


def _holds(x: Any, y: Any) -> bool:
    if isinstance(x, str):
        y = "".join(y) if isinstance(y, list) and _all(y, str) else y
        return isinstance(y, str) and y in x
    with contextlib.suppress(TypeError):  # of what has no hash
        return (
            isinstance(x, list | tuple | dict)
            and isinstance(y, list | tuple)
            and all(each in x for each in y)
        )
    return False


def _same_length(rng: Draws, drawn: list[Any], a: int, b: int) -> None:
    length = min(len(drawn[a]), len(drawn[b]))
    drawn[a], drawn[b] = drawn[a][:length], drawn[b][:length]


def _part(rng: Draws, drawn: list[Any], a: int, b: int) -> None:
    if rng.random() < 0.5 and isinstance(drawn[a], str | list | tuple) and drawn[a]:
        count = min(len(drawn[b]), len(drawn[a]))
        if isinstance(drawn[a], str):
            start = rng.randint(0, len(drawn[a]) - count)
            drawn[b] = drawn[a][start : start + count]
        else:
            drawn[b] = type(drawn[b])(rng.sample(list(drawn[a]), count))


def _member(rng: Draws, drawn: list[Any], a: int, b: int) -> None:
    if rng.random() < 0.6 and drawn[a] and not isinstance(drawn[a], set):
        drawn[b] = deepcopy(rng.choice(list(drawn[a])))


def _as_long(rng: Draws, drawn: list[Any], a: int, b: int, difference: int) -> None:
    drawn[b] = len(drawn[a]) + difference


def _at_most_as_long(rng: Draws, drawn: list[Any], a: int, b: int, difference: int) -> None:
    drawn[b] = min(drawn[b], max(0, len(drawn[a]) + difference))


def _in_order(rng: Draws, drawn: list[Any], a: int, b: int) -> None:
    if drawn[a] > drawn[b]:
        drawn[a], drawn[b] = drawn[b], drawn[a]


def _all(values: Sequence[Any], *types: type) -> bool:
    return all(type(value) in types for value in values)


def _like(rng: Draws, pool: Sequence[Any], base: Any) -> Any:
    """A value like those of the pool, from one of them."""
    if isinstance(base, bool) or base is None:
        return rng.choice(pool)
    if isinstance(base, int):
        return _whole(rng, [value for value in pool if type(value) is int], base)
    if isinstance(base, float):
        numbers = [value for value in pool if isinstance(value, NUMBERS)]
        return round(rng.uniform(min(numbers), max(numbers)), 1)
    if isinstance(base, str):
        return _text(rng, [value for value in pool if isinstance(value, str)], base)
    if isinstance(base, dict):
        return _mapping(rng, [value for value in pool if isinstance(value, dict)], base)
    if isinstance(base, set):
        return set(
            _sequence(
                rng,
                [sorted(value, key=repr) for value in pool if isinstance(value, set)],
                sorted(base, key=repr),
            )
        )
    return type(base)(
        _sequence(rng, [list(value) for value in pool if isinstance(value, ORDERED)], list(base))
    )


def _whole(rng: Draws, pool: Sequence[int], base: int) -> int:
    low, high = min(pool), max(pool)
    if low == high or rng.random() < 0.2:
        return rng.choice(pool)
    if low >= 0 and high >= 100 and set("".join(map(str, pool))) <= {"0", "1"}:
        return int("1" + "".join(rng.choice("01") for _ in range(rng.randint(1, len(str(high)) - 1))))
    if rng.random() < 0.3:
        near = base + rng.choice([-2, -1, 1, 2, 3])
        return near if near >= min(low, 1) else base
    lowest = min(low, max(2, low // 2)) if low > 0 else low
    return rng.randint(lowest, high + max(12, high // 3) if high > 0 else high)


def _text(rng: Draws, pool: Sequence[str], base: str) -> str:
    if len(set(pool)) == 1 or not base:
        return rng.choice(pool)
    characters = "".join(pool)
    if " " in base.strip() and rng.random() < 0.5:
        words = [word for text in pool for word in text.split()]
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, len(base.split()))))
    text, least, most = list(base), max(1, min(map(len, pool)) - 1), max(map(len, pool)) + 1
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(text))
        match rng.randrange(6):
            case 0:
                text[at] = _similar(rng, characters, text[at])
            case 1 if len(text) > least:
                del text[at]
            case 2 if len(text) < most:
                text.insert(at, _similar(rng, characters, text[at]))
            case 3:
                other = rng.randrange(len(text))
                text[at], text[other] = text[other], text[at]
            case 4:
                text[at] = rng.choice(text)
            case 5:
                other_text = rng.choice(pool)
                text = [*text[: len(text) // 2], *other_text[len(other_text) // 2 :]][:most] or text
    return "".join(text)


def _similar(rng: Draws, characters: str, old: str) -> str:
    for test in (str.islower, str.isupper, str.isdigit):
        if test(old):
            same = "".join(filter(test, characters))
            return rng.choice(same)
    return rng.choice(characters)


def _mapping(rng: Draws, pool: Sequence[dict[Any, Any]], base: dict[Any, Any]) -> dict[Any, Any]:
    keys, values = [key for each in pool for key in each], [value for each in pool for value in each.values()]
    if not keys:
        return dict(base)
    names = [
        each
        for each in dict.fromkeys(rng.choice(keys) for _ in range(max(1, len(base) + rng.choice([-1, 0, 1]))))
    ]
    if all(each.keys() == base.keys() for each in pool):
        return {key: _like(rng, [each[key] for each in pool], base[key]) for key in base}
    alike = [value for value in values if type(value) is type(values[0])] or values
    return {key: _like(rng, alike, rng.choice(alike)) for key in names}


def _sequence(rng: Draws, pool: Sequence[list[Any]], base: list[Any]) -> list[Any]:
    elements = [element for each in pool for element in each]
    if not elements:
        return list(base)
    lengths = [len(each) for each in pool]
    if len(set(lengths)) == 1 and len({type(each) for each in elements}) > 1:
        drawn = [
            _like(rng, column, base[at]) if rng.random() < 0.7 else base[at]
            for at, column in enumerate(zip(*pool, strict=True))
        ]
        return _as_in(rng, pool, drawn)
    fixed = len(set(lengths)) == 1 and len(pool) > 3
    length = lengths[0] if fixed else max(1, rng.randint(max(1, min(*lengths, 9) - 1), min(max(lengths), 9)))
    if rng.random() < 0.3 and not fixed:
        drawn = deepcopy(base)
        rng.shuffle(drawn)
        return _as_in(rng, pool, drawn[:length])
    if rng.random() < 0.2 and base and not fixed:
        drawn = deepcopy(base)
        at = rng.randrange(len(drawn))
        drawn[at] = deepcopy(rng.choice(drawn))
        return _as_in(rng, pool, drawn)
    drawn = []
    few = (
        rng.sample(elements, min(len(elements), rng.choice([2, 3, 5, 9]))) if rng.random() < 0.5 else elements
    )
    for _ in range(length):
        element = rng.choice(few)
        drawn.append(
            _like(rng, [each for each in elements if type(each) is type(element)], element)
            if rng.random() < 0.4
            else deepcopy(element)
        )
    if elements and all(isinstance(each, ORDERED) for each in elements):
        sizes = {tuple(len(each) for each in one) for one in pool}
        if all(len(set(each)) == 1 for each in sizes) and drawn:
            least = min(map(len, drawn))
            drawn = [each[:least] for each in drawn]
    return _as_in(rng, pool, drawn)


def _as_in(rng: Draws, pool: Sequence[list[Any]], drawn: list[Any]) -> list[Any]:
    """Mostly sorted, or without duplicates, if all of the pool are."""
    if all(isinstance(x, bool) for x in drawn):
        return drawn
    if None in drawn and rng.random() < 0.5:
        rng.shuffle(drawn)
    try:
        many = [each for each in pool if len(each) > 1]
        if many and rng.random() < 0.75 and all(len({repr(x) for x in each}) == len(each) for each in pool):
            drawn = list({repr(x): x for x in drawn}.values())
        if not rng.ordered and rng.random() < 0.25:
            return drawn
        if len(many) > 1 and all(each == sorted(each) for each in many):
            drawn = sorted(drawn)
        elif len(many) > 1 and all(each == sorted(each, reverse=True) for each in many):
            drawn = sorted(drawn, reverse=True)
    except TypeError:
        pass
    return drawn
