"""The formulas of a problem in LaTeX, and all their parts."""

from __future__ import annotations

import re

FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\[(.+?)\\\]", re.DOTALL)
FIGURE = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
TOKEN = re.compile(
    r"\\(?:begin|end)\{[a-z*]+\}|\\[a-zA-Z]+|\\.|[0-9]+(?:,\\?!?[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+|\S"
)
NEVER_FIRST = {*"})]=,.&^_", r"\}", r"\\"}
NEVER_LAST = {*"+-*/^_=,", r"\frac", r"\sqrt", r"\times", r"\cdot"}


def formulas(problem: str) -> list[str]:
    """What is between dollar signs or in displays, without figures."""
    return [inline or display for inline, display in FORMULA.findall(FIGURE.sub("", problem))]


def subformulas(formula: str) -> set[str]:
    """Every range of its tokens whose braces, brackets and parentheses balance."""
    tokens, found = TOKEN.findall(formula), set()
    for start, first in enumerate(tokens):
        braces = brackets = 0
        for stop in range(start, len(tokens) * (first not in NEVER_FIRST)):
            token = tokens[stop]
            braces += (token == "{") - (token == "}")
            brackets += (token in ("(", "[")) - (token in (")", "]"))
            if braces < 0:
                break
            if braces == brackets == 0 and token not in NEVER_LAST:
                found.add(
                    "".join(
                        f"{part} " if re.fullmatch(r"\\[a-zA-Z]+", part) else part
                        for part in tokens[start : stop + 1]
                    ).strip()
                )
    return found


def is_reference(formula: str, reference: str) -> bool:
    """Whether a formula is the reference itself, apart from space, braces, thousands separators, a plus sign,
    and parentheses around it."""
    formula, reference = (
        re.sub(r"\\(?:[!,; ]|left|right|text)|[ ,${}]", "", text).removesuffix(".")
        for text in (formula, reference)
    )
    formula, reference = (re.sub(r"^\(([0-9]+|[A-Z])\)$", r"\1", text) for text in (formula, reference))
    return formula.removeprefix("+") == reference
