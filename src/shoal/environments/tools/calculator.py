"""The calculator: a turn that is an expression gets its value, a turn that is anything else is the model's answer.

    sum      := product (("+" | "-") product)*
    product  := factor (("*" | "/") factor)*
    factor   := ("+" | "-") factor | power
    power    := atom (("^" | "**") factor)?
    atom     := number | "(" sum ")"

A tokeniser and a recursive descent: nothing that is written here is ever run as code. Values are exact fractions.
Everything is capped, so that no text takes long or gives a long answer: its length, the digits of a number, the depth
of parentheses and signs, exponents, and the size of every value on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 256
MAX_DIGITS = 32
MAX_DEPTH = 32
MAX_EXPONENT = 64
MAX_BITS = 256
DECIMALS = 6

_TOKEN = re.compile(r"\*\*|[-+*/^()]|[0-9]+(?:\.[0-9]+)?|\.[0-9]+", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?", re.ASCII)
_BLANK = " \t\n\r"
_DIGITS = frozenset("0123456789")
_SIGNS = _DIGITS | frozenset(".+-*/^()=" + _BLANK)
ERROR = "error"


class NoValue(Exception):
    """The text is no expression, or its value is out of bounds."""


def calculator(turns: Sequence[str]) -> str | None:
    """What is said to the last turn. A bare number is a question the first time, and an answer ever after.

    So a dialogue is: calculate once or more, then say the result; or say in words what it is at once.
    """
    turn = turns[-1].strip(_BLANK)
    if not _DIGITS & set(turn) or not set(turn) <= _SIGNS:
        return None
    if len(turns) > 1 and is_number(turn):
        return None
    try:
        return shown(evaluate(turn.removesuffix("=")))
    except NoValue:
        return ERROR


def evaluate(text: str) -> Fraction:
    """The exact value of an expression; `NoValue` for whatever has none."""
    parser = _Parser(_tokens(text))
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


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise NoValue(f"more than {MAX_CHARACTERS} characters")
    tokens, at = [], 0
    while at < len(text):
        if text[at] in _BLANK:
            at += 1
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            raise NoValue(f"{text[at]!r} is no part of an expression")
        tokens.append(match.group())
        at = match.end()
    return tokens


@dataclass
class _Parser:
    tokens: list[str]
    at: int = 0

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
        if self.peek() in ("+", "-"):
            return -self.factor(depth + 1) if self.take() == "-" else self.factor(depth + 1)
        return self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        if self.peek() not in ("^", "**"):
            return base
        self.take()
        return _raised(base, self.factor(depth + 1))

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise NoValue("a parenthesis is not closed")
            return value
        if not token or token[0] not in "0123456789.":
            raise NoValue(f"{token!r} where a number should be")
        if len(token) > MAX_DIGITS:
            raise NoValue(f"a number of more than {MAX_DIGITS} digits")
        return Fraction(token)


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
