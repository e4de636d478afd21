"""Find the answer in text that a model wrote, in linear time. Nothing is found in texts of more than
`MAX_TEXT` characters."""

from __future__ import annotations

MAX_TEXT = 16_384
OPEN, CLOSE = "<answer>", "</answer>"
FENCE = "```"
BOX = "\\boxed{"


def between(text: str, opening: str, closing: str) -> list[str]:
    """The text between each opening mark and the next closing one, in order."""
    found: list[str] = []
    stop = 0
    while len(text) <= MAX_TEXT and (start := text.find(opening, stop)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            break
        found.append(text[start:stop])
        stop += len(closing)
    return found


def answer_of(text: str) -> str | None:
    """The content of the single pair of answer tags, or a whole text without tags, stripped; None if it is
    empty or the tags are others."""
    if len(text) > MAX_TEXT:
        return None
    if OPEN not in text and CLOSE not in text:
        return text.strip() or None
    tags = (text.count(OPEN), text.count(CLOSE))
    found = between(text, OPEN, CLOSE)
    return (found[0].strip() or None) if tags == (1, 1) and found else None


def boxed(text: str) -> str | None:
    r"""The stripped content of the last `\boxed{`; None if there is none, or it is empty or does not
    close."""
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
    """The first fenced block, if it closes and names one of these languages or none; else None."""
    if len(text) > MAX_TEXT:
        return None
    _, opened, rest = text.partition(FENCE)
    block, closed, _ = rest.partition("\n" + FENCE)
    language, newline, code = block.partition("\n")
    return (
        code + "\n"
        if opened and closed and newline and language.strip().lower() in ("", *languages)
        else None
    )
