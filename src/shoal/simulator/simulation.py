"""A scenario, played: the world and everybody in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal import protocol
from shoal.hub.changes import Topic
from shoal.hub.state.batches import batch_digest
from shoal.protocol import Audit, AuditRequest, Outcome, SignedDocument, sign_document
from shoal.simulator.workers import TOKENS, SimulatedWorker
from shoal.simulator.world import RUN, Scenario, SimulationResult, World


def beat(world: World, node: str) -> None:
    world.hub.membership.heartbeat(world.signed_in(node), protocol.Heartbeat())
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
        self._version = 0
        self.node = ""

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
        batch = world.hub.training.batch(world.signed_in(self.node), step).batch
        if batch is None:
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
    """One run of `scenario`. `folder` holds the run's secret and nothing else.

    >>> import tempfile; from shoal.simulator import WorkerKind
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Simulation(Path(folder), Scenario(crews=(WorkerKind(8, group_s=10),), seconds=120)).run().steps > 0
    True
    """

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.world = World(folder, scenario)
        self.trainer = SimulatedTrainer(self.world)
        self.workers = [SimulatedWorker(self.world, crew) for crew in scenario.crews for _ in range(crew.count)]
        self.world.at(0, self.trainer.arrive)
        for number in range(scenario.validators):
            self.world.at(0, SimulatedValidator(self.world, number).arrive)
        for worker in self.workers:
            self.world.at(self.world.random.uniform(0, scenario.arrive_s), worker.arrive)

    def run(self) -> SimulationResult:
        """Until the scenario's time is over or the last step is trained."""
        return self.world.run(lambda: self.trainer.finished)
