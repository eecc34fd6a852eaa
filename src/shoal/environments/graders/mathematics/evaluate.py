"""Whether two trees are the same number, or the same function of their variables: exactly where numbers are rational,
to fifty digits where they are not. Every step is bounded, so that no tree takes long.

    rational, no variables    fractions, exactly                       2^{2007} - 1 is not 2^{2007}
    rational, with variables  exactly, modulo a prime, at drawn points (x+1)^2 = x^2 + 2x + 1
    all else                  60 digits, at several points             \\sqrt{8} = 2\\sqrt{2}; \\pi is not 3.14

A polynomial identity that fails holds at a point modulo the prime with a chance of degree / 2^61; two numbers that
people write as answers and that agree to fifty digits are the same number.
"""

from __future__ import annotations

from fractions import Fraction

from shoal.environments.graders.mathematics.exact import (
    Inexact,
    TooLarge,
    Undefined,
    exact,
    same_rational_function,
    variables,
)
from shoal.environments.graders.mathematics.expression import Tree
from shoal.environments.graders.mathematics.numeric import same_numerically


def same_value(left: Tree, right: Tree) -> bool | None:
    """Whether two trees are equal; None if that cannot be told. Raises `TooLarge`."""
    names = variables(left) | variables(right)
    try:
        if not names:
            return exact(left) == exact(right)
        return same_rational_function(left, right, sorted(names))
    except Inexact:
        return same_numerically(left, right, sorted(names))
    except Undefined:
        return None


def exact_value(tree: Tree) -> Fraction | None:
    """The rational number that a tree is; None if it is none (or is not defined, or too large)."""
    try:
        return Fraction(exact(tree)) if not variables(tree) else None
    except (Inexact, Undefined, TooLarge):
        return None
