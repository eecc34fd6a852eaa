"""A simulated worker: asks for work, takes its time, submits it. Some lie, some sit on leases, all may die.

arrive ─► ask ─┬─ leases ─► generating (heartbeats with progress) ─► submit ─► ask
               ├─ nothing ─► waits, like a long poll
               ├─ suspended ─► asks again when that is over
               └─ banned ─► gone, or back with a fresh key
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.hub.changes import Topic
from shoal.hub.service import retry
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import NodeRow
from shoal.protocol import Heartbeat, LeaseRequest, pack, submission
from shoal.protocol.submission import Receipt, Rollout, ShownChunks, ShownProgress, pack_tokens, submission_digest
from shoal.simulator.world import RETRY_S, HubDown, WorkerKind, World

TOKENS = 16
_TOKENS, _PROOFS = pack_tokens(range(TOKENS)), bytes(4)
_ROLLOUT = Rollout(tokens=_TOKENS, logprobs=submission.pack_logprobs([-0.5] * TOKENS), finish="eos", proofs=_PROOFS)


@dataclass
class Generating:
    """A lease at work: its document, when it will be done (or was begun, by one who does not deliver), and how many
    of its rollouts the hub was shown."""

    lease: dict[str, Any]
    at_s: float
    shown: int = 0


class SimulatedWorker:
    """One machine. `_life` grows with every death: what an earlier life had planned does not happen."""

    def __init__(self, world: World, crew: WorkerKind) -> None:
        self._world, self._crew = world, crew
        self._pace_s = crew.group_s * math.exp(world.random.gauss(0, crew.spread))  # all its life
        self._life = self._asked = 0
        self._submitted = 0  # by its present key
        self._work: dict[str, Generating] = {}
        self.node = ""
        self.kind = "newcomer"

    def arrive(self) -> None:
        world, crew = self._world, self._crew
        if not self.node:
            self.node = world.register(world.key(f"worker/{world.counts['keys']}"))
            world.counts["keys"] += 1
            self._submitted = 0
            if crew.proven:
                world.prove(self.node)
        self._row = world.known(self.node)
        self._life += 1
        life = self._life
        world.at(world.about(crew.lives_s), lambda: self._die(life))
        world.at(world.random.uniform(0, world.scenario.heartbeat_s), lambda: self._beat(life))
        self.ask()

    def _die(self, life: int) -> None:
        if life == self._life:
            self._world.counts["deaths"] += 1
            self._life += 1
            self._work.clear()
            self._world.at(self._world.about(self._crew.away_s), self.arrive)

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
        """Tokens so far of each lease: in proportion to the time that has passed."""
        now_s, wanted = self._world.now_s, TOKENS * self._world.scenario.run.group_size
        if self._crew.delivers:
            shares = {name: 1 - (work.at_s - now_s) / self._pace_s for name, work in self._work.items()}
            return {name: min(wanted, max(0, int(wanted * share))) for name, share in shares.items()}
        if self._crew.pretends:  # one more rollout whenever the lease is about to run out
            each_s = 0.75 * self._world.rules.lease_ms / 1000
            return {n: min(wanted, TOKENS * int((now_s - work.at_s) / each_s)) for n, work in self._work.items()}
        return {}

    def ask(self) -> None:
        life, world, crew = self._life, self._world, self._crew
        if self._work and crew.delivers:
            return  # it died while it waited, came back, and got work; or a wake-up too many
        self._asked += 1
        name = f"{self.node[:16]}-{self._asked:08d}"
        request = LeaseRequest(request=name, max_units=crew.units, held=tuple(self._work))
        try:
            row = world.signed_in(self.node)
            self.kind = self._kind(row)
            reply = retry(lambda: world.hub.work.lease(row, request, crew.network, crew.address))
        except HubDown:
            self._later(RETRY_S, life)
            return
        except Refusal as refusal:
            world.counts[refusal.code] += 1
            if refusal.code == "node.suspended":
                left_s = ((world.known(self.node).until_ms or 0) - world.hub.context.clock.now_ms()) / 1000
                self._later(max(RETRY_S, left_s), life)
            elif crew.fresh_keys:
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
        where = f"{self._crew.network} {self._crew.address}"
        return f"newcomer of {where}{', its first group is not judged' if waits else ''}"

    def _later(self, delay_s: float, life: int) -> None:
        self._world.at(delay_s, lambda: self.ask() if life == self._life else None)

    def _take(self, lease: dict[str, Any], life: int) -> None:
        world, name = self._world, lease["lease"]
        world.counts["leases"] += 1
        if self._crew.delivers:
            takes_s = self._pace_s * world.random.uniform(0.8, 1.2)
            self._work[name] = Generating(lease, world.now_s + takes_s)
            world.at(takes_s, lambda: self._submit(name, life))
            return
        until_ms = lease["hard_deadline_ms" if self._crew.pretends else "deadline_ms"]
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
        made = submission.Submission(
            format=submission.SUBMISSION_FORMAT, run=lease["run"], node=lease["node"], lease=name, unit=lease["unit"],
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
            if world.random.random() < self._crew.lies:
                world.lies.add(submission_digest(body))
                world.counts["lies"] += 1
        self._submitted += 1
        del self._work[name]
        if not self._work:
            self.ask()
