"""A simulated worker: asks for work, takes its time, submits it. Some lie, some sit on leases, all may die.

arrive ─► ask ─┬─ leases ─► generating (heartbeats with progress) ─► hand in ─► ask
               ├─ nothing ─► waits, like a long poll
               ├─ suspended ─► asks again when that is over
               └─ banned ─► gone, or back with a fresh key
"""

from __future__ import annotations

import math

import numpy as np

from shoal.engines.groups import submission_of
from shoal.engines.protocol import Completion
from shoal.hub.changes import Topic
from shoal.hub.service import retry
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import NodeRow
from shoal.protocol import Heartbeat, Lease, LeaseRequest, Receipt, pack, pack_tokens, submission_digest
from shoal.protocol.submission import ShownChunks, ShownProgress
from shoal.simulator.world import HubDown, WorkerKind, World

RETRY_S = 2.0
TOKENS = 16
_DRAWN = Completion(np.arange(TOKENS, dtype=np.int32), np.full(TOKENS, -0.5, dtype=np.float32), "eos", bytes(4))


class SimulatedWorker:
    """One machine. `_life` grows with every death: what an earlier life had planned does not happen."""

    def __init__(self, world: World, crew: WorkerKind) -> None:
        self._world, self._crew = world, crew
        self._pace_s = crew.group_s * math.exp(world.random.gauss(0, crew.spread))  # all its life
        self._life = 0
        self._asked = 0
        self._keys = 0
        self._handed_in = 0  # by its present key
        self._leases: dict[str, tuple[Lease, float]] = {}
        self._shown: dict[str, int] = {}  # rollouts of a lease that the hub was shown
        self.node = ""
        self.kind = "newcomer"

    def arrive(self) -> None:
        try:
            if not self.node:
                self._keys += 1
                number = self._world.counts["keys"]
                self._world.counts["keys"] += 1
                self.node = self._world.register(self._world.key(f"worker/{number}"))
                self._handed_in = 0
                if self._crew.proven:
                    self._world.prove(self.node)
                self._row = self._world.known(self.node)
        except HubDown:
            self._world.at(RETRY_S, self.arrive)
            return
        self._life += 1
        life = self._life
        self._world.at(self._world.about(self._crew.lives_s), lambda: self._die(life))
        self._world.at(self._world.random.uniform(0, self._world.scenario.heartbeat_s), lambda: self._beat(life))
        self.ask()

    def _die(self, life: int) -> None:
        if life != self._life:
            return
        self._world.counts["deaths"] += 1
        self._life += 1
        self._leases.clear()
        self._shown.clear()
        self._world.at(self._world.about(self._crew.away_s), self.arrive)

    def _beat(self, life: int) -> None:
        if life != self._life:
            return
        self._world.at(self._world.scenario.heartbeat_s, lambda: self._beat(life))
        progress = self._progress()
        try:
            known = self._world.hub.membership.heartbeat(self._row, Heartbeat(progress=progress, counters={}))
            if known.node.on_probation:
                self._show(progress)
        except (HubDown, Refusal):  # the lease may have run out
            return

    def _show(self, progress: dict[str, int]) -> None:
        """The rollouts of each lease that were finished since the last time, one after the other."""
        for name, tokens in progress.items():
            first, end = self._shown.get(name, 0), min(tokens // TOKENS, len(self._leases[name][0].seeds))
            if end > first:
                drawn = pack_tokens(_DRAWN.token_ids), _DRAWN.proofs
                chunks = [ShownChunks(index, 0, *drawn) for index in range(first, end)]
                self._world.hub.showing.show(self._row, name, pack(ShownProgress(chunks), level=1))
                self._shown[name] = end

    def _progress(self) -> dict[str, int]:
        """Tokens so far of each lease: in proportion to the time that has passed."""
        now_s, wanted = self._world.now_s, TOKENS * self._world.scenario.run.group_size
        if not self._crew.delivers and not self._crew.pretends:
            return {}
        if self._crew.pretends:  # one more rollout whenever the lease is about to run out
            each_s = 0.75 * self._world.rules.lease_ms / 1000
            said = {name: TOKENS * int((now_s - began_s) / each_s) for name, (_, began_s) in self._leases.items()}
            return {name: min(wanted, tokens) for name, tokens in said.items()}
        return {
            name: min(wanted, max(0, int(wanted * (1 - (done_s - now_s) / self._pace_s))))
            for name, (_lease, done_s) in self._leases.items()
        }

    def ask(self) -> None:
        life = self._life
        if self._leases and self._crew.delivers:
            return  # it died while it waited, came back, and got work; or a wake-up too many
        self._asked += 1
        name = f"{self.node[:16]}-{self._asked:08d}"
        request = LeaseRequest(request=name, max_units=self._crew.units, held=tuple(self._leases))
        try:
            row = self._world.signed_in(self.node)
            self.kind = self._kind(row)
            reply = retry(lambda: self._world.hub.work.lease(row, request, self._crew.network, self._crew.address))
        except HubDown:
            self._later(RETRY_S, life)
            return
        except Refusal as refusal:
            self._world.counts[refusal.code] += 1
            if refusal.code == "node.suspended":
                until_ms = self._world.known(self.node).until_ms or 0
                left_s = (until_ms - self._world.hub.context.clock.now_ms()) / 1000
                self._later(max(RETRY_S, left_s), life)
            elif self._crew.fresh_keys:
                self.node = ""
                self._life += 1
                self._world.at(RETRY_S, self.arrive)
            return
        for signed in reply.leases:
            self._take(Lease.model_validate(signed.document), life)
        if not reply.leases and not reply.finished:
            self._world.wait(Topic.LEASES, self)

    def _kind(self, row: NodeRow) -> str:
        if not row.on_probation:
            return "established"
        judged = row.rejected + row.unsure
        waits = row.unproven and self._handed_in > judged
        where = f"{self._crew.network} {self._crew.address}"
        return f"newcomer of {where}{', its first group is not judged' if waits else ''}"

    def _later(self, delay_s: float, life: int) -> None:
        self._world.at(delay_s, lambda: self.ask() if life == self._life else None)

    def _take(self, lease: Lease, life: int) -> None:
        self._world.counts["leases"] += 1
        if not self._crew.delivers:
            until_ms = lease.hard_deadline_ms if self._crew.pretends else lease.deadline_ms
            self._leases[lease.lease] = (lease, self._world.now_s)
            left_s = (until_ms - self._world.hub.context.clock.now_ms()) / 1000 + 1
            self._world.at(left_s, lambda: self._let_go(lease, life))
            return
        takes_s = self._pace_s * self._world.random.uniform(0.8, 1.2)
        self._leases[lease.lease] = (lease, self._world.now_s + takes_s)
        self._world.at(takes_s, lambda: self._hand_in(lease, life))

    def _let_go(self, lease: Lease, life: int) -> None:
        if life == self._life and lease.lease in self._leases:
            self._drop(lease)
            self._world.counts["sat"] += 1
            self.ask()

    def _hand_in(self, lease: Lease, life: int) -> None:
        if life != self._life or lease.lease not in self._leases:
            return
        body = pack(submission_of(lease, [_DRAWN] * len(lease.seeds), "simulated"), level=1)
        try:
            row = self._world.signed_in(self.node)
            status, signed = self._world.hub.work.submit(row, lease.lease, body)
        except HubDown:
            self._world.at(RETRY_S, lambda: self._hand_in(lease, life))
            return
        except Refusal as refusal:
            self._world.counts[refusal.code] += 1
        else:
            self._world.counts["receipts" if status == 201 else "again"] += 1
            receipt = Receipt.model_validate(signed.document)
            self._world.receipts[submission_digest(body)] = receipt
            if self._world.random.random() < self._crew.lies:
                self._world.lies.add(receipt.submission)
                self._world.counts["lies"] += 1
        self._handed_in += 1
        self._drop(lease)
        if not self._leases:
            self.ask()

    def _drop(self, lease: Lease) -> None:
        self._leases.pop(lease.lease, None)
        self._shown.pop(lease.lease, None)
