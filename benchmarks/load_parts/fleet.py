"""Workers, a validator and a trainer as coroutines of one process, over real HTTP.

worker     lease ─► so many seconds ─► submit ─► …            a heartbeat every five seconds beside it
validator  claim ─► fetch the bytes ─► signed verdicts ─► …
trainer    batch (long poll) ─► rollouts ─► announce ─► …
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import numpy as np

from load_parts.servers import GROUP_SIZE, RUN, TOKENS, key_of
from load_parts.wire import Latencies, Wire
from shoal.client.hub import BULK, SUBMISSION_BODIES_LIMITS
from shoal.engines.groups import submission_of
from shoal.engines.protocol import Completion
from shoal.protocol import (
    Audit,
    Lease,
    Outcome,
    PolicyAnnouncement,
    PolicyRef,
    Registration,
    Role,
    RoleCertificate,
    RolloutReward,
    SignedDocument,
    SigningKey,
    SubmissionBodies,
    Verdict,
    pack,
    sign_document,
    submission_digest,
    unpack,
)

WAIT_S = 20
CLAIM = 64
_DRAWN = Completion(np.arange(TOKENS, dtype=np.int32), np.full(TOKENS, -0.5, dtype=np.float32), "eos")


@dataclass
class Fleet:
    """Everybody; `receipts` are those given, by submission, `judged` how many verdicts were taken."""

    hubs: list[tuple[str, int]]  # workers are spread over them, and each has a validator; the trainer asks the first
    workers: int
    group_s: float
    heartbeat_s: float = 5.0
    latencies: Latencies = field(default_factory=Latencies)
    receipts: dict[str, str] = field(default_factory=dict)
    judged: int = 0
    steps: int = 0
    stopping: bool = False

    def wire(self, key: SigningKey, number: int = 0) -> Wire:
        return Wire(*self.hubs[number % len(self.hubs)], RUN, key, self.latencies)

    async def run(self, warm_up_s: float, seconds: float) -> None:
        """Warm up, measure for `seconds`, then hand in and judge what is out."""
        trusted = [asyncio.create_task(self._trainer())]
        trusted += [asyncio.create_task(self._validator(number)) for number in range(len(self.hubs))]
        workers = [asyncio.create_task(self._worker(number)) for number in range(self.workers)]
        tasks = [*trusted, *workers]
        await self._watch(tasks, warm_up_s)
        self.latencies.on = True
        await self._watch(tasks, seconds)
        self.latencies.on = False
        self.stopping = True
        await asyncio.wait_for(asyncio.gather(*workers), WAIT_S + 3 * self.group_s + 60)
        end_s = time.monotonic() + 180
        while self.judged < len(self.receipts) and time.monotonic() < end_s:
            await self._watch(trusted, 0.2)
        for task in trusted:
            task.cancel()
        await asyncio.gather(*trusted, return_exceptions=True)

    async def _watch(self, tasks: list[asyncio.Task[None]], seconds: float) -> None:
        """Wait; whoever fails meanwhile ends the benchmark."""
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def _register(self, wire: Wire, role: Role = "worker") -> None:
        certificate = None
        if role != "worker":
            document = RoleCertificate(run=RUN, role=role, public_key=wire.key.public_key, issued_at_ms=0)
            certificate = sign_document(document, key_of("root"))
        message = Registration(public_key=wire.key.public_key, role=role, certificate=certificate)
        await _ok(wire.call("register", "POST", "/nodes", message.model_dump_json().encode()))

    async def _worker(self, number: int) -> None:
        dice = random.Random(number)
        wire, pulse = (self.wire(key_of(f"worker-{number}"), number) for _ in range(2))
        await asyncio.sleep(dice.uniform(0, self.workers / 100))
        await self._register(wire)
        beating = asyncio.create_task(self._beat(pulse, dice))
        asked = 0
        while not self.stopping:
            asked += 1
            ask = {"request": f"{wire.key.node[:8]}-{asked:08d}", "max_units": 1, "wait_s": WAIT_S}
            reply = await _ok(wire.call("lease", "POST", "/leases", json.dumps(ask).encode()))
            for signed in reply["leases"]:
                lease = Lease.model_validate(signed["document"])
                await asyncio.sleep(self.group_s * dice.uniform(0.5, 1.5))
                await self._submit(wire, lease)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        wire.close()
        pulse.close()

    async def _submit(self, wire: Wire, lease: Lease) -> None:
        body = pack(submission_of(lease, [_DRAWN] * len(lease.seeds), "load"), level=1)
        status, answer = await wire.call("submit", "PUT", f"/submissions/{lease.lease}", body, BULK)
        if status in (200, 201):
            self.receipts[submission_digest(body)] = lease.lease
        elif status != 410:  # late is nobody's mistake
            raise SystemExit(f"a submission was answered with {status}: {answer[:300]!r}")

    async def _beat(self, wire: Wire, dice: random.Random) -> None:
        await asyncio.sleep(dice.uniform(0, self.heartbeat_s))
        body = json.dumps({"doing": "generating", "counters": {"tokens": 4096, "busy_s": 12.5}}).encode()
        while True:
            await _ok(wire.call("heartbeat", "POST", "/heartbeat", body))
            await asyncio.sleep(self.heartbeat_s)

    async def _validator(self, number: int) -> None:
        wire = self.wire(key_of(f"validator-{number}"), number)
        await self._register(wire, "validator")
        while True:
            ask = json.dumps({"max_audits": CLAIM, "wait_s": WAIT_S}).encode()
            reply = await _ok(wire.call("audits", "POST", "/audits", ask))
            audits = [Audit.model_validate(each) for each in reply["audits"]]
            if not audits:
                continue
            names = urlencode([("name", audit.submission) for audit in audits])
            _status, packed = await wire.call("bodies", "GET", f"/submissions?{names}")
            bodies = unpack(packed, SubmissionBodies, SUBMISSION_BODIES_LIMITS).bodies
            assert [submission_digest(body) for body in bodies] == [audit.submission for audit in audits]
            verdicts = [_verdict(audit, wire.key).model_dump(mode="json") for audit in audits]
            report = await _ok(wire.call("verdicts", "POST", "/verdicts", json.dumps({"verdicts": verdicts}).encode()))
            assert not report["refused"], report["refused"][:3]
            self.judged += len(verdicts)

    async def _trainer(self) -> None:
        wire = self.wire(key_of("trainer"))
        await self._register(wire, "trainer")
        version = 0
        while True:
            ref = PolicyRef(incarnation=0, version=version, digest=f"{version:064x}")
            document = PolicyAnnouncement(run=RUN, policy=ref, created_at_ms=0)
            signed: SignedDocument = sign_document(document, wire.key)
            await _ok(wire.call("policy", "POST", "/policies", signed.model_dump_json().encode()))
            batch = None
            while batch is None:
                ask = json.dumps({"wait_s": WAIT_S}).encode()
                batch = (await _ok(wire.call("batch", "POST", f"/batches/{version}", ask)))["batch"]
            await wire.call("rollouts", "GET", f"/batches/{version}/rollouts")
            version += 1
            self.steps = version


def _verdict(audit: Audit, key: SigningKey) -> SignedDocument:
    lease = Lease.model_validate(audit.lease.document)
    verdict = Verdict(
        run=RUN,
        submission=audit.submission,
        unit=lease.unit,
        node=lease.node,
        outcome=Outcome.ACCEPTED,
        rewards=tuple(RolloutReward(value=float(index)) for index in range(GROUP_SIZE)),
        generated_tokens=GROUP_SIZE * TOKENS,
        depth=audit.depth,
        decided_at_ms=time.time_ns() // 1_000_000,
        environment_digest=lease.environment_digest,
    )
    return sign_document(verdict, key)


async def _ok(call: Any) -> Any:
    status, body = await call
    if status >= 300:
        raise SystemExit(f"the hub answered {status}: {body[:300]!r}")
    return json.loads(body) if body else None
