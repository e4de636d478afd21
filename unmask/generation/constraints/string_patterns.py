"""Patterns of strings in JSON schemas, as patterns of what stands between the quotes.

A character that JSON writes with a backslash is never matched: the strings are those of the pattern that need none.
"""

from __future__ import annotations

import re
from typing import Any

from unmask.errors import GenerationError

PLAIN = r'[^"\\\x00-\x1F]'
"""A character that JSON writes as it is."""
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]", "s": r"[\s]", "S": r"[^\s]"}
"""Those of ECMA 262, which JSON schemas use; Rust's also hold digits and letters of other scripts."""
DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{CLOCK})"
LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
FORMATS = {
    "date": f"[0-9]{{4}}-{DAY}",
    "date-time": f"[0-9]{{4}}-{DAY}T{TIME}",
    "email": rf"[a-z0-9_+-]+(?:\.[a-z0-9_+-]+)*@{LABEL}(?:\.{LABEL})+",
    "ipv4": r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "time": TIME,
    "uri": rf"https?://{LABEL}(?:\.{LABEL})*(?::[0-9]{{1,4}})?(?:/[A-Za-z0-9._~-]+)*/?(?:\?[A-Za-z0-9._~=&-]+)?(?:#[A-Za-z0-9._~-]+)?",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
"""Common forms of each format: all of them valid, but not all that are."""


def string_pattern(pattern: Any, where: str) -> str:
    """The pattern, of whole strings, with every class and dot restricted to plain characters.

    Raises:
        GenerationError: it is no text, or a class in it is not closed.
    """
    if not isinstance(pattern, str):
        raise GenerationError(f"{pattern!r} is not a pattern", where=where, remedy="Give a regular expression")
    body = pattern.removeprefix("^")
    if re.search(r"(?<!\\)(\\\\)*\$$", body):
        body = body[:-1]
    parts, at = [], 0
    while at < len(body):
        stop = at + (2 if body[at] == "\\" else 1)
        if body[at] == "[":
            stop = _class_end(body, at, where)
            inside = re.sub(r"\\([dDwWsS])|\\.", lambda found: CLASSES.get(found[1], found[0]), body[at:stop], flags=re.S)
            parts.append(f"[{inside}&&{PLAIN}]")
        elif body[at] == ".":
            parts.append(PLAIN)
        elif body[at] == "\\" and body[at + 1 : stop] in CLASSES:
            parts.append(f"[{CLASSES[body[at + 1]]}&&{PLAIN}]")
        else:
            parts.append(body[at:stop])
        at = stop
    return f"(?:{''.join(parts)})"


def _class_end(body: str, start: int, where: str) -> int:
    """The place after the bracket that closes a class."""
    at = start + (2 if body[start + 1 : start + 2] == "^" else 1)
    at += body[at : at + 1] == "]"  # a bracket that comes first is one of the characters
    while at < len(body) and body[at] != "]":
        at += 2 if body[at] == "\\" else 1
    if at >= len(body):
        raise GenerationError(f"the class at character {start + 1} is not closed", where=where, remedy="Add a ]")
    return at + 1
