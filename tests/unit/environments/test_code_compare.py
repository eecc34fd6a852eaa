"""What counts as the same output, and what as another one."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.environments.graders.code_tests import same_text, same_value

SAME_TEXT = [
    (b"5", b"5\n"),
    (b"5\n", b"5"),
    (b"1 2 3\n", b"1 2 3 \n\n"),
    (b"1 2 3", b"1  2\t3"),
    (b"a\nb", b"a\r\nb\r\n"),
    (b"\n5\n", b"5"),
    (b"", b"\n"),
    (b"0.5", b"0.50"),
    (b"0.3333333333", b"0.333333"),
    (b"1e-3", b"0.001"),
    (b"1000000000.0", b"1000000000.2"),
    (b"1000000000.1", b"1000000000.6"),
    (b"1234567890123456.0", b"1234567890123456"),
    (b"0.000123", b"0.00012345678"),
    (b"0.000123456789", b"0.000123"),
    (b"0.000000001", b"1.001e-9"),
    (b"0.000012", b"0.0000123"),
    (b"0.0", b"0.0000001"),
    (b"0.000000000000", b"1e-10"),
    (b"0e999", b"0"),
    (b"x 2.50 y", b"x 2.5 y"),
    (b"-0.0", b"0.0"),
    (b"2.0", b"2"),
    ("é ü".encode(), "é ü".encode()),
]
OTHER_TEXT = [
    (b"5", b"6"),
    (b"5", b"5.0"),
    (b"5", b"05"),
    (b"5", b"+5"),
    (b"5", b""),
    (b"", b"5"),
    (b"5", b"5\n5"),
    (b"5", b"5 5"),
    (b"5", b"The answer is 5"),
    (b"YES", b"Yes"),
    (b"a b", b"ab"),
    (b"a\nb", b"a b"),
    (b"a\n\nb", b"a\nb"),
    (b"1 2", b"2 1"),
    (b"3.1416", b"3.14"),
    (b"0.333333", b"0.333336"),
    (b"1234567.89", b"1234567.88"),
    (b"100000000000000000001", b"100000000000000000002"),
    (b"1000000000.0", b"1000000000.5"),
    (b"1234567890123456.0", b"1234567890100000"),
    (b"0.000000001", b"0"),
    (b"1e-9", b"0.0"),
    (b"0.000000001", b"0.000000002"),
    (b"-0.00000123", b"0.00000123"),
    (b"0.5", b"nan"),
    (b"0.5", b"inf"),
    (b"1e999", b"5.0"),
    (b"0.5", b"1/2"),
    (b"5", b"\xff\xfe"),
]


@pytest.mark.parametrize(("expected", "printed"), SAME_TEXT)
def test_text_that_is_the_same(expected: bytes, printed: bytes) -> None:
    assert same_text(expected, printed)


@pytest.mark.parametrize(("expected", "printed"), OTHER_TEXT)
def test_text_that_is_not(expected: bytes, printed: bytes) -> None:
    assert not same_text(expected, printed)


SAME_VALUE: list[tuple[Any, Any]] = [
    (5, 5),
    (5, 5.0),
    (5.0, 5),
    (10**12, 1e12),
    (1e-9, 1.001e-9),
    (1e16, 1.0000000001e16),
    (0.3, 0.1 + 0.2),
    ([1, [2, 3]], [1, [2, 3]]),
    ({"a": [1.0]}, {"a": [1]}),
    (None, None),
    ("é", "é"),
    ([], []),
    (True, True),
    (float("nan"), float("nan")),
    (float("inf"), float("inf")),
    (10**400, 10**400),
]
OTHER_VALUE: list[tuple[Any, Any]] = [
    (5, 6),
    (5, "5"),
    (1, True),
    (True, 1),
    (0, False),
    (0.0, False),
    (0, None),
    ("", None),
    ([], {}),
    ([1], [1, 1]),
    ([1, 2], [2, 1]),
    ([1], 1),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 1, "b": 1}),
    (10**400, 1.0),
    (1.0, 10**400),
    (10**12, 1e12 + 999),
    (3, 3.0000009),
    (3, float("nan")),
    (10**400, float("inf")),
    (1e-9, 0.0),
    (1e-9, 0),
    (1e12, 10**12 + 1),
    (float("inf"), 1.0),
    (1.0, float("nan")),
    (float("inf"), float("-inf")),
    (1.0, 1.001),
    (5, [5]),
]


@pytest.mark.parametrize(("expected", "returned"), SAME_VALUE)
def test_values_that_are_the_same(expected: Any, returned: Any) -> None:
    assert same_value(expected, returned)


@pytest.mark.parametrize(("expected", "returned"), OTHER_VALUE)
def test_values_that_are_not(expected: Any, returned: Any) -> None:
    assert not same_value(expected, returned)


def test_values_of_any_depth_are_compared() -> None:
    deep: Any = 1
    other: Any = 2
    for _ in range(50_000):
        deep, other = [deep], [other]

    assert same_value(deep, deep)
    assert not same_value(deep, other)
