"""Rows that cannot be used: which, why, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

SHOWN = 20
MOST_REASONS = 1000


@dataclass
class Problems:
    """The first rows by number with what is wrong, and how often each reason occurred."""

    first: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, row: int, reason: str) -> None:
        """Remember a row; rows may come in any order, those with the lowest numbers are shown."""
        known = reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else "other reasons"
        self.reasons[known] += 1
        self.first.append((row, reason))
        if len(self.first) > 4 * SHOWN:
            self.first = sorted(self.first)[:SHOWN]

    def add_all(self, others: Problems) -> None:
        self.reasons += others.reasons
        self.first = sorted({*self.first, *others.first})[:SHOWN]

    def lines(self, where: Callable[[int], str]) -> list[str]:
        """One line for each of the first rows, and one for the rest."""
        shown = sorted(self.first)[:SHOWN]
        lines = [f"row {row} ({where(row)}): {reason}" for row, reason in shown]
        return [*lines, *([f"and {self.count - len(shown):,} more"] if self.count > len(shown) else [])]

    def sentence(self, where: Callable[[int], str], most: int = 3) -> str:
        """The first few in one sentence: `row 7 (a.jsonl line 8): prompt is empty; row 9 …; and 12 more`."""
        shown = sorted(self.first)[:most]
        parts = [f"row {row} ({where(row)}): {reason}" for row, reason in shown]
        return "; ".join([*parts, *([f"and {self.count - len(shown):,} more"] if self.count > len(shown) else [])])

    def as_json(self) -> dict[str, object]:
        return {"first": sorted(self.first)[:SHOWN], "reasons": dict(self.reasons)}

    @classmethod
    def from_json(cls, first: Iterable[tuple[int, str]], reasons: dict[str, int]) -> Problems:
        return cls([(int(row), str(reason)) for row, reason in first], Counter(reasons))
