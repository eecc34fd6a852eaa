"""The hash chain: any change, gap, swap or rollback is found and its row named."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LedgerError
from shoal.ledger import GENESIS, append, head_of, verify
from shoal.protocol import LedgerEntry, LedgerHead


def chain(count: int) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    for number in range(count):
        entries.append(append(entries[-1] if entries else None, "policy", {"version": number}, at_ms=number))
    return entries


def test_the_first_entry_follows_genesis() -> None:
    entry = append(None, "run", {"run": "demo"}, 7)
    assert (entry.index, entry.previous, entry.at_ms) == (0, GENESIS, 7)
    verify([entry], head_of("demo", entry))


def test_the_hash_is_the_published_one() -> None:
    """SHA-256 over a first line and canonical JSON, spelt out here for whoever implements it again."""
    content = (
        'shoal/ledger/v1\n{"at_ms":1700000000000,"body":{"name":"ü","node":"ab","tokens":3},"index":0,'
        f'"kind":"credit","previous":"{GENESIS}"}}'
    )
    entry = append(None, "credit", {"node": "ab", "tokens": 3, "name": "ü"}, 1_700_000_000_000)
    assert entry.hash == hashlib.sha256(content.encode()).hexdigest()
    assert entry.hash == "262d3482fceb0dede87ed68b41e3808b3bc4706be530349889aedc3c368cfe1b"


def test_an_empty_ledger_has_a_head() -> None:
    assert head_of("demo", None) == LedgerHead(run="demo", index=-1, hash=GENESIS)
    verify([], head_of("demo", None))


@given(
    count=st.integers(2, 8),
    data=st.data(),
    change=st.sampled_from(["body", "kind", "at_ms", "previous", "hash", "index"]),
)
def test_every_change_names_its_row(count: int, data: st.DataObject, change: str) -> None:
    entries = chain(count)
    row = data.draw(st.integers(0, count - 1))
    new: dict[str, Any] = {
        "body": {"version": -1},
        "kind": "credit",
        "at_ms": 10**6,
        "previous": "f" * 64,
        "hash": "f" * 64,
        "index": count + 5,
    }
    entries[row] = entries[row].model_copy(update={change: new[change]})
    with pytest.raises(LedgerError, match=rf"row {row}\b"):
        verify(entries)


def test_a_recomputed_forgery_is_found_by_an_old_head() -> None:
    honest = chain(4)
    forged = honest[:2]
    forged.append(append(forged[-1], "credit", {"node": "me"}, 2))
    forged.append(append(forged[-1], "policy", {"version": 3}, 3))
    verify(forged)
    verify(honest, head_of("demo", honest[1]))
    with pytest.raises(LedgerError, match="row 2 is not the one that was signed for"):
        verify(forged, head_of("demo", honest[2]))


def test_a_rollback_is_found() -> None:
    entries = chain(4)
    with pytest.raises(LedgerError, match="ends at row 1, but row 3"):
        verify(entries[:2], head_of("demo", entries[3]))


def test_a_missing_row_and_a_swap_are_found() -> None:
    entries = chain(4)
    with pytest.raises(LedgerError, match="row 1 is missing"):
        verify([entries[0], entries[2]])
    with pytest.raises(LedgerError, match="row 0 is missing"):
        verify(entries[1:])


def test_pages_are_verified_one_after_the_other() -> None:
    entries = chain(6)
    head = head_of("demo", entries[5])
    verify(entries[:3])
    verify(entries[3:], head, after=entries[2])
    with pytest.raises(LedgerError, match="row 3 does not follow row 2"):
        verify(entries[3:], head, after=append(entries[1], "credit", {}, 9))


def test_what_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(LedgerError, match="not a kind"):
        append(None, "gift", {}, 1)
    with pytest.raises(LedgerError, match="row 0"):
        append(None, "credit", {"tokens": float("nan")}, 1)
