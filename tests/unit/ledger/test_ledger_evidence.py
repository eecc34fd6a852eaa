"""Credit has evidence: who holds the hub's key alone cannot invent any that verifies."""

import copy
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.evidence import ALICE, BOB, HUB, JUDGE, STRANGER, Book, certificate, check, honest, submission
from shoal.errors import LedgerError, LedgerForked
from shoal.ledger.evidence import read_first_row
from shoal.protocol import Evidence, Outcome, SigningKey, sign_values

HONEST = honest()


def test_an_honest_ledger_is_proven() -> None:
    proofs = check(HONEST)
    assert (proofs.credited, proofs.rejections, proofs.orders) == (7, 1, 2)


# What somebody with the hub's key alone appends: each verified before there was evidence.

Forge = Callable[[Book], object]
OTHER_RUN = "other-123456789012"
STRANGER_ROW = {"node": STRANGER.node, "public_key": STRANGER.public_key, "role": "validator", "name": ""}


HONEST_ONE: Mapping[str, Any] = {}


def steps(*forges: Forge) -> Forge:
    return lambda book: [forge(book) for forge in forges]


def earn(*arguments: Any, judge: SigningKey | None = None, **more: Any) -> Forge:
    def forge(book: Book) -> None:
        book.judge = judge or book.judge
        book.earn(*arguments, **more)

    return forge


def pay(receipt: Any = HONEST_ONE, verdict: Any = HONEST_ONE, tokens: int = 10, key: SigningKey = ALICE) -> Forge:
    """Credit for unit 9, submission 90; with documents that say another thing, or without one (None)."""

    def forge(book: Book) -> None:
        plain = {"unit": 9, "key": key, "number": 90}
        signed = None if receipt is None else book.receipt(**{**plain, **receipt})
        judged = None if verdict is None else book.verdict(**{**plain, "tokens": tokens, **verdict})
        book.pay("credit", 9, key, 90, tokens, signed, judged)

    return forge


def add(kind: str, **body: Any) -> Forge:
    return lambda book: book.add(kind, body)


def again(kind: str, row: int = -1, **changes: Any) -> Forge:
    """A row like one that is there, but for this."""
    return lambda book: book.add(kind, {**book.entries[row].body, **changes})


def instead(**changes: Any) -> Forge:
    """The last row, exchanged for one that differs in this."""
    return lambda book: book.add(book.entries[-1].kind, {**book.entries.pop().body, **changes})


def reject(unit: int, number: int, **severity: Any) -> Forge:
    return lambda book: book.reject(unit, ALICE, number, **severity)


def void(row: int) -> Forge:
    return lambda book: book.void(len(book.entries) + row)


def pulled(unit: int, number: int, key: SigningKey = ALICE) -> Forge:
    return add("pulled", node=key.node, units=[unit], submission=submission(number), reason="x")


def certified(**terms: Any) -> Forge:
    signed = certificate(STRANGER, "validator", **terms).model_dump(mode="json")
    return add("node", **STRANGER_ROW, certificate=signed)


def order(*arguments: Any, **more: Any) -> Forge:
    return lambda book: book.order(*arguments, **more)


PENDING = earn(9, ALICE, 10, "pending")
UNTRUSTED, MISSING, NOT_FAILED = "is not trusted for it", "its signed {} is missing", "no audit of this node failed"
FORGERIES: dict[str, tuple[Forge, str]] = {
    "unregistered": (earn(9, STRANGER, 10), "is not registered in the ledger"),
    "registered under another key": (add("node", **{**STRANGER_ROW, "public_key": ALICE.public_key, "role": "worker"}),
        "not the one of its public key"),
    "too many tokens": (earn(9, ALICE, 10**15), "more than a group of this run can have"),
    "below nothing": (pay(tokens=-5), "do not earn|more than a group"),
    "no such validator": (earn(9, ALICE, 10, judge=STRANGER), UNTRUSTED),
    "validator that the hub certified": (certified(by=HUB), UNTRUSTED),
    "validator of another run": (certified(run=OTHER_RUN), "for run other-"),
    "verdict signed by the hub": (earn(9, ALICE, 10, judge=HUB), UNTRUSTED),
    "validator that was revoked": (earn(9, ALICE, 10, judge=JUDGE), UNTRUSTED),
    "no verdict": (pay(verdict=None), MISSING.format("verdict")),
    "no receipt": (pay(receipt=None), MISSING.format("receipt")),
    "no documents": (steps(pay(verdict=None), lambda book: book.evidence.popitem()), "is missing"),
    "verdict of another submission": (pay(verdict={"number": 6}), "says submission"),
    "verdict of another unit": (pay(verdict={"unit": 5}), "says unit 5"),
    "verdict for another node": (pay(verdict={"key": ALICE}, key=BOB), "says node"),
    "verdict for other tokens": (pay(verdict={"tokens": 10}, tokens=11), "accepted with 10 tokens; the row has 11"),
    "verdict that rejects": (pay(verdict={"outcome": Outcome.REJECTED}), "verdict is rejected"),
    "verdict on half a group": (pay(verdict={"rewards": ()}), "0 rewards for a group of 2"),
    "verdict of another run": (pay(verdict={"run": OTHER_RUN}), "says run"),
    "verdict on shown progress": (pay(verdict={"depth": "progress"}), "a progress audit"),
    "verdict with another environment": (pay(verdict={"environment_digest": "ff"}), "says environment_digest ff"),
    "receipt by another key": (pay(receipt={"by": STRANGER}), UNTRUSTED),
    "receipt for another unit": (pay(receipt={"unit": 8}), "says unit 8"),
    "unit paid twice": (earn(0, BOB, 10, number=90), "unit 0 has earned before"),
    "unit paid twice by pending": (earn(0, BOB, 10, "pending", number=90), "unit 0 has earned before"),
    "submission paid twice": (earn(9, ALICE, 32, number=6), "was judged before"),
    "pulled without a failed audit": (pulled(0, 90), "did not fail"),
    "pulled from another node": (pulled(0, 50, BOB), "has no void credit of this node"),
    "pulled although the credit is final": (steps(reject(9, 90), pulled(0, 90), earn(0, ALICE, 30, number=91)),
        "final credit stays"),
    "pulled for a soft rejection": (steps(reject(9, 90, severity=None), pulled(0, 90)), "did not fail"),
    "void without a failed audit": (steps(PENDING, void(-1)), NOT_FAILED),
    "void for a soft rejection": (steps(PENDING, reject(10, 90, severity=None), void(-2)), NOT_FAILED),
    "void for an audit that failed before": (steps(reject(10, 90), PENDING, void(-1)), f"{NOT_FAILED} since"),
    "void of another unit": (steps(PENDING, reject(10, 90), again("void", -2, unit=0, reason="x")),
        "not what was pending"),
    "pending paid on other documents": (steps(PENDING, again("credit", verdict="0" * 64)), "verdict is another than"),
    "pending paid for another unit": (steps(PENDING, again("credit", unit=777)), "unit is another than when"),
    "pending paid as of another validator": (steps(PENDING, again("credit", validator=JUDGE.node)),
        "validator is another than when the credit was pending"),
    "rejection that nobody signed": (steps(reject(9, 90), lambda book: book.evidence.popitem()),
        MISSING.format("verdict")),
    "owner that did not sign": (steps(lambda book: book.vouch(ALICE), instead(node=BOB.node)), "for another node"),
    "order by a revoked key": (steps(order("revoke", target=STRANGER.public_key), order("pause", by=STRANGER)),
        "had been revoked"),
    "order that says another thing": (steps(order("pause"), instead(verb="ban", target=ALICE.node)),
        "another thing than the order"),
    "admin that revokes the hub": (order("revoke", by=STRANGER, target=HUB.public_key), "only the root key revokes"),
    "second run": (again("run", 0), "a run begins once"),
    "same worker twice": (lambda book: book.join(ALICE), "has a row already"),
    "unknown kind": (lambda book: book.entries.append(book.entries[-1].model_copy(update={"kind": "gift"})),
        "is missing|not a kind"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_ledger_written_with_the_hubs_key_alone_does_not_verify(name: str) -> None:
    forge, words = FORGERIES[name]
    book = honest()
    check(book)
    forge(book)
    with pytest.raises(LedgerError, match=words):
        check(book)


@pytest.mark.parametrize(
    "name", ["unregistered", "registered under another key", "too many tokens", "unit paid twice", "second run"]
)
def test_without_documents_the_rows_alone_are_still_checked(name: str) -> None:
    book = honest()
    FORGERIES[name][0](book)
    with pytest.raises(LedgerError):
        check(book, needs_documents=False)


@pytest.mark.parametrize(("kind", "body"), [
    ("node", {"run": "run-1", "root_key": "ab"}), ("run", {"run": 7, "root_key": "ab"}), ("run", {"run": "run-1"}),
])  # fmt: skip
def test_first_row_that_names_no_run_is_refused(kind: str, body: dict[str, Any]) -> None:
    first = honest().entries[0].model_copy(update={"kind": kind, "body": body})
    rows: Any = SimpleNamespace(label="here", root_key=None, entries=lambda: iter([first]))
    with pytest.raises(LedgerError, match="row 0 does not say which run"):
        read_first_row(rows, needs_documents=False)


@pytest.mark.parametrize("audit", ["all", "reputation"])
def test_light_audit_gives_credit_only_in_runs_that_audit_by_reputation(audit: str) -> None:
    book = Book()
    book.begin(audit=audit)
    book.join(JUDGE, "validator")
    book.join(ALICE)
    light = book.verdict(0, ALICE, 1, 30, depth="light")
    book.pay("credit", 0, ALICE, 1, 30, book.receipt(0, ALICE, 1), light)
    if audit == "reputation":
        assert check(book).credited == 1
        return
    with pytest.raises(LedgerError, match="a light audit"):
        check(book)


@pytest.mark.parametrize("limits", [{"group_size": 1025}, {"max_new_tokens": 10**15}, {"max_new_tokens": 0}])
def test_limits_in_row_0_that_the_protocol_does_not_have_are_refused(limits: dict[str, int]) -> None:
    book = Book()
    book.begin(**limits)
    with pytest.raises(LedgerError, match="no run has groups of"):
        check(book)


def test_invented_credit_passes_only_without_documents() -> None:
    book = honest()
    pay(verdict=None)(book)
    assert check(book, needs_documents=False).credited == 8


def test_receipt_with_another_ledger_head_proves_a_fork() -> None:
    book = honest()
    receipt = book.receipt(9, ALICE, 90)
    head = {**receipt.document["ledger"], "hash": "f" * 64}
    forged = sign_values("receipt", {**receipt.document, "ledger": head}, HUB)
    book.pay("credit", 9, ALICE, 90, 10, forged, book.verdict(9, ALICE, 90, 10))
    with pytest.raises(LedgerForked) as caught:
        check(book)
    assert caught.value.statement == forged
    assert caught.value.index == len(HONEST.entries) - 1


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values that hold no others."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in leaves(each, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, each in enumerate(value) for leaf in leaves(each, (*path, index))]
    return [path]


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy in which the leaf at `path` is another one of its type."""
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    was = inner[path[-1]]
    if isinstance(was, str):
        new: Any = ("0" if was[:1] != "0" else "1") + was[1:] if was else "0"
    else:
        new = (not was) if isinstance(was, bool) else "x" if was is None else was + 1
    inner[path[-1]] = new
    return made


UNSIGNED = {
    "node": {"name"}, "batch": {"step", "units", "digest"}, "sanction": {"state", "reason"}, "pulled": {"reason"},
    "void": {"reason"}, "admin": {"reason", "by"},
}  # fmt: skip
"""What no signature but the hub's covers: only a head from before shows that it was changed."""

MUTABLE = [
    (entry.index, path)
    for entry in HONEST.entries
    for path in leaves(entry.body)
    if path[0] not in UNSIGNED.get(entry.kind, ())
    and not (entry.kind == "run" and path[0] in ("group_size", "max_new_tokens"))
]


@given(st.sampled_from(MUTABLE))
def test_changed_value_of_a_row_is_found_even_if_hashed_again(where: tuple[int, tuple[Any, ...]]) -> None:
    row, path = where
    with pytest.raises(LedgerError):
        check(HONEST.rewritten(row, changed(HONEST.entries[row].body, path)))


DOCUMENTS = [
    (row, name, path)
    for row, evidence in HONEST.evidence.items()
    for name in ("receipt", "verdict")
    for path in leaves(getattr(evidence, name).model_dump(mode="json"))
    if not (name == "receipt" and HONEST.entries[row].kind == "rejected")
]


@given(st.sampled_from(DOCUMENTS))
def test_any_value_of_a_document_that_is_changed_is_found(where: tuple[int, str, tuple[Any, ...]]) -> None:
    row, name, path = where
    values = json.loads(HONEST.evidence[row].model_dump_json())
    try:
        forged = Evidence.model_validate(changed(values, (name, *path)))
    except ValueError:
        return  # no such document
    book = Book(HONEST.entries, {**HONEST.evidence, row: forged})
    with pytest.raises(LedgerError, match=f"row {row} "):
        check(book)
