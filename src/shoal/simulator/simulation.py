"""A scenario, played: the world and everybody in it.

A simulated worker asks for leases, takes its time (with heartbeats), submits, and asks again; without leases it waits.
Some lie, some sit on leases, all may die; who is suspended waits, who is banned goes, or is back with a fresh key.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import protocol
from shoal.hub.changes import Topic
from shoal.hub.service import retry
from shoal.hub.state import NodeRow, Refusal
from shoal.hub.state.batches import batch_digest
from shoal.protocol import Audit, AuditRequest, Heartbeat, LeaseRequest, Outcome, SignedDocument, pack, sign_document
from shoal.protocol.submission import Receipt, Rollout, ShownChunks, ShownProgress, pack_tokens, submission_digest
from shoal.simulator.world import RETRY_S, RUN, HubDown, Scenario, SimulationResult, WorkerKind, World

TOKENS = 16
_TOKENS, _PROOFS = pack_tokens(range(TOKENS)), bytes(4)
_ROLLOUT = Rollout(tokens=_TOKENS, logprobs=protocol.pack_logprobs([-0.5] * TOKENS), finish="eos", proofs=_PROOFS)


@dataclass
class Generating:
    """A lease, when it will be done (or was begun, if it is not delivered), and the rollouts shown so far."""

    lease: dict[str, Any]
    at_s: float
    shown: int = 0


class SimulatedWorker:
    """`_life` grows with every death: what an earlier life had planned does not happen."""

    def __init__(self, world: World, spec: WorkerKind) -> None:
        self._world, self._spec = world, spec
        self._pace_s = spec.group_s * math.exp(world.random.gauss(0, spec.spread))  # all its life
        self._life = self._asked = 0
        self._submitted = 0  # by its present key
        self._work: dict[str, Generating] = {}
        self.node, self.kind = "", "newcomer"

    def arrive(self) -> None:
        world, spec = self._world, self._spec
        if not self.node:
            self.node = world.register(world.key(f"worker/{world.counts['keys']}"))
            world.counts["keys"] += 1
            self._submitted = 0
            if spec.proven:
                world.prove(self.node)
        self._row = world.known(self.node)
        self._life += 1
        life = self._life
        world.at(world.about(spec.lives_s), lambda: self._die(life))
        world.at(world.random.uniform(0, world.scenario.heartbeat_s), lambda: self._beat(life))
        self.ask()

    def _die(self, life: int) -> None:
        if life == self._life:
            self._world.counts["deaths"] += 1
            self._life += 1
            self._work.clear()
            self._world.at(self._world.about(self._spec.away_s), self.arrive)

    def _beat(self, life: int) -> None:
        if life != self._life:
            return
        self._world.at(self._world.scenario.heartbeat_s, lambda: self._beat(life))
        progress = self._progress()
        with suppress(HubDown, Refusal):  # the lease may have run out
            known = self._world.hub.membership.heartbeat(self._row, Heartbeat(progress=progress, counters={}))
            for name, tokens in progress.items() if known.node.on_probation else ():
                work = self._work[name]
                end = min(tokens // TOKENS, len(work.lease["seeds"]))
                if end > work.shown:  # rollouts that were finished since the last time
                    chunks = [ShownChunks(index, 0, _TOKENS, _PROOFS) for index in range(work.shown, end)]
                    self._world.hub.showing.show(self._row, name, pack(ShownProgress(chunks), level=1))
                    work.shown = end

    def _progress(self) -> dict[str, int]:
        now_s, wanted = self._world.now_s, TOKENS * self._world.scenario.run.group_size
        if self._spec.delivers:
            shares = {name: 1 - (work.at_s - now_s) / self._pace_s for name, work in self._work.items()}
            return {name: min(wanted, max(0, int(wanted * share))) for name, share in shares.items()}
        if self._spec.pretends:  # one more rollout whenever the lease is about to run out
            each_s = 0.75 * self._world.rules.lease_ms / 1000
            return {n: min(wanted, TOKENS * int((now_s - work.at_s) / each_s)) for n, work in self._work.items()}
        return {}

    def ask(self) -> None:
        life, world, spec = self._life, self._world, self._spec
        if self._work and spec.delivers:
            return  # it died while it waited, came back, and got work; or a wake-up too many
        self._asked += 1
        name = f"{self.node[:16]}-{self._asked:08d}"
        request = LeaseRequest(request=name, max_units=1, held=tuple(self._work))
        try:
            row = world.signed_in(self.node)
            self.kind = self._kind(row)
            reply = retry(lambda: world.hub.work.lease(row, request, spec.network, spec.address))
        except HubDown:
            self._later(RETRY_S, life)
            return
        except Refusal as refusal:
            world.counts[refusal.code] += 1
            if refusal.code == "node.suspended":
                left_s = ((world.known(self.node).until_ms or 0) - world.hub.context.clock.now_ms()) / 1000
                self._later(max(RETRY_S, left_s), life)
            elif spec.fresh_keys:
                self.node = ""
                self._life += 1
                world.at(RETRY_S, self.arrive)
            return
        for signed in reply.leases:
            self._take(signed.document, life)
        if not reply.leases and not reply.finished:
            world.wait(Topic.LEASES, self)

    def _kind(self, row: NodeRow) -> str:
        if not row.on_probation:
            return "established"
        waits = row.unproven and self._submitted > row.rejected + row.unsure
        where = f"{self._spec.network} {self._spec.address}"
        return f"newcomer of {where}{', its first group is not judged' if waits else ''}"

    def _later(self, delay_s: float, life: int) -> None:
        self._world.at(delay_s, lambda: self.ask() if life == self._life else None)

    def _take(self, lease: dict[str, Any], life: int) -> None:
        world, name = self._world, lease["lease"]
        world.counts["leases"] += 1
        if self._spec.delivers:
            takes_s = self._pace_s * world.random.uniform(0.8, 1.2)
            self._work[name] = Generating(lease, world.now_s + takes_s)
            world.at(takes_s, lambda: self._submit(name, life))
            return
        until_ms = lease["hard_deadline_ms" if self._spec.pretends else "deadline_ms"]
        self._work[name] = Generating(lease, world.now_s)
        world.at((until_ms - world.hub.context.clock.now_ms()) / 1000 + 1, lambda: self._let_go(name, life))

    def _let_go(self, name: str, life: int) -> None:
        if life == self._life and name in self._work:
            del self._work[name]
            self._world.counts["sat"] += 1
            self.ask()

    def _submit(self, name: str, life: int) -> None:
        world, work = self._world, self._work.get(name)
        if life != self._life or work is None:
            return
        lease, policy = work.lease, work.lease["policy"]
        made = protocol.Submission(
            format=protocol.SUBMISSION_FORMAT, run=lease["run"], node=lease["node"], lease=name, unit=lease["unit"],
            incarnation=policy["incarnation"], version=policy["version"], policy_digest=policy["digest"],
            prompt=pack_tokens(lease["prompt_ids"]), rollouts=[_ROLLOUT] * len(lease["seeds"]), engine="simulated",
        )  # fmt: skip
        body = pack(made, level=1)
        try:
            status, signed = world.hub.work.submit(world.signed_in(self.node), name, body)
        except Refusal as refusal:
            world.counts[refusal.code] += 1
        else:
            world.counts["receipts" if status == 201 else "again"] += 1
            world.receipts[submission_digest(body)] = Receipt.model_validate(signed.document)
            if world.random.random() < self._spec.lies:
                world.lies.add(submission_digest(body))
                world.counts["lies"] += 1
        self._submitted += 1
        del self._work[name]
        if not self._work:
            self.ask()


def beat(world: World, node: str) -> None:
    world.hub.membership.heartbeat(world.signed_in(node), Heartbeat())
    world.at(world.scenario.heartbeat_s, lambda: beat(world, node))


class SimulatedValidator:
    kind = "validator"

    def __init__(self, world: World, number: int) -> None:
        self._world, self._key = world, world.key(f"validator/{number}")
        self.node = ""

    def arrive(self) -> None:
        self.node = self._world.register(self._key, "validator")
        beat(self._world, self.node)
        self.ask()

    def ask(self) -> None:
        world = self._world
        request = AuditRequest(max_audits=world.scenario.claims)
        reply = world.hub.checking.audits(world.signed_in(self.node), request)
        if not reply.audits:
            world.wait(Topic.AUDITS, self)
            return
        verdicts = [self._verdict(audit) for audit in reply.audits if audit.depth != "progress"]
        world.at(len(reply.audits) * world.scenario.audit_s, lambda: self._report(verdicts))

    def _report(self, verdicts: Sequence[SignedDocument]) -> None:
        if verdicts:
            report = protocol.VerdictReport(verdicts=tuple(verdicts))
            refused = self._world.hub.checking.verdicts(self._world.signed_in(self.node), report).refused
            self._world.counts["verdicts"] += len(verdicts) - len(refused)
            self._world.counts["verdicts refused"] += len(refused)
        self.ask()

    def _verdict(self, audit: Audit) -> SignedDocument:
        world, lease, size = self._world, audit.lease.document, self._world.scenario.run.group_size
        lied = audit.submission in world.lies and audit.depth == "full"
        teaches = world.random.random() >= 1 / world.scenario.equal
        rewards = tuple(protocol.RolloutReward(value=float(index * teaches)) for index in range(size))
        verdict = protocol.Verdict(
            run=RUN, submission=audit.submission, unit=lease["unit"], node=lease["node"],
            outcome=Outcome.REJECTED if lied else Outcome.ACCEPTED,
            severity=protocol.Severity.CERTAIN if lied else None, reason="sampling.seed" if lied else "",
            rewards=() if lied else rewards, generated_tokens=0 if lied else TOKENS * size, depth=audit.depth,
            decided_at_ms=world.clock.now_ms(), environment_digest=lease["environment_digest"],
        )  # fmt: skip
        return sign_document(verdict, self._key)


class SimulatedTrainer:
    kind = "trainer"

    def __init__(self, world: World) -> None:
        self._world, self._key = world, world.key("trainer")
        self._version, self.node = 0, ""

    @property
    def finished(self) -> bool:
        return self._version >= self._world.scenario.run.steps

    def arrive(self) -> None:
        self.node = self._world.register(self._key, "trainer")
        beat(self._world, self.node)
        self._announce(0)

    def _announce(self, version: int) -> None:
        world = self._world
        ref = protocol.PolicyRef(incarnation=0, version=version, digest=f"{version:064x}")
        document = protocol.PolicyAnnouncement(run=RUN, policy=ref, created_at_ms=world.clock.now_ms())
        world.hub.training.announce(world.signed_in(self.node), sign_document(document, self._key))
        self._version = version
        if not self.finished:
            self.ask()

    def ask(self) -> None:
        step, world = self._version, self._world
        if (batch := world.hub.training.batch(world.signed_in(self.node), step).batch) is None:
            world.wait(Topic.BATCHES, self)
            return
        known = world.batches.setdefault(step, batch)
        world.counts["batches changed"] += batch_digest(known) != batch_digest(batch)
        if world.random.random() < 1 / world.scenario.trainer_dies:  # half a step is lost, and done again
            world.counts["trainer deaths"] += 1
            world.at(world.scenario.train_s / 2, self.ask)
            return
        world.at(world.scenario.train_s, lambda: self._announce(step + 1))


class Simulation:
    """One run of `scenario`. `folder` holds the run's secret and nothing else."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.world = World(folder, scenario)
        self.trainer = SimulatedTrainer(self.world)
        self.workers = [SimulatedWorker(self.world, spec) for spec in scenario.workers for _ in range(spec.count)]
        self.world.at(0, self.trainer.arrive)
        for number in range(scenario.validators):
            self.world.at(0, SimulatedValidator(self.world, number).arrive)
        for worker in self.workers:
            self.world.at(self.world.random.uniform(0, scenario.arrive_s), worker.arrive)

    def run(self) -> SimulationResult:
        return self.world.run(lambda: self.trainer.finished)
