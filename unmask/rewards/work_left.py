"""What a formula leaves to be computed. Runs in the worker of symbolic.py, because SymPy takes long to import."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import sympy

Formula = Any
"""A formula of SymPy as math-verify reads it, not evaluated: a value, relation, tuple, interval, set or matrix."""


def as_final(answer: Formula, reference: Formula) -> bool:
    """Whether an answer leaves no more to be computed than its reference, and is factored if the reference is."""
    left, allowed = work_left(answer), work_left(reference)
    return not left - allowed and (left["products of sums"] > 0 or not allowed["products of sums"])


def work_left(formula: Formula) -> Counter[str]:
    """How often a formula has each kind of what could still be computed."""
    left: Counter[str] = Counter()
    if isinstance(formula, sympy.MatrixBase):
        return sum(map(work_left, formula), left)
    for part in sympy.preorder_traversal(formula):
        if isinstance(part, sympy.Add):
            left["sums of like terms"] += _repeats(_like(term) for term in sympy.Add.make_args(part))
        elif isinstance(part, sympy.Mul):
            left += _of_product(_factors(part))
        elif isinstance(part, sympy.Pow):
            left += _of_power(*part.args)
        elif isinstance(part, sympy.Function) and not part.free_symbols:
            left["functions of numbers"] += 1
    return left


def _of_product(factors: list[Formula]) -> Counter[str]:
    quotients = [abs(value) for value in map(_rational, factors) if value is not None]
    over, under = [q.p for q in quotients if q.p != 1], [q.q for q in quotients if q.q != 1]
    others = [factor for factor in factors if _rational(factor) is None and not _is_inverse(factor)]
    sums = [factor for factor in others if isinstance(factor.as_base_exp()[0], sympy.Add)]
    return Counter(
        {
            "products of numbers": int(len(over) > 1 or len(under) > 1 or math.gcd(math.prod(over), math.prod(under)) > 1),
            "products of powers": _repeats("root" if _is_root(factor) else factor.as_base_exp()[0] for factor in others),
            "products of sums": int(len(sums) > 1),
        }
    )


def _of_power(base: Formula, exponent: Formula) -> Counter[str]:
    if _is_root(sympy.Pow(base, exponent, evaluate=False)):
        powerless = base.is_Integer and base > 0 and all(times < exponent.q for times in sympy.factorint(base).values())
        return Counter() if powerless and exponent.p == 1 else Counter(["roots"])
    inverse, whole = bool(exponent.could_extract_minus_sign()), bool(exponent.is_Integer)
    kinds = {
        "powers of numbers": whole and base.is_Number and not (base.is_Integer and exponent == -1),
        "products of sums": whole and not inverse and isinstance(base, sympy.Add),
        "powers of powers": whole and exponent != -1 and isinstance(base, sympy.Pow | sympy.Mul),
        "sums below": inverse and isinstance(base, sympy.Add),
        "roots below": inverse and any(map(_is_root, (base, *base.args))),
    }
    return Counter(kind for kind, found in kinds.items() if found)


def _factors(product: Formula) -> list[Formula]:
    """The factors of nested products."""
    if not isinstance(product, sympy.Mul):
        return [product]
    return [factor for part in product.args for factor in _factors(part)]


def _like(term: Formula) -> tuple[str, ...]:
    """What is the same in like terms: all factors that are no rational numbers."""
    return tuple(sorted(str(factor) for factor in _factors(term) if _rational(factor) is None))


def _rational(factor: Formula) -> Formula | None:
    """The value of a number or of the inverse of one."""
    if isinstance(factor, sympy.Pow) and factor.base.is_Rational and factor.base != 0 and factor.exp == -1:
        return 1 / factor.base
    return sympy.nsimplify(factor, rational=True) if factor.is_Number and factor.is_finite else None


def _is_root(formula: Formula) -> bool:
    return isinstance(formula, sympy.Pow) and formula.base.is_Number and formula.exp.is_Rational and not formula.exp.is_Integer


def _is_inverse(factor: Formula) -> bool:
    return isinstance(factor, sympy.Pow) and bool(factor.exp.could_extract_minus_sign())


def _repeats(keys: Iterable[Any]) -> int:
    return sum(count - 1 for count in Counter(keys).values())
