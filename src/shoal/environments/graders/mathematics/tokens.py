"""The signs of a formula, one by one."""

from __future__ import annotations

import re
from functools import lru_cache

_TOKENS = 250
"""Signs of one formula. A sum of many terms is a deep tree: this keeps it from exhausting the stack."""
_SCIENTIFIC = r"(?:\d+\.\d*|\.\d+|\d+(?!e[+-]\d(?!\d)))[eE][+-]?\d{1,4}(?![\d.])"
"""1.5e-3, 1e3, 2E-1, 2e-10. But `2e-1` is 2·e - 1: that is how people write Euler's number in an answer."""
_TOKEN = re.compile(
    rf"\s*(?:(?P<num>{_SCIENTIFIC}|\d+(?:\.\d*)?|\.\d+)"
    r"|(?P<cmd>\\(?:[a-zA-Z]+|.))|(?P<word>[a-zA-Z]+)|(?P<sym>.))",
    re.DOTALL,
)
CALLS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp ln lg log".split()  # noqa: SIM905
)
GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi omega ell "  # noqa: SIM905
    "Gamma Delta Theta Lambda Sigma Phi Psi Omega".split()
)
_WORDS = CALLS | {"sqrt", "pi"}
_ENDINGS = ("arcsin", "arccos", "arctan", "sqrt", "sin", "cos", "tan", "log", "ln", "pi")
"""Names that a variable may stand before without a space: xsin, apart from those that begin another way."""
_LONGEST_WORD = 3
"""Letters in a row that are a product of variables; more are a word."""


class Unreadable(Exception):
    """The text is not a formula of this grammar."""


def tokens(text: str) -> list[tuple[str, str]]:
    """Kind and text of each: "num", "cmd" (a command), "let" (a letter) or "sym". `Unreadable` if too many."""
    found: list[tuple[str, str]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        if len(found) > _TOKENS:
            raise Unreadable("too long")
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(text)
        position = match.end()
        kind = match.lastgroup or "sym"
        value = match[kind]
        if kind == "word":
            found.extend(_letters(value))
        else:
            found.append((kind, value))
    return found


@lru_cache(maxsize=1024)
def _letters(word: str) -> tuple[tuple[str, str], ...]:
    """A run of letters: a function's name, or single variables."""
    if word in _WORDS:
        return (("cmd", "\\" + word),)
    for name in _ENDINGS:
        if word.endswith(name) and len(word) - len(name) <= 1:
            return (*(("let", letter) for letter in word[: -len(name)]), ("cmd", "\\" + name))
    if len(word) > _LONGEST_WORD:
        raise Unreadable(word)
    return tuple(("let", letter) for letter in word)
