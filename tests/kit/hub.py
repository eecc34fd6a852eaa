"""A hub in this process for tests: a fake environment, keys, actors that sign what they send, and the run's owner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from kit.asgi import AppTransport
from kit.storage import Stored, apply, changed
from shoal import protocol
from shoal.client.transport import HEADERS
from shoal.environments import Score, Split, Task
from shoal.hub import HubConfig, HubSettings, RunSettings
from shoal.hub.http.app import App
from shoal.hub.service import Hub
from shoal.hub.state.rows import NodeRow
from shoal.ledger.accounts import Accounts
from shoal.runtime.clock import Clock, ManualClock

TOKENS_PER_ROLLOUT = 3


class Lazy(Sequence[Task]):
    """Tasks that are made when they are looked at."""

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]
        return self._make(index)


class FakeEnvironment:
    """Ten tasks whose prompts are their names."""

    name = "fake"
    digest = "e0" * 32

    def __init__(self, count: int = 10) -> None:
        self._tasks = [Task(id=f"task-{index}", prompt=f"{index}=", answer=str(index)) for index in range(count)]

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks if split == "train" else []

    def task(self, task_id: str) -> Task:
        return next(task for task in self._tasks if task.id == task_id)

    def score(self, task: Task, completion: str) -> Score:
        return Score(float(completion == task.answer))


ROOT = protocol.SigningKey.from_seed(b"r" * 32)
HUB = protocol.SigningKey.from_seed(b"h" * 32)
TRAINER = protocol.SigningKey.from_seed(b"t" * 32)
VALIDATOR = protocol.SigningKey.from_seed(b"v" * 32)
RUN_ID = f"test-{protocol.fingerprint(ROOT.public_key)[:12]}"


def worker_key(number: int) -> protocol.SigningKey:
    return protocol.SigningKey.from_seed(bytes([number]) * 32)


def certificate(
    key: protocol.SigningKey, role: protocol.Role, run: str = RUN_ID, signer: protocol.SigningKey = ROOT,
    expires_at_ms: int | None = None,
) -> protocol.SignedDocument:  # fmt: skip
    document = protocol.RoleCertificate(
        run=run, role=role, public_key=key.public_key, issued_at_ms=0,
        expires_at_ms=2**52 if role == "trusted" and expires_at_ms is None else expires_at_ms,
    )  # fmt: skip
    return protocol.sign_document(document, signer)


def make_config(folder: Path, run: dict[str, Any] | None = None, settings: dict[str, Any] | None = None) -> HubConfig:
    """A small run: 2 groups of 2 rollouts a step."""
    sizes = {"name": "test", "steps": 3, "groups_per_step": 2, "group_size": 2, "max_staleness": 0}
    return HubConfig(
        folder=folder, run_id=RUN_ID, run=RunSettings(**{**sizes, **(run or {})}),
        settings=HubSettings(**{"port": 0, **(settings or {})}), environment=FakeEnvironment(),
        encode=lambda task: list(task.prompt.encode()), eos_token_ids=(0,), key=HUB, root_key=ROOT.public_key,
        certificates=(certificate(HUB, "hub"), certificate(TRAINER, "trainer"), certificate(VALIDATOR, "validator")),
        sources=("http://127.0.0.1:1",),
    )  # fmt: skip


@dataclass
class Actor:
    """One key that talks to the hub; `call` signs like a client does, and can be told to sign wrongly."""

    key: protocol.SigningKey
    http: httpx2.Client
    clock: Clock
    run: str = RUN_ID
    hub_key: str = HUB.public_key

    def call(
        self, method: str, path: str, body: bytes | protocol.Message | dict[str, Any] | None = None
    ) -> httpx2.Response:
        content = as_bytes(body)
        headers = protocol.sign_request(self.key, self.run, method, path, content, self.clock.now_ms())
        return self.http.request(method, path, content=content, headers=headers)

    def register(self, role: protocol.Role = "worker", name: str = "", **changes: Any) -> httpx2.Response:
        signed = None if role == "worker" else certificate(self.key, role)
        fields = {"name": name, "role": role, "certificate": signed, **changes}
        return self.call("POST", "/nodes", protocol.Registration(public_key=self.key.public_key, **fields))

    def ask(self, max_units: int = 1, **fields: Any) -> protocol.LeaseReply:
        body = {"request": fresh_request(), "max_units": max_units, **fields}
        return protocol.LeaseReply.model_validate_json(ok(self.call("POST", "/leases", body)).content)

    def lease(self, max_units: int = 1, **fields: Any) -> list[protocol.Lease]:
        leases = self.ask(max_units, **fields).leases
        return [protocol.open_document(signed, protocol.Lease, self.hub_key) for signed in leases]

    def submit(self, lease: protocol.Lease, body: bytes | None = None) -> httpx2.Response:
        return self.call("PUT", f"/submissions/{lease.lease}", submission_body(lease) if body is None else body)

    def deliver(self, max_units: int = 1) -> list[protocol.Lease]:
        """Lease so many units, and submit their groups."""
        leases = self.lease(max_units)
        for lease in leases:
            ok(self.submit(lease))
        return leases

    def beat(self, **said: Any) -> protocol.HeartbeatReply:
        return protocol.HeartbeatReply.model_validate_json(ok(self.call("POST", "/heartbeat", said)).content)


_requests = itertools.count()


def fresh_request() -> str:
    return f"request-{next(_requests):06d}"


def as_bytes(body: bytes | protocol.Message | dict[str, Any] | None) -> bytes:
    if isinstance(body, bytes):
        return body
    if isinstance(body, protocol.Message):
        return body.model_dump_json().encode()
    return b"" if body is None else httpx2.Request("POST", "http://x", json=body).content


def ok(response: httpx2.Response) -> httpx2.Response:
    assert response.status_code < 300, response.text
    return response


def code_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


def submission(lease: protocol.Lease, /, **changes: Any) -> dict[str, Any]:
    """What one may submit for a lease, before it is packed: a dictionary, for it may also be what nobody may."""
    logprobs = protocol.pack_logprobs([-0.5] * TOKENS_PER_ROLLOUT)
    rollout = {"tokens": protocol.pack_tokens(range(TOKENS_PER_ROLLOUT)), "logprobs": logprobs, "finish": "eos"}
    return {
        "format": protocol.SUBMISSION_FORMAT, "run": lease.run, "node": lease.node, "lease": lease.lease,
        "unit": lease.unit, "incarnation": lease.policy.incarnation, "version": lease.policy.version,
        "policy_digest": lease.policy.digest, "prompt": protocol.pack_tokens(lease.prompt_ids),
        "rollouts": [rollout] * len(lease.seeds), **changes,
    }  # fmt: skip


def submission_body(lease: protocol.Lease, /, **changes: Any) -> bytes:
    fields = submission(lease)
    fields["rollouts"] = [protocol.Rollout(**rollout) for rollout in fields["rollouts"]]
    return protocol.pack(protocol.Submission(**{**fields, **changes}))


def verdict_on(
    lease: protocol.Lease, submission: str, rewards: Sequence[float] = (0.0, 1.0), /, **changes: Any
) -> protocol.Verdict:
    """Accepted, with these rewards, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "run": lease.run, "submission": submission, "unit": lease.unit, "node": lease.node,
        "outcome": protocol.Outcome.ACCEPTED,
        "rewards": tuple(protocol.RolloutReward(value=value) for value in rewards), "decided_at_ms": 1,
        "generated_tokens": TOKENS_PER_ROLLOUT * len(rewards), "environment_digest": lease.environment_digest,
    }  # fmt: skip
    return protocol.Verdict(**{**fields, **changes})


def policy(version: int, incarnation: int = 0, digest: str | None = None) -> protocol.PolicyRef:
    return protocol.PolicyRef(
        incarnation=incarnation, version=version, digest=digest or f"{incarnation:02x}{version:02x}" * 16
    )


def as_texts(ids: Sequence[list[int]]) -> list[str]:
    """Token ids as letters: 0 is A."""
    return ["".join(chr(65 + token) for token in each) for each in ids]


@dataclass
class Bench:
    """An app with a trainer, a validator and two workers registered."""

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=ManualClock)
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = replace(make_config(self.folder, self.run, self.settings), **self.changes)
        self.app = App(config, self.clock)
        self.http = httpx2.Client(transport=AppTransport(self.app), base_url="http://hub", timeout=20, headers=HEADERS)
        self.trainer, self.validator = self.actor(TRAINER), self.actor(VALIDATOR)
        self.alice, self.bob = self.actor(worker_key(1)), self.actor(worker_key(2))
        ok(self.trainer.register("trainer"))
        ok(self.validator.register("validator"))
        ok(self.alice.register(name="alice"))
        ok(self.bob.register(name="bob"))
        self.prove(self.alice, self.bob)

    def actor(self, key: protocol.SigningKey) -> Actor:
        return Actor(key, self.http, self.clock)

    def prove(self, *workers: Actor) -> None:
        """Let workers have passed an audit: others have one unit in hand until their first group is accepted."""
        for worker in workers:
            if self.row(worker).unproven:
                self.change(worker, passed=1)

    @property
    def hub(self) -> Hub:
        hub: Hub = self.app.hub
        return hub

    def row(self, who: Actor) -> NodeRow:
        row: NodeRow = self.stored.node(who.key.node)
        return row

    @property
    def stored(self) -> Stored:
        return Stored(self.hub.context.storage)

    def change(self, who: Actor, **changes: Any) -> None:
        """Let the hub know other things of a node."""
        apply(self.hub.context.storage, changed(self.row(who), **changes))

    def close(self) -> None:
        self.http.close()

    def restart(self) -> None:
        """Another app over the same folder."""
        self.close()
        self.__post_init__()

    def announce(self, version: int, incarnation: int = 0, digest: str | None = None) -> httpx2.Response:
        ref = policy(version, incarnation, digest)
        document = protocol.PolicyAnnouncement(run=RUN_ID, policy=ref, created_at_ms=self.clock.now_ms())
        return self.trainer.call("POST", "/policies", protocol.sign_document(document, TRAINER))

    def audits(self, max_audits: int = 8, left: Sequence[protocol.Audit] = ()) -> tuple[protocol.Audit, ...]:
        names = [audit.submission for audit in left]
        response = ok(self.validator.call("POST", "/audits", {"max_audits": max_audits, "left": names}))
        return protocol.AuditReply.model_validate_json(response.content).audits

    def judge(self, audit: protocol.Audit, rewards: Sequence[float] = (0.0, 1.0), **changes: Any) -> httpx2.Response:
        return self.report(self.verdict(audit, rewards, **changes))

    def report(self, *verdicts: protocol.SignedDocument) -> httpx2.Response:
        """The hub's answer; if it did not take the only verdict, the answer that this one alone amounts to."""
        response = self.validator.call("POST", "/verdicts", protocol.VerdictReport(verdicts=verdicts))
        refused = response.json().get("refused", ())
        if len(verdicts) == len(refused) == 1:
            return httpx2.Response(refused[0]["status"], json=refused[0], request=response.request)
        return response

    def verdict(
        self, audit: protocol.Audit, rewards: Sequence[float] = (0.0, 1.0), **changes: Any
    ) -> protocol.SignedDocument:
        lease = protocol.open_document(audit.lease, protocol.Lease, HUB.public_key)
        changes = {"decided_at_ms": self.clock.now_ms(), **changes}
        return protocol.sign_document(verdict_on(lease, audit.submission, rewards, **changes), VALIDATOR)

    def batch(self, step: int, wait_s: float = 0) -> protocol.Batch | None:
        response = ok(self.trainer.call("POST", f"/batches/{step}", {"wait_s": wait_s}))
        document = response.json()["batch"]
        return None if document is None else protocol.Batch.model_validate(document)

    def status(self) -> protocol.RunStatus:
        return protocol.RunStatus.model_validate_json(ok(self.http.get("/status")).content)

    def ledger(self) -> protocol.LedgerPage:
        return protocol.LedgerPage.model_validate_json(ok(self.http.get("/ledger?limit=1000")).content)

    def accept_groups(self, count: int) -> list[protocol.Lease]:
        """`count` units leased, submitted and accepted with rewards that differ."""
        leases = self.alice.deliver(count)
        self.accept()
        return leases

    def accept(self, **changes: Any) -> None:
        """Accept all that waits, with rewards that differ."""
        for audit in self.audits(64):
            ok(self.judge(audit, **{"depth": audit.depth, **changes}))

    def audit_of(self, actor: Actor) -> protocol.Audit:
        """The audit of a new group of this node; nothing else waits for one."""
        actor.deliver()
        [audit] = self.audits()
        return audit

    def view(self, actor: Actor) -> protocol.NodeView:
        return next(node for node in self.status().nodes if node.node == actor.key.node)


ADMIN = protocol.SigningKey.from_seed(b"a" * 32)
_numbers = itertools.count(1)


def action(verb: str, /, **fields: Any) -> protocol.AdminAction:
    values: dict[str, Any] = {"run": RUN_ID, "id": f"{next(_numbers):032x}", "verb": verb, "issued_at_ms": 0}
    return protocol.AdminAction(**{**values, **fields})


@dataclass
class Owner:
    """Sends orders to the hub of a bench."""

    bench: Bench

    def request(self, verb: str, /, key: protocol.SigningKey = ADMIN, **fields: Any) -> protocol.AdminRequest:
        values = {"issued_at_ms": self.bench.clock.now_ms(), **fields}
        signed = None if key is ROOT else certificate(ADMIN, "admin")
        return protocol.AdminRequest(action=protocol.sign_document(action(verb, **values), key), certificate=signed)

    def post(self, request: protocol.AdminRequest) -> httpx2.Response:
        return self.bench.http.post("/admin", content=request.model_dump_json())

    def order(self, verb: str, /, key: protocol.SigningKey = ADMIN, **fields: Any) -> protocol.AdminReply:
        return protocol.AdminReply.model_validate_json(ok(self.post(self.request(verb, key, **fields))).content)

    def run_info(self) -> protocol.RunInfo:
        answer = ok(self.bench.http.get("/run"))
        return protocol.RunInfo.model_validate(protocol.SignedDocument.model_validate_json(answer.content).document)


def earned(accounts: Accounts) -> int:
    """All that was ever accepted: credit, pending credit and void credit."""
    return sum(account.credit + account.pending + account.void for account in accounts.by_node.values())
