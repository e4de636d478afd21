"""Whether two formulas are equal. Runs in the worker of symbolic.py, because SymPy takes long to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from sympy.core.relational import Relational

Formula = Any
"""A formula of SymPy as math-verify reads it, not evaluated: a value, relation, set or matrix."""

DIGITS = 600
"""To how many digits the difference of equal numbers vanishes. An answer has fewer, so that no decimal equals
a root."""
POINTS = 4
"""Values of the variables, for each of which equal formulas are equal; SymPy proves the rest."""


def same(one: Formula, other: Formula) -> bool:
    """Whether two formulas are equal: values exactly, relations up to a factor, sets and matrices if their
    members are."""
    if isinstance(one, Relational) and isinstance(other, Relational):
        return _same_relation(one, other)
    if isinstance(one, sympy.And) and isinstance(other, sympy.And):
        return _same_members(one.args, other.args)
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
        return _same_members(one.args, other.args)
    if isinstance(one, sympy.Set) or isinstance(other, sympy.Set):
        return bool(one == other)
    if isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) and isinstance(
        other, sympy.MatrixBase | sympy.MatrixExpr
    ):
        one, other = one.doit(), other.doit()
        return one.shape == other.shape and all(map(same, one, other))
    return isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr) and _same_value(one, other)


def _same_members(ones: Sequence[Formula], others: Sequence[Formula]) -> bool:
    left = list(others)
    for one in ones:
        found = next((at for at, other in enumerate(left) if same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _same_relation(one: Relational, other: Relational) -> bool:
    """Whether both say that a formula is zero, below zero etc., and the formulas differ in a factor only,
    above zero for an inequality."""
    (sign, zero), (other_sign, other_zero) = map(_against_zero, (one, other))
    if sign != other_sign:
        return False
    factor = sympy.simplify(zero / other_zero)
    return (
        not factor.free_symbols
        and bool(factor.is_finite)
        and bool(factor.is_positive or (sign in ("==", "!=") and factor.is_nonzero))
    )


def _against_zero(relation: Relational) -> tuple[str, Formula]:
    sign, difference = relation.rel_op, relation.lhs - relation.rhs
    return (sign.replace(">", "<"), -difference) if ">" in sign else (sign, difference)


def _same_value(one: Formula, other: Formula) -> bool:
    one, other = map(_evaluated, (one, other))
    if one == other:
        return one not in (sympy.nan, sympy.zoo)
    if one.is_finite is False or other.is_finite is False:
        return False
    difference = one - other
    variables = sorted(difference.free_symbols, key=str)
    if not variables and (vanishes := _vanishes(difference)) is not None:
        return vanishes
    points = ({name: _coordinate(at, place) for place, name in enumerate(variables)} for at in range(POINTS))
    return (
        all(_vanishes(difference.subs(point)) is not False for point in points)
        and sympy.simplify(difference) == 0
    )


def _evaluated(formula: Formula) -> Formula:
    """The formula evaluated, where i is the imaginary unit."""
    return formula.xreplace({name: sympy.I for name in formula.free_symbols if name.name == "i"}).doit()


def _coordinate(at: int, place: int) -> Formula:
    """A fraction without a pattern, of either sign, that gets larger from point to point."""
    return (-1) ** (at + at * place // 2) * sympy.Rational(
        sympy.prime(7 + 5 * place + at) * 9**at, sympy.prime(31 + place)
    )


def _vanishes(number: Formula) -> bool | None:
    """Whether a number is zero to `DIGITS` digits of its terms; None if it cannot be evaluated."""
    parts = number.evalf(2, maxn=DIGITS).as_real_imag()
    if not all(part.is_Float or part.is_Integer for part in parts):
        return None
    return all(part == 0 or part._prec == 1 for part in parts)
