"""A hub that goes on with another key: what it signed before is handed out by the key of now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kit.asgi import AsgiTransport
from kit.hub import HUB, VALIDATOR, Actor, Bench, certificate, fresh_request, make_config, ok, worker_key
from shoal.client.http import HEADERS
from shoal.errors import SignatureError
from shoal.hub import create_app
from shoal.protocol import AuditReply, Lease, LeaseReply, Receipt, SignedDocument, SigningKey, open_document

NEXT = SigningKey.from_seed(b"n" * 32)


def test_leases_and_receipts_of_before_are_signed_by_the_key_of_now(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "hub")
    bench.announce(0)
    request = fresh_request()
    [lease] = bench.alice.lease(request)
    ok(bench.alice.submit(lease))
    [other] = bench.bob.lease("request-of-bob")
    bench.close()
    config = make_config(tmp_path / "hub")
    config = replace(config, key=NEXT, certificates=(*config.certificates, certificate(NEXT, "hub")))
    app = create_app(config, bench.clock)
    with httpx.Client(transport=AsgiTransport(app), base_url="http://hub", headers=HEADERS, timeout=20) as http:
        validator, alice, bob = (Actor(key, http, bench.clock) for key in (VALIDATOR, worker_key(1), worker_key(2)))
        [audit] = AuditReply.model_validate_json(ok(validator.call("POST", "/audits", {})).content).audits
        assert open_document(audit.lease, Lease, NEXT.public_key) == lease
        with pytest.raises(SignatureError):
            open_document(audit.lease, Lease, HUB.public_key)
        again = SignedDocument.model_validate_json(ok(alice.submit(lease)).content)
        assert open_document(again, Receipt, NEXT.public_key).lease == lease.lease
        reply = LeaseReply.model_validate_json(ok(bob.call("POST", "/leases", {"request": "request-of-bob"})).content)
        assert [open_document(signed, Lease, NEXT.public_key) for signed in reply.leases] == [other]
