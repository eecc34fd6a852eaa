"""Parts of a score that have a meaning: shoal adds them and decides by them, so nobody else may use their names."""

from __future__ import annotations

RESERVED = {
    "task": "the reward before length and judges count",
    "length": "what the length added",
    "target": "the length that was asked for",
    "limit": "scoring took too much time or memory",
    "shuffled_from": "whose reward it is in the control run",
}
RESERVED_PREFIX = "judge."


def is_reserved(name: str) -> bool:
    """
    >>> is_reserved("task"), is_reserved("judge.taste"), is_reserved("style")
    (True, True, False)
    """
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


def reserved_names() -> str:
    """For messages."""
    return f"{', '.join(RESERVED)} and {RESERVED_PREFIX}*"
