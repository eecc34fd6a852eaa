"""Credit has evidence: who holds the hub's key alone cannot invent any that verifies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from evidencekit import (
    ALICE,
    BOB,
    HUB,
    JUDGE,
    LATER_JUDGE,
    OWNER,
    RUN,
    STRANGER,
    Book,
    certificate,
    check,
    honest,
    submission,
)
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LedgerError, LedgerForked
from shoal.protocol import Evidence, Outcome, SignedDocument, document_hash, node_id
from shoal.protocol.signing import sign_values

HONEST = honest()


def test_an_honest_ledger_is_proven() -> None:
    proofs = check(HONEST)
    assert (proofs.credited, proofs.rejections, proofs.orders) == (7, 1, 2)


# What somebody with the hub's key alone appends: each verified before there was evidence.


def unregistered(book: Book) -> None:
    book.earn(9, STRANGER, 10)


def registered_under_another_key(book: Book) -> None:
    body = {"node": STRANGER.node, "public_key": ALICE.public_key, "role": "worker", "name": ""}
    book.add("node", body)


def too_many_tokens(book: Book) -> None:
    book.earn(9, ALICE, 10**15)


def below_nothing(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, -5, book.receipt(9, ALICE, 90), book.verdict(9, ALICE, 90, -5))


def no_such_validator(book: Book) -> None:
    book.judge = STRANGER
    book.earn(9, ALICE, 10)


def validator_that_the_hub_certified(book: Book) -> None:
    body = {"node": STRANGER.node, "public_key": STRANGER.public_key, "role": "validator", "name": ""}
    signed = certificate(STRANGER, "validator", by=HUB).model_dump(mode="json")
    book.add("node", {**body, "certificate": signed})


def validator_of_another_run(book: Book) -> None:
    body = {"node": STRANGER.node, "public_key": STRANGER.public_key, "role": "validator", "name": ""}
    signed = certificate(STRANGER, "validator", run="other-123456789012").model_dump(mode="json")
    book.add("node", {**body, "certificate": signed})


def verdict_signed_by_the_hub(book: Book) -> None:
    book.judge = HUB
    book.earn(9, ALICE, 10)


def validator_that_was_revoked(book: Book) -> None:
    book.judge = JUDGE
    book.earn(9, ALICE, 10)


def no_verdict(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90), None)


def no_receipt(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, 10, None, book.verdict(9, ALICE, 90, 10))


def no_documents(book: Book) -> None:
    no_verdict(book)
    book.evidence.popitem()


def verdict_of_another_submission(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, 32, book.receipt(9, ALICE, 90), verdict_of(book, 19))


def verdict_for_another_node(book: Book) -> None:
    book.pay("credit", 9, BOB, 90, 32, book.receipt(9, BOB, 90), book.verdict(9, ALICE, 90, 32))


def verdict_for_other_tokens(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, 11, book.receipt(9, ALICE, 90), book.verdict(9, ALICE, 90, 10))


def verdict_that_rejects(book: Book) -> None:
    rejects = book.verdict(9, ALICE, 90, 10, outcome=Outcome.REJECTED)
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90), rejects)


def verdict_on_half_a_group(book: Book) -> None:
    half = book.verdict(9, ALICE, 90, 10, rewards=())
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90), half)


def verdict_of_another_run(book: Book) -> None:
    other = book.verdict(9, ALICE, 90, 10, run="other-123456789012")
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90), other)


def receipt_by_another_key(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90, by=STRANGER), book.verdict(9, ALICE, 90, 10))


def receipt_for_another_unit(book: Book) -> None:
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(8, ALICE, 90), book.verdict(9, ALICE, 90, 10))


def unit_paid_twice(book: Book) -> None:
    book.earn(0, BOB, 10, number=90)


def unit_paid_twice_by_pending(book: Book) -> None:
    book.earn(0, BOB, 10, "pending", number=90)


def submission_paid_twice(book: Book) -> None:
    book.earn(9, ALICE, 32, number=6)


def pulled_without_a_failed_audit(book: Book) -> None:
    book.add("pulled", {"node": ALICE.node, "units": [0], "submission": submission(90), "reason": "x"})


def pulled_from_another_node(book: Book) -> None:
    book.add("pulled", {"node": BOB.node, "units": [0], "submission": submission(50), "reason": "x"})


def void_without_a_failed_audit(book: Book) -> None:
    book.earn(9, ALICE, 10, "pending")
    book.void(len(book.entries) - 1)


def pulled_although_the_credit_is_final(book: Book) -> None:
    """The same node would be paid twice for one unit."""
    book.reject(9, ALICE, 90)
    book.add("pulled", {"node": ALICE.node, "units": [0], "submission": submission(90), "reason": "x"})
    book.earn(0, ALICE, 30, number=91)


def pulled_for_a_soft_rejection(book: Book) -> None:
    book.reject(9, ALICE, 90, severity=None)
    book.add("pulled", {"node": ALICE.node, "units": [0], "submission": submission(90), "reason": "x"})


def void_for_a_soft_rejection(book: Book) -> None:
    book.earn(9, ALICE, 10, "pending")
    book.reject(10, ALICE, 90, severity=None)
    book.void(len(book.entries) - 2)


def void_for_an_audit_that_failed_before(book: Book) -> None:
    book.reject(10, ALICE, 90)
    book.earn(9, ALICE, 10, "pending")
    book.void(len(book.entries) - 1)


def void_of_another_unit(book: Book) -> None:
    book.earn(9, ALICE, 10, "pending")
    book.reject(10, ALICE, 90)
    book.add("void", {**book.entries[-2].body, "unit": 0, "reason": "x"})


def pending_paid_for_another_unit(book: Book) -> None:
    book.earn(9, ALICE, 10, "pending")
    book.add("credit", {**book.entries[-1].body, "unit": 777})


def pending_paid_as_of_another_validator(book: Book) -> None:
    book.earn(9, ALICE, 10, "pending")
    book.add("credit", {**book.entries[-1].body, "validator": JUDGE.node})


def verdict_on_shown_progress(book: Book) -> None:
    shown = book.verdict(9, ALICE, 90, 10, depth="progress")
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90), shown)


def verdict_with_another_environment(book: Book) -> None:
    other = book.verdict(9, ALICE, 90, 10, environment_digest="ff")
    book.pay("credit", 9, ALICE, 90, 10, book.receipt(9, ALICE, 90), other)


def pending_paid_on_other_documents(book: Book) -> None:
    book.earn(9, ALICE, 10, "pending")
    book.add("credit", {**book.entries[-1].body, "verdict": "0" * 64})


def rejection_that_nobody_signed(book: Book) -> None:
    body = {"node": ALICE.node, "unit": 9, "submission": submission(90), "reason": "sampling.seed"}
    book.add("rejected", {**body, "severity": "certain", "validator": LATER_JUDGE.node, "verdict": "0" * 64})


def owner_that_did_not_sign(book: Book) -> None:
    book.vouch(ALICE)
    body = {**book.entries[-1].body, "node": BOB.node}
    book.entries.pop()
    book.add("vouch", body)


def order_by_a_revoked_key(book: Book) -> None:
    book.order("revoke", target=STRANGER.public_key)
    book.order("pause", by=STRANGER)


def order_that_says_another_thing(book: Book) -> None:
    book.order("pause")
    body = {**book.entries[-1].body, "verb": "ban", "target": ALICE.node}
    book.entries.pop()
    book.add("admin", body)


def admin_that_revokes_the_hub(book: Book) -> None:
    book.order("revoke", by=STRANGER, target=HUB.public_key)


def second_run(book: Book) -> None:
    book.add("run", book.entries[0].body)


def same_worker_twice(book: Book) -> None:
    book.join(ALICE)


def unknown_kind(book: Book) -> None:
    book.entries.append(book.entries[-1].model_copy(update={"kind": "gift"}))


def verdict_of(book: Book, row: int) -> SignedDocument:
    verdict = book.evidence[row].verdict
    assert verdict is not None
    return verdict


FORGERIES: dict[Callable[[Book], None], str] = {
    unregistered: "is not registered in the ledger",
    registered_under_another_key: "not the one of its public key",
    too_many_tokens: "more than a group of this run can have",
    below_nothing: "do not earn|more than a group",
    no_such_validator: "is not trusted for it",
    validator_that_the_hub_certified: "is not trusted for it",
    validator_of_another_run: "for run other-",
    verdict_signed_by_the_hub: "is not trusted for it",
    validator_that_was_revoked: "is not trusted for it",
    no_verdict: "its signed verdict is missing",
    no_receipt: "its signed receipt is missing",
    no_documents: "is missing",
    verdict_of_another_submission: "says unit 5|says submission",
    verdict_for_another_node: "says node",
    verdict_for_other_tokens: "accepted with 10 tokens; the row has 11",
    verdict_that_rejects: "verdict is rejected",
    verdict_on_half_a_group: "0 rewards for a group of 2",
    verdict_of_another_run: "says run",
    receipt_by_another_key: "is not trusted for it",
    receipt_for_another_unit: "says unit 8",
    unit_paid_twice: "unit 0 has earned before",
    unit_paid_twice_by_pending: "unit 0 has earned before",
    submission_paid_twice: "was judged before",
    pulled_without_a_failed_audit: "did not fail",
    pulled_from_another_node: "has no void credit of this node",
    pulled_although_the_credit_is_final: "final credit stays",
    pulled_for_a_soft_rejection: "did not fail",
    void_without_a_failed_audit: "no audit of this node failed",
    void_for_a_soft_rejection: "no audit of this node failed",
    void_for_an_audit_that_failed_before: "no audit of this node failed since",
    void_of_another_unit: "not what was pending",
    pending_paid_on_other_documents: "verdict is another than when the credit was pending",
    pending_paid_for_another_unit: "unit is another than when the credit was pending",
    pending_paid_as_of_another_validator: "validator is another than when the credit was pending",
    verdict_on_shown_progress: "a progress audit",
    verdict_with_another_environment: "says environment_digest ff",
    rejection_that_nobody_signed: "its signed verdict is missing",
    owner_that_did_not_sign: "for another node",
    order_by_a_revoked_key: "had been revoked",
    order_that_says_another_thing: "another thing than the order",
    admin_that_revokes_the_hub: "only the root key revokes",
    second_run: "a run begins once",
    same_worker_twice: "has a row already",
    unknown_kind: "is missing|not a kind",
}


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_what_the_hubs_key_alone_can_write_does_not_verify(forge: Callable[[Book], None]) -> None:
    book = honest()
    check(book)
    forge(book)
    with pytest.raises(LedgerError, match=FORGERIES[forge]):
        check(book)


@pytest.mark.parametrize(
    "forge", [unregistered, registered_under_another_key, too_many_tokens, unit_paid_twice, second_run]
)
def test_without_documents_the_rows_alone_are_still_checked(forge: Callable[[Book], None]) -> None:
    book = honest()
    forge(book)
    with pytest.raises(LedgerError):
        check(book, needs_documents=False)


@pytest.mark.parametrize("audit", ["all", "reputation"])
def test_a_light_audit_pays_only_where_row_0_says_that_audits_go_by_reputation(audit: str) -> None:
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


def test_without_documents_invented_credit_passes_and_that_is_why_they_are_needed() -> None:
    book = honest()
    no_verdict(book)
    assert check(book, needs_documents=False).credited == 8


def test_a_receipt_that_names_another_ledger_is_a_fork_with_the_receipt_as_statement() -> None:
    book = honest()
    receipt = book.receipt(9, ALICE, 90)
    head = {**receipt.document["ledger"], "hash": "f" * 64}
    forged = sign_values("receipt", {**receipt.document, "ledger": head}, HUB)
    book.pay("credit", 9, ALICE, 90, 10, forged, book.verdict(9, ALICE, 90, 10))
    with pytest.raises(LedgerForked) as caught:
        check(book)
    assert caught.value.statement == forged
    assert caught.value.index == len(HONEST.entries) - 1


# Any single change.


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
    "node": {"name"},
    "batch": {"step", "units", "digest"},
    "sanction": {"state", "reason"},
    "pulled": {"reason"},
    "void": {"reason"},
    "admin": {"reason", "by"},
}
"""What no signature but the hub's covers: only a head from before shows that it was changed."""

MUTABLE = [
    (entry.index, path)
    for entry in HONEST.entries
    for path in leaves(entry.body)
    if path[0] not in UNSIGNED.get(entry.kind, ())
    and not (entry.kind == "run" and path[0] in ("group_size", "max_new_tokens"))
]


@given(st.sampled_from(MUTABLE))
def test_any_signed_value_of_a_row_that_is_changed_and_hashed_anew_is_found(where: tuple[int, tuple[Any, ...]]) -> None:
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


@given(st.integers(0, len(HONEST.entries) - 1))
def test_any_row_that_is_dropped_is_found_by_the_hash_after_it(row: int) -> None:
    entries = HONEST.entries[:row] + HONEST.entries[row + 1 :]
    if row == len(HONEST.entries) - 1:
        return  # the end: only a head knows of it
    with pytest.raises(LedgerError, match=f"row {row} is missing"):
        check(Book(entries, HONEST.evidence))


def test_the_kit_is_what_it_says() -> None:
    assert HONEST.entries[0].body["run"] == RUN
    assert HONEST.entries[6].body["owner"] == OWNER.public_key
    assert node_id(JUDGE.public_key) == HONEST.entries[4].body["validator"]
    signed = verdict_of(HONEST, 4)
    assert document_hash(signed) == document_hash(signed.model_dump_json()) == HONEST.entries[4].body["verdict"]
