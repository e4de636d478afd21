"""Published shaping: rewards for the format of a completion, independent of its content (d1, Zhao et al. 2025).

Values are those of the published functions; their regular expressions, which take quadratic time on some texts, are scans here.
"""

from __future__ import annotations

import ast
import warnings

from unmask.rewards.parsing import CLOSE, MAX_TEXT, OPEN, between, boxed, code_block

REASONING, REASONED = "<reasoning>", "</reasoning>"


def published_answer(text: str) -> str:
    """What the published functions take for the answer: from the last opening tag (or the beginning) to the next closing one."""
    return text[-MAX_TEXT:].rpartition(OPEN)[2].partition(CLOSE)[0].strip()


def tagged_answers(text: str) -> list[str]:
    """The contents of answer tags, stripped of spaces: the published puzzles use the last one."""
    return [answer.strip() for answer in between(text, OPEN, CLOSE)]


def xml_count(text: str) -> float:
    """An eighth for each of four tags that occurs once and on a separate line, less a thousandth per character after the last."""
    count = 0.125 * (text.count(f"{REASONING}\n") == 1) + 0.125 * (text.count(f"\n{REASONED}\n") == 1)
    if text.count(f"\n{OPEN}\n") == 1:
        count += 0.125 - 0.001 * len(text.rpartition(f"\n{CLOSE}\n")[2])
    if text.count(f"\n{CLOSE}") == 1:
        count += 0.125 - 0.001 * (len(text.rpartition(f"\n{CLOSE}")[2]) - 1)
    return count


def soft_format(text: str) -> float:
    """A half for `<reasoning>...</reasoning> <answer>...</answer>` at the beginning, with any space between and anything after."""
    return 0.5 * _reasoned(text, REASONING, REASONED, OPEN, CLOSE, spaced=True)


def strict_format(text: str) -> float:
    """A half for the four tags, each on a separate line, and nothing else around them."""
    lines = (f"{REASONING}\n", f"\n{REASONED}\n", f"{OPEN}\n", f"\n{CLOSE}\n")
    # As published: its `$` also allows one more newline, and the last tag may come again.
    return 0.5 * (text.endswith(lines[-1]) or text.endswith(lines[-1] + "\n")) * _reasoned(text, *lines, spaced=False)


def _reasoned(text: str, opening: str, closing: str, second: str, last: str, *, spaced: bool) -> bool:
    """Whether a text begins with one mark, and somewhere a second one is followed by a third, and that by a fourth later on."""
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
    """A half for something in a box within the answer tags (or within a text without any)."""
    return 0.5 * (boxed(published_answer(text)) is not None)


def code_format(text: str, *languages: str) -> float:
    """1 for a fenced block that parses as Python (of another language: for any block), a half for one that does not."""
    code = code_block(text, *languages)
    if code is None:
        return 0.0
    return 1.0 if "python" not in languages or parses(code) else 0.5


def parses(code: str) -> bool:
    """Whether a text is a Python program."""
    try:
        parse_python(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def parse_python(code: str) -> ast.Module:
    """The tree of a program, without the warnings that its author should have seen. Raises as `ast.parse`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)
