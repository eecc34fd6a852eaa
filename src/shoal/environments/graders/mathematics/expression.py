r"""A formula as a tree: what a person writes as one answer, in LaTeX or plain, and nothing else.

    sum      := product (("+" | "-") product)*
    product  := signed (("*" | "/" | nothing) signed)*         nothing: 2x, 3\sqrt{2}, (x+1)(x-1)
    power    := atom ("!" | "^" group | "^\circ")*
    atom     := number | name | \frac | \sqrt | \binom | function | ( sum ) | |sum|

Trees are tuples: ("num", Fraction), ("var", name), ("const", "pi"), ("add", a, b), ("mul", a, b), ("div", a, b),
("pow", a, b), ("neg", a), ("fac", a), ("call", name, a), ("log", base, a), ("root", n, a), ("binom", a, b).

>>> tree("2\\frac{1}{2}") == ("add", ("num", Fraction(2)), ("div", ("num", Fraction(1)), ("num", Fraction(2))))
True
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from shoal.environments.graders.mathematics.tokens import CALLS, GREEK, Unreadable, tokens

Tree = tuple[Any, ...]

DEEPEST = 40
"""Levels of nesting that are read: far above what people write, far below what exhausts the stack."""
_DIGITS = 1_000
"""Digits of one number."""

_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_CLOSERS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\{": "\\}"}
_ATOM_SYMBOLS = frozenset("({[")
_ATOM_COMMANDS = frozenset(("\\frac", "\\sqrt", "\\binom", "\\pi", "\\lfloor", "\\lceil", "\\overline"))


def tree(text: str) -> Tree:
    """The formula as a tree; `Unreadable` if it is none."""
    parser = _Parser(tokens(text))
    result = parser.sum(0)
    if parser.here < len(parser.tokens):
        raise Unreadable(text)
    return result


class _Parser:
    """Recursive descent over the tokens; every descent is counted against `DEEPEST`."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.here = 0

    def peek(self) -> str:
        return self.tokens[self.here][1] if self.here < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.here][0] if self.here < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        value = self.peek()
        if not value or (expected and value not in expected):
            raise Unreadable(value)
        self.here += 1
        return value

    def sum(self, depth: int) -> Tree:
        if depth > DEEPEST:
            raise Unreadable("too deep")
        result = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = self.take()
            right = self.product(depth)
            result = ("add", result, right if sign == "+" else ("neg", right))
        return result

    def product(self, depth: int) -> Tree:
        result = self.signed(depth)
        while True:
            operator = self.peek()
            if operator in ("*", "/"):
                self.take()
                right = self.signed(depth)
                result = ("mul" if operator == "*" else "div", result, right)
            elif self.starts_atom():
                result = self.beside(result, depth)
            else:
                return result

    def beside(self, left: Tree, depth: int) -> Tree:
        """Two things side by side: a whole number and a fraction of numbers are a mixed number, all else a product."""
        numeral = self.kind() == "num"
        mixed = self.peek() == "\\frac" and left[0] == "num" and left[1].denominator == 1
        if numeral and left[0] == "num":
            raise Unreadable("two numbers side by side")
        right = self.power(depth)
        if mixed and right[0] == "div" and right[1][0] == "num" and right[2][0] == "num":
            return ("add", left, right)
        return ("mul", left, right)

    def starts_atom(self) -> bool:
        kind, value = self.kind(), self.peek()
        if kind in ("num", "let"):
            return True
        if kind == "cmd":
            return value in _ATOM_COMMANDS or value[1:] in CALLS or value[1:] in GREEK
        return value in _ATOM_SYMBOLS

    def signed(self, depth: int) -> Tree:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        value = self.power(depth)
        if value[0] == "num" and self.peek() == "\\frac":
            value = self.beside(value, depth)  # before the sign: -1\frac{1}{4} is -(1 + 1/4)
        return ("neg", value) if negative else value

    def power(self, depth: int) -> Tree:
        base = self.atom(depth)
        while self.peek() in ("!", "^"):
            if self.take() == "!":
                if self.peek() == "!":
                    raise Unreadable("3!! is not the factorial of 3!")
                base = ("fac", base)
            elif self.peek() == "\\circ":
                self.take()
                base = ("mul", base, ("div", ("const", "pi"), ("num", Fraction(180))))
            else:
                base = ("pow", base, self.exponent(depth))
        return base

    def exponent(self, depth: int) -> Tree:
        """What follows "^": `2^3^2` is `2^(3^2)`, and a sign needs no brace."""
        if self.peek() == "-":
            self.take()
            return ("neg", self.group(depth))
        exponent = self.group(depth)
        if self.peek() == "^":
            self.take()
            return ("pow", exponent, self.exponent(depth + 1))
        return exponent

    def group(self, depth: int) -> Tree:
        r"""One argument: `{…}`, or a single sign as in `\frac12`."""
        if self.peek() == "{":
            return self.bracketed(depth)
        if self.kind() == "num" and self._splittable():
            return self._digit()
        return self.atom(depth + 1)

    def _splittable(self) -> bool:
        r"""`\frac12` is one half: LaTeX takes one digit, unless a person clearly meant the number (`2^10`)."""
        before = self.tokens[self.here - 1][1]
        return before in ("\\frac", "\\binom", "\\sqrt") and self.peek().isdigit() and len(self.peek()) > 1

    def _digit(self) -> Tree:
        digits = self.peek()
        self.tokens[self.here] = ("num", digits[1:])
        return ("num", Fraction(int(digits[0])))

    def bracketed(self, depth: int) -> Tree:
        opening = self.take()
        inner = self.sum(depth + 1)
        self.take(_CLOSERS[opening])
        return inner

    def atom(self, depth: int) -> Tree:
        if depth > DEEPEST:
            raise Unreadable("too deep")
        kind, value = self.kind(), self.peek()
        if kind == "num":
            return self.number()
        if kind == "let":
            return self.variable()
        if kind == "cmd":
            return self.command(depth)
        if value in _ATOM_SYMBOLS:
            return self.bracketed(depth)
        if value == "|":
            self.take()
            inner = self.sum(depth + 1)
            self.take("|")
            return ("call", "abs", inner)
        raise Unreadable(value)

    def number(self) -> Tree:
        digits = self.take()
        if len(digits) > _DIGITS:
            raise Unreadable("too many digits")
        value = Fraction(digits)
        if self.peek() == "\\overline" and "." in digits:
            self.take()
            value += self.period(len(digits.partition(".")[2]))
        return ("num", value)

    def period(self, after: int) -> Fraction:
        """The repeating digits of a decimal, `after` digits behind the point."""
        self.take("{")
        digits = self.take()
        self.take("}")
        if not digits.isdigit() or len(digits) > _DIGITS:
            raise Unreadable(digits)
        return Fraction(int(digits), (10 ** len(digits) - 1) * 10**after)

    def variable(self) -> Tree:
        name = self.take()
        while self.peek() == "'":  # a derivative, or another point: f' is not f
            name += self.take()
        if self.peek() == "_":
            return ("var", f"{name}_{self.subscript()}")
        if name in ("e", "i"):
            return ("const", name)
        return ("var", name)

    def subscript(self) -> str:
        self.take("_")
        if self.peek() != "{":
            return self.take()
        self.take("{")
        parts = []
        while self.peek() != "}":
            parts.append(self.take())
        self.take("}")
        return "".join(parts)

    def command(self, depth: int) -> Tree:
        name = self.take()[1:]
        if name == "pi":
            return ("const", "pi")
        if name in ("frac", "binom"):
            first = self.group(depth)
            self.tokens.insert(self.here, ("cmd", "\\frac"))  # so that the second argument is read like the first
            self.here += 1
            return ("div" if name == "frac" else "binom", first, self.group(depth))
        if name == "sqrt":
            return self.root(depth)
        if name in ("lfloor", "lceil", "{"):
            self.here -= 1
            if name == "{":
                raise Unreadable("a set is no formula")
            return ("call", "floor" if name == "lfloor" else "ceil", self.bracketed(depth))
        if name in CALLS:
            return self.call(name, depth)
        if name in GREEK:
            return ("var", f"{name}_{self.subscript()}" if self.peek() == "_" else name)
        raise Unreadable(name)

    def root(self, depth: int) -> Tree:
        degree: Tree = ("num", Fraction(2))
        if self.peek() == "[":
            degree = self.bracketed(depth)
            self.tokens.insert(self.here, ("cmd", "\\sqrt"))
            self.here += 1
        return ("root", degree, self.group(depth))

    def call(self, name: str, depth: int) -> Tree:
        r"""A function: `\sin x`, `\sin^2 x`, `\log_2 8`, `\sin^{-1} x`. Its argument without brackets is a product."""
        base, power = None, None
        if self.peek() == "_":
            self.take()
            base = self.group(depth)
        if self.peek() == "^":
            self.take()
            power = self.exponent(depth)
        argument = self.argument(depth)
        if power == ("neg", ("num", Fraction(1))):
            if name not in _INVERSE:
                raise Unreadable(name)
            name, power = _INVERSE[name], None
        value = self.named(name, base, argument)
        return value if power is None else ("pow", value, power)

    def named(self, name: str, base: Tree | None, argument: Tree) -> Tree:
        if name in ("log", "lg"):
            return ("log", base or ("num", Fraction(10)), argument)
        if base is not None:
            raise Unreadable(name)
        return ("pow", ("const", "e"), argument) if name == "exp" else ("call", name, argument)

    def argument(self, depth: int) -> Tree:
        if self.peek() in ("(", "[", "{"):
            return self.bracketed(depth)
        if self.peek() == "|":
            return self.atom(depth)
        result = self.power(depth + 1)
        while self.starts_atom() and self.peek() not in ("(", "[", "{") and self.peek()[1:] not in CALLS:
            result = self.beside(result, depth + 1)
        return result
