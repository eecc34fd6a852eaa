r"""The forms that an answer can have.

Value     42 · \frac{1}{2} · x^2+1 · 5 cm · 50%         text, its unit, whether a percent sign was there
Group     (1,2) · [1,2) · {1,2} · 1, 2 · 3:2            its brackets, its items
Matrix    \begin{pmatrix}1&2\\3&4\end{pmatrix}
Relation  x = 3 · y = 2x + 1 · x > 3                    sign and both sides
Words     \text{Tuesday}                                folded to letters and digits
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.environments.graders.mathematics.units import Unit

SHORT = 200
"""Characters up to which what was read is remembered: a group gives the same answers again."""


@dataclass(frozen=True)
class Value:
    """A formula. `infinite` is its sign if it is infinity, 0 otherwise."""

    text: str
    unit: Unit = ()
    percent: bool = False
    infinite: int = 0


@dataclass(frozen=True)
class Group:
    """Several items. `brackets` says which: "()", "[]", "[)", "(]", "{}", ":", "or", or nothing for a bare list."""

    brackets: str
    items: tuple[Reading, ...]


@dataclass(frozen=True)
class Matrix:
    """Its rows; `bars` if it stands between bars: a determinant is no matrix."""

    rows: tuple[tuple[Reading, ...], ...]
    bars: bool = False


@dataclass(frozen=True)
class Relation:
    r"""`left sign right`, the sign being one of = < > \le \ge \ne, or \to \in \equiv between what are no names.
    `between` is what a chain a = b = c says on the way."""

    sign: str
    left: Reading
    right: Reading
    between: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class Words:
    folded: str


Reading = Value | Group | Matrix | Relation | Words
