"""The answer within text that a model wrote. Linear scans: no text makes them slow.

In texts of more than `MAX_TEXT` characters nothing is found: they are no answers.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_TEXT = 16_384
OPEN, CLOSE = "<answer>", "</answer>"
FENCE = "```"
BOX = "\\boxed{"


def between(text: str, opening: str, closing: str) -> list[str]:
    """The text between each opening mark and the next closing one, in order."""
    return list(_between(text, opening, closing)) if len(text) <= MAX_TEXT else []


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    stop = 0
    while (start := text.find(opening, stop)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield text[start:stop]
        stop += len(closing)


def answer_of(text: str) -> str | None:
    """The answer: the content of the one pair of answer tags, or all of a text without any, less the space around it.

    None where there are other tags than one pair, and where nothing is left.
    """
    if len(text) > MAX_TEXT:
        return None
    if OPEN not in text and CLOSE not in text:
        return text.strip() or None
    tags = (text.count(OPEN), text.count(CLOSE))
    found = between(text, OPEN, CLOSE)
    return (found[0].strip() or None) if tags == (1, 1) and found else None


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that closes, less the space around it; None where there is none, or nothing in it."""
    start = text.rfind(BOX) + len(BOX)
    if start < len(BOX) or len(text) > MAX_TEXT:
        return None
    depth, escaped = 1, False
    for at in range(start, len(text)):
        depth += 0 if escaped else (text[at] == "{") - (text[at] == "}")
        escaped = text[at] == "\\" and not escaped
        if depth == 0:
            return text[start:at].strip() or None
    return None


def code_block(text: str, *languages: str) -> str | None:
    """The first fenced block, if it is of one of these languages or of none named; None without one that closes."""
    if len(text) > MAX_TEXT:
        return None
    _, opened, rest = text.partition(FENCE)
    block, closed, _ = rest.partition("\n" + FENCE)
    language, newline, code = block.partition("\n")
    return code + "\n" if opened and closed and newline and language.strip().lower() in ("", *languages) else None
