"""Accounts follow from the ledger alone: one credit per verified token, once per submission. Shares follow from a
prefix of it: exact, by owner, and never changed by what comes later."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LedgerError, UserError
from shoal.ledger import Account, Share, append, fold, shares_of, subjects
from shoal.protocol import LedgerEntry

Row = tuple[str, dict[str, Any]]


def entries_of(*rows: Row) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    for kind, body in rows:
        entries.append(append(entries[-1] if entries else None, kind, body, at_ms=0))
    return entries


def credit(node: str, submission: str, tokens: int, amount: int | None = None) -> Row:
    earned = tokens if amount is None else amount
    return "credit", {"node": node, "submission": submission, "tokens": tokens, "credit": earned}


def test_accounts_of_a_small_run() -> None:
    accounts = fold(
        entries_of(
            ("run", {"run": "demo"}), ("node", {"node": "a"}), ("node", {"node": "b"}), credit("a", "s1", 100),
            ("rejected", {"node": "b", "submission": "s2", "reason": "sampling.seed"}),
            ("sanction", {"node": "b", "state": "banned", "reason": "sampling.seed"}), credit("a", "s3", 20),
            ("batch", {"step": 0, "units": [0, 2]}),
        )
    )  # fmt: skip
    assert accounts.by_node["a"] == Account(credit=120, accepted=2)
    assert accounts.by_node["b"] == Account(rejected=1, banned=True, reason="sampling.seed")
    assert accounts.total_credit == 120


def pending(node: str, submission: str, tokens: int) -> Row:
    return "pending", credit(node, submission, tokens)[1]


def void(node: str, submission: str, tokens: int) -> Row:
    return "void", {**credit(node, submission, tokens)[1], "reason": "sampling.seed"}


def test_pending_credit_matures_or_is_void() -> None:
    accounts = fold(
        entries_of(
            pending("a", "s1", 5), pending("a", "s2", 7), pending("a", "s3", 11), credit("a", "s1", 5),
            void("a", "s2", 7), ("pulled", {"node": "a", "units": [2], "submission": "s4", "reason": "sampling.seed"}),
        )
    )  # fmt: skip
    assert accounts.by_node["a"] == Account(credit=5, pending=11, void=7, accepted=3)
    assert accounts.total_credit == 5


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 10**6), st.sampled_from(["at once", "credit", "void", ""]))
    )
)
def test_nothing_is_lost_or_made_on_the_way(work: list[tuple[str, int, str]]) -> None:
    numbered = [(node, f"s{number}", tokens, fate) for number, (node, tokens, fate) in enumerate(work)]
    rows = [credit(*row) if fate == "at once" else pending(*row) for *row, fate in numbered]
    rows += [{"credit": credit, "void": void}[fate](*row) for *row, fate in numbered if fate in ("credit", "void")]
    accounts = fold(entries_of(*rows))
    for name, fates in (("credit", ("at once", "credit")), ("void", ("void",)), ("pending", ("",))):
        for node in "abc":
            expected = sum(tokens for who, tokens, fate in work if who == node and fate in fates)
            assert getattr(accounts.by_node.get(node, Account()), name) == expected
    assert accounts.total_credit == sum(tokens for _, tokens, fate in work if fate in ("at once", "credit"))


@pytest.mark.parametrize(("rows", "why"), [
    ([credit("a", "s1", 5), credit("a", "s1", 5)], r"row 1.*judged before"),
    ([credit("a", "s1", 5), ("rejected", {"node": "a", "submission": "s1"})], r"row 1.*judged before"),
    *(
        ([pending("a", "s1", 5), settled, last], "row 2")
        for settled in (credit("a", "s1", 5), void("a", "s1", 5))
        for last in (credit("a", "s1", 5), void("a", "s1", 5), pending("a", "s1", 5))
    ),
    *(
        ([pending("a", "s1", 5), other], "row 1")
        for other in (credit("b", "s1", 5), credit("a", "s1", 6), void("b", "s1", 5), void("a", "s2", 5))
    ),
    ([credit("a", "s1", 5, 6)], r"row 0 \(credit\)"), ([credit("a", "s1", 5, 0)], r"row 0 \(credit\)"),
    ([credit("a", "s1", -5, -5)], r"row 0 \(credit\)"), ([("credit", {"node": "a"})], "row 0"),
    ([("batch", {"step": 0}), ("batch", {"step": 2})], "step 2 comes where step 1 should be"),
])  # fmt: skip
def test_invalid_rows_are_refused_by_number(rows: list[Row], why: str) -> None:
    with pytest.raises(LedgerError, match=why):
        fold(entries_of(*rows))


OWNER = "0a" * 32


def batch(step: int) -> Row:
    return "batch", {"step": step, "units": [], "digest": "d"}


RUN = entries_of(
    ("node", {"node": "a"}), ("node", {"node": "b"}), ("node", {"node": "c"}), credit("a", "s1", 30),
    credit("b", "s2", 10), batch(0), ("vouch", {"node": "a", "owner": OWNER}), ("vouch", {"node": "b", "owner": OWNER}),
    credit("c", "s3", 20), pending("c", "s4", 7), batch(1), credit("c", "s4", 7),
)  # fmt: skip


def test_shares_are_those_of_the_moment_of_the_batch_and_need_credit() -> None:
    first = shares_of(RUN, step=0)
    assert (first.index, first.total) == (5, 40)
    assert [(share.holder, share.fraction) for share in first.shares] == [("a", (3, 4)), ("b", (1, 4))]
    second = shares_of(RUN, step=1)
    assert (second.index, second.total) == (10, 60)
    assert second.shares == (Share(OWNER, ("a", "b"), 40, 60), Share("c", ("c",), 20, 60))
    assert shares_of(RUN).shares[1] == Share("c", ("c",), 27, 67)
    for end in range(6, len(RUN) + 1):
        assert shares_of(RUN[:end], step=0) == shares_of(RUN, step=0)
    assert shares_of(RUN[:3]).shares == ()
    with pytest.raises(UserError, match="no step has a batch yet"):
        shares_of(RUN[:3], step=0)


@pytest.mark.parametrize(("step", "words"), [(2, "the last one is of step 1"), (9, "no batch of step 9")])
def test_a_step_without_a_batch_has_no_shares(step: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        shares_of(RUN, step)


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


def test_second_owner_of_a_node_is_refused_and_sanctions_come_and_go() -> None:
    again = entries_of(("vouch", {"node": "a", "owner": OWNER}), ("vouch", {"node": "a", "owner": OWNER}))
    assert fold(again).by_node["a"].owner == OWNER
    with pytest.raises(LedgerError, match=r"row 1 \(vouch\).*an owner never changes"):
        fold(entries_of(("vouch", {"node": "a", "owner": OWNER}), ("vouch", {"node": "a", "owner": "0b" * 32})))
    rows: list[Row] = [("sanction", {"node": "a", "state": "suspended", "reason": "lapses", "until_ms": 60_000})]
    assert fold(entries_of(*rows)).by_node["a"] == Account(reason="lapses", suspended_until_ms=60_000)
    rows.append(("sanction", {"node": "a", "state": "banned", "reason": "sampling.seed"}))
    assert fold(entries_of(*rows)).by_node["a"] == Account(banned=True, reason="sampling.seed")
    rows.append(("sanction", {"node": "a", "state": "active", "reason": "an appeal"}))
    assert fold(entries_of(*rows)).by_node["a"] == Account()


@pytest.mark.parametrize(("row", "about"), [
    (("credit", {"node": "a", "unit": 0}), ("node:a", "unit:0")),
    (("batch", {"step": 0, "units": [3, 1]}), ("unit:3", "unit:1")),
    (("pulled", {"node": "a", "units": [2], "submission": "s"}), ("node:a", "unit:2")),
    (("policy", {"version": 1}), ()), (("admin", {"verb": "ban", "node": "a", "target": "a"}), ("node:a",)),
])  # fmt: skip
def test_subjects_of_entries(row: Row, about: tuple[str, ...]) -> None:
    assert subjects(entries_of(row)[0]) == about
