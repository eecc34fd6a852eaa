"""Whether a program's output is the expected one. Computed outside of the sandbox, from bytes that came out of it.

Printed text is compared line by line, without regard to the amount of white space within and after a line, or to empty
lines at the beginning and the end. Returned values are compared as JSON: tuples are lists, and true is not 1.

Numbers that are expected with a point or an exponent may differ by 10⁻⁶, or by 10⁻⁹ of their size if that is more; but
one that is whole (5.0) by less than a half, and one that is very small by a hundredth of itself, or half of the last
digit that is expected, if that is more. Numbers without a point may not differ.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

ABSOLUTE, RELATIVE, SHARE = 1e-6, 1e-9, 1e-2
ALL_WHOLE = 2**53
"""Below this a float can be every whole number; above, many are none."""
_NUMBER = re.compile(rb"[+-]?(?:\d{1,64}\.?\d{0,64}|\.\d{1,64})(?:[eE][+-]?\d{1,3})?")


def same_text(expected: bytes, printed: bytes) -> bool:
    """
    >>> same_text(b"1 2\\n0.5\\n", b"1  2 \\n0.50000001")
    True
    >>> same_text(b"3", b"4"), same_text(b"3", b"3.0"), same_text(b"a\\nb", b"a b")
    (False, False, False)
    """
    wanted, got = expected.strip(), printed.strip()
    if wanted == got:
        return True
    if wanted.count(b"\n") != got.count(b"\n"):
        return False
    return all(_same_line(one, other) for one, other in zip(wanted.split(b"\n"), got.split(b"\n"), strict=True))


def _same_line(wanted: bytes, got: bytes) -> bool:
    if wanted == got:
        return True
    words, others = wanted.split(), got.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(wanted: bytes, got: bytes) -> bool:
    if wanted == got:
        return True
    inexact = b"." in wanted or b"e" in wanted.lower()
    if not (inexact and _NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(got)):
        return False
    return near(float(wanted), float(got), wanted.decode())


def near(wanted: float, got: float, spelled: str = "") -> bool:
    """
    >>> near(0.1, 0.1 + 5e-7), near(1234567.89, 1234567.88), near(1e-9, 0.0)
    (True, False, False)
    """
    if wanted == got or not (math.isfinite(wanted) and math.isfinite(got)):
        return wanted == got or (math.isnan(wanted) and math.isnan(got))
    if wanted.is_integer() and abs(wanted) < ALL_WHOLE and abs(wanted - got) >= 0.5:
        return False
    allowed = ABSOLUTE
    if 0 < abs(wanted) < ABSOLUTE / SHARE:
        last_digit = 10.0 ** int(Decimal(spelled or repr(wanted)).as_tuple().exponent)
        allowed = min(ABSOLUTE, max(SHARE * abs(wanted), last_digit / 2))
    return abs(wanted - got) <= max(allowed, RELATIVE * abs(wanted))


@dataclass(frozen=True)
class Long:
    """A whole number with more digits than Python reads: JSON has one spelling of each, so the digits will do."""

    digits: str


def read_value(text: bytes | str) -> Any:
    """A value from JSON; ValueError or RecursionError if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_whole)


def _whole(digits: str) -> int | Long:
    try:
        return int(digits)
    except ValueError:
        return Long(digits)


def written(value: Any) -> str:
    """The JSON of what `read_value` read.

    >>> written(["a", 5])
    '["a", 5]'
    """
    mark = uuid.uuid4().hex  # so that no text in the value is taken for a number
    text = json.dumps(value, default=lambda long: f"{mark}{long.digits}{mark}")
    return text.replace(f'"{mark}', "").replace(f'{mark}"', "")


def same_value(expected: Any, returned: Any) -> bool:
    """
    >>> same_value([1, {"a": 0.3}], [1, {"a": 0.1 + 0.2}])
    True
    >>> same_value(1, True), same_value([1], [1, 1]), same_value("1", 1)
    (False, False, False)
    """
    pairs = [(expected, returned)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            pairs += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, list | dict) or not _same_leaf(one, other):
            return False
    return True


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is float and type(other) in (int, float):
        return _fits(other) and near(one, float(other))
    if type(one) is int and type(other) is float:
        return other == one
    return type(one) is type(other) and bool(one == other)


def _fits(number: Any) -> bool:
    """Whether it can be a float at all: a whole number may be too large."""
    return type(number) is float or abs(number) < 1 << 1000
