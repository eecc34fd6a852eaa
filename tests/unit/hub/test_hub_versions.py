"""A real hub with a node of protocol 1 beside one of protocol 2: each is answered in the shape that it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hubkit import HUB, ROOT, Actor, Bench, certificate, code_of, fresh_request, make_config, ok, worker_key

import shoal.protocol as protocol
from shoal.client.asgi import AsgiTransport
from shoal.hub import create_app
from shoal.hub.shapes import HUB_DOCUMENTS, answer_for
from shoal.protocol import Lease, Receipt, Registration, RunInfo, SignedDocument, SigningKey, open_document
from shoal.protocol.signing import Document
from shoal.protocol.versions import HEADER_PROTOCOL

OLD = json.loads((Path(__file__).parents[2] / "data" / "protocol_v1.json").read_text())
V1 = {"user-agent": "python-httpx/0.28.1"}  # as version 1 asked: no word of a version
ADMIN = worker_key(99)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "hub")
    bench.announce(0)
    yield bench
    bench.close()


def check(name: str, values: Any) -> None:
    """Raise unless `values` has no other fields than version 1 gave a message of this name, at any depth."""
    kind = getattr(protocol, name)
    assert set(values) <= set(OLD["messages"][name]), f"{name}: {set(values) - set(OLD['messages'][name])}"
    if kind is SignedDocument:
        inner = HUB_DOCUMENTS.get(values["kind"])
        if inner is not None:
            check(inner.__name__, values["document"])
        return
    for field, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            held = [held for held in _held(kind, field) if isinstance(item, dict)]
            for inside in held:
                check(inside, item)


def _held(kind: Any, field: str) -> list[str]:
    text = str(kind.model_fields[field].annotation)
    names = sorted(OLD["messages"], key=len, reverse=True)
    return [name for name in names if f".{name}'" in text or f".{name}," in text or f".{name} " in text][:1]


def v1_actor(bench: Bench, key: SigningKey, role: Any = "worker") -> Actor:
    http = httpx.Client(transport=bench.http._transport, base_url="http://hub", timeout=20, headers=V1)
    actor = Actor(key, http, bench.clock)
    signed = None if role == "worker" else certificate(key, role)
    body = Registration(public_key=key.public_key, name="old", role=role, certificate=signed, protocol_version=1)
    old = {name: value for name, value in body.model_dump(mode="json").items() if name != "vouch"}
    answer = ok(actor.call("POST", "/nodes", old)).json()
    check("NodeView", answer)
    assert "window" not in answer
    return actor


def test_the_checker_notices_what_version_1_does_not_know() -> None:
    with pytest.raises(AssertionError, match="window"):
        check("HeartbeatReply", {"node": {"window": 3}})
    with pytest.raises(AssertionError, match="hubs"):
        check("SignedDocument", {"kind": "run-info", "document": {"hubs": []}})


def test_a_worker_of_version_1_gets_nothing_that_it_does_not_know(bench: Bench) -> None:
    old = v1_actor(bench, worker_key(7))
    check("HeartbeatReply", ok(old.call("POST", "/heartbeat", {"doing": "generating"})).json())
    reply = ok(old.call("POST", "/leases", {"request": fresh_request()})).json()
    check("LeaseReply", reply)
    [signed] = reply["leases"]
    assert "hard_deadline_ms" not in signed["document"]
    lease = open_document(SignedDocument.model_validate(signed), Lease, HUB.public_key)
    receipt = ok(old.submit(lease)).json()
    check("SignedDocument", receipt)
    assert open_document(SignedDocument.model_validate(receipt), Receipt, HUB.public_key).lease == lease.lease


def test_a_worker_of_this_version_gets_all_of_it(bench: Bench) -> None:
    reply = ok(bench.alice.call("POST", "/leases", {"request": fresh_request()})).json()
    assert "hard_deadline_ms" in reply["leases"][0]["document"]
    assert "deadlines" in ok(bench.alice.call("POST", "/heartbeat", {})).json()


def test_a_validator_of_version_1_can_read_the_lease_of_a_newer_worker(bench: Bench) -> None:
    [lease] = bench.alice.lease(fresh_request())
    ok(bench.alice.submit(lease))
    old = v1_actor(bench, SigningKey.from_seed(b"w" * 32), "validator")
    reply = ok(old.call("POST", "/audits", {"max_audits": 4})).json()
    check("AuditReply", reply)
    [audit] = reply["audits"]
    signed = SignedDocument.model_validate(audit["lease"])
    assert open_document(signed, Lease, HUB.public_key).lease == lease.lease


@pytest.mark.parametrize(
    ("path", "kind"), [("/run", "SignedDocument"), ("/status", "RunStatus"), ("/ledger", "LedgerPage")]
)
def test_strangers_are_answered_in_the_version_that_they_ask_for(bench: Bench, path: str, kind: str) -> None:
    for headers in ({**V1, HEADER_PROTOCOL: "1"}, {HEADER_PROTOCOL: "0"}):
        check(kind, ok(bench.http.get(path, headers=headers)).json())
    newest = ok(bench.http.get(path, headers={HEADER_PROTOCOL: "3"})).json()
    assert newest == ok(bench.http.get(path, headers={HEADER_PROTOCOL: "2"})).json()


def test_version_1_itself_is_told_by_its_http_library_and_a_browser_gets_everything(tmp_path: Path) -> None:
    app = create_app(make_config(tmp_path / "hub"))
    with httpx.Client(transport=AsgiTransport(app), base_url="http://hub") as http:
        old = ok(http.get("/run", headers=V1)).json()
        new = ok(http.get("/run", headers={"user-agent": "curl/8"})).json()
    check("SignedDocument", old)
    assert old["document"]["protocol_version"] == 1
    assert new["document"]["protocol_version"] == 2
    for signed in (old, new):
        assert open_document(SignedDocument.model_validate(signed), RunInfo, HUB.public_key).run


def test_certificates_of_roles_that_version_1_does_not_know_are_left_out() -> None:
    certificates = (certificate(HUB, "hub"), certificate(ADMIN, "admin"))
    values = {"kind": "run-info", "signed_by": HUB.public_key, "signature": "0" * 128,
              "document": {"certificates": [signed.model_dump(mode="json") for signed in certificates]}}  # fmt: skip
    shown = answer_for(1, SignedDocument, values, HUB)["document"]["certificates"]
    assert [signed["document"]["role"] for signed in shown] == ["hub"]


def test_what_others_signed_goes_on_as_it_came() -> None:
    values = certificate(HUB, "hub", signer=ROOT).model_dump(mode="json")
    assert answer_for(1, SignedDocument, values, HUB) == values


@pytest.mark.parametrize(("version", "remedy"), [(0, "pip install -U shoal"), (3, "ask the run's owner to upgrade it")])
def test_a_version_that_is_not_spoken_is_refused_with_what_to_do(bench: Bench, version: int, remedy: str) -> None:
    key = worker_key(8)
    stranger = bench.actor(key)
    refusal = stranger.call("POST", "/nodes", Registration(public_key=key.public_key, protocol_version=version))
    assert code_of(refusal) == (409, "protocol.version")
    assert remedy in refusal.json()["message"]


def test_every_document_of_the_hub_can_be_signed_anew() -> None:
    assert all(issubclass(kind, Document) for kind in HUB_DOCUMENTS.values())
    assert {"lease", "receipt", "run-info", "ledger-head"} <= set(HUB_DOCUMENTS)
