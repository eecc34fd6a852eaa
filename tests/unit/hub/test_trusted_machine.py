"""Trusted workers among all others, under random interleavings: expiry, samples that fail, keys that are revoked."""

from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_hub_machine import INDEX, HubMachine

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


class TrustedMachine(HubMachine):
    groups_per_step = 4

    @initialize(
        staleness=st.integers(0, 2), refill_cap=st.integers(0, 2), audit=st.sampled_from(["all", "reputation"]),
        share=st.sampled_from([0.0, 0.25, 1.0]), sampled=st.sampled_from([0.05, 0.5]),
    )  # fmt: skip
    def begin(self, staleness: int, refill_cap: int, audit: str, share: float, sampled: float) -> None:
        self.sampled = sampled
        super().begin(staleness, refill_cap, audit, share)
        self.revoked: dict[str, int] = {}  # and how many batches there were at that time
        self.play.join_trusted()

    @property
    def more_settings(self) -> dict[str, float]:
        return {"trusted_audit": self.sampled}

    @rule(for_s=st.sampled_from([20, 90, 10**6]))
    @precondition(lambda self: len(self.play.workers) < 6)
    def join_trusted(self, for_s: int) -> None:
        self.play.join_trusted(for_s)

    @rule(who=INDEX)
    def pardon(self, who: int) -> None:
        """The hub refuses to pardon a trusted worker."""
        if not self.play.workers[who % len(self.play.workers)].certified:
            super().pardon(who)

    @property
    def trusted_here(self) -> list[NodeRow]:
        known = [self.play._node(row.node) for row in self.play.workers if row.certified]
        return [row for row in known if row.state != NodeState.BANNED]

    @rule(who=INDEX)
    @precondition(lambda self: self.trusted_here)
    def revoke(self, who: int) -> None:
        self.play.revoke(self.trusted_here[who % len(self.trusted_here)])

    @rule(fails=st.sampled_from([None, *Severity]))
    @precondition(lambda self: self.trusted_here)
    def trust_a_worker_that_fails_or_is_revoked_before_a_batch(self, fails: Severity | None) -> None:
        """Some of its groups are accepted, some wait for an audit, one is in one, and one is being generated."""
        worker = self.trusted_here[-1]
        index = next(place for place, row in enumerate(self.play.workers) if row.node == worker.node)
        self.work_well(index, 2, [True] * 4)
        self.lease(index, 3)
        for lease in [lease for lease in self.play.leases if lease.node == worker.node][:-1]:
            self.play.submit(lease)
        own = [audit for audit in self.play.claim(2) if audit.lease.document["node"] == worker.node]
        if fails and own:
            self.rule_on(own[0], Outcome.REJECTED, True, fails)
        else:
            self.play.revoke(worker)

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

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.hub.posting.post()
            with self.play.storage.read() as reader:
                checked = read_first_row(Book(reader), needs_documents=True)
                check_rows(Book(reader), checked, Proofs(Keys(RUN_ID, ROOT.public_key), Chain()))
        super().teardown()


TrustedMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTrustedMachine = TrustedMachine.TestCase
