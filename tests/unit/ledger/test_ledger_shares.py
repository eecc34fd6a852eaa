"""Shares of a run follow from a prefix of its ledger: exact, by owner, and never changed by what comes later."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LedgerError, UserError
from shoal.ledger import Account, Share, append, fold, shares_of, subjects
from shoal.protocol import LedgerEntry

OWNER = "0a" * 32
Row = tuple[str, dict[str, Any]]


def entries_of(*rows: Row) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    for kind, body in rows:
        entries.append(append(entries[-1] if entries else None, kind, body, at_ms=len(entries)))
    return entries


def credit(node: str, submission: str, tokens: int, kind: str = "credit") -> Row:
    return kind, {"node": node, "unit": 0, "submission": submission, "tokens": tokens, "credit": tokens}


def batch(step: int) -> Row:
    return "batch", {"step": step, "units": [], "digest": "d"}


RUN = entries_of(
    ("node", {"node": "a"}),
    ("node", {"node": "b"}),
    ("node", {"node": "c"}),
    credit("a", "s1", 30),
    credit("b", "s2", 10),
    batch(0),
    ("vouch", {"node": "a", "owner": OWNER}),
    ("vouch", {"node": "b", "owner": OWNER}),
    credit("c", "s3", 20),
    credit("c", "s4", 7, "pending"),
    batch(1),
    credit("c", "s4", 7),
)


def test_shares_are_those_of_the_moment_when_a_batch_was_written_down() -> None:
    first = shares_of(RUN, step=0)
    assert (first.index, first.total) == (5, 40)
    assert [(share.holder, share.fraction) for share in first.shares] == [("a", (3, 4)), ("b", (1, 4))]
    second = shares_of(RUN, step=1)
    assert (second.index, second.total) == (10, 60)
    assert second.shares == (Share(OWNER, ("a", "b"), 40, 60), Share("c", ("c",), 20, 60))
    assert shares_of(RUN).shares[1] == Share("c", ("c",), 27, 67)


def test_what_comes_later_changes_no_earlier_share() -> None:
    for end in range(6, len(RUN) + 1):
        assert shares_of(RUN[:end], step=0) == shares_of(RUN, step=0)


@pytest.mark.parametrize(("step", "words"), [(2, "the last one is of step 1"), (9, "no batch of step 9")])
def test_a_step_without_a_batch_has_no_shares(step: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        shares_of(RUN, step)


def test_nobody_has_a_share_before_there_is_credit() -> None:
    assert shares_of(RUN[:3]).shares == ()
    with pytest.raises(UserError, match="no step has a batch yet"):
        shares_of(RUN[:3], step=0)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 10**12)), max_size=20), st.sets(st.sampled_from("abc"))
)
def test_shares_add_up_to_one_exactly(work: list[tuple[str, int]], owned: set[str]) -> None:
    vouches: list[Row] = [("vouch", {"node": node, "owner": OWNER}) for node in sorted(owned)]
    found = shares_of(entries_of(*vouches, *(credit(node, f"s{i}", tokens) for i, (node, tokens) in enumerate(work))))
    assert found.total == sum(tokens for _, tokens in work)
    assert sum(share.credit for share in found.shares) == found.total
    if found.total:
        assert sum(Fraction(*share.fraction) for share in found.shares) == 1


def test_an_owner_has_what_its_machines_earned() -> None:
    accounts = fold(RUN)
    assert accounts.by_holder()[OWNER] == Account(credit=40, accepted=2, owner=OWNER)
    assert accounts.holder("a") == OWNER
    assert accounts.holder("c") == "c"


def test_the_first_vouch_stays() -> None:
    again = entries_of(("vouch", {"node": "a", "owner": OWNER}), ("vouch", {"node": "a", "owner": OWNER}))
    assert fold(again).by_node["a"].owner == OWNER
    with pytest.raises(LedgerError, match=r"row 1 \(vouch\).*the first who vouched stays"):
        fold(entries_of(("vouch", {"node": "a", "owner": OWNER}), ("vouch", {"node": "a", "owner": "0b" * 32})))


def test_sanctions_come_and_go() -> None:
    rows: list[Row] = [("sanction", {"node": "a", "state": "suspended", "reason": "lapses", "until_ms": 60_000})]
    assert fold(entries_of(*rows)).by_node["a"] == Account(reason="lapses", suspended_until_ms=60_000)
    rows.append(("sanction", {"node": "a", "state": "banned", "reason": "sampling.seed"}))
    assert fold(entries_of(*rows)).by_node["a"] == Account(banned=True, reason="sampling.seed")
    rows.append(("sanction", {"node": "a", "state": "active", "reason": "an appeal"}))
    assert fold(entries_of(*rows)).by_node["a"] == Account()


def test_batches_come_in_order() -> None:
    with pytest.raises(LedgerError, match="step 2 comes where that of step 1 should be"):
        fold(entries_of(batch(0), batch(2)))


@pytest.mark.parametrize(
    ("row", "about"),
    [
        (credit("a", "s", 1), ("node:a", "unit:0")),
        (("batch", {"step": 0, "units": [3, 1]}), ("unit:3", "unit:1")),
        (("pulled", {"node": "a", "units": [2], "submission": "s"}), ("node:a", "unit:2")),
        (("policy", {"version": 1}), ()),
        (("admin", {"verb": "ban", "node": "a", "target": "a"}), ("node:a",)),
    ],
)
def test_what_an_entry_is_about(row: Row, about: tuple[str, ...]) -> None:
    assert subjects(entries_of(row)[0]) == about
