"""Owners: a vouch that the node itself brings is checked, written down once, and stays."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kit.hub import TRAINER, Bench, certificate, code_of, fresh_request, ok, worker_key
from shoal.ledger import fold
from shoal.protocol import LedgerEntry, LedgerPage, Registration, SignedDocument, SigningKey, Vouch, sign_document
from shoal.protocol.signing import sign_values

OWNER, OTHER = SigningKey.from_seed(b"o" * 32), SigningKey.from_seed(b"p" * 32)
CAROL = worker_key(5)


def vouch(node: str = CAROL.node, owner: SigningKey = OWNER, by: SigningKey | None = None) -> SignedDocument:
    return sign_document(Vouch(owner=owner.public_key, node=node, issued_at_ms=1), by or owner)


def register(bench: Bench, key: SigningKey, signed: SignedDocument | None, **changes: Any) -> httpx.Response:
    return bench.actor(key).call("POST", "/nodes", Registration(public_key=key.public_key, vouch=signed, **changes))


def ledger(bench: Bench) -> list[LedgerEntry]:
    return list(LedgerPage.model_validate_json(ok(bench.http.get("/ledger")).content).entries)


def vouches(bench: Bench) -> list[dict[str, Any]]:
    return [entry.body for entry in ledger(bench) if entry.kind == "vouch"]


def works(bench: Bench, key: SigningKey) -> None:
    """The node has a group accepted, with which it comes into the ledger."""
    actor = bench.actor(key)
    ok(actor.submit(actor.lease(fresh_request())[0]))
    for audit in bench.audits():
        ok(bench.judge(audit))


def test_an_owner_is_written_down_once_and_stays(bench: Bench) -> None:
    ok(bench.announce(0))
    assert ok(register(bench, CAROL, vouch())).json()["owner"] == OWNER.public_key
    ok(register(bench, CAROL, vouch()))
    assert ok(register(bench, CAROL, None)).json()["owner"] == OWNER.public_key, "silence takes nothing away"
    assert code_of(register(bench, CAROL, vouch(owner=OTHER))) == (409, "vouch.owner")
    assert vouches(bench) == [], "nothing of hers was accepted yet"
    works(bench, CAROL)
    signed = vouch().model_dump(mode="json")
    assert vouches(bench) == [{"node": CAROL.node, "owner": OWNER.public_key, "vouch": signed}]
    assert fold(ledger(bench)).by_node[CAROL.node].owner == OWNER.public_key


def test_a_node_that_worked_alone_can_get_an_owner_later(bench: Bench) -> None:
    ok(bench.announce(0))
    assert ok(register(bench, CAROL, None)).json()["owner"] == ""
    works(bench, CAROL)
    assert vouches(bench) == []
    assert ok(register(bench, CAROL, vouch())).json()["owner"] == OWNER.public_key
    assert len(vouches(bench)) == 1


def test_one_owner_can_have_several_machines(bench: Bench) -> None:
    dave = worker_key(6)
    ok(bench.announce(0))
    ok(register(bench, CAROL, vouch()))
    ok(register(bench, dave, vouch(dave.node)))
    works(bench, CAROL)
    works(bench, dave)
    assert {body["owner"] for body in vouches(bench)} == {OWNER.public_key}
    assert len(vouches(bench)) == 2


@pytest.mark.parametrize(
    ("signed", "code"),
    [
        (vouch(node="0" * 32), "vouch.other"),  # for another node
        (vouch(by=OTHER), "vouch.other"),  # in the name of somebody else
        (vouch().model_copy(update={"signature": "0" * 128}), "vouch.signature"),
        (vouch().model_copy(update={"kind": "lease"}), "vouch.signature"),
        (certificate(CAROL, "worker"), "vouch.signature"),
    ],
)
def test_a_vouch_that_does_not_hold_is_refused_and_leaves_nothing(
    bench: Bench, signed: SignedDocument, code: str
) -> None:
    assert code_of(register(bench, CAROL, signed)) == (403, code)
    assert vouches(bench) == []
    assert CAROL.node not in [node.node for node in bench.status().nodes]


def test_a_vouch_carries_no_load(bench: Bench) -> None:
    """Keys are free, and what a key brings is kept: 60 a minute of 64 kB would be 5 GB a day for each address."""
    values = {**vouch().document, "load": "x" * 2000}
    signed = sign_values("vouch", values, OWNER)
    assert code_of(register(bench, CAROL, signed)) == (422, "vouch.size")
    ok(register(bench, CAROL, sign_values("vouch", {**vouch().document, "later": "field"}, OWNER)))


def test_only_workers_have_owners(bench: Bench) -> None:
    signed = certificate(TRAINER, "trainer")
    answer = register(bench, TRAINER, vouch(TRAINER.node), role="trainer", certificate=signed)
    assert code_of(answer) == (403, "vouch.role")
