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


def pending(node: str, submission: str, tokens: int) -> tuple[str, dict[str, Any]]:
    return "pending", credit(node, submission, tokens)[1]


def void(node: str, submission: str, tokens: int) -> tuple[str, dict[str, Any]]:
    return "void", {**credit(node, submission, tokens)[1], "reason": "sampling.seed"}


def test_pending_credit_matures_or_is_void() -> None:
    accounts = fold(
        entries_of(
            pending("a", "s1", 5),
            pending("a", "s2", 7),
            pending("a", "s3", 11),
            credit("a", "s1", 5),
            void("a", "s2", 7),
            ("pulled", {"node": "a", "units": [2], "submission": "s4", "reason": "sampling.seed"}),
        )
    )
    assert accounts.by_node["a"] == Account(credit=5, pending=11, void=7, accepted=3)
    assert accounts.total_credit == 5


@pytest.mark.parametrize(
    "last",
    [credit("a", "s1", 5), void("a", "s1", 5), pending("a", "s1", 5)],
    ids=["credited twice", "void after all", "pending again"],
)
def test_credit_moves_on_once(last: tuple[str, dict[str, Any]]) -> None:
    for settled in (credit("a", "s1", 5), void("a", "s1", 5)):
        with pytest.raises(LedgerError, match="row 2"):
            fold(entries_of(pending("a", "s1", 5), settled, last))


@pytest.mark.parametrize("other", [credit("b", "s1", 5), credit("a", "s1", 6), void("b", "s1", 5), void("a", "s2", 5)])
def test_what_matures_or_is_void_is_what_was_pending(other: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(LedgerError, match="row 1"):
        fold(entries_of(pending("a", "s1", 5), other))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**6), st.sampled_from(["credit", "void", ""]))))
def test_nothing_is_lost_or_made_on_the_way(work: list[tuple[str, int, str]]) -> None:
    rows = [pending(node, f"s{number}", tokens) for number, (node, tokens, _) in enumerate(work)]
    makers = {"credit": credit, "void": void}
    rows += [
        makers[fate](node, f"s{number}", tokens) for number, (node, tokens, fate) in enumerate(work) if fate in makers
    ]
    accounts = fold(entries_of(*rows))
    for kind, sums in (("credit", "credit"), ("void", "void"), ("", "pending")):
        expected = sum(tokens for _, tokens, fate in work if fate == kind)
        assert sum(getattr(account, sums) for account in accounts.by_node.values()) == expected


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
