"""Tools answer a model's turns. Contributors run them, so a tool only computes and never executes code.

The calculator answers an expression with its value; any other turn is the model's answer. Values are exact fractions.
The length of a text, the digits of a number, the nesting, exponents and all intermediate values are bounded, so no text
takes long.

    factor   := ("+" | "-") factor | (number | "(" sum ")") (("^" | "**") factor)?
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv

MAX_CHARACTERS, MAX_DIGITS, MAX_DEPTH, MAX_EXPONENT, MAX_BITS = 256, 32, 32, 64, 256
DECIMALS = 6
ERROR = "error"
OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {"+": add, "-": sub, "*": mul, "/": truediv}

_TOKEN = re.compile(r"\*\*|[-+*/^()]|[0-9]+(?:\.[0-9]+)?|\.[0-9]+", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?", re.ASCII)
_BLANK = " \t\n\r"
_DIGITS = frozenset("0123456789")
_SIGNS = _DIGITS | frozenset(".+-*/^()=" + _BLANK)


class NoValue(Exception):
    """The text is no expression, or its value is out of bounds."""


def calculator(turns: Sequence[str]) -> str | None:
    """A plain number is an expression in the first turn, and the model's answer in later turns."""
    turn = turns[-1].strip(_BLANK)
    if not _DIGITS & set(turn) or not set(turn) <= _SIGNS or (len(turns) > 1 and is_number(turn)):
        return None
    try:
        return shown(evaluate(turn.removesuffix("=")))
    except NoValue:
        return ERROR


def evaluate(text: str) -> Fraction:
    tokens = _TOKEN.findall(text)
    if len(text) > MAX_CHARACTERS or "".join(tokens) != re.sub(f"[{_BLANK}]", "", text):
        raise NoValue
    parser = _SumParser(tokens)
    value = parser.sum(0)
    if parser.tokens:
        raise NoValue
    return value


def shown(value: Fraction) -> str:
    """A value as text: whole numbers whole, others with up to six decimals, halves to even."""
    scaled = round(value * 10**DECIMALS)  # of a Fraction: exact, halves to even
    whole, rest = divmod(abs(scaled), 10**DECIMALS)
    decimals = f"{rest:0{DECIMALS}d}".rstrip("0")
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


class _SumParser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    def take(self, *wanted: str) -> str:
        return self.tokens.pop() if self.tokens and (not wanted or self.tokens[-1] in wanted) else ""

    def sum(self, depth: int, signs: str = "+-") -> Fraction:
        """A sum; with the other two signs a product."""
        value = self.sum(depth, "*/") if signs == "+-" else self.factor(depth)
        while sign := self.take(*signs):
            right = self.sum(depth, "*/") if signs == "+-" else self.factor(depth)
            if sign == "/" and right == 0:
                raise NoValue
            value = _bounded(OPERATIONS[sign](value, right))
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NoValue
        if sign := self.take("+", "-"):
            return -self.factor(depth + 1) if sign == "-" else self.factor(depth + 1)
        if self.take("("):
            base = self.sum(depth + 1)
            if not self.take(")"):
                raise NoValue
        else:
            token = self.take()
            if not token or token[0] not in "0123456789." or len(token) > MAX_DIGITS:
                raise NoValue
            base = Fraction(token)
        if not self.take("^", "**"):
            return base
        exponent = self.factor(depth + 1)
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT or (base == 0 and exponent < 0):
            raise NoValue
        if _bits(base) * abs(int(exponent)) > 2 * MAX_BITS:  # too large to compute
            raise NoValue
        return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise NoValue
    return value


Tool = Callable[[Sequence[str]], str | None]
"""From all of the model's turns so far to the answer to the last one; None ends the dialogue.

The same on every machine, for any text, in bounded time. Workers and validators compare answers token by token, so a
tool never changes under its name: a better one is a new entry.
"""

TOOLS: Mapping[str, Tool] = {"calculator": calculator}
