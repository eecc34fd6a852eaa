"""Trees of rational numbers: their value, exactly, and modulo a prime where they have variables. Bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from shoal.environments.graders.mathematics.expression import Tree

_BITS = 1 << 15
"""Bits of an exact number: 2^{30000} is computed, 9^{9^{9}} is not."""
_FACTORIAL = 2_000
_DEGREE = 100_000
_PRIMES = ((1 << 61) - 1, (1 << 89) - 1)
_POINTS = (
    0x1F2E_3D4C_5B6A_7988, 0x0A1B_2C3D_4E5F_6071, 0x1357_9BDF_0246_8ACE, 0x0FED_CBA9_8765_4321, 0x1234_5678_9ABC_DEF0,
)  # fmt: skip
"""Where variables are put. Fixed: the same question has the same answer everywhere."""


class TooLarge(Exception):
    """A number that would take too long to compute."""


class Inexact(Exception):
    """Not a rational number, or not a rational function."""


class Undefined(Exception):
    """No value at this point: a division by zero, a logarithm of zero."""


def variables(tree: Tree) -> frozenset[str]:
    """The names of a tree's variables."""
    if tree[0] == "var":
        return frozenset((tree[1],))
    if tree[0] in ("num", "const"):
        return frozenset()
    return frozenset().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


def exact(tree: Tree) -> Fraction:
    """The rational number that a tree is. Raises `Inexact`, `Undefined` or `TooLarge`."""
    kind = tree[0]
    if kind == "num":
        return tree[1]  # type: ignore[no-any-return]
    if kind in _EXACT:
        value = _EXACT[kind](*[exact(part) for part in tree[1:]])
        if value.numerator.bit_length() > _BITS or value.denominator.bit_length() > _BITS:
            raise TooLarge
        return value
    if kind == "call" and tree[1] in _EXACT_CALLS:
        return Fraction(_EXACT_CALLS[tree[1]](exact(tree[2])))
    raise Inexact


def _quotient(a: Fraction, b: Fraction) -> Fraction:
    if b == 0:
        raise Undefined
    return a / b


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise Inexact
    if base == 0 and exponent <= 0:
        raise Undefined
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base.numerator) != base.denominator and bits * abs(exponent.numerator) > _BITS:
        raise TooLarge
    if abs(base.numerator) == base.denominator:
        return base if exponent.numerator % 2 else Fraction(1)
    return Fraction(base**exponent.numerator)


def _factorial(n: Fraction) -> Fraction:
    if n.denominator != 1 or n < 0:
        raise Undefined
    if n > _FACTORIAL:
        raise TooLarge
    return Fraction(math.factorial(n.numerator))


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        raise Undefined
    if n > _FACTORIAL:
        raise TooLarge
    return Fraction(math.comb(n.numerator, k.numerator))


_EXACT: Mapping[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "div": _quotient,
    "pow": _power,
    "fac": _factorial,
    "binom": _binomial,
}
_EXACT_CALLS: Mapping[str, Callable[[Fraction], Any]] = {"abs": abs, "floor": math.floor, "ceil": math.ceil}


def same_rational_function(left: Tree, right: Tree, names: list[str]) -> bool | None:
    """Whether two trees are the same function; None where they have no value. Each point has a prime of its own."""
    compared = 0
    for shift in range(4):
        prime = _PRIMES[shift % len(_PRIMES)]
        point = {
            name: (_POINTS[(index + shift) % len(_POINTS)] * (index + 2 * shift + 1) + index) % prime
            for index, name in enumerate(names)
        }
        try:
            if modular(left, point, prime) != modular(right, point, prime):
                return False
        except Undefined:
            continue
        compared += 1
        if compared == len(_PRIMES):
            return True
    return None


def modular(tree: Tree, point: Mapping[str, int], prime: int) -> int:
    """The value of a tree at a point, modulo the prime."""
    kind = tree[0]
    if kind == "var":
        return point[tree[1]]
    if kind == "num":
        return _residue(tree[1], prime)
    if kind == "pow":
        return _modular_power(tree, point, prime)
    if kind in ("add", "mul", "div", "neg"):
        parts = [modular(part, point, prime) for part in tree[1:]]
        if kind == "add":
            return (parts[0] + parts[1]) % prime
        if kind == "neg":
            return -parts[0] % prime
        return parts[0] * (parts[1] if kind == "mul" else _inverse(parts[1], prime)) % prime
    if not variables(tree):
        return _residue(exact(tree), prime)
    raise Inexact


def _modular_power(tree: Tree, point: Mapping[str, int], prime: int) -> int:
    if variables(tree[2]):
        raise Inexact
    exponent = exact(tree[2])
    if exponent.denominator != 1:
        raise Inexact
    if abs(exponent) > _DEGREE:  # of that degree, different functions agree at the points: x^(p-1) is 1 everywhere
        raise TooLarge
    base = modular(tree[1], point, prime)
    return pow(base if exponent >= 0 else _inverse(base, prime), abs(exponent.numerator), prime)


def _residue(value: Fraction, prime: int) -> int:
    return value.numerator * _inverse(value.denominator, prime) % prime


def _inverse(value: int, prime: int) -> int:
    if value == 1:
        return 1
    if value % prime == 0:
        raise Undefined
    return pow(value, -1, prime)
