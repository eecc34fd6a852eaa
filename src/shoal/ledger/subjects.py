"""What a ledger entry is about, so that all entries about a unit or a node can be found without reading the chain."""

from __future__ import annotations

from typing import Any

from shoal.protocol import LedgerEntry


def node_subject(node: str) -> str:
    return f"node:{node}"


def unit_subject(unit: int) -> str:
    return f"unit:{unit}"


def subjects(entry: LedgerEntry) -> tuple[str, ...]:
    """Each once, in a fixed order. What a body should hold and does not is left out: it is the chain's business.

    >>> from shoal.ledger.chain import append
    >>> subjects(append(None, "credit", {"node": "ab", "unit": 3}, at_ms=1))
    ('node:ab', 'unit:3')
    """
    body: dict[str, Any] = entry.body
    found: list[str] = []
    if isinstance(body.get("node"), str) and body["node"]:
        found.append(node_subject(body["node"]))
    numbers = [body.get("unit"), *(body["units"] if isinstance(body.get("units"), list) else ())]
    found += [unit_subject(number) for number in numbers if isinstance(number, int)]
    return tuple(dict.fromkeys(found))
