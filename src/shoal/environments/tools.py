"""Tools: what answers a model's turn. Contributors run them, so a tool reads the text and computes; it runs nothing.

The calculator: a turn that is an expression gets its value, a turn that is anything else is the model's answer.

    sum      := product (("+" | "-") product)*
    product  := factor (("*" | "/") factor)*
    factor   := ("+" | "-") factor | atom (("^" | "**") factor)?
    atom     := number | "(" sum ")"

Values are exact fractions. No text takes long or gives a long answer: its length, the digits of a number, the depth of
parentheses and signs, exponents, and the size of every value on the way are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

MAX_CHARACTERS, MAX_DIGITS, MAX_DEPTH, MAX_EXPONENT, MAX_BITS = 256, 32, 32, 64, 256
DECIMALS = 6
ERROR = "error"

_TOKEN = re.compile(r"\*\*|[-+*/^()]|[0-9]+(?:\.[0-9]+)?|\.[0-9]+", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?", re.ASCII)
_BLANK = " \t\n\r"
_DIGITS = frozenset("0123456789")
_SIGNS = _DIGITS | frozenset(".+-*/^()=" + _BLANK)


class NoValue(Exception):
    """The text is no expression, or its value is out of bounds."""


def calculator(turns: Sequence[str]) -> str | None:
    """What is said to the last turn. A bare number is a question the first time, and an answer ever after.

    So a dialogue is: calculate once or more, then say the result; or say in words what it is at once.
    """
    turn = turns[-1].strip(_BLANK)
    if not _DIGITS & set(turn) or not set(turn) <= _SIGNS or (len(turns) > 1 and is_number(turn)):
        return None
    try:
        return shown(evaluate(turn.removesuffix("=")))
    except NoValue:
        return ERROR


def evaluate(text: str) -> Fraction:
    """The exact value of an expression; `NoValue` for whatever has none."""
    if len(text) > MAX_CHARACTERS:
        raise NoValue(f"more than {MAX_CHARACTERS} characters")
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None and text[at] not in _BLANK:
            raise NoValue(f"{text[at]!r} is no part of an expression")
        tokens += [match.group()] if match else []
        at = match.end() if match else at + 1
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.peek():
        raise NoValue(f"{parser.peek()!r} is left over")
    return value


def shown(value: Fraction) -> str:
    """A value as text: whole numbers whole, others with up to six decimals, halves to even."""
    scaled = round(value * 10**DECIMALS)  # of a Fraction: exact, halves to even
    whole, rest = divmod(abs(scaled), 10**DECIMALS)
    decimals = f"{rest:0{DECIMALS}d}".rstrip("0")
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


def is_number(text: str) -> bool:
    """Whether a text is digits, with at most one sign before and one point among them, as `shown` writes them."""
    return _NUMBER.fullmatch(text) is not None


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = _bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            operator, right = self.take(), self.factor(depth)
            if operator == "/" and right == 0:
                raise NoValue("division by zero")
            value = _bounded(value * right if operator == "*" else value / right)
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NoValue(f"nested deeper than {MAX_DEPTH}")
        token = self.take()
        if token in ("+", "-"):
            return -self.factor(depth + 1) if token == "-" else self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise NoValue("a parenthesis is not closed")
        elif not token or token[0] not in "0123456789.":
            raise NoValue(f"{token!r} where a number should be")
        elif len(token) > MAX_DIGITS:
            raise NoValue(f"a number of more than {MAX_DIGITS} digits")
        else:
            value = Fraction(token)
        if self.peek() in ("^", "**"):
            self.take()
            return _raised(value, self.factor(depth + 1))
        return value


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    """A power that is known to be small before it is computed."""
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise NoValue(f"exponents are whole and at most {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise NoValue("division by zero")
    if _bits(base) * abs(int(exponent)) > 2 * MAX_BITS:
        raise NoValue("too large")
    return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise NoValue("too large")
    return value


Tool = Callable[[Sequence[str]], str | None]
"""All of the model's turns so far, as texts, to what is said to the last one; None if that was the last one.

The same on every machine, for any text, in bounded time. A tool never changes under its name, for workers and
validators compare its answers token by token: a better one is another entry.
"""

TOOLS: Mapping[str, Tool] = {"calculator": calculator}
