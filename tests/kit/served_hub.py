"""A real hub behind real sockets, and keys that talk to it by hand: an attacker need not use our client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import zstandard

from kit import eventually
from kit.hub import Actor, code_of, ok, submission, verdict_on
from kit.roles import Sections, prepared, running_roles
from shoal import protocol
from shoal.run.folder import RunFolder
from shoal.runtime.clock import SystemClock

START_S = 60.0
RECIPE: Sections = {
    "run": {"steps": 3, "groups_per_step": 16, "group_size": 2, "max_staleness": 1, "max_new_tokens": 8},
    "hub": {"port": 0, "leases_per_node": 16},
    "relay": {"count": 0},
}
POLICY = protocol.PolicyRef(incarnation=0, version=0, digest="d" * 64)

__all__ = ["ok", "submission"]  # imported from here
refusal = code_of


@dataclass(frozen=True)
class Hub:
    """The hub, and whose keys it believes."""

    folder: RunFolder
    http: httpx2.Client

    @property
    def run(self) -> str:
        return self.folder.run_id

    def status(self) -> protocol.RunStatus:
        return protocol.RunStatus.model_validate_json(ok(self.http.get("/status")).content)

    def caller(self, key: protocol.SigningKey | None = None) -> "Caller":
        return Caller(self, key or protocol.SigningKey.generate())

    def worker(self, name: str = "") -> "Caller":
        """Somebody with a fresh key who has registered with it."""
        caller = self.caller()
        ok(caller.register(name=name))
        return caller

    def trusted(self, name: str, role: protocol.Role) -> "Caller":
        caller = self.caller(self.folder.key(name))
        ok(caller.register(role, certificate=self.folder.certificate(name)))
        return caller


class Caller(Actor):
    """One key; `call` signs as it should be done, `signed` gives the headers to do something else with."""

    def __init__(self, hub: Hub, key: protocol.SigningKey) -> None:
        super().__init__(key, hub.http, SystemClock(), hub.run, hub.folder.key("hub").public_key)
        self.hub = hub

    def signed(self, method: str, path: str, body: bytes, run: str | None = None) -> dict[str, str]:
        return dict(protocol.sign_request(self.key, run or self.run, method, path, body, self.clock.now_ms()))

    def audits(self) -> tuple[protocol.Audit, ...]:
        answer = ok(self.call("POST", "/audits", {"max_audits": 64}))
        return protocol.AuditReply.model_validate_json(answer.content).audits

    def judge(self, audit: protocol.Audit, **changes: Any) -> None:
        """As a validator: accept, with rewards that differ, unless told otherwise."""
        lease = protocol.open_document(audit.lease, protocol.Lease, self.hub_key)
        verdict = verdict_on(lease, audit.submission, **{"depth": audit.depth, **changes})
        report = protocol.VerdictReport(verdicts=(protocol.sign_document(verdict, self.key),))
        reply = ok(self.call("POST", "/verdicts", report)).json()
        assert not reply.get("refused"), reply


def packed(value: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(value))


@contextmanager
def running_hub(folder: Path, **changes: dict[str, Any]) -> Iterator[Hub]:
    """A hub with policy 0 announced."""
    run = prepared(folder, RECIPE, **changes)
    with running_roles(run, "hub") as roles, httpx2.Client(base_url=run.endpoints.hub, timeout=30) as http:
        yield begun(run, http, roles["hub"].done)


def begun(run: RunFolder, http: httpx2.Client, has_ended: Callable[[], bool]) -> Hub:
    """A hub that is being started: once it answers, and with policy 0 announced."""

    def answers() -> bool:
        assert not has_ended(), "the hub did not start"
        with suppress(httpx2.TransportError):
            return http.get("/status").is_success
        return False

    eventually(answers, START_S)
    hub = Hub(run, http)
    trainer = hub.trusted("trainer", "trainer")
    document = protocol.PolicyAnnouncement(run=run.run_id, policy=POLICY, created_at_ms=0)
    ok(trainer.call("POST", "/policies", protocol.sign_document(document, trainer.key)))
    return hub


def establish(hub: Hub, workers: Sequence[Caller], units: int = 8) -> None:
    """Have so many groups of each accepted: they are off probation then."""
    validator = hub.trusted("validator-0", "validator")
    for worker in workers:
        for _ in range(units):
            worker.deliver()
            for audit in validator.audits():
                validator.judge(audit)
