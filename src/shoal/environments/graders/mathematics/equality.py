r"""Compares an answer with the gold answer.

Kinds of brackets must agree, and items are compared one by one: `(1,2)` is not `[1,2]`, `\{1,2\}` is not `(1,2)`. The
order of a bare list does not matter, nor does it in `{…}`, where repetitions do not count either. Numbers are exact:
0.333 is not 1/3 and 3.14 is not π; only a gold answer that is a decimal of four or more places is rounded. 50% is
equal to 0.5 and to 50; a number without the sign counts as a percentage only above 1.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from shoal.environments.graders.mathematics import formula
from shoal.environments.graders.mathematics.formula import Tree, close, tree, variables
from shoal.environments.graders.mathematics.reading import CLOCK, HIGH, LOW, RELATIONS, Form, folded, units_agree

Symbolic = Callable[[str, str], bool]  # compares two formulas that this package cannot read

# Most answers are numerals. They are compared without parsing.
_NUMERAL = re.compile(r"(-?)(?:(\d+)(?:/(\d+))?|(\d*\.\d+)|\\frac\{(\d+)\}\{(\d+)\})")
_ROUNDED_FROM = 4  # decimal places from which on a gold answer counts as rounded
_MOST_ITEMS = 200
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # spaces without meaning: all but those between digits
_SIDE_BY_SIDE = re.compile(r"\d \d")
_PURE_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_LETTERS = re.compile(r"[a-zA-Z]{2,3}")
_PLAIN_LETTERS = re.compile(r"[a-zA-Z ]{2,}")
_QUOTED = re.compile(r"\\text ?\{[^{}]*[A-Za-z]{2}[^{}]*\}")
_SHORT_WORDS = frozenset(
    "no on so to do go in is it at an as be by he if me my of or up us we am yes one two six ten net not now won own "  # noqa: SIM905
    "odd all any few low top red sun saw was tea eat ate act cat art rat tar arm ram dog god pot end and are can for "
    "day may nor the too who how".split()
)
_LABEL = re.compile(
    r"\\?[a-zA-Z]\w*(?:_\{?[\w,]+\}?)?'*|m?\\[a-zA-Z]+(?:\{\w+\}|[A-Z]+)?|[a-zA-Z]\w?'*(?:_\w)?\([^()=]*\)"
    r"|\\frac\{d[a-z]?\}\{d[a-z]\}"
)  # A left side that names a value: x, a_1, \angle ABC, f(x), a derivative
_NOTHING = ("num", Fraction(0))
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_DIRECTED = ("\\to", "\\in", "\\equiv")
_UNORDERED = ({""}, {"{}"}, {"", "{}"}, {"or"}, {"and"})


@dataclass(frozen=True)
class Comparison:
    """Compares a gold answer with a given one; `symbolic` decides about formulas outside the grammar."""

    symbolic: Symbolic

    def same(self, gold: Form, given: Form) -> bool:
        if gold == given:
            return gold.kind != "value" or bool(gold.text)
        if gold.kind == "\\approx":
            return any(self.same(item, given) for item in gold.items)
        if given.kind == "\\approx":  # if both sides are numbers, they must differ by at most one percent
            a, b = map(_number, given.items)
            near = a is None or b is None or abs(complex(a) - complex(b)) <= 0.01 * abs(complex(a))
            return near and any(self.same(gold, item) for item in given.items)
        kinds = {gold.kind, given.kind}
        if kinds & RELATIONS:
            first, *steps = given.items[1:] if given.kind == "=" else [given]
            if _number(first) is not None:  # a chain may contradict itself: x = 1 = 2 = 3
                steps = [step for step in steps if _number(step) is not None and units_agree(step.unit, first.unit)]
                if not all(self.same(step, first) for step in steps):
                    return False
            return self._related(gold, given)
        if kinds == {"words"}:
            return gold.text == given.text
        if kinds == {"words", "value"}:  # only if the value is a word: \text{1 2} must not equal 1/2, 1.2 and 1-2
            words, other = (gold, given) if gold.kind == "words" else (given, gold)
            return bool(_PURE_WORDS.fullmatch(other.text)) and words.text == folded(other.text)
        if kinds != {"value"}:
            return self._grouped(gold, given)
        if (gold.unit == ("%",)) != (given.unit == ("%",)):
            return not (gold.unit and given.unit) and _percent(gold, given)
        return units_agree(gold.unit, given.unit) and self._same_formula(gold.text, given.text)

    def _grouped(self, gold: Form, given: Form) -> bool:
        kinds = {gold.kind, given.kind}
        if max(len(gold.items), len(given.items)) > _MOST_ITEMS:
            return False
        if kinds in ({"row"}, {"matrix"}, {"bars"}):
            return self._in_order(gold.items, given.items)
        # a matrix of one column or one row is a vector, which may be written as a tuple
        gold, given = (
            Form("()", tuple(cell for row in form.items for cell in row.items))
            if form.kind == "matrix" and 1 in (len(form.items), len(form.items[0].items)) else form
            for form in (gold, given)
        )  # fmt: skip
        kinds = {gold.kind, given.kind}
        if kinds == {"matrix", "value"}:  # a sum or a product of matrices
            return self.symbolic(gold.text, given.text)
        if "value" in kinds:
            group, value = (gold, given) if given.kind == "value" else (given, gold)
            if group.kind == ":" and len(group.items) == 2 and not _is_time(group):
                ratio, number = _ratio(group), _number(value)
                return ratio is not None and ratio[1] != 0 and number is not None and close(number * ratio[1], 1)
            items = _distinct(group.items) if group.kind == "{}" else list(group.items)
            if group.kind in ("", "{}") and len(items) == 1:
                return self.same(items[0], given) if group is gold else self.same(gold, items[0])
            return False
        if kinds in _UNORDERED:
            # in any order, but "x = 1, y = 2" and "1, 2" are compared in order
            golds, givens = list(gold.items), list(given.items)
            if "{}" in (gold.kind, given.kind) or (len(golds) > 1 and len(_distinct(golds)) == len(golds)):
                golds, givens = _distinct(golds), _distinct(givens)
            if len(golds) != len(givens):
                return False
            named = [{label(item.items[0]) for item in items if item.kind == "="} for items in (golds, givens)]
            if (len(named[0]) > 1 and not named[1]) or (len(named[1]) > 1 and not named[0]):
                return self._in_order(golds, givens)
            for wanted in golds:
                found = next((item for item in givens if self.same(wanted, item)), None)
                if found is None:
                    return False
                givens.remove(found)
            return True
        clocks = CLOCK.fullmatch(gold.text) and CLOCK.fullmatch(given.text)  # 3:30 may be a time or a ratio
        if kinds == {":"} and not (clocks or _is_time(gold)) and (first := _ratio(gold)) and (second := _ratio(given)):
            return len(first) == len(second) and all(map(close, first, second))
        return (len(kinds) == 1 or kinds == {"", "()"}) and self._in_order(gold.items, given.items)

    def _in_order(self, gold: Sequence[Form], given: Sequence[Form]) -> bool:
        return len(gold) == len(given) and all(map(self.same, gold, given))

    def _related(self, gold: Form, given: Form) -> bool:
        both = gold.kind in RELATIONS and given.kind in RELATIONS
        if gold.kind in _DIRECTED or given.kind in _DIRECTED:
            return both and gold.kind == given.kind and self._in_order(gold.items, given.items)
        ranges = as_range(gold), as_range(given)
        if both:
            names = [label(form.items[0]) or label(form.items[1]) for form in (gold, given)]
            equal = gold.kind == "=" == given.kind
            stems = [name.partition("_")[0] for name in names]  # x_1 and x_2 are solutions for x
            alike = names[0] == names[1] or (stems[0] == stems[1] and ("_" in names[0]) != ("_" in names[1]))
            if equal and names[0] and alike:
                firsts = [form.items[1] if label(form.items[0]) else form.items[0] for form in (gold, given)]
                if self.same(firsts[0], firsts[1]):
                    return True
            elif not equal and names[0] == names[1] and all(form.kind not in RELATIONS for form in ranges):
                return self._grouped(*ranges)
            elif equal and all(map(self._answers, (gold, given))) and not names[0] and not names[1]:
                return self._in_order(gold.items[:2], given.items[:2])
            return self._proportional(gold, given)
        if ranges != (gold, given):
            return self.same(*ranges)
        if gold.kind == "=" and self._answers(gold):
            return self.same(gold.items[1], given)
        if given.kind != "=" or not self._answers(given):
            return False
        if gold.unit == ("%",) and not given.items[1].unit:  # x = 7 does not mean seven hundredths
            return _percent(gold, given.items[1]) and _number(gold) != _number(given.items[1])
        return self.same(gold, given.items[1])

    def _answers(self, equation: Form) -> bool:
        """Whether the right side is the answer: "x = 3", "f(x) = 3", and "1 + 2 = 3" if it is true."""
        left, right = equation.items[:2]
        name, base = label(left), left.text.partition("'")[0]
        if name.endswith("'") and base in variables(_tree(right) or _NOTHING):  # y'' = y
            return False
        if name or (left.items and all(map(label, left.items))):
            return True
        found, zero = _tree(left), _number(right) == 0
        if found is None:
            unread = left.kind == "words" or (left.kind == "value" and bool(re.search(r"\\[a-z]+|\(", left.text)))
            return (unread and not zero) or left.kind in (":", "words")
        names = variables(found)
        if not names:
            return self.same(left, right)
        sides = variables(_tree(right) or _NOTHING)
        return not (zero or sides or _has_numbers(found) or any("'" in name for name in names))

    def _proportional(self, gold: Form, given: Form) -> bool:
        """`2x - y = -1` is `y = 2x + 1`: the differences of the sides are a constant multiple of each other."""
        sides = [[_tree(item) for item in form.items[:2]] for form in (gold, given)]
        if None in (*sides[0], *sides[1]):
            texts = [f"{form.items[0].text} {form.kind} {form.items[1].text}" for form in (gold, given)]
            return _comparable(*texts) and all(form.items[0].text for form in (gold, given)) and self.symbolic(*texts)
        first, second = (("add", left, ("neg", right)) for left, right in sides)
        names = variables(first)
        if not names or names != variables(second):
            return False
        pairs = [[formula.value_at(side, point) for side in (first, second)] for point in formula.points(names)[:3]]
        if not all(a and b for a, b in pairs):
            return False
        factor = pairs[0][0] / pairs[0][1]
        sign = given.kind if factor.real > 0 else _FLIPPED.get(given.kind, given.kind)
        return gold.kind == sign and all(close(a, factor * b) for a, b in pairs)

    def _same_formula(self, gold: str, given: str) -> bool:
        if gold == given or _SPACE.sub("", gold) == _SPACE.sub("", given):
            return True
        # letters in a row may be a product: abc equals cba, but HHT is not HTH, and "no" is not "on"
        product = gold.islower() and given.islower() and _SHORT_WORDS.isdisjoint((gold, given))
        if not product and _LETTERS.fullmatch(gold) and _LETTERS.fullmatch(given):
            return gold.casefold() == given.casefold() and gold.casefold() in _SHORT_WORDS
        numerals = _numeral(gold), _numeral(given)
        if None not in numerals and (numerals[0] == numerals[1] or "." not in gold):
            return numerals[0] == numerals[1]
        first, second = tree(gold), tree(given)
        if first is None or second is None:
            return _comparable(gold, given) and self.symbolic(gold, given)
        same = formula.same_value(first, second)
        if same is None:  # no value at the points, such as n! between whole numbers; constants such as 0^0 have none
            return bool(variables(first) | variables(second)) and self.symbolic(gold, given)
        return same or _rounds_to(gold, given, second)


@lru_cache(maxsize=16384)
def _numeral(text: str) -> Fraction | None:
    if len(text) < 100 and text.isdecimal():
        return Fraction(int(text))
    found = _NUMERAL.fullmatch(text) if len(text) < 100 else None
    if found is None:
        return None
    top, bottom = found[2] or found[4] or found[5], int(found[3] or found[6] or 1)
    return Fraction(found[1] + top) / bottom if bottom else None


def label(form: Form) -> str:
    """The name on the left side of an equation: "x", "f(x)", "a_1", or words; empty if it is no name."""
    text = form.text.replace(" ", "")
    if text.lstrip("\\") in formula.CALLS:
        return ""
    return text if form.kind == "words" or (form.kind == "value" and _LABEL.fullmatch(text)) else ""


def as_range(form: Form) -> Form:
    """`x > 3` as (3, ∞), `3 \\ge x` as (-∞, 3], `x \\ne 0` as a union, also inside a union; others unchanged."""
    if form.kind == "or":
        return Form("or", tuple(map(as_range, form.items)))
    if form.kind not in (*_FLIPPED, "\\ne"):
        return form
    sign, (left, right) = form.kind, form.items
    if not label(left):
        if not label(right):
            return form
        sign, right = _FLIPPED.get(sign, sign), left
    if sign == "\\ne":
        items = right.items or (right,)
        if any(_number(item) is None for item in items):
            return form
        edges = [LOW, *sorted(items, key=lambda item: _number(item).real), HIGH]
        return Form("or", tuple(Form("()", pair) for pair in pairwise(edges)))
    if sign in (">", "\\ge"):
        return Form("()" if sign == ">" else "[)", (right, HIGH))
    return Form("()" if sign == "<" else "(]", (LOW, right))


def _tree(form: Form) -> Tree | None:
    return tree(form.text) if form.kind == "value" else None


def _number(form: Form) -> Any:
    return formula.number(_tree(form))


def _has_numbers(found: Tree) -> bool:
    return found[0] == "num" or any(_has_numbers(part) for part in found[1:] if isinstance(part, tuple))


def _distinct(items: Sequence[Form]) -> list[Form]:
    kept: dict[object, Form] = {}
    for item in items:
        value = _number(item)
        kept.setdefault(item if value is None else (formula.MP.nstr(value, 40), item.unit), item)
    return list(kept.values())


def _is_time(form: Form) -> bool:
    """Whether "3:30" is a time: by what follows it, or because a ratio would be in lowest terms."""
    clock = CLOCK.fullmatch(form.text)
    return clock is not None and (bool(clock[3] or form.unit) or math.gcd(int(clock[1]), int(clock[2])) > 1)


def _ratio(form: Form) -> list[Any] | None:
    """The terms divided by the first one: 3:2 equals 6:4, and 1:2:3 equals 2:4:6."""
    terms = [_number(item) for item in form.items]
    return [term / terms[0] for term in terms] if terms[0] and None not in terms else None


def _percent(gold: Form, given: Form) -> bool:
    marked, bare = (_number(gold), _number(given)) if gold.unit else (_number(given), _number(gold))
    if bare is None or marked is None:
        return False
    return close(marked, 100 * bare) or (abs(bare) > 1 and close(marked, bare))


def _comparable(gold: str, given: str) -> bool:
    """Whether symbolic algebra may decide: it ignores words and primes, and misreads two numbers side by side."""
    both = (gold, given)
    return (
        all(not _PLAIN_LETTERS.fullmatch(text) and any(sign.isalnum() for sign in text) for text in both)
        and gold.count("'") == given.count("'")
        and not any(map(_SIDE_BY_SIDE.search, both))
        and _QUOTED.findall(gold) == _QUOTED.findall(given)
    )


def _rounds_to(gold: str, given: str, answer: Tree) -> bool:
    """Whether the gold answer is a long decimal, and the given answer, more precise, rounds to it."""
    decimal, written = _DECIMAL.fullmatch(gold), _DECIMAL.fullmatch(given)
    if decimal is None or len(decimal[1]) < _ROUNDED_FROM:
        return False
    if (written and len(written[1]) <= len(decimal[1])) or given.lstrip("-").isdigit():
        return False
    value = formula.number(answer)
    if value is None or value.imag != 0:
        return False
    half = formula.MP.mpf(10) ** -len(decimal[1]) * (0.5 + 1e-10)
    return bool(abs(value - formula.MP.mpf(gold)) <= half)
