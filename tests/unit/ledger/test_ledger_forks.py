"""A fork is proven by two signed documents and the rows between them, to anybody, without the hub."""

from __future__ import annotations

from typing import Any

import pytest

from kit.evidence import ALICE, HUB, JUDGE, ROOT, RUN, STRANGER, TRAINER, Book, certificate, honest
from shoal.errors import LedgerError
from shoal.ledger import ForkProof, check_fork, head_of, is_run_of
from shoal.protocol import LedgerHead, SignedDocument, SigningKey, sign_document

CERTIFICATES = (certificate(HUB, "hub"), certificate(TRAINER, "trainer"), certificate(JUDGE, "validator"))
ONE = honest()
OTHER = ONE.rewritten(13, {**ONE.entries[13].body, "reason": "another"})


def head(book: Book, index: int, by: SigningKey = HUB, run: str = RUN) -> SignedDocument:
    return sign_document(head_of(run, book.entries[index]), by)


def proof(first: SignedDocument, second: SignedDocument, rows: range = range(0), **changes: Any) -> ForkProof:
    values: dict[str, Any] = {
        "run": RUN, "root_key": ROOT.public_key, "certificates": CERTIFICATES, "first": first, "second": second,
        "entries": tuple(OTHER.entries[row] for row in rows),
    }  # fmt: skip
    return ForkProof(**{**values, **changes})


def test_two_signed_heads_at_one_row_with_different_hashes_prove_a_fork() -> None:
    sentence = check_fork(proof(head(ONE, 15), head(OTHER, 15)))
    assert f"the ledger of {RUN} was forked" in sentence
    assert ONE.entries[15].hash[:16] in sentence
    assert OTHER.entries[15].hash[:16] in sentence


def test_an_older_head_and_the_rows_up_to_a_newer_one_prove_it_too() -> None:
    check_fork(proof(head(ONE, 13), head(OTHER, 20), range(13, 21)))


def test_a_receipt_is_a_statement() -> None:
    check_fork(proof(ONE.receipt(9, ALICE, 90), head(OTHER, len(OTHER.entries) - 1)))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (proof(head(ONE, 15), head(ONE, 15)), "both statements fit one ledger"),
        (proof(head(ONE, 5), head(OTHER, 20), range(5, 21)), "both statements fit"),  # they part later
        (proof(head(ONE, 13), head(OTHER, 20)), "rows from 13 to 20 are not there"),
        (proof(head(ONE, 13), head(OTHER, 20), range(14, 21)), "are not there"),
        (proof(head(ONE, 13), head(OTHER, 20), entries=(*OTHER.entries[13:16], *OTHER.entries[17:21])), "missing"),
        (proof(head(ONE, 13), head(OTHER, 20), entries=(*OTHER.entries[13:20], ONE.entries[20])), "does not follow"),
        (proof(head(ONE, 15), head(OTHER, 15, by=STRANGER)), "not trusted for it"),
        (proof(head(ONE, 15), head(OTHER, 15, by=TRAINER)), "not trusted for it"),
        (proof(head(ONE, 15), head(OTHER, 15, run="other-123456789012")), "about another run"),
        (proof(head(ONE, 15), head(OTHER, 15), root_key=STRANGER.public_key), "another root key"),
        (proof(head(ONE, 15), head(OTHER, 15), certificates=()), "not trusted for it"),
        (
            proof(head(ONE, 15), head(OTHER, 15, by=STRANGER), certificates=(certificate(STRANGER, "hub", by=HUB),)),
            "not trusted for it",
        ),
    ],
)
def test_what_proves_nothing(made: ForkProof, why: str) -> None:
    with pytest.raises(LedgerError, match=f"proves no fork: .*{why}"):
        check_fork(made)


def test_a_head_that_was_changed_after_it_was_signed_proves_nothing() -> None:
    signed = head(OTHER, 15)
    forged = LedgerHead(run=RUN, index=15, hash="f" * 64).model_dump(mode="json")
    with pytest.raises(LedgerError, match="does not match the key"):
        check_fork(proof(head(ONE, 15), signed.model_copy(update={"document": forged})))


def test_the_id_of_a_run_can_be_a_files_name() -> None:
    assert is_run_of(RUN, ROOT.public_key)
    assert not is_run_of(f"a\0{RUN}", ROOT.public_key)
