r"""What relations say: names for values (x = 3), ranges (x > 3), and equations that are multiples of each other."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from shoal.environments.graders.mathematics.evaluate import exact_value
from shoal.environments.graders.mathematics.exact import variables
from shoal.environments.graders.mathematics.expression import Tree, tree
from shoal.environments.graders.mathematics.forms import SHORT, Group, Reading, Relation, Value, Words
from shoal.environments.graders.mathematics.tokens import Unreadable

_NAME = re.compile(r"[a-zA-Z]\w*(?:_\{?\w+\}?)?|m?\\[a-zA-Z]+(?:\{\w+\})?|[a-zA-Z]\w?'? ?\([^()=]*\)")
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def exact_of(reading: Reading) -> Fraction | None:
    found = tree_of(reading)
    return None if found is None else exact_value(found)


def tree_of_text(text: str) -> Tree | None:
    """The formula as a tree; None if it is none. Short ones are remembered: long ones would only fill the memory."""
    return _remembered(text) if len(text) <= SHORT else _parsed(text)


def _parsed(text: str) -> Tree | None:
    try:
        return tree(text)
    except (Unreadable, RecursionError):
        return None


_remembered = lru_cache(maxsize=16384)(_parsed)


def tree_of(reading: Reading) -> Tree | None:
    return tree_of_text(reading.text) if isinstance(reading, Value) and not reading.infinite else None


def label(reading: Reading) -> str:
    """The name that an equation gives a value: "x", "f(x)", "a_1", or words; empty if its left side is more."""
    if isinstance(reading, Value):
        text = reading.text.replace(" ", "")
        return text if _NAME.fullmatch(text) else ""
    return reading.folded if isinstance(reading, Words) else ""


def is_label(left: Reading, right: Reading) -> bool:
    r"""Whether "left = right" answers with its right side: a name, or names that are asked for together (x + y = 5)."""
    if label(left):
        return True
    if isinstance(left, Group):
        return all(label(item) for item in left.items)
    found = tree_of(left)
    if found is None:
        return isinstance(left, Value) and ("\\text" in left.text or "(" in left.text)
    return (
        bool(variables(found))
        and not _has_numbers(found)
        and not isinstance(right, Relation)
        and not (variables(tree_of(right) or ("num", Fraction(0))))
    )


def _has_numbers(found: Tree) -> bool:
    return found[0] == "num" or any(_has_numbers(part) for part in found[1:] if isinstance(part, tuple))


def names(items: list[Reading]) -> set[str]:
    return {label(item.left) for item in items if isinstance(item, Relation)}


def label_of(relation: Relation) -> str:
    return label(relation.left) or label(relation.right)


def as_range(reading: Reading) -> Reading:
    """`x > 3` as (3, ∞), `3 \\ge x` as (-∞, 3], `x \\ne 0` as a union; a union of such; anything else as it is."""
    if isinstance(reading, Group) and reading.brackets == "or":
        return Group("or", tuple(map(as_range, reading.items)))
    if not isinstance(reading, Relation) or reading.sign == "=":
        return reading
    sign, bound = reading.sign, reading.right
    if not label(reading.left):
        if not label(reading.right):
            return reading
        sign, bound = FLIPPED.get(sign, sign), reading.left
    low, high = Value("-\\infty", infinite=-1), Value("\\infty", infinite=1)
    if sign == "\\ne":
        return _all_but(bound, low, high)
    if sign in (">", "\\ge"):
        return Group("()" if sign == ">" else "[)", (bound, high))
    return Group("()" if sign == "<" else "(]", (low, bound))


def _all_but(points: Reading, low: Value, high: Value) -> Reading:
    items = list(points.items) if isinstance(points, Group) else [points]
    valued = [(value, item) for item in items if (value := exact_of(item)) is not None]
    if len(valued) != len(items):
        return points
    edges: list[Reading] = [low, *(item for _value, item in sorted(valued, key=lambda pair: pair[0])), high]
    return Group("or", tuple(Group("()", pair) for pair in pairwise(edges)))


def difference(relation: Relation) -> Tree | None:
    left, right = tree_of(relation.left), tree_of(relation.right)
    return None if left is None or right is None else ("add", left, ("neg", right))


def multiple(first: Tree, second: Tree) -> Fraction | None:
    """What the second must be multiplied with to be the first, if they are multiples: told at one point."""
    names = variables(first)
    if names != variables(second) or not names:
        return None
    for start in (3, 7, 13):
        point = {name: Fraction(start + 4 * index, 5) for index, name in enumerate(sorted(names))}
        a, b = exact_value(_put(first, point)), exact_value(_put(second, point))
        if a is None or b is None:
            return None
        if b != 0 and a != 0:
            return a / b
    return None


def _put(found: Tree, point: dict[str, Fraction]) -> Tree:
    if found[0] == "var":
        return ("num", point[found[1]])
    return tuple(_put(part, point) if isinstance(part, tuple) else part for part in found)


def written(relation: Relation) -> str:
    sides = [side.text if isinstance(side, Value) else "" for side in (relation.left, relation.right)]
    return f"{sides[0]} {relation.sign} {sides[1]}"
