"""Accounts follow from the ledger alone: one credit per verified token, once per submission."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LedgerError
from shoal.ledger import Account, append, credit_for, fold
from shoal.protocol import LedgerEntry


def entries_of(*rows: tuple[str, dict[str, Any]]) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    for kind, body in rows:
        entries.append(append(entries[-1] if entries else None, kind, body, at_ms=0))
    return entries


def credit(node: str, submission: str, tokens: int, amount: int | None = None) -> tuple[str, dict[str, Any]]:
    earned = tokens if amount is None else amount
    return "credit", {"node": node, "submission": submission, "tokens": tokens, "credit": earned}


def test_accounts_of_a_small_run() -> None:
    accounts = fold(
        entries_of(
            ("run", {"run": "demo"}),
            ("node", {"node": "a"}),
            ("node", {"node": "b"}),
            credit("a", "s1", 100),
            ("rejected", {"node": "b", "submission": "s2", "reason": "sampling.seed"}),
            ("sanction", {"node": "b", "state": "banned", "reason": "sampling.seed"}),
            credit("a", "s3", 20),
            ("batch", {"step": 0, "units": [0, 2]}),
        )
    )
    assert accounts.by_node["a"] == Account(credit=120, accepted=2)
    assert accounts.by_node["b"] == Account(rejected=1, banned=True, reason="sampling.seed")
    assert accounts.total_credit == 120


def test_a_submission_is_judged_once() -> None:
    with pytest.raises(LedgerError, match=r"row 1.*judged before"):
        fold(entries_of(credit("a", "s1", 5), credit("a", "s1", 5)))
    with pytest.raises(LedgerError, match=r"row 1.*judged before"):
        fold(entries_of(credit("a", "s1", 5), ("rejected", {"node": "a", "submission": "s1"})))


@pytest.mark.parametrize(("tokens", "amount"), [(5, 6), (5, 0), (-5, -5)])
def test_credit_follows_the_formula(tokens: int, amount: int) -> None:
    with pytest.raises(LedgerError, match=r"row 0 \(credit\)"):
        fold(entries_of(credit("a", "s1", tokens, amount)))


def test_a_row_without_its_fields_is_named() -> None:
    with pytest.raises(LedgerError, match="row 0"):
        fold(entries_of(("credit", {"node": "a"})))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**6))))
def test_the_total_is_the_sum_of_the_tokens(work: list[tuple[str, int]]) -> None:
    rows = [credit(node, f"s{number}", tokens) for number, (node, tokens) in enumerate(work)]
    accounts = fold(entries_of(*rows))
    assert accounts.total_credit == sum(credit_for(tokens) for _, tokens in work)
    for node in "abc":
        expected = sum(tokens for who, tokens in work if who == node)
        assert accounts.by_node.get(node, Account()).credit == expected
