"""Published rewards for the format of a completion (d1, Zhao et al. 2025), without their regular expressions,
which can be slow."""

from __future__ import annotations

import ast
import warnings

from unmask.rewards.parsing import CLOSE, MAX_TEXT, OPEN, between, boxed, code_block

REASONING, REASONED = "<reasoning>", "</reasoning>"


def published_answer(text: str) -> str:
    """The answer as the published functions find it: from the last opening tag (or the beginning) to the next
    closing one."""
    return text[-MAX_TEXT:].rpartition(OPEN)[2].partition(CLOSE)[0].strip()


def tagged_answers(text: str) -> list[str]:
    """The stripped contents of all answer tags. The published puzzles use the last one."""
    return [answer.strip() for answer in between(text, OPEN, CLOSE)]


def xml_count(text: str) -> float:
    """An eighth for each of the four tags that occurs once, on a line of its own, less a thousandth per
    character after the last."""
    count = 0.125 * (text.count(f"{REASONING}\n") == 1) + 0.125 * (text.count(f"\n{REASONED}\n") == 1)
    if text.count(f"\n{OPEN}\n") == 1:
        count += 0.125 - 0.001 * len(text.rpartition(f"\n{CLOSE}\n")[2])
    if text.count(f"\n{CLOSE}") == 1:
        count += 0.125 - 0.001 * (len(text.rpartition(f"\n{CLOSE}")[2]) - 1)
    return count


def soft_format(text: str) -> float:
    """A half for text that begins with `<reasoning>...</reasoning><answer>...</answer>`, with any white space
    between the two."""
    return 0.5 * _reasoned(text, REASONING, REASONED, OPEN, CLOSE, spaced=True)


def strict_format(text: str) -> float:
    """A half for the four tags, each on a line of its own, and nothing around them."""
    lines = (f"{REASONING}\n", f"\n{REASONED}\n", f"{OPEN}\n", f"\n{CLOSE}\n")
    # As published, one more newline may follow, and the last tag may occur again.
    return (
        0.5
        * (text.endswith(lines[-1]) or text.endswith(lines[-1] + "\n"))
        * _reasoned(text, *lines, spaced=False)
    )


def _reasoned(text: str, opening: str, closing: str, second: str, last: str, *, spaced: bool) -> bool:
    """Whether a text begins with `opening`, has `second` right after `closing` (or after white space), and
    `last` later."""
    if len(text) > MAX_TEXT or not text.startswith(opening):
        return False
    at = text.find(closing, len(opening))
    while at >= 0:
        after = at + len(closing)
        while spaced and after < len(text) and text[after].isspace():
            after += 1
        if text.startswith(second, after):
            return text.find(last, after + len(second)) >= 0
        at = text.find(closing, at + 1)
    return False


def integer(text: str) -> float:
    """A half for an answer of digits alone."""
    return 0.5 * published_answer(text).isdigit()


def boxed_in_answer(text: str) -> float:
    """A half for a box with content within the answer tags (or within a text without tags)."""
    return 0.5 * (boxed(published_answer(text)) is not None)


def code_format(text: str, *languages: str) -> float:
    """1 for a fenced block, but a half for Python that does not parse; 0 without a block."""
    code = code_block(text, *languages)
    if code is None:
        return 0.0
    try:
        if "python" in languages:
            parse_python(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return 0.5
    return 1.0


def parse_python(code: str) -> ast.Module:
    """The syntax tree of a program, without warnings about it. Raises like `ast.parse`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)
