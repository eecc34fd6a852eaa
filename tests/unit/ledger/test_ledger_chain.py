"""The hash chain: any change, gap, swap or rollback is found and its row named."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.evidence import ALICE, HUB, JUDGE, ROOT, RUN, STRANGER, TRAINER, Book, certificate, honest
from shoal.errors import LedgerError
from shoal.ledger import GENESIS, ForkProof, append, check_fork, head_of, is_run_of, verify
from shoal.protocol import LedgerEntry, LedgerHead, SignedDocument, SigningKey, sign_document


def chain(count: int) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    for number in range(count):
        entries.append(append(entries[-1] if entries else None, "policy", {"version": number}, at_ms=number))
    return entries


def test_the_hash_is_the_published_one() -> None:
    """SHA-256 over a first line and canonical JSON, spelt out here for whoever implements it again."""
    content = (
        'shoal/ledger/v1\n{"at_ms":1700000000000,"body":{"name":"ü","node":"ab","tokens":3},"index":0,'
        f'"kind":"credit","previous":"{GENESIS}"}}'
    )
    entry = append(None, "credit", {"node": "ab", "tokens": 3, "name": "ü"}, 1_700_000_000_000)
    assert entry.hash == hashlib.sha256(content.encode()).hexdigest()
    assert entry.hash == "262d3482fceb0dede87ed68b41e3808b3bc4706be530349889aedc3c368cfe1b"


@given(
    count=st.integers(2, 8),
    data=st.data(),
    change=st.sampled_from(["body", "kind", "at_ms", "previous", "hash", "index"]),
)
def test_every_change_names_its_row(count: int, data: st.DataObject, change: str) -> None:
    entries = chain(count)
    row = data.draw(st.integers(0, count - 1))
    new: dict[str, Any] = {"body": {"version": -1}, "kind": "credit", "at_ms": 10**6, "index": count + 5}
    new |= {"previous": "f" * 64, "hash": "f" * 64}
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


def test_pages_are_verified_and_a_rollback_a_missing_row_and_a_swap_are_found() -> None:
    entries = chain(4)
    for kept, head, why in (
        (entries[:2], head_of("demo", entries[3]), "ends at row 1, but row 3"),
        ([entries[0], entries[2]], None, "row 1 is missing"),
        (entries[1:], None, "row 0 is missing"),
    ):
        with pytest.raises(LedgerError, match=why):
            verify(kept, head)
    entries = chain(6)
    head = head_of("demo", entries[5])
    verify(entries[:3])
    verify(entries[3:], head, after=entries[2])
    with pytest.raises(LedgerError, match="row 3 does not follow row 2"):
        verify(entries[3:], head, after=append(entries[1], "credit", {}, 9))
    assert head_of("demo", None) == LedgerHead(run="demo", index=-1, hash=GENESIS)
    verify([], head_of("demo", None))


def test_values_that_json_cannot_carry_are_refused() -> None:
    with pytest.raises(LedgerError, match="not a kind"):
        append(None, "gift", {}, 1)
    with pytest.raises(LedgerError, match="row 0"):
        append(None, "credit", {"tokens": float("nan")}, 1)


# Forks: proven by two signed documents and the rows between them, to anybody, without the hub

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


def test_two_signed_statements_that_differ_prove_a_fork() -> None:
    sentence = check_fork(proof(head(ONE, 15), head(OTHER, 15)))
    assert f"the ledger of {RUN} was forked" in sentence
    assert ONE.entries[15].hash[:16] in sentence
    assert OTHER.entries[15].hash[:16] in sentence
    check_fork(proof(head(ONE, 13), head(OTHER, 20), range(13, 21)))  # an older head, and the rows up to a newer one
    check_fork(proof(ONE.receipt(9, ALICE, 90), head(OTHER, len(OTHER.entries) - 1)))  # a receipt is a statement


@pytest.mark.parametrize(("made", "why"), [
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
    (proof(head(ONE, 15), head(OTHER, 15, by=STRANGER), certificates=(certificate(STRANGER, "hub", by=HUB),)),
        "not trusted for it"),
])  # fmt: skip
def test_invalid_fork_proofs_are_refused(made: ForkProof, why: str) -> None:
    with pytest.raises(LedgerError, match=f"proves no fork: .*{why}"):
        check_fork(made)


def test_the_id_of_a_run_can_be_a_files_name() -> None:
    assert is_run_of(RUN, ROOT.public_key)
    assert not is_run_of(f"a\0{RUN}", ROOT.public_key)
