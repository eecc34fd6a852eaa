"""Trusted workers beside others in long random walks: certificates that end, samples that fail, keys that are revoked.

The rules and invariants are those of the whole hub (`test_hub_machine`). Hypothesis seldom reaches a failed sample
with accepted, waiting and unfinished groups beside it, so that the steps are drawn here, by seed and weight.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis.stateful import invariant
from test_hub_machine import HubMachine

from kit.hub import ROOT, RUN_ID
from shoal.hub.service.stories import evidence_of
from shoal.hub.state.rows import NodeRow
from shoal.hub.storage import Reader
from shoal.ledger.chain import Chain
from shoal.ledger.evidence import Keys, Proofs, check_rows, read_first_row
from shoal.protocol import Evidence, LedgerEntry, NodeState, Outcome, Severity


class Book:
    """A hub's ledger with its documents, as `shoal ledger verify` reads one."""

    label, root_key = "the hub", ROOT.public_key

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def entries(self) -> Iterator[LedgerEntry]:
        yield from self._reader.ledger_after(-1, 10**6)

    def evidence(self, entries: Sequence[LedgerEntry]) -> dict[int, Evidence]:
        return {each.row: each for each in evidence_of(self._reader, entries)}


STEPS = {"lease": 6, "submit": 9, "claim": 4, "judge": 9, "train": 3, "time": 2, "restart": 0.5, "revoke": 0.5}
SEEDS, LENGTH = 12, 200


class TrustedWalk(HubMachine):
    groups_per_step = 3

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.more_settings = {"trusted_audit": self.random.choice([0.05, 0.5])}
        self.begin(self.random.randrange(3), 2, self.random.choice(["all", "reputation"]), 0.25)
        self.revoked: dict[str, int] = {}  # and how many batches there were at that time
        self.seen = Counter[str]()

    @property
    def trusted_here(self) -> list[NodeRow]:
        known = [self.play._node(row.node) for row in self.play.workers if row.certified]
        return [row for row in known if row.state != NodeState.BANNED]

    def step(self) -> None:
        draw, play = self.random, self.play
        if not self.trusted_here and len(play.workers) < 12:
            play.join_trusted(draw.choice([20, 300, 10**6]))
        (what,) = draw.choices(list(STEPS), list(STEPS.values()))
        known, who = {row.node for row in play.workers if row.certified}, draw.randrange(len(play.workers))
        if what == "lease":
            self.lease(who, draw.randint(1, 4))
        elif what == "submit" and play.leases:
            self.submit(-1 - draw.randrange(min(8, len(play.leases))), "")
        elif what == "judge" and play.audits:
            audit = draw.choice(play.audits[-8:])
            is_trusted = audit.lease.document["node"] in known
            weights = [30, 1 + is_trusted, 1 + is_trusted]
            (outcome,) = draw.choices([Outcome.ACCEPTED, Outcome.UNSURE, Outcome.REJECTED], weights)
            self.rule_on(audit, outcome, draw.random() < 0.9, draw.choice(list(Severity)))
            self.seen[f"{outcome.value} {audit.depth}"] += is_trusted
        elif what == "revoke" and self.trusted_here:
            play.revoke(draw.choice(self.trusted_here))
        elif what == "time":
            self.let_time_pass(draw.choice([1, 5, 30]))
        elif what in ("claim", "train", "restart"):
            {"claim": lambda: self.claim(draw.randint(1, 4)), "train": self.train, "restart": self.restart}[what]()

    @invariant()
    def nothing_of_a_revoked_node_is_trained_on_afterwards(self) -> None:
        for row in self.play.workers:
            if row.certified and self.play._node(row.node).state == NodeState.BANNED:
                since = self.revoked.setdefault(row.node, len(self.batches))
                late = [batch for step, batch in self.batches.items() if step >= since]
                assert row.node not in {group.node for batch in late for group in batch.groups}
                assert self.play.stored.light_audits(row.node) == self.play.stored.untrained(row.node) == []

    @invariant()
    def batches_say_how_each_group_was_audited(self) -> None:
        trusted = {row.node for row in self.play.workers if row.certified} | {self.play.validator.node}
        for group in (group for batch in self.batches.values() for group in batch.groups):
            assert group.audit == self.play.stored.submission(group.submission).depth
            assert group.audit == "full" or group.node in trusted or self.play.rules.audit == "reputation"

    @invariant()
    def nothing_is_given_to_or_taken_of_a_node_whose_certificate_ended(self) -> None:
        ends_ms = {row.node: row.expires_at_ms for row in self.play.workers if row.certified}
        for lease in self.play.leases:
            if lease.node in ends_ms:
                answer = self.play.stored.submission_of_lease(lease.lease)
                last_ms = lease.issued_at_ms if answer is None else answer.received_at_ms
                assert last_ms < ends_ms[lease.node]

    def check(self) -> None:
        for each in self.invariants:
            each.function(self)
        if self.play.stored.outbox_length() == 0:
            with self.play.storage.read() as reader:
                checked = read_first_row(Book(reader), needs_documents=True)
                check_rows(Book(reader), checked, Proofs(Keys(RUN_ID, ROOT.public_key), Chain()))


def test_nothing_of_a_revoked_worker_is_trained_on_and_nothing_unaudited_is_paid() -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        walk = TrustedWalk(seed)
        for _ in range(LENGTH):
            walk.step()
            walk.check()
        walk.teardown()
        seen += walk.seen + Counter(revoked=len(walk.revoked), batches=len(walk.batches))
    assert min(seen[f"{outcome} {depth}"] for outcome in ("accepted", "rejected") for depth in ("light", "full")) > 0
    assert min(seen["revoked"], seen["batches"]) > SEEDS // 2
