"""Trees of any numbers: their value to sixty digits, at several points where they have variables. Bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpmath  # type: ignore[import-untyped]

from shoal.environments.graders.mathematics.exact import Inexact, TooLarge, Undefined, exact
from shoal.environments.graders.mathematics.expression import Tree

_REAL_POINTS = ("0.7310585786300048792", "2.3025850929940456840", "-1.3247179572447460259", "0.1234567891011121314",
                "-0.4812118250596034474", "5.1961524227066318805")  # fmt: skip
_LARGE = 2_000
"""Digits before the point that two large numbers are compared with."""
_ENOUGH = 3
"""Points at which two functions must agree; of the first three one is negative."""
_EXPONENT = 1 << 20
"""Largest exponent of two of a number on the way."""


def same_numerically(left: Tree, right: Tree, names: list[str]) -> bool | None:
    with mpmath.workdps(60):
        if not names:
            return _same_at(left, right, {})
        compared = 0
        for shift in range(len(_REAL_POINTS)):
            point = {
                name: mpmath.mpf(_REAL_POINTS[(index + shift) % len(_REAL_POINTS)]) + index // len(_REAL_POINTS)
                for index, name in enumerate(names)
            }
            same = _same_at(left, right, point)
            if same is False:
                return False
            compared += same is True
            if compared == _ENOUGH:
                return True
        return True if compared >= 2 else None


def _same_at(left: Tree, right: Tree, point: Mapping[str, Any]) -> bool | None:
    """At one point; None where either has no value, or only one beside the real numbers (outside its domain)."""
    try:
        a, b = _numeric(left, point), _numeric(right, point)
        if point and (_beside(a) or _beside(b)) and not (_imaginary(left) or _imaginary(right)):
            return None
        if max(abs(a), abs(b)) < mpmath.mpf(10) ** -40:
            return _same_small(left, right, point)
        same = bool(abs(a - b) <= mpmath.mpf(10) ** -45 * max(abs(a), abs(b)))
        return _same_large(left, right, point) if same and abs(a) > mpmath.mpf(10) ** 20 else same
    except (Undefined, ZeroDivisionError):
        return None


def _same_small(left: Tree, right: Tree, point: Mapping[str, Any]) -> bool:
    """Both nearly zero: rounding, or small numbers? With more digits rounding shrinks, numbers do not."""
    with mpmath.workdps(250):
        a, b = _numeric(left, point), _numeric(right, point)
        scale = max(abs(a), abs(b))
        return bool(scale < mpmath.mpf(10) ** -200 or abs(a - b) <= mpmath.mpf(10) ** -45 * scale)


def _same_large(left: Tree, right: Tree, point: Mapping[str, Any]) -> bool:
    """Both large: with so many digits that a difference of one would be seen."""
    digits = int(mpmath.mag(_numeric(left, point)) * 0.31) + 60
    if digits > _LARGE:
        raise TooLarge
    with mpmath.workdps(digits):
        return bool(abs(_numeric(left, point) - _numeric(right, point)) < mpmath.mpf(10) ** -30)


def _beside(value: Any) -> bool:
    return bool(abs(mpmath.im(value)) > mpmath.mpf(10) ** -30 * abs(value))


def _imaginary(tree: Tree) -> bool:
    if tree[0] == "const":
        return bool(tree[1] == "i")
    return any(_imaginary(part) for part in tree[1:] if isinstance(part, tuple))


def _numeric(tree: Tree, point: Mapping[str, Any]) -> Any:
    kind = tree[0]
    if kind == "num":
        return mpmath.mpf(tree[1].numerator) / tree[1].denominator
    if kind == "var":
        return point[tree[1]]
    if kind == "const":
        return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}[tree[1]] * 1
    if kind in ("fac", "binom"):
        return mpmath.mpf(_whole(tree))
    if kind == "call":
        return _bounded(_called(tree[1], _numeric(tree[2], point)))
    parts = [_numeric(part, point) for part in tree[1:]]
    return _bounded(_combined(kind, parts))


def _whole(tree: Tree) -> int:
    """A factorial or a binomial coefficient. Of numbers that are not rational there is none here."""
    try:
        return exact(tree).numerator
    except Inexact:
        raise Undefined from None


def _combined(kind: str, parts: list[Any]) -> Any:
    if kind == "add":
        return parts[0] + parts[1]
    if kind == "mul":
        return parts[0] * parts[1]
    if kind == "neg":
        return -parts[0]
    if kind == "div":
        return parts[0] / _nonzero(parts[1])
    if kind == "log":
        base = mpmath.log(_nonzero(parts[0]))
        return mpmath.log(_nonzero(parts[1])) / _nonzero(base)
    if kind == "root":
        return _rooted(parts[1], parts[0])
    return _raised(parts[0], parts[1])


def _rooted(value: Any, degree: Any) -> Any:
    """The real root of a negative number, where the degree is odd: `\\sqrt[3]{-8}` is -2."""
    if mpmath.im(value) == 0 and mpmath.re(value) < 0 and mpmath.isint(degree) and int(abs(degree)) % 2 == 1:
        return -_raised(-value, 1 / _nonzero(degree))
    return _raised(value, 1 / _nonzero(degree))


def _raised(base: Any, exponent: Any) -> Any:
    if base == 0:
        if mpmath.re(exponent) > 0:
            return base
        raise Undefined
    if abs(exponent) > _EXPONENT or abs(exponent * mpmath.log(abs(base))) > _EXPONENT:
        raise TooLarge
    return mpmath.power(base, exponent)


def _called(name: str, value: Any) -> Any:
    if name == "abs":
        return abs(value)
    if name in ("floor", "ceil"):
        return (mpmath.floor if name == "floor" else mpmath.ceil)(value)
    if name == "ln":
        return mpmath.log(_nonzero(value))
    if abs(value) > 1 << 16:
        raise TooLarge
    function = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(name, name)
    result = getattr(mpmath, function)(value)
    if not mpmath.isfinite(result) or abs(result) > mpmath.mpf(10) ** 40:  # a pole, met to within rounding
        raise Undefined
    return result


def _nonzero(value: Any) -> Any:
    if value == 0:
        raise Undefined
    return value


def _bounded(value: Any) -> Any:
    if not mpmath.isfinite(value):
        raise Undefined
    if value != 0 and abs(mpmath.mag(value)) > 2 * _EXPONENT:
        raise TooLarge
    return value


def numeric_value(tree: Tree) -> Any:
    """The number that a tree without variables is, as an mpmath number to 60 digits; None if there is none."""
    try:
        with mpmath.workdps(60):
            return _numeric(tree, {})
    except (Undefined, TooLarge, ZeroDivisionError):
        return None
