r"""Whether an answer is the gold answer.

Brackets are compared as they are written and their items one by one, so that what is close and wrong stays wrong:
`(1,2)` is not `[1,2]`, `\{1,2\}` is not `(1,2)`. A bare list is in no order, `{…}` also in no multiplicity.

Numbers are exact: 0.333 is not 1/3 and 3.14 is not π. Only a gold answer that is a decimal of four or more places is
taken as rounded, and then an exact or longer answer that rounds to it is right.

A percent sign is a unit that also has a value: 50% is 0.5, and is 50 too; a number without the sign is read as a
percentage only above 1 (0.5 is not 0.5%).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shoal.environments.graders.mathematics.evaluate import exact_value, same_value
from shoal.environments.graders.mathematics.exact import TooLarge, variables
from shoal.environments.graders.mathematics.expression import Tree
from shoal.environments.graders.mathematics.forms import Group, Matrix, Reading, Relation, Value, Words
from shoal.environments.graders.mathematics.numeric import numeric_value
from shoal.environments.graders.mathematics.relations import (
    FLIPPED,
    as_range,
    difference,
    exact_of,
    is_label,
    label,
    label_of,
    multiple,
    names,
    tree_of,
    tree_of_text,
    written,
)
from shoal.environments.graders.mathematics.units import Unit, units_agree
from shoal.environments.graders.mathematics.values import folded

Symbolic = Callable[[str, str], bool]
"""Decides over two formulas that this package cannot read."""

_ROUNDED_FROM = 4
"""Decimal places from which on a gold answer counts as rounded."""
_MOST_ITEMS = 200
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_SPACE = re.compile(r"(?<!\d) | (?!\d)")
"""Spaces that part nothing: between two digits they do."""
_SIDE_BY_SIDE = re.compile(r"\d \d")
_DIRECTED = ("\\to", "\\in", "\\equiv")
_PURE_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_NAME = re.compile(r"[a-zA-Z]{2,3}")
_QUOTED = re.compile(r"\\text ?\{[^{}]*[A-Za-z]{2}[^{}]*\}")
_SHORT_WORDS = frozenset(
    "no on so to do go in is it at an as be by he if me my of or up us we am yes one two six ten net not now won own "  # noqa: SIM905
    "odd all any few low top red sun saw was tea eat ate act cat art rat tar arm ram dog god pot end and are can for "
    "day may nor the too who how".split()
)
_PLAIN_LETTERS = re.compile(r"[a-zA-Z ]{2,}")


@dataclass(frozen=True)
class Comparison:
    """One gold answer against one given; `symbolic` is asked where a formula is not of the grammar."""

    symbolic: Symbolic

    def same(self, gold: Reading, given: Reading) -> bool:
        if gold == given:
            return not isinstance(gold, Value) or bool(gold.text)
        if isinstance(given, Relation) and given.between and self._contradicts(given):
            return False
        if isinstance(gold, Relation) or isinstance(given, Relation):
            return self._related(gold, given)
        if isinstance(gold, Words) or isinstance(given, Words):
            return self._worded(gold, given)
        if isinstance(gold, Group) or isinstance(given, Group):
            return self._grouped(gold, given)
        if isinstance(gold, Matrix) or isinstance(given, Matrix):
            return self._arrayed(gold, given)
        return self._valued(gold, given)

    # words

    def _worded(self, gold: Reading, given: Reading) -> bool:
        if isinstance(gold, Words) and isinstance(given, Words):
            return gold.folded == given.folded
        words, other = (gold, given) if isinstance(gold, Words) else (given, gold)
        # Against a formula only if that is a word too: `\text{1 2}` must not be 1/2, 1.2 and 1-2 at once.
        return (
            isinstance(words, Words)
            and isinstance(other, Value)
            and bool(_PURE_WORDS.fullmatch(other.text))
            and words.folded == folded(other.text)
        )

    # matrices

    def _arrayed(self, gold: Reading, given: Reading) -> bool:
        if isinstance(gold, Matrix) and isinstance(given, Matrix):
            if gold.bars != given.bars or [len(row) for row in gold.rows] != [len(row) for row in given.rows]:
                return False
            return self._in_order(_cells(gold), _cells(given))
        return isinstance(gold, Value) and isinstance(given, Value) and self.symbolic(gold.text, given.text)

    # several values

    def _grouped(self, gold: Reading, given: Reading) -> bool:
        gold, given = _column(gold), _column(given)
        if not isinstance(gold, Group) or not isinstance(given, Group):
            return self._group_and_value(gold, given)
        kinds = {gold.brackets, given.brackets}
        if max(len(gold.items), len(given.items)) > _MOST_ITEMS:
            return False
        if kinds == {"time"}:
            return _same_time(gold, given)
        if kinds in ({""}, {"{}"}, {"", "{}"}, {"or"}, {"and"}):
            return self._matched(gold, given)
        if len(kinds) == 1 or kinds == {"", "()"}:
            return self._ratio(gold, given) if kinds == {":"} else self._in_order(gold.items, given.items)
        return False

    def _group_and_value(self, gold: Reading, given: Reading) -> bool:
        r"""One item in braces or a list of one is that item. A ratio may be written as a fraction."""
        group, value = (gold, given) if isinstance(gold, Group) else (given, gold)
        if not isinstance(group, Group) or not isinstance(value, Value):
            return False
        if group.brackets == ":" and len(group.items) == 2:
            quotient = _quotient(group)
            return quotient is not None and exact_of(value) == quotient
        items = self._distinct(list(group.items)) if group.brackets == "{}" else list(group.items)
        if group.brackets in ("", "{}") and len(items) == 1:
            item = items[0]
            return self.same(item, given) if group is gold else self.same(gold, item)
        return False

    def _ratio(self, gold: Group, given: Group) -> bool:
        """3:2 is 6:4, and 1:2:3 is 2:4:6: each term is the same multiple of the other side's."""
        golds, givens = [exact_of(item) for item in gold.items], [exact_of(item) for item in given.items]
        if len(golds) == len(givens) and golds[0] and givens[0] and None not in (*golds, *givens):
            return [term * givens[0] for term in golds if term is not None] == [
                term * golds[0] for term in givens if term is not None
            ]
        return self._in_order(gold.items, given.items)

    def _in_order(self, gold: Sequence[Reading], given: Sequence[Reading]) -> bool:
        return len(gold) == len(given) and all(map(self.same, gold, given))

    def _matched(self, gold: Group, given: Group) -> bool:
        """In any order. Names make an order: "x = 1, y = 2" against "1, 2" is compared one by one."""
        golds, givens = list(gold.items), list(given.items)
        if "{}" in (gold.brackets, given.brackets):
            golds, givens = self._distinct(golds), self._distinct(givens)
        if len(golds) != len(givens):
            return False
        if len(names(golds)) > 1 and not names(givens):
            return self._in_order(golds, givens)
        for wanted in golds:
            found = next((item for item in givens if self.same(wanted, item)), None)
            if found is None:
                return False
            givens.remove(found)
        return True

    def _distinct(self, items: list[Reading]) -> list[Reading]:
        """Each once; 1 and 1.0 are the same."""
        kept: dict[object, Reading] = {}
        for item in items:
            exact = exact_of(item)
            known = isinstance(item, Value) and exact is not None and (exact, item.unit, item.percent)
            kept.setdefault(known or item, item)
        return list(kept.values())

    # equations and inequalities

    def _contradicts(self, given: Relation) -> bool:
        """Whether a chain is false by its own numbers: x = 1 = 2 = 3. A formula on the way is a step, no number."""
        if not _is_number(given.right):
            return False
        steps = [step for step in given.between if _is_number(step) and units_agree(_unit(step), _unit(given.right))]
        return not all(self.same(step, given.right) for step in steps)

    def _related(self, gold: Reading, given: Reading) -> bool:
        if any(isinstance(side, Relation) and side.sign in _DIRECTED for side in (gold, given)):
            return (
                isinstance(gold, Relation)
                and isinstance(given, Relation)
                and gold.sign == given.sign
                and self._in_order((gold.left, gold.right), (given.left, given.right))
            )
        if isinstance(gold, Relation) and isinstance(given, Relation):
            return self._two_relations(gold, given)
        gold_range, given_range = as_range(gold), as_range(given)
        if isinstance(gold_range, Group) and isinstance(given_range, Group):
            return self._grouped(gold_range, given_range)
        if isinstance(gold, Relation):
            return gold.sign == "=" and is_label(gold.left, gold.right) and self.same(gold.right, given)
        return isinstance(given, Relation) and given.sign == "=" and self._said(given) and self.same(gold, given.right)

    def _said(self, given: Relation) -> bool:
        """Whether the right side is what was answered: "x = 3", "f(x) = 3", and "1 + 2 = 3" if it holds."""
        if is_label(given.left, given.right):
            return True
        left = tree_of(given.left)
        return left is not None and not variables(left) and self.same(given.left, given.right)

    def _two_relations(self, gold: Relation, given: Relation) -> bool:
        if gold.sign == "=" == given.sign and label(gold.left) and label(gold.left) == label(given.left):
            return self.same(gold.right, given.right) or self._proportional(gold, given)
        ranges = as_range(gold), as_range(given)
        if isinstance(ranges[0], Group) and isinstance(ranges[1], Group) and label_of(gold) == label_of(given):
            return self._grouped(ranges[0], ranges[1])
        return self._proportional(gold, given)

    def _proportional(self, gold: Relation, given: Relation) -> bool:
        """`2x - y = -1` is `y = 2x + 1`: the differences of the sides are a constant multiple of each other."""
        first, second = difference(gold), difference(given)
        if first is None or second is None:
            return self.symbolic(written(gold), written(given))
        factor = multiple(first, second)
        if factor is None or factor == 0:
            return False
        try:
            same = same_value(first, ("mul", ("num", factor), second))
        except TooLarge:
            return False
        sign = given.sign if factor > 0 else FLIPPED.get(given.sign, given.sign)
        return bool(same) and gold.sign == sign

    # values

    def _valued(self, gold: Reading, given: Reading) -> bool:
        if not isinstance(gold, Value) or not isinstance(given, Value):
            return False
        if gold.infinite or given.infinite:
            return gold.infinite == given.infinite
        if not gold.text or not given.text or not units_agree(gold.unit, given.unit):
            return False
        if gold.percent != given.percent:
            return self._percent(gold, given)
        return self._same_formula(gold.text, given.text)

    def _percent(self, gold: Value, given: Value) -> bool:
        bare, marked = exact_of(given if gold.percent else gold), exact_of(gold if gold.percent else given)
        if bare is None or marked is None:
            return False
        return marked == 100 * bare or (abs(bare) > 1 and marked == bare)

    def _same_formula(self, gold: str, given: str) -> bool:
        if gold == given or _SPACE.sub("", gold) == _SPACE.sub("", given):
            return True
        if _NAME.fullmatch(gold) and _NAME.fullmatch(given) and not _is_product(gold, given):
            return gold.casefold() == given.casefold() and gold.casefold() in _SHORT_WORDS
        trees = tree_of_text(gold), tree_of_text(given)
        if trees[0] is None or trees[1] is None:
            return _comparable(gold, given) and self.symbolic(gold, given)
        same = same_value(trees[0], trees[1])
        if same is None and not variables(trees[0]) and not variables(trees[1]):
            return False  # 0^0 is no number, whatever algebra makes of it
        if same is None:  # n! and n(n-1)! have no value at points between the whole numbers
            return self.symbolic(gold, given)
        return same or _rounds_to(gold, given, trees[1])


def _cells(matrix: Matrix) -> list[Reading]:
    return [cell for row in matrix.rows for cell in row]


def _column(reading: Reading) -> Reading:
    """A matrix of one column, or of one row, is the vector that others write as a tuple."""
    if isinstance(reading, Matrix) and not reading.bars and (len(reading.rows[0]) == 1 or len(reading.rows) == 1):
        return Group("()", tuple(_cells(reading)))
    return reading


def _same_time(gold: Group, given: Group) -> bool:
    """A time without "am" or "pm" may be either."""
    first, second = _clock(gold), _clock(given)
    if first[1:3] != second[1:3]:
        return False
    half = 24 if bool(first[3]) == bool(second[3]) else 12
    return (first[0] - second[0]) % half == 0


def _clock(group: Group) -> tuple[int, int, int, bool]:
    hours, minutes, seconds = (int(item.text) for item in group.items if isinstance(item, Value))
    first = group.items[0]
    return hours, minutes, seconds, isinstance(first, Value) and bool(first.unit)


def _quotient(group: Group) -> Fraction | None:
    first, second = exact_of(group.items[0]), exact_of(group.items[1])
    return first / second if first is not None and second else None


def _mathematical(text: str) -> bool:
    """Whether a formula may be there at all: words, and signs without any letter or digit, are none."""
    return not _PLAIN_LETTERS.fullmatch(text) and any(sign.isalnum() for sign in text)


def _comparable(gold: str, given: str) -> bool:
    """Whether symbolic algebra may be asked. It leaves out words and primes: those must be the same on both sides. And
    it finds some sense in two numbers side by side, where there is none."""
    return (
        _mathematical(gold)
        and _mathematical(given)
        and gold.count("'") == given.count("'")
        and not _SIDE_BY_SIDE.search(gold)
        and not _SIDE_BY_SIDE.search(given)
        and _QUOTED.findall(gold) == _QUOTED.findall(given)
    )


def _is_product(gold: str, given: str) -> bool:
    """Whether letters in a row may be variables: abc is cba, but HHT is not HTH, and "no" is not "on"."""
    both = {gold, given}
    return all(text.islower() for text in both) and both.isdisjoint(_SHORT_WORDS)


def _is_number(reading: Reading) -> bool:
    found = tree_of(reading)
    return found is not None and not variables(found)


def _unit(reading: Reading) -> Unit:
    return reading.unit if isinstance(reading, Value) else ()


def _rounds_to(gold: str, given: str, answer: Tree) -> bool:
    """Whether the gold answer is a long decimal, and the given answer, more precise, rounds to it."""
    decimal = _DECIMAL.fullmatch(gold)
    if decimal is None or len(decimal[1]) < _ROUNDED_FROM:
        return False
    written = _DECIMAL.fullmatch(given)
    if (written and len(written[1]) <= len(decimal[1])) or given.lstrip("-").isdigit() or variables(answer):
        return False
    exact = exact_value(answer)
    half = Fraction(1, 2 * 10 ** len(decimal[1]))
    if exact is not None:
        return abs(exact - Fraction(gold)) <= half
    value = numeric_value(answer)
    if value is None or value.imag != 0:
        return False
    wanted = Fraction(gold)
    return bool(abs(value.real * wanted.denominator - wanted.numerator) <= wanted.denominator * float(half))
