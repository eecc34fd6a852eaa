"""The whole hub under random interleavings: what must hold after every single call."""

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kit.hub import earned
from kit.machine import Play
from shoal import ledger
from shoal.hub.state import Refusal, newcomers, nodes
from shoal.hub.state.orders import REVOKED
from shoal.hub.state.rows import UNDECIDED_SUBMISSIONS, LeaseState, Moment, SubmissionState, UnitState
from shoal.hub.state.units import TRUSTED_AFTER, VOID_ATTEMPTS
from shoal.protocol import Audit, Batch, Lease, NodeState, Outcome, Receipt, Severity
from shoal.simulator import problems

INDEX = st.integers(0, 10**6)
PROVEN = 100  # audited fully one time in ten


class HubMachine(RuleBasedStateMachine):
    """Workers, a validator and a trainer that do anything at any time, honest or not."""

    more_settings: Mapping[str, float] = {}
    groups_per_step = 2

    @initialize(
        staleness=st.integers(0, 2), refill_cap=st.integers(0, 2), audit=st.sampled_from(["all", "reputation"]),
        share=st.sampled_from([0.0, 0.25, 1.0]),
    )  # fmt: skip
    def begin(self, staleness: int, refill_cap: int, audit: str, share: float) -> None:
        self.folder = tempfile.TemporaryDirectory()
        run = {"steps": 4, "groups_per_step": self.groups_per_step, "max_staleness": staleness}
        settings = {"refill_cap": refill_cap, "leases_per_node": 5}
        settings |= {"lease_s": 60, "lease_hard_s": 100, "audit": audit, "newcomer_share": share, **self.more_settings}
        self.play = Play(Path(self.folder.name), run, settings, credit_window_s=45)
        self.play.join(streak=PROVEN)
        self.drawn: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.receipts: dict[str, Receipt] = {}
        self.accepted_tokens: dict[str, int] = {}
        self.batches: dict[int, Batch] = {}
        self.lies: set[str] = set()  # what a validator has rejected for sure
        self.incarnation = 0
        self.play.announce(0)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(streak=st.sampled_from([0, PROVEN]))
    @precondition(lambda self: len(self.play.workers) < 4)
    def join(self, streak: int) -> None:
        self.play.join(streak)

    @rule()
    def restart(self) -> None:
        self.play.restart()

    @rule(who=INDEX, count=st.integers(1, 4))
    def lease(self, who: int, count: int) -> None:
        worker = self.play.workers[who % len(self.play.workers)]
        before = self.play._node(worker.node)
        progress, in_hand = self.play.stored.progress(), self.play.stored.newcomers_in_hand(worker.node)
        now_ms = self.play.hub.context.clock.now_ms()
        bounded = before.on_probation and self.play.rules.newcomer_share < 1
        bounded = bounded and self.play.stored.is_established_here(now_ms - newcomers.HERE_MS)
        found = self.play.lease(worker, count)
        assert not (before.state == NodeState.BANNED and found), "a banned node gets no work"
        if before.state == NodeState.SUSPENDED and found:
            assert before.until_ms is not None
            assert before.until_ms <= now_ms, "nor does a suspended one"
            assert self.play._node(worker.node).state == NodeState.ACTIVE
        if bounded:
            most = newcomers.most_in_hand(Moment(self.play.rules, progress, 0))
            assert len(found) <= max(0, most - sum(in_hand.networks.values())), "newcomers keep to their share"
        for lease in found:
            self.check_draw(lease)

    @rule(who=INDEX, count=st.integers(1, 4), useful=st.lists(st.booleans(), min_size=4, max_size=4))
    def work_well(self, who: int, count: int, useful: list[bool]) -> None:
        """Lease, submit and judge without a hitch, so that runs get far."""
        self.lease(who, count)
        for index in range(max(0, len(self.play.leases) - count), len(self.play.leases)):
            self.submit(index, "")
        for audit, is_useful in zip(self.play.claim(4), useful, strict=False):
            self.rule_on(audit, Outcome.ACCEPTED, is_useful, None)

    @rule()
    def train(self) -> None:
        """What a trainer does all day."""
        before = len(self.batches)
        self.ask_for_a_batch(0)
        if len(self.batches) > before:
            self.announce_the_next_version()

    @rule(which=INDEX)
    @precondition(lambda self: self.play.leases)
    def repeat_a_lease_request(self, which: int) -> None:
        lease = self.play.leases[which % len(self.play.leases)]
        request = self.play.stored.holding(lease.lease).lease.request
        worker = next(row for row in self.play.workers if row.node == lease.node)
        assert lease in self.play.lease(worker, 4, request=request)

    @rule(which=INDEX, engine=st.sampled_from(["", "", "", "other"]))
    @precondition(lambda self: self.play.leases)
    def submit(self, which: int, engine: str) -> None:
        lease = self.play.leases[which % len(self.play.leases)]
        result = self.play.submit(lease, engine)
        if isinstance(result, Refusal):
            assert result.status in (403, 409, 410)
            return
        receipt = Receipt.model_validate(result.document)
        assert self.receipts.setdefault(receipt.submission, receipt) == receipt

    @rule(who=INDEX, count=st.integers(1, 4), useful=st.lists(st.booleans(), min_size=4, max_size=4))
    def work_well_again(self, who: int, count: int, useful: list[bool]) -> None:
        self.work_well(who, count, useful)
        self.train()

    @rule(which=INDEX)
    @precondition(lambda self: self.play.leases)
    def release(self, which: int) -> None:
        self.play.release(self.play.leases[which % len(self.play.leases)])

    @rule(which=INDEX, tokens=st.integers(-1, 50))
    @precondition(lambda self: self.play.leases)
    def go_on_with_a_lease(self, which: int, tokens: int) -> None:
        """A heartbeat that says how far a lease is, true or not, one's own or another's."""
        lease = self.play.leases[which % len(self.play.leases)]
        worker = self.play.workers[tokens % len(self.play.workers)]
        before = self.play.stored.holding(lease.lease)
        reply = self.play.beat(worker, {lease.lease: tokens})
        after = self.play.stored.holding(lease.lease)
        assert after.lease.deadline_ms <= max(lease.deadline_ms, lease.hard_deadline_ms)
        if after.lease != before.lease:
            assert (before.lease.node, before.lease.state) == (worker.node, LeaseState.ACTIVE)
            assert after.lease.progress > before.lease.progress, "only progress renews"
            assert reply.deadlines == {lease.lease: after.lease.deadline_ms}
            assert after.lease.deadline_ms >= before.lease.deadline_ms

    @rule(who=INDEX, seconds=st.sampled_from([None, 1, 30, 1000]))
    def suspend(self, who: int, seconds: int | None) -> None:
        worker = self.play.workers[who % len(self.play.workers)]
        for_ms = None if seconds is None else seconds * 1000
        refusal = self.play.sanction(worker, lambda row, _, now_ms: nodes.suspend(row, "owner", now_ms, for_ms))
        assert (refusal is not None) == (self.play._node(worker.node).state == NodeState.BANNED)

    @rule(who=INDEX)
    def pardon(self, who: int) -> None:
        worker = self.play.workers[who % len(self.play.workers)]
        before = self.play._node(worker.node)
        assert self.play.sanction(worker, lambda row, _, now_ms: nodes.pardon(row, "owner", now_ms)) is None
        after = self.play._node(worker.node)
        assert after.state == NodeState.ACTIVE
        assert (after.credit, after.pending) == (before.credit, before.pending)
        if before.state != NodeState.ACTIVE:
            assert (after.strikes, after.on_probation) == (0, True)

    @rule(seconds=st.sampled_from([1, 1, 1, 30, 61]))
    def let_time_pass(self, seconds: int) -> None:
        self.play.clock.advance(seconds)
        self.play.hub.upkeep.tick()

    @rule(count=st.integers(1, 4))
    def claim(self, count: int) -> None:
        self.play.claim(count)

    @rule(
        which=INDEX,
        outcome=st.sampled_from([*[Outcome.ACCEPTED] * 5, Outcome.REJECTED, Outcome.UNSURE]),
        useful=st.sampled_from([True, True, True, False]),
        severity=st.sampled_from([None, Severity.STATISTICAL, Severity.CERTAIN]),
    )
    @precondition(lambda self: self.play.audits)
    def judge(self, which: int, outcome: Outcome, useful: bool, severity: Severity | None) -> None:
        self.rule_on(self.play.audits[which % len(self.play.audits)], outcome, useful, severity)

    def rule_on(self, audit: Audit, outcome: Outcome, useful: bool, severity: Severity | None) -> None:
        rewards = (0.0, 1.0) if useful else (0.0, 0.0)
        row = self.play.stored.submission(audit.submission)
        struck = self.play._node(row.node).strikes
        refusal = self.play.judge(audit, outcome, rewards, severity if outcome == Outcome.REJECTED else None)
        if refusal is not None:
            assert refusal.code == "verdict.decided" or (refusal.code, audit.depth) == ("verdict.depth", "light")
        elif outcome == Outcome.ACCEPTED and self.play._node(row.node).is_unpaid(audit.depth):
            self.accepted_tokens[audit.submission] = 0
        elif outcome == Outcome.ACCEPTED:
            self.accepted_tokens[audit.submission] = Lease.model_validate(audit.lease.document).unit % 5 + 1
        if refusal is None and self.play._node(row.node).strikes > struck:
            self.lies.add(audit.submission)
            self.check_that_nothing_is_left(Lease.model_validate(audit.lease.document).node)

    @rule(answers=st.sampled_from(["", "", "other", None]), useful=st.booleans())
    def generate_as_a_validator(self, answers: str | None, useful: bool) -> None:
        """What nobody could judge twice: generated and judged, or left."""
        before = [lease.lease for lease in self.play.entrusted]
        for lease in self.play.entrust():
            self.check_draw(lease)
            assert self.play.stored.holding(lease.lease).unit.failures >= TRUSTED_AFTER
        if answers is None:
            self.play.entrust(left=tuple(before))
            return
        for lease in self.play.entrusted:
            result = self.play.submit(lease, answers)
            if not isinstance(result, Refusal):
                receipt = Receipt.model_validate(result.document)
                self.receipts.setdefault(receipt.submission, receipt)
        for audit in self.play.claim(4):
            if audit.trusted:
                assert audit.depth == "light"
                self.rule_on(audit, Outcome.ACCEPTED, useful, None)

    @rule(who=INDEX)
    def make_groups_unsure(self, who: int) -> None:
        """A worker whose groups nobody can judge, again and again."""
        for _ in range(4):
            self.lease(who, 2)
            for index in range(max(0, len(self.play.leases) - 2), len(self.play.leases)):
                self.submit(index, "")
            for audit in self.play.claim(4):
                if not audit.trusted:
                    self.rule_on(audit, Outcome.UNSURE, True, None)

    @invariant()
    def only_validators_can_give_a_unit_up(self) -> None:
        """And only they hold what was unsure twice."""
        validator = self.play.validator.node
        with self.play.storage.read() as reader:
            ours = {lease.unit for lease in self.play.entrusted}
            units = reader.units_named(list(self.drawn))
            assert {row.unit for row in units.values() if row.reason == VOID_ATTEMPTS} <= ours
            for held in reader.holdings():
                assert (held.unit.failures >= TRUSTED_AFTER) == (held.lease.node == validator)

    def check_that_nothing_is_left(self, node: str) -> None:
        """After a failed audit nothing of its node is trained on, or paid, that was not looked at closely."""
        row = self.play._node(node)
        untrained = self.play.stored.untrained(node)
        assert (self.play.stored.light_audits(node), self.play.stored.pending_credit(node)) == ([], [])
        assert (row.pending, row.streak) == (0, 0)
        assert all(filled.submission.depth == "full" for filled in untrained)
        if (row.certified or self.play.rules.audit == "reputation") and row.state == NodeState.BANNED:
            assert untrained == []

    @rule(who=INDEX, severity=st.sampled_from(list(Severity)))
    def catch_a_cheat(self, who: int, severity: Severity | None) -> None:
        """A node that holds other leases too is rejected: those must go to others."""
        self.lease(who, 3)
        worker = self.play.workers[who % len(self.play.workers)]
        own = [index for index, lease in enumerate(self.play.leases) if lease.node == worker.node]
        if own:
            self.submit(own[-1], "")
        for audit in self.play.claim(4):
            self.rule_on(audit, Outcome.REJECTED, True, severity)

    @rule(who=INDEX, severity=st.sampled_from([None, *Severity]))
    def wake_a_sleeper(self, who: int, severity: Severity | None) -> None:
        """A node whose groups were just accepted is rejected before they are trained on."""
        self.work_well(who, 2, [True] * 4)
        self.catch_a_cheat(who, severity)

    @rule(ahead=st.sampled_from([0, 0, 0, 1, -1]))
    def ask_for_a_batch(self, ahead: int) -> None:
        step = len(self.batches) + ahead
        if step < 0:
            return
        result = self.play.batch(step)
        if isinstance(result, Refusal):
            assert result.code in ("batch.order", "batch.finished")
        elif result is not None:
            assert self.batches.setdefault(step, result) == result, "a batch never changes"

    @rule()
    def announce_the_next_version(self) -> None:
        self.play.announce(len(self.batches), self.incarnation)

    @rule(back=st.integers(0, 2))
    @precondition(lambda self: self.incarnation < 2)
    def resume_as_a_new_incarnation(self, back: int) -> None:
        self.incarnation += 1
        assert self.play.announce(max(0, len(self.batches) - back), self.incarnation) is None

    def check_draw(self, lease: Lease) -> None:
        draw = (lease.task, lease.seeds)
        assert self.drawn.setdefault(lease.unit, draw) == draw, "a unit keeps its task and its seeds"

    @invariant()
    def what_holds_in_every_simulated_run_holds(self) -> None:
        self.play.hub.posting.post()
        play, seen = self.play, {"receipts": self.receipts, "batches": self.batches, "lies": self.lies}
        world = SimpleNamespace(storage=play.storage, blobs=play.blobs, rules=play.rules, counts=Counter(), **seen)
        assert [each for each in problems(world) if REVOKED not in each] == []  # type: ignore[arg-type]

    @invariant()
    def batches_hold_accepted_groups(self) -> None:
        with self.play.storage.read() as reader:
            for step, batch in self.batches.items():
                for group in batch.groups:
                    assert group.policy.version <= step
                    assert group.submission in self.accepted_tokens
                    filled = reader.submission(group.submission)
                    assert filled.state == SubmissionState.ACCEPTED, "what is in a batch is not pulled, nor the reverse"
                    row = reader.unit(group.unit)
                    assert row.step == step
                    assert row.state in (UnitState.ACCEPTED, UnitState.TRAINED)
                assert len({group.policy.incarnation for group in batch.groups}) <= 1, "incarnations never mix"

    @invariant()
    def credit_is_the_sum_of_accepted_tokens_exactly_once(self) -> None:
        self.play.hub.posting.post()
        with self.play.storage.read() as reader:
            accounts, nodes = ledger.fold(reader.ledger_after(-1, 10**6)), reader.nodes()
        assert earned(accounts) == sum(self.accepted_tokens.values())
        if self.play.rules.audit == "all":
            assert accounts.total_credit == earned(accounts)
        for node in nodes:
            account = accounts.by_node.get(node.node, ledger.Account())
            assert account.banned == (node.state == NodeState.BANNED and node.on_chain)

    @invariant()
    def nobody_holds_more_than_its_window_ever_allowed(self) -> None:
        rules = self.play.rules
        for row in self.play.stored.nodes():
            assert 1 <= nodes.window(rules, row) <= rules.leases_per_node
            assert 0 <= row.lapses <= row.lapsed
            assert (row.until_ms is not None) == (row.state == NodeState.SUSPENDED)
            assert row.pending >= 0

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every lease is at work, answered or over; every unit that waits for a verdict waits for one that comes."""
        now_ms = self.play.hub.context.clock.now_ms()
        with self.play.storage.read() as reader:
            for lease in self.play.leases:
                held = reader.holding(lease.lease)
                assert (held.lease.ended_at_ms is None) == (held.lease.state == LeaseState.ACTIVE)
                assert held.lease.ended_at_ms is None or held.lease.ended_at_ms <= now_ms
                answer = reader.submission_of_lease(lease.lease)
                assert (held.lease.state == LeaseState.SUBMITTED) == (answer is not None)
            waiting = reader.submissions_in(UNDECIDED_SUBMISSIONS, 10**6)
            filled = {unit.submission for unit in reader.alive_units() if unit.state == UnitState.SUBMITTED}
        assert filled <= {row.submission for row in waiting}

    @invariant()
    def the_status_can_always_be_told(self) -> None:
        status = self.play.hub.reporting.status()
        assert status.finished == (status.policy is not None and status.policy.version >= 4)
        assert sum(count for state, count in status.units.items() if not state.startswith("void_")) == len(self.drawn)


HubMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHubMachine = HubMachine.TestCase
