"""Exact arithmetic on text that a model wrote.

The text is parsed, never evaluated: a syntax tree of `+ - * /` over integers, folded into fractions. Anything
else that Python accepts (names, calls, powers, floats, signs, ...) is refused. Text of bounded length without
powers has a bounded value, so nothing here can hang.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate

from unmask.errors import UnmaskError

MAX_LENGTH = 256
MAX_DEPTH = 32
ALPHABET = frozenset("0123456789+-*/() ")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ArithmeticSyntaxError(UnmaskError):
    """The text is not an arithmetic expression, or divides by zero."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of non-negative integers, `+ - * /`, parentheses and spaces.

    Raises:
        ArithmeticSyntaxError: any other text, more than `MAX_LENGTH` characters or `MAX_DEPTH` nested
            parentheses, or a division by zero.
    """
    try:
        return _fold(_parse(expression))
    except ZeroDivisionError:
        raise _refusal(expression, "it divides by zero") from None


def numbers_used(expression: str) -> list[int]:
    """The integers of an expression in ascending order, with repetitions. Raises like `evaluate`, except for
    a division by zero."""
    return sorted(
        node.value
        for node in ast.walk(_parse(expression))
        if isinstance(node, ast.Constant) and isinstance(node.value, int)
    )


def _parse(expression: str) -> ast.expr:
    """The syntax tree of an expression."""
    if len(expression) > MAX_LENGTH:
        raise _refusal(expression, f"it has {len(expression)} characters, more than {MAX_LENGTH}")
    if not ALPHABET.issuperset(expression):
        raise _refusal(expression, "only digits, + - * / and parentheses may occur")
    depths = accumulate((character == "(") - (character == ")") for character in expression)
    # checked first, because Python's parser runs out of memory on deep text
    if max(depths, default=0) > MAX_DEPTH:
        raise _refusal(expression, f"its parentheses are nested more than {MAX_DEPTH} deep")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise _refusal(expression, error.msg) from None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.BinOp, ast.Constant, *OPERATIONS)):
            raise _refusal(expression, f"{type(node).__name__} is not one of + - * / over integers")
    return tree


def _fold(node: ast.expr) -> Fraction:
    """The value of a tree from `_parse`."""
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_fold(node.left), _fold(node.right))
    assert isinstance(node, ast.Constant) and isinstance(node.value, int)
    return Fraction(node.value)


def _refusal(expression: str, why: str) -> ArithmeticSyntaxError:
    shown = expression if len(expression) <= 40 else expression[:40] + "..."
    return ArithmeticSyntaxError(
        f"{shown!r} is not an arithmetic expression: {why}", remedy="Use integers, + - * / and parentheses."
    )
