"""Orders of a run's owner for tests: signed by an admin that the root certified, or by whoever a test says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import httpx

from kit.hub import ROOT, RUN_ID, Bench, certificate, ok
from shoal.protocol import AdminAction, AdminReply, AdminRequest, RunInfo, SignedDocument, SigningKey, sign_document

ADMIN = SigningKey.from_seed(b"a" * 32)
_numbers = itertools.count(1)


def action(verb: str, /, **fields: Any) -> AdminAction:
    values: dict[str, Any] = {"run": RUN_ID, "id": f"{next(_numbers):032x}", "verb": verb, "issued_at_ms": 0}
    return AdminAction(**{**values, **fields})


@dataclass
class Owner:
    """Sends orders to the hub of a bench."""

    bench: Bench

    def request(self, verb: str, /, key: SigningKey = ADMIN, **fields: Any) -> AdminRequest:
        values = {"issued_at_ms": self.bench.clock.now_ms(), **fields}
        signed = None if key is ROOT else certificate(ADMIN, "admin")
        return AdminRequest(action=sign_document(action(verb, **values), key), certificate=signed)

    def post(self, request: AdminRequest) -> httpx.Response:
        return self.bench.http.post("/admin", content=request.model_dump_json())

    def order(self, verb: str, /, key: SigningKey = ADMIN, **fields: Any) -> AdminReply:
        return AdminReply.model_validate_json(ok(self.post(self.request(verb, key, **fields))).content)

    def run_info(self) -> RunInfo:
        answer = ok(self.bench.http.get("/run", headers={"shoal-protocol": "2"}))
        return RunInfo.model_validate(SignedDocument.model_validate_json(answer.content).document)
