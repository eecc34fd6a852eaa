"""Whether a text is plain mathematics that a computer algebra system may be given: parsers of such evaluate what they
read, so that anything else in it would be run, and a short text could ask for a number that fills the memory."""

from __future__ import annotations

import ast
import string

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh", "tanh",
    "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "erf",
})  # fmt: skip
NAMES = FUNCTIONS | {"pi", "E", "I"} | set(string.ascii_letters)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
MOST_CHARACTERS, MOST_TERMS = 8_000, 512
MOST_DIGITS, MOST_DIGITS_OF_A_POWER = 100, 24
LARGEST_EXPONENT, LARGEST_EXPONENT_OF_A_LETTER = 64, 256
MOST_POWERS_OF_NUMBERS = 64
DEEPEST = 60
"""Products of polynomials have many terms with long numbers; powers of long numbers, and many of them, take minutes."""


def checked_expression(text: str) -> str:
    """The text itself, if it is made of numbers, one-letter names, `+ - * / **`, brackets and known functions.

    Anything else is a `ValueError`; so is a power of numbers whose exponent is large.
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
