r"""Parses formulas into trees, and compares two as numbers or as functions of their variables.

    sum      := product (("+" | "-") product)*
    product  := signed (("*" | "/" | nothing) signed)*         nothing: 2x, 3\sqrt{2}, (x+1)(x-1)
    power    := atom ("!" | "^" group | "^\circ")*
    atom     := number | name | \frac | \sqrt | \binom | function | f(sum) | ( sum ) | |sum|

Trees are tuples: ("num", Fraction), ("var", name), ("const", "pi"), ("add", a, b), ("call", "sin", a), ….

Both sides are computed to sixty digits (large numbers to the unit), with variables at several fixed points. Every step
is bounded, so no formula takes long. Two numbers that agree to 45 digits count as equal.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

Tree = tuple[Any, ...]
Point = Mapping[str, Fraction]
MP = mpmath.MPContext()  # its own precision: nobody else's changes
MP.dps = 60

_TOKENS, _DEEPEST, _DIGITS = 250, 40, 1_000  # tokens of a formula, levels of nesting, digits of a number
_EXPONENT, _LARGE = 1 << 20, 1_000  # binary exponents of intermediate values, digits of compared numbers
_FACTORIAL = 2_000  # arguments of factorials and binomials
_POINTS = ((173, 107), (-131, 97), (277, 103), (41, 331), (-53, 110), (563, 108))
"""Values for variables. Fixed, so that every machine decides alike."""

_SCIENTIFIC = r"(?:\d+\.\d*|\.\d+|\d+(?!e[+-]\d(?!\d)))[eE][+-]?\d{1,4}(?![\d.])"
"""1.5e-3, 1e3, 2E-1, 2e-10. But `2e-1` is 2·e - 1 with Euler's number."""
_NUMBER = rf"(?P<num>{_SCIENTIFIC}|\d+(?:\.\d*)?|\.\d+)"
_TOKEN = re.compile(rf"\s*(?:{_NUMBER}|(?P<cmd>\\(?:[a-zA-Z]+|.))|(?P<word>[a-zA-Z]+)|(?P<sym>.))", re.DOTALL)
CALLS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp ln lg log".split())  # noqa: SIM905
_ONE_SIGN = frozenset("h H P Q phi varphi psi zeta theta".split())  # noqa: SIM905  functions, with one sign in brackets
_GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi omega ell "  # noqa: SIM905
    "Gamma Delta Theta Lambda Sigma Phi Psi Omega".split()
)
_ENDINGS = ("arcsin", "arccos", "arctan", "sqrt", "sin", "cos", "tan", "log", "ln", "pi")
"""Names that may follow a variable without a space, as in xsin."""
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_CLOSERS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ATOMS = frozenset(("(", "{", "[", *(f"\\{name}" for name in ("frac", "sqrt", "binom", "pi", "lfloor", "lceil"))))


class Unreadable(Exception):
    """The text is not a formula of this grammar."""


class TooLarge(Exception):
    """A number that would take too long to compute."""


class Undefined(Exception):
    """No value at this point: a division by zero, a logarithm of zero."""


@lru_cache(maxsize=4096)
def tree(text: str) -> Tree | None:
    """The tree of a formula; None if the text is no formula. Cached: a group repeats its answers."""
    try:
        # kind and text of each: "num", "cmd" (a command), "let" (a letter) or "sym"
        found: list[tuple[str, str]] = []
        for match in _TOKEN.finditer(text.rstrip()):
            kind = match.lastgroup or "sym"
            found.extend(_letters(match[kind]) if kind == "word" else ((kind, match[kind]),))
            if len(found) > _TOKENS:
                raise Unreadable("too long")
        parser = _Parser(found)
        result = parser.sum(0)
        return result if parser.here == len(parser.tokens) else None
    except (Unreadable, RecursionError):
        return None


@lru_cache(maxsize=1024)
def _letters(word: str) -> tuple[tuple[str, str], ...]:
    """A run of letters: a function's name, perhaps after a variable, or up to three single variables."""
    name = word if word in CALLS else next((one for one in _ENDINGS if word.endswith(one)), "")
    before = word.removesuffix(name) if name else word
    if name and len(before) <= 1:
        return (*(("let", letter) for letter in before), ("cmd", "\\" + name))
    if len(word) > 3:
        raise Unreadable(word)
    return tuple(("let", letter) for letter in word)


class _Parser:
    """Recursive descent over the tokens, at most `_DEEPEST` levels."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.here = tokens, 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.here + ahead][1] if self.here + ahead < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.here][0] if self.here < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        value = self.peek()
        if not value or (expected and value != expected):
            raise Unreadable(value)
        self.here += 1
        return value

    def met(self, sign: str) -> bool:
        found = self.peek() == sign
        self.here += found
        return found

    def sum(self, depth: int, binding: int = 0) -> Tree:
        """A sum; with binding 1 a product, with binding 2 a power."""
        if depth > _DEEPEST:
            raise Unreadable("too deep")
        if self.peek() in ("+", "-"):
            negative, left = self.take() == "-", self.sum(depth + 1, max(binding, 1))  # -1\frac{1}{4} is -(1 + 1/4)
            left = ("neg", left) if negative else left
        else:
            left = self.atom(depth)
        while True:
            sign = self.peek()
            if sign in ("!", "^"):
                left = self.raised(left, depth)
            elif sign in ("+", "-") and binding < 1:
                self.take()
                right = self.sum(depth, 1)
                left = ("add", left, ("neg", right) if sign == "-" else right)
            elif sign in ("*", "/") and binding < 2:
                self.take()
                left = ("mul" if sign == "*" else "div", left, self.sum(depth, 2))
            elif binding < 2 and self.starts_atom():
                left = self.beside(left, depth)
            else:
                return left

    def beside(self, left: Tree, depth: int) -> Tree:
        """Two factors side by side; a whole number before a fraction of numbers makes a mixed number."""
        whole, fraction = left[0] == "num" and left[1].denominator == 1, self.peek() == "\\frac"
        if self.kind() == "num" and left[0] == "num":
            raise Unreadable("two numbers side by side")
        right = self.sum(depth, 2)
        mixed = whole and fraction and right[0] == "div" and right[1][0] == "num" == right[2][0]
        return ("add" if mixed else "mul", left, right)

    def starts_atom(self) -> bool:
        kind, value = self.kind(), self.peek()
        return kind in ("num", "let") or value in _ATOMS or (kind == "cmd" and value[1:] in CALLS | _GREEK)

    def raised(self, base: Tree, depth: int) -> Tree:
        if self.take() == "!":
            if self.peek() == "!":
                raise Unreadable("3!! is not the factorial of 3!")
            return ("fac", base)
        if self.met("\\circ"):
            return ("mul", base, ("div", ("const", "pi"), ("num", Fraction(180))))
        return ("pow", base, self.exponent(depth))

    def exponent(self, depth: int) -> Tree:
        """The exponent after "^": `2^3^2` is `2^(3^2)`, and a sign needs no brace."""
        if self.met("-"):
            return ("neg", self.group(depth))
        exponent = self.group(depth)
        return ("pow", exponent, self.exponent(depth + 1)) if self.met("^") else exponent

    def group(self, depth: int, one_digit: bool = False) -> Tree:
        r"""One argument: `{…}`, or a single sign. `\frac12` is one half, but `2^10` is 2 to the 10."""
        digits = self.peek()
        if one_digit and digits.isdigit() and len(digits) > 1:
            self.tokens[self.here] = ("num", digits[1:])
            return ("num", Fraction(int(digits[0])))
        return self.bracketed(depth) if digits == "{" else self.atom(depth + 1)

    def bracketed(self, depth: int) -> Tree:
        opening = self.take()
        inner = self.sum(depth + 1)
        self.take(_CLOSERS[opening])
        return inner

    def atom(self, depth: int) -> Tree:
        if depth > _DEEPEST:
            raise Unreadable("too deep")
        kind, value = self.kind(), self.peek()
        if kind == "num":
            return self.number()
        if kind == "let":
            return self.name(self.take(), depth)
        if kind == "cmd":
            return self.command(depth)
        if value in ("(", "{", "["):
            return self.bracketed(depth)
        self.take("|")
        inner = self.sum(depth + 1)
        self.take("|")
        return ("call", "abs", inner)

    def number(self) -> Tree:
        digits = self.take()
        if len(digits) > _DIGITS:
            raise Unreadable("too many digits")
        value = Fraction(digits)
        if "." in digits and self.met("\\overline"):
            self.take("{")
            period = self.take()
            self.take("}")
            if not period.isdigit() or len(period) > _DIGITS:
                raise Unreadable(period)
            value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits.partition(".")[2]))
        return ("num", value)

    def name(self, name: str, depth: int) -> Tree:
        """A variable with primes and subscript, or a call of an unknown function: f(2) is not 2f. With one sign in the
        bracket h, H, P and Q are functions, too."""
        while self.met("'"):  # a derivative, or another point: f' is not f
            name += "'"
        if self.met("_"):
            name += "_" + self.take()
            while name.count("{") > name.count("}"):
                name += self.take()
        called = name[0] in "fgFG" or "'" in name or (name in _ONE_SIGN and self.peek(2) == ")")
        if called and self.peek() == "(":
            return ("var", f"{name}{self.bracketed(depth)}")
        return ("const", name) if name in ("e", "i") else ("var", name)

    def command(self, depth: int) -> Tree:
        name = self.take()[1:]
        if name == "pi":
            return ("const", "pi")
        if name in ("frac", "binom"):
            kind = "div" if name == "frac" else "binom"
            return (kind, self.group(depth, one_digit=True), self.group(depth, one_digit=True))
        if name == "sqrt":
            degree = self.bracketed(depth) if self.peek() == "[" else ("num", Fraction(2))
            return ("root", degree, self.group(depth, one_digit=True))
        if name in ("lfloor", "lceil"):
            self.here -= 1
            return ("call", name[1:], self.bracketed(depth))
        if name in CALLS:
            return self.call(name, depth)
        if name in _GREEK:
            return self.name(name, depth)
        raise Unreadable(name)

    def call(self, name: str, depth: int) -> Tree:
        r"""A function: `\sin x`, `\sin^2 x`, `\log_2 8`, `\sin^{-1} x`. Its argument without brackets is a product."""
        base = self.group(depth) if self.met("_") else None
        power = self.exponent(depth) if self.met("^") else None
        if self.peek() in ("(", "[", "{"):
            argument = self.bracketed(depth)
        elif self.peek() == "|":
            argument = self.atom(depth)
        else:
            argument = self.sum(depth + 1, 2)
            while self.starts_atom() and self.peek() not in ("(", "[", "{") and self.peek()[1:] not in CALLS:
                argument = self.beside(argument, depth + 1)
        if power == ("neg", ("num", Fraction(1))):
            name, power = _INVERSE.get(name, ""), None
        if not name or (base is not None and name not in ("log", "lg")):
            raise Unreadable(name)
        if name in ("log", "lg"):
            value: Tree = ("log", base or ("num", Fraction(10)), argument)
        else:
            value = ("pow", ("const", "e"), argument) if name == "exp" else ("call", name, argument)
        return value if power is None else ("pow", value, power)


def variables(found: Tree) -> frozenset[str]:
    if found[0] == "var":
        return frozenset((found[1],))
    return frozenset().union(*(variables(part) for part in found[1:] if isinstance(part, tuple)))


def number(found: Tree | None) -> Any:
    """The value of a tree without variables; None without one, or if it is too large."""
    with suppress(TooLarge):
        return None if found is None or variables(found) else value_at(found, {})


def points(names: frozenset[str]) -> list[Point]:
    size, order = len(_POINTS), [*enumerate(sorted(names))]
    values = [[Fraction(*_POINTS[(at + shift) % size]) + at // size for at, _ in order] for shift in range(size)]
    return [dict(zip((name for _, name in order), each, strict=True)) for each in values]


def same_value(left: Tree, right: Tree) -> bool | None:
    """Whether two trees are equal; None if that cannot be decided. Raises `TooLarge`."""
    names = variables(left) | variables(right)
    if not names:
        return _same_at(left, right, {})
    agreed = 0
    for point in points(names):
        same = _same_at(left, right, point)
        if same is False:
            return False
        agreed += same is True
        if agreed == 2:  # a positive and a negative one, where both have values
            return True
    return None


def value_at(found: Tree, point: Point) -> Any:
    """The value at a point, or None. Raises `TooLarge`."""
    with suppress(Undefined, ZeroDivisionError):
        return _value(found, point)


def close(a: Any, b: Any) -> bool:
    return a == b or bool(MP.mag(a - b) < max(MP.mag(a), MP.mag(b)) - 150)


def _same_at(left: Tree, right: Tree, point: Point) -> bool | None:
    """At one point; None where one has no value, or leaves the real numbers (outside its domain)."""
    a, b = value_at(left, point), value_at(right, point)
    if a is None or b is None:
        return None
    beside = (isinstance(one, MP.mpc) and one.imag != 0 and MP.mag(one.imag) > MP.mag(one) - 100 for one in (a, b))
    if point and any(beside) and not (_imaginary(left) or _imaginary(right)):
        return None
    size = max(MP.mag(a), MP.mag(b))  # the exponent of two
    if -130 < size < 66 or a == b == 0 or (size > 0 and not close(a, b)):
        return close(a, b)
    digits = 250 if size < 0 else int(size * 0.31) + 60
    if digits > _LARGE:
        raise TooLarge
    with MP.workdps(digits):  # nearly zero, or so large that a difference of one would not be seen
        a, b = _value(left, point), _value(right, point)
        return a == b or bool(MP.mag(a - b) < (-100 if size > 0 else max(size - 150, -660)))


def _imaginary(found: Tree) -> bool:
    return found == ("const", "i") or any(_imaginary(part) for part in found[1:] if isinstance(part, tuple))


def _value(found: Tree, point: Point) -> Any:
    kind = found[0]
    if kind in ("num", "var"):
        exact = found[1] if kind == "num" else point[found[1]]
        return MP.mpf(exact.numerator) / exact.denominator if exact.denominator != 1 else MP.mpf(exact.numerator)
    if kind == "const":
        return {"pi": MP.pi, "e": MP.e, "i": MP.j}[found[1]] * 1
    if kind != "call":
        return _combined(kind, *[_value(part, point) for part in found[1:]])
    name, value = found[1], _value(found[2], point)
    if name in ("ln", "abs"):
        return abs(value) if name == "abs" else MP.log(_nonzero(value))
    if abs(value) > 1 << 16:
        raise TooLarge
    result = getattr(MP, name.replace("arc", "a"))(value)
    if abs(result) > MP.mpf(10) ** 40:  # a pole, met to within rounding
        raise Undefined
    return result


def _combined(kind: str, a: Any, b: Any = MP.mpf(0)) -> Any:
    match kind:
        case "add":
            return a + b
        case "mul":
            return a * b
        case "neg":
            return -a
        case "div":
            return a / _nonzero(b)
        case "pow":
            return _raised(a, b)
        case "log":
            return MP.log(_nonzero(b)) / _nonzero(MP.log(_nonzero(a)))
        case "root":  # the cube root of -8 is -2
            odd = MP.im(b) == 0 and MP.re(b) < 0 and MP.isint(a) and int(abs(a)) % 2 == 1
            return -_raised(-b, 1 / _nonzero(a)) if odd else _raised(b, 1 / _nonzero(a))
    if abs(a) > _FACTORIAL or abs(b) > _FACTORIAL or (MP.dps > 60 and not (MP.isint(a) and MP.isint(b))):
        raise TooLarge  # between whole numbers it takes long to many digits
    if any(MP.isint(value) and value < 0 for value in (a, b)):
        raise Undefined
    if kind == "binom" and MP.isint(a - b) and a < b:
        return MP.mpf(0)
    return MP.factorial(a) / (MP.factorial(b) * MP.factorial(a - b) if kind == "binom" else 1)


def _raised(base: Any, exponent: Any) -> Any:
    if base == 0:
        return base if MP.re(exponent) > 0 else _nonzero(base)
    if abs(exponent) * max(1, abs(MP.mag(base))) > _EXPONENT:
        raise TooLarge
    return MP.power(base, exponent)


def _nonzero(value: Any) -> Any:
    if value == 0:
        raise Undefined
    return value
