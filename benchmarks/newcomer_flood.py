"""What does a flood of fresh keys cost honest workers, and an honest newcomer?

    python benchmarks/newcomer_flood.py [--seconds 180] [--staleness 1] [--floods 0,100,1000] [--same-network]

The real hub services over a real SQLite file, under a manual clock. Eight established workers take 4 s for a group; one
validator audits 4 groups a second; a trainer takes 1 s for a step of 16 groups. After the warm-up an honest newcomer
arrives that takes 4 s for a group, too. Beside them a number of fresh keys of another network (or of another
address of its own, `--same-network`) that

    sit       lease all they are given, are heard of like anybody, say in every heartbeat that they have gone on (so
              that their leases should be renewed), and hand nothing in until their leases run out
    rubbish   hand in rubbish at once; every audit of it bans the key, and a fresher one takes its place

Everybody who has nothing to do asks in every tick (half a second), in random order: with 1,000 keys and 8 workers a
worker is rarely the first to ask. Asks that can get nothing are not made: that only makes this script quicker.
`share 1.0` is the alternative: no bound on newcomers, as it was before there was one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from shoal.engines import Completion
from shoal.engines.groups import submission_of
from shoal.environments import Score, Split, Task
from shoal.hub import HubConfig, HubSettings, RunSettings
from shoal.hub.service import Hub, retry
from shoal.hub.state.commands import Save
from shoal.hub.state.rows import PROBATION_AUDITS, NodeRow
from shoal.protocol import (
    Audit,
    AuditRequest,
    Heartbeat,
    Lease,
    LeaseRequest,
    Outcome,
    PolicyAnnouncement,
    PolicyRef,
    Registration,
    Role,
    RoleCertificate,
    RolloutReward,
    Severity,
    SignedDocument,
    SigningKey,
    Verdict,
    VerdictReport,
    pack,
    sign_document,
)
from shoal.runtime.clock import ManualClock

TICK_S = 0.5
WARM_UP_S = 30
HONEST, GROUP_S = 8, 4.0
AUDITS_PER_S, CLAIM = 4, 8
TRAIN_S = 1.0
HEARTBEAT_S = 5.0
SUSPENDED_S = 60.0
GROUPS_PER_STEP, GROUP_SIZE, TOKENS = 16, 2, 4

HOME, FLOOD = "192.0.2.0/24", "198.51.100.0/24"
HOME_ADDRESS, FLOOD_ADDRESS = "192.0.2.7", "192.0.2.9"

Flood = Literal["sit", "rubbish"]


class Numbers:
    """Tasks without content: nobody generates anything here."""

    name = "numbers"
    digest = "ab" * 32

    def __init__(self) -> None:
        self._tasks = {str(number): Task(id=str(number), prompt=f"{number}=", answer="") for number in range(1000)}

    def tasks(self, split: Split) -> Sequence[Task]:
        return list(self._tasks.values()) if split == "train" else []

    def task(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def score(self, task: Task, completion: str) -> Score:
        raise NotImplementedError


@dataclass
class Worker:
    """A key; `busy_until_s` is when it has generated what it leased."""

    node: NodeRow
    leases: list[Lease]
    busy_until_s: float = 0.0
    until_ms: int = 0
    out_until_s: float = 0.0
    honest: bool = False
    network: str = ""


@dataclass(frozen=True)
class Scenario:
    flood: Flood
    keys: int
    share: float
    staleness: int
    network: str = FLOOD


@dataclass(frozen=True)
class Result:
    """Per simulated second: accepted groups of established workers, and of the honest newcomer, and steps trained; and
    how long the hub takes for a lease."""

    groups_per_s: float
    newcomer_per_s: float
    steps_per_s: float
    lease_ms: float


class World:
    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(1)
        self.clock = ManualClock()
        self.started_s = self.clock.monotonic_s()
        self.keys = {role: SigningKey.from_seed(role.encode().ljust(32)) for role in ("root", "trainer", "validator")}
        self.run_id = "flood"
        self.hub = Hub(self._config(folder), self.clock)
        self.trainer = self._trusted("trainer")
        self.validator = self._trusted("validator")
        self.made = 0
        self.honest = [self._worker(honest=True) for _ in range(HONEST)]
        self.flood = [self._worker() for _ in range(scenario.keys)]
        self.newcomer: Worker | None = None
        self.version = 0
        self.accepted: Counter[str] = Counter()
        self.claimed: list[Audit] = []
        self.audited_at_s = self.trained_at_s = 0.0
        self.training = False
        self.beat_at_s = 0.0
        self.lease_times_s: list[float] = []
        self._announce()

    def _config(self, folder: Path) -> HubConfig:
        return HubConfig(
            folder=folder,
            run_id=self.run_id,
            run=RunSettings(
                steps=10**6,
                groups_per_step=GROUPS_PER_STEP,
                group_size=GROUP_SIZE,
                max_staleness=self.scenario.staleness,
            ),
            settings=HubSettings(newcomer_share=self.scenario.share),
            environment=Numbers(),
            encode=lambda task: list(task.prompt.encode()),
            eos_token_ids=(0,),
            key=SigningKey.from_seed(b"hub".ljust(32)),
            root_key=self.keys["root"].public_key,
        )

    def _trusted(self, role: Role) -> NodeRow:
        key = self.keys[role]
        document = RoleCertificate(run=self.run_id, role=role, public_key=key.public_key, issued_at_ms=0)
        certificate = sign_document(document, self.keys["root"])
        return self._register(Registration(public_key=key.public_key, role=role, certificate=certificate))

    def _register(self, registration: Registration) -> NodeRow:
        node = self.hub.membership.register(registration).node
        with self.hub.context.storage.read() as reader:
            row = reader.node(node)
        assert row is not None
        return row

    def _worker(self, honest: bool = False, proven: bool = True) -> Worker:
        self.made += 1
        key = SigningKey.from_seed(self.made.to_bytes(32, "big"))
        row = self._register(Registration(public_key=key.public_key))
        if honest and proven:
            row = replace(row, passed=PROBATION_AUDITS, streak=PROBATION_AUDITS, accepted=PROBATION_AUDITS)
            with self.hub.context.storage.write() as transaction:
                transaction.apply([Save(row, row.state)])
        return Worker(row, [], honest=honest, network=HOME if honest else self.scenario.network)

    @property
    def now_s(self) -> float:
        return self.clock.monotonic_s() - self.started_s

    def run(self, seconds: float) -> Result:
        while self.now_s < WARM_UP_S:
            self.tick()
        self.newcomer = self._worker(honest=True, proven=False)
        self.honest.append(self.newcomer)
        steps = self.version
        self.accepted.clear()
        while self.now_s < WARM_UP_S + seconds:
            self.tick()
        lease_ms = statistics.median(self.lease_times_s) * 1000
        theirs = self.accepted.pop(self.newcomer.node.node, 0)
        return Result(self.accepted.total() / seconds, theirs / seconds, (self.version - steps) / seconds, lease_ms)

    def tick(self) -> None:
        self.clock.advance(TICK_S)
        self.hub.upkeep.tick()
        self._beat()
        self._hand_in()
        self._audit()
        self._train()
        self._ask()

    def _beat(self) -> None:
        """Heartbeats of whoever the hub must think alive."""
        if self.now_s < self.beat_at_s:
            return
        self.beat_at_s = self.now_s + HEARTBEAT_S
        for worker in self.honest:
            self.hub.membership.heartbeat(worker.node, Heartbeat())
        for key in self.flood:
            if key.leases:
                progress = {lease.lease: int(self.now_s) for lease in key.leases}
                deadlines = self.hub.membership.heartbeat(key.node, Heartbeat(progress=progress)).deadlines
                key.until_ms = max(deadlines.values(), default=0)

    def _hand_in(self) -> None:
        for worker in self.honest:
            if worker.leases and self.now_s >= worker.busy_until_s:
                self._submit(worker)
        for key in self.flood:
            if not key.leases:
                continue
            if self.scenario.flood == "rubbish":
                self._submit(key)
            else:
                now_ms = self.clock.now_ms()
                key.leases = [lease for lease in key.leases if max(lease.deadline_ms, key.until_ms) > now_ms]

    def _submit(self, worker: Worker) -> None:
        for lease in worker.leases:
            self.hub.work.submit(worker.node, lease.lease, body_of(lease))
        worker.leases = []

    def _audit(self) -> None:
        """One validator at a fixed rate, with the ordinary claims."""
        if self.now_s < self.audited_at_s:
            return
        if self.claimed:
            self.hub.checking.verdicts(self.validator, VerdictReport(verdicts=tuple(map(self._verdict, self.claimed))))
        judged = {str(audit.lease.document["node"]) for audit in self.claimed}
        self.flood = [self._worker() if key.node.node in judged else key for key in self.flood]  # banned: a fresher key
        reply = self.hub.checking.audits(self.validator, AuditRequest(max_audits=CLAIM))
        self.claimed = list(reply.audits)
        self.audited_at_s = self.now_s + len(self.claimed) / AUDITS_PER_S

    def _verdict(self, audit: Audit) -> SignedDocument:
        lease = Lease.model_validate(audit.lease.document)
        honest = lease.node in {worker.node.node for worker in self.honest}
        self.accepted[lease.node] += honest
        verdict = Verdict(
            run=self.run_id,
            submission=audit.submission,
            unit=lease.unit,
            node=lease.node,
            outcome=Outcome.ACCEPTED if honest else Outcome.REJECTED,
            severity=None if honest else Severity.CERTAIN,
            reason="" if honest else "proofs.malformed",
            rewards=tuple(RolloutReward(value=float(index)) for index in range(GROUP_SIZE)) if honest else (),
            generated_tokens=GROUP_SIZE * TOKENS if honest else 0,
            decided_at_ms=self.clock.now_ms(),
            environment_digest=lease.environment_digest,
        )
        return sign_document(verdict, self.keys["validator"])

    def _train(self) -> None:
        if not self.training:
            self.training = self.hub.training.batch(self.trainer, self.version).batch is not None
            self.trained_at_s = self.now_s + TRAIN_S
        elif self.now_s >= self.trained_at_s:
            self.version += 1
            self.training = False
            self._announce()

    def _announce(self) -> None:
        ref = PolicyRef(incarnation=0, version=self.version, digest=f"{self.version:064x}")
        document = PolicyAnnouncement(run=self.run_id, policy=ref, created_at_ms=self.clock.now_ms())
        self.hub.training.announce(self.trainer, sign_document(document, self.keys["trainer"]))

    def _ask(self) -> None:
        """Who has nothing to do asks, in random order. Once one of a kind gets nothing, the others would not either."""
        idle = [each for each in [*self.honest, *self.flood] if not each.leases and each.out_until_s <= self.now_s]
        self.random.shuffle(idle)
        in_vain: set[str] = set()
        for worker in idle:
            kind = f"{worker.network} {worker.honest} {worker is self.newcomer}"
            if kind in in_vain:
                continue
            waiting = self._lease(worker)
            if waiting.startswith("this node is suspended"):
                worker.out_until_s = self.now_s + SUSPENDED_S
            elif not worker.leases:
                in_vain.add(kind)

    def _lease(self, worker: Worker) -> str:
        self.made += 1
        ask = LeaseRequest(request=f"request-{self.made}", max_units=1 if worker.honest else 64)
        with self.hub.context.storage.write(durable=False) as transaction:
            transaction.touch_presence(worker.node.node, self.hub.context.clock.now_ms())  # as with any signed call
        before_s = time.perf_counter()
        address = HOME_ADDRESS if worker.honest else FLOOD_ADDRESS
        reply = retry(lambda: self.hub.work.lease(worker.node, ask, worker.network, address))
        self.lease_times_s.append(time.perf_counter() - before_s)
        worker.leases = [Lease.model_validate(signed.document) for signed in reply.leases]
        worker.busy_until_s = self.now_s + GROUP_S
        return reply.waiting


def body_of(lease: Lease) -> bytes:
    drawn = Completion(np.arange(TOKENS, dtype=np.int32), np.full(TOKENS, -0.5, dtype=np.float32), "eos")
    return pack(submission_of(lease, [drawn] * len(lease.seeds), "none"))


def measure(scenario: Scenario, seconds: float) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "hub", scenario)
        try:
            return world.run(seconds)
        finally:
            world.hub.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=180, help="simulated, after a warm-up of 30")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--floods", default="100,1000", help="numbers of fresh keys, beside none")
    parser.add_argument("--same-network", action="store_true", help="the fresh keys are in the honest newcomer's /24")
    options = parser.parse_args()
    print(
        "| fresh keys | they | share | groups/s of the established | of a newcomer | steps/min | a lease takes |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    floods = [int(text) for text in options.floods.split(",")]
    calm = [Scenario("sit", 0, 0.25, options.staleness)]
    loud = [
        Scenario(flood, keys, share, options.staleness, HOME if options.same_network else FLOOD)
        for flood in ("sit", "rubbish")
        for keys in floods
        for share in (0.25, 1.0)
    ]
    for scenario in [*calm, *loud]:
        found = measure(scenario, options.seconds)
        what = scenario.flood if scenario.keys else "none"
        print(
            f"| {scenario.keys} | {what} | {scenario.share} | {found.groups_per_s:.2f} | {found.newcomer_per_s:.2f} | "
            f"{found.steps_per_s * 60:.1f} | {found.lease_ms:.1f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
