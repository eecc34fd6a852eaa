"""Whether a text is plain mathematics that a computer algebra system may be given: parsers of such evaluate what they
read, so that anything else in it would be run, and a short text could ask for a number that fills the memory."""

from __future__ import annotations

import ast
import math
import string
from dataclasses import dataclass

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh", "tanh",
    "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "erf",
})  # fmt: skip
NAMES = FUNCTIONS | {"pi", "E", "I"} | set(string.ascii_letters)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
MOST_CHARACTERS, MOST_CHARACTERS_TO_SIMPLIFY = 8_000, 2_000
MOST_DIGITS, MOST_DIGITS_OF_A_POWER = 100, 24
LARGEST_EXPONENT, LARGEST_EXPONENT_OF_A_LETTER = 64, 256
MOST_POWERS_OF_NUMBERS = 64
DEEPEST = 60
"""Products of polynomials have many terms with long numbers; powers of long numbers, and many of them, take minutes."""
HIGHEST_DEGREE, MOST_TERMS, DEEPEST_CALL, MOST_CALLS, MOST_FACTORS = 32, 512, 4, 16, 3
"""What simplifying an expression may come to: its degree where it multiplies sums out, how many terms that makes, how
many functions are within each other, how many there are, and how many in a product. Each alone can take minutes."""


def checked_expression(text: str) -> str:
    """The text itself, if it is made of numbers, one-letter names, `+ - * / **`, brackets and known functions.

    Anything else is a `ValueError`; so is a power of numbers whose exponent is large.

    >>> checked_expression("x**2/2 + sin(x) + C")
    'x**2/2 + sin(x) + C'
    """
    if len(text) > MOST_CHARACTERS or not text.isascii() or "_" in text:
        raise ValueError("not an expression of numbers and letters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    if sum(_is_power_of_numbers(node) for node in ast.walk(tree)) > MOST_POWERS_OF_NUMBERS:
        raise ValueError("too many powers of numbers")
    _check(tree.body, 0, MOST_DIGITS)
    return text


def _check(node: ast.expr, depth: int, most_digits: int) -> None:
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    terms = 0
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):  # terms of a sum are not nested
        terms += 1
        if terms > MOST_TERMS:
            raise ValueError("too many terms")
        _check(node.right, depth + 1, most_digits)
        node = node.left
    if isinstance(node, ast.Constant):
        _check_number(node.value, most_digits)
    elif isinstance(node, ast.Name):
        if node.id not in NAMES:
            raise ValueError(f"the name {node.id!r} means nothing here")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, OPERATORS):
        _check(node.operand, depth + 1, most_digits)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
        if isinstance(node.op, ast.Pow):
            _check_power(node)
            most_digits = MOST_DIGITS_OF_A_POWER
        _check(node.left, depth + 1, most_digits)
        _check(node.right, depth + 1, most_digits)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        if len(node.args) != 1 or node.keywords:
            raise ValueError("a function has one argument here")
        _check(node.args[0], depth + 1, most_digits)
    else:
        raise ValueError(f"{type(node).__name__} is no part of an expression here")


def _check_number(value: object, most_digits: int) -> None:
    """Whole and decimal numbers that are not long. (`True` is an int to Python, and no number here.)"""
    if type(value) not in (int, float) or len(repr(value)) > most_digits:
        raise ValueError(f"{value!r:.40} is no number here")


def _check_power(node: ast.BinOp) -> None:
    """No towers of numbers: an exponent is small, or it has a letter in it."""
    if any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow) for part in ast.walk(node.right)):
        raise ValueError("a power in an exponent")
    numbers = [part.value for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
    largest = LARGEST_EXPONENT_OF_A_LETTER if isinstance(node.left, ast.Name) else LARGEST_EXPONENT
    if any(isinstance(number, int | float) and abs(number) > largest for number in numbers):
        raise ValueError("the exponent is too large")
    if len(numbers) > 2:  # 64*64*64
        raise ValueError("the exponent is too long")
    towers = sum(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow) for part in ast.walk(node.left))
    if towers > 1:  # ((9**64)**64)**64
        raise ValueError("powers of powers of powers")


def _is_power_of_numbers(node: ast.AST) -> bool:
    is_power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    return is_power and not any(isinstance(part, ast.Name) for part in ast.walk(node.left))  # type: ignore[attr-defined]


# ── what it would be to simplify it ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Extent:
    """How large an expression becomes when it is multiplied out: of x*(x+1)**2 the degree is 3, and there are 3 terms.

    `calls` is how many functions are within each other, and `factors` how many are multiplied with each other.
    """

    degree: int = 0
    terms: int = 1
    calls: int = 0
    factors: int = 0

    def times(self, other: Extent) -> Extent:
        calls, factors = max(self.calls, other.calls), self.factors + other.factors
        product = Extent(self.degree + other.degree, self.terms * other.terms, calls, factors)
        return product.checked() if self.degree and other.degree else product

    def plus(self, other: Extent) -> Extent:
        degree, calls = max(self.degree, other.degree), max(self.calls, other.calls)
        return Extent(degree, self.terms + other.terms if degree else 1, calls, max(self.factors, other.factors))

    def to_the(self, power: int, calls: int) -> Extent:
        if self.terms == 1:
            return Extent(self.degree * power, 1, max(self.calls, calls), self.factors)
        terms = math.comb(self.terms + power - 1, power)
        return Extent(self.degree * power, terms, max(self.calls, calls), self.factors * power).checked()

    def checked(self) -> Extent:
        if self.terms > 1 and (self.degree > HIGHEST_DEGREE or self.terms > MOST_TERMS):
            raise ValueError("too much to multiply out")
        if self.factors > MOST_FACTORS:
            raise ValueError("too many functions multiplied with each other")
        return self


def checked_for_simplifying(text: str) -> str:
    """As `checked_expression`, and small enough for a computer algebra system to simplify: that is no matter of length.

    >>> checked_for_simplifying("(3*x + 2)**5/15 + C")
    '(3*x + 2)**5/15 + C'
    """
    if len(text) > MOST_CHARACTERS_TO_SIMPLIFY:
        raise ValueError("too long to simplify")
    tree = ast.parse(checked_expression(text).strip(), mode="eval")
    if sum(isinstance(node, ast.Call) for node in ast.walk(tree)) > MOST_CALLS:
        raise ValueError("too many functions")
    _extent(tree.body)
    return text


def _extent(node: ast.expr) -> Extent:
    if isinstance(node, ast.UnaryOp):
        return _extent(node.operand)
    if isinstance(node, ast.Call):
        inner = _extent(node.args[0])
        if inner.calls >= DEEPEST_CALL:
            raise ValueError("too many functions within each other")
        return Extent(max(1, inner.degree), 1, inner.calls + 1, 1)
    if not isinstance(node, ast.BinOp):
        return Extent(degree=int(isinstance(node, ast.Name)))
    one, other = _extent(node.left), _extent(node.right)
    if isinstance(node.op, ast.Pow):
        return one.to_the(_power(node.right), other.calls)
    return one.plus(other) if isinstance(node.op, ast.Add | ast.Sub) else one.times(other)


def _power(node: ast.expr) -> int:
    """How often something is multiplied by itself, at most: the product of the exponent's numbers. A root is one more
    function, and its own power."""
    numbers = [abs(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]  # type: ignore[arg-type]
    return max(1, math.ceil(math.prod(numbers)))
