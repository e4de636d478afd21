"""What a formula leaves to be computed. Runs in the worker of symbolic.py, because SymPy takes long to
import."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from unmask.rewards.equality import Formula


def as_final(answer: Formula, reference: Formula) -> bool:
    """Whether an answer leaves no more to be computed than its reference, and is factored if the reference
    is."""
    left, allowed = work_left(answer), work_left(reference)
    return not left - allowed and (left["products of sums"] > 0 or not allowed["products of sums"])


def work_left(formula: Formula) -> Counter[str]:
    """How often a formula has each kind of what could still be computed."""
    left: Counter[str] = Counter()
    if isinstance(formula, sympy.MatrixBase):
        return sum(map(work_left, formula), left)
    for part in sympy.preorder_traversal(formula):
        left["operations on matrices"] += any(
            isinstance(operand, sympy.MatrixBase | sympy.MatrixExpr) for operand in part.args
        )
        if isinstance(part, sympy.Add):
            left["sums of like terms"] += _repeats(map(_like, part.args)) + part.args.count(sympy.S.Zero)
            left["sums of products of sums"] += sum(any(map(_is_sum, _factors(term))) for term in part.args)
        elif isinstance(part, sympy.Mul):
            left += _of_product(_factors(part))
            left["factors of one or zero"] += _is_padded(part.args)
        elif isinstance(part, sympy.core.relational.Relational):
            left += _of_relation(part)
        elif isinstance(part, sympy.Pow):
            left += _of_power(*part.args)
        elif isinstance(part, sympy.Function):
            left["functions of numbers"] += not part.free_symbols
            left["functions of sums"] += any(map(_is_sum, part.args))
    return left


def _of_product(factors: list[Formula]) -> Counter[str]:
    values = [value for value in map(_rational, factors) if value is not None]
    over, under = (
        [abs(value.p) for value in values if abs(value.p) != 1],
        [value.q for value in values if value.q != 1],
    )
    inverses = [factor for factor in factors if _rational(factor) is None and _is_inverse(factor)]
    others = [factor for factor in factors if _rational(factor) is None and not _is_inverse(factor)]
    sums = list(filter(_is_sum, others))
    common = math.gcd(
        math.prod([*over, *map(_divisor, others)]), math.prod([*under, *map(_divisor, inverses)])
    )
    signs = sum(value.p < 0 for value in values)
    return Counter(
        {
            "products of numbers": int(len(over) > 1 or len(under) > 1 or common > 1 or signs > 1),
            "products of powers": _repeats(
                "root" if _is_root(factor) else factor.as_base_exp()[0] for factor in others
            ),
            "what cancels": len(
                {factor.as_base_exp()[0] for factor in others}
                & {factor.as_base_exp()[0] for factor in inverses}
            ),
            "products of sums": int(len(sums) > 1),
        }
    )


def _of_relation(relation: Formula) -> Counter[str]:
    """What a relation of sums has beside one of coprime integers."""
    sides = relation.args if relation.lhs else reversed(relation.args)
    terms = sympy.expand(operator.sub(*sides)).as_ordered_terms()
    numbers = [term.as_coeff_Mul()[0] for term in terms]
    if not all(number.is_Rational for number in numbers):
        return Counter()
    against_zero = relation.is_Equality and 0 in (relation.lhs, relation.rhs)
    return Counter(
        {
            "common divisors of a relation": int(math.gcd(*(number.p for number in numbers)) > 1),
            "fractions in a relation": int(any(number.q > 1 for number in numbers)),
            "first terms below zero": int(against_zero and numbers[0].p < 0),
        }
    )


def _is_padded(factors: Sequence[Formula]) -> bool:
    """Whether a product has a factor 0, or a factor 1 that is no numerator."""
    return 0 in factors or factors.count(sympy.S.One) > sum(map(_is_inverse, factors))


def _of_power(base: Formula, exponent: Formula) -> Counter[str]:
    if _is_root(sympy.Pow(base, exponent, evaluate=False)):
        times = list(sympy.factorint(base).values()) if base.is_Integer and base > 1 else [exponent.q]
        powerless = max(times) < exponent.q and math.gcd(exponent.q, *times) == 1
        return Counter() if powerless and exponent.p == 1 else Counter(["roots"])
    inverse, whole = bool(exponent.could_extract_minus_sign()), bool(exponent.is_Integer)
    kinds = {
        "powers of one or zero": exponent in (0, 1) or base == 1,
        "powers of numbers": whole and base.is_Number and not (base.is_Integer and exponent == -1),
        "products of sums": whole and not inverse and isinstance(base, sympy.Add),
        "powers of powers": whole and exponent != -1 and isinstance(base, sympy.Pow | sympy.Mul),
        "sums below": inverse and isinstance(base, sympy.Add),
        "roots below": inverse and any(map(_is_root, (base, *base.args))),
    }
    return Counter(kind for kind, found in kinds.items() if found)


def _factors(product: Formula) -> list[Formula]:
    """The factors of nested products, and of the inverses of products."""
    if isinstance(product, sympy.Mul):
        return [factor for part in product.args for factor in _factors(part)]
    if isinstance(product, sympy.Pow) and isinstance(product.base, sympy.Mul) and product.exp == -1:
        return [sympy.Pow(factor, -1, evaluate=False) for factor in _factors(product.base)]
    return [product]


def _is_sum(factor: Formula) -> bool:
    """Whether a factor is a sum or a power of one, not below a fraction bar."""
    return isinstance(factor.as_base_exp()[0], sympy.Add) and not _is_inverse(factor)


def _divisor(factor: Formula) -> int:
    """What divides all terms of a sum or of the inverse of one; 1 for other factors."""
    total = factor.as_base_exp()[0]
    values = (
        [filter(None, map(_rational, _factors(term))) for term in total.args]
        if isinstance(total, sympy.Add)
        else [()]
    )
    return math.gcd(*(abs(math.prod(value.p for value in term)) for term in values))


def _like(term: Formula) -> tuple[str, ...]:
    """What is the same in like terms: all factors that are no rational numbers."""
    return tuple(sorted(str(factor) for factor in _factors(term) if _rational(factor) is None))


def _rational(factor: Formula) -> Formula | None:
    """The value of a number or of the inverse of one."""
    if isinstance(factor, sympy.Pow) and factor.base.is_Rational and factor.base != 0 and factor.exp == -1:
        return 1 / factor.base
    return sympy.nsimplify(factor, rational=True) if factor.is_Number and factor.is_finite else None


def _is_root(formula: Formula) -> bool:
    return (
        isinstance(formula, sympy.Pow)
        and formula.base.is_Number
        and formula.exp.is_Rational
        and not formula.exp.is_Integer
    )


def _is_inverse(factor: Formula) -> bool:
    return isinstance(factor, sympy.Pow) and bool(factor.exp.could_extract_minus_sign())


def _repeats(keys: Iterable[Any]) -> int:
    return sum(count - 1 for count in Counter(keys).values())
