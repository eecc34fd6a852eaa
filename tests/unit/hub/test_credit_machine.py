"""Credit under random interleavings of work, verdicts, time and crashes, through the real services on SQLite.

    call ─► point ─ ✝ Died ─► the transaction is undone, what the process knew is gone ─► the folder is opened again
                              └► the caller may ask once more, or never know

Deaths here are exceptions that nothing in the hub catches, so that thousands fit into a second; the same points with
real processes and SIGKILL are in tests/integration/test_crash_hub.py.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kit.machine import Play
from shoal import ledger
from shoal.hub.service import Hub
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import UNDECIDED_SUBMISSIONS, SubmissionRow, SubmissionState
from shoal.protocol import Audit, Lease, NodeState, Outcome, Receipt, Severity
from shoal.runtime import crash

INDEX = st.integers(0, 10**6)
AGAIN = st.booleans()
OUTCOMES = st.sampled_from([*[Outcome.ACCEPTED] * 5, Outcome.REJECTED, Outcome.UNSURE])
WINDOW_S = 45
PROVEN = 100  # audited fully one time in ten


class Died(BaseException):
    """In the place of a death of the process: no code of ours catches it."""


def deaths(*prefixes: str) -> st.SearchStrategy[str]:
    """Nothing, or a crash point that the call may reach."""
    return st.sampled_from(["", *(name for name in crash.POINTS if name.startswith(prefixes))])


class SqlitePlay(Play):
    """The stage over a real folder. `restart` forgets everything but what is on disk, as a death does."""

    def restart(self) -> None:
        if hasattr(self, "hub"):
            self.storage.close()  # and not the hub: that would be told to stop, and have the time to tidy up
        self.hub = Hub(self.config, self.clock)
        self.storage = self.hub.context.storage  # type: ignore[assignment]


class CreditMachine(RuleBasedStateMachine):
    """Workers, a validator and a trainer whose hub may die at any point of any call."""

    @initialize(staleness=st.integers(0, 2), audit=st.sampled_from(["all", "reputation", "reputation"]))
    def begin(self, staleness: int, audit: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.die, crash.die = crash.die, _raise
        run = {"steps": 3, "groups_per_step": 2, "max_staleness": staleness}
        self.play = SqlitePlay(
            Path(self.folder.name), run, {"audit": audit, "credit_window_s": WINDOW_S, "newcomer_share": 1.0}
        )
        self.play.join(streak=PROVEN)
        self.play.join()
        self.receipts: dict[str, Receipt] = {}
        self.ruled: dict[str, Outcome] = {}  # verdicts that the hub has confirmed
        self.history: list[tuple[str, dict[str, Any], int]] = []
        self.play.announce(0)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            crash.arm({})
            crash.die = self.die
            if hasattr(self, "play"):
                self.play.hub.close()
            self.folder.cleanup()

    def perform(self, call: Callable[[], Any], death: str, again: bool) -> Any:
        """What the call answers; None if the hub died of it and nobody asked again."""
        crash.arm({crash.CRASH_AT: death})
        try:
            return call()
        except Died:
            self.play.restart()
            return self.perform(call, "", again) if again else None
        finally:
            crash.arm({})

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────

    @rule(in_order=st.booleans())
    def restart(self, in_order: bool) -> None:
        if in_order:
            self.play.hub.close()
        self.play.restart()

    @rule(who=INDEX, count=st.integers(1, 3), lost=deaths("hub.lease."), death=deaths("hub.submit."), again=AGAIN)
    def work(self, who: int, count: int, lost: str, death: str, again: bool) -> None:
        worker = self.play.workers[who % len(self.play.workers)]
        for lease in self.perform(lambda: self.play.lease(worker, count), lost, again) or []:
            self.hand_in(lease, death, again)

    @rule(which=INDEX, death=deaths("hub.submit."), again=AGAIN)
    @precondition(lambda self: self.play.leases)
    def submit(self, which: int, death: str, again: bool) -> None:
        """Any lease there ever was, also one that was handed in, ran out or whose answer was lost."""
        self.hand_in(self.play.leases[which % len(self.play.leases)], death, again)

    def hand_in(self, lease: Lease, death: str, again: bool) -> None:
        result = self.perform(lambda: self.play.submit(lease), death, again)
        if result is not None and not isinstance(result, Refusal):
            receipt = Receipt.model_validate(result.document)
            assert self.receipts.setdefault(receipt.submission, receipt) == receipt

    @rule(
        outcomes=st.lists(OUTCOMES, max_size=4),
        severity=st.sampled_from([None, *Severity]),
        lost=deaths("hub.audit."),
        death=deaths("hub.verdict."),
        again=AGAIN,
    )
    def judge(self, outcomes: list[Outcome], severity: Severity | None, lost: str, death: str, again: bool) -> None:
        claimed = self.perform(self.play.claim, lost, again) or []
        for audit, outcome in zip(claimed, outcomes, strict=False):
            self.rule_on(audit, outcome, severity if outcome is Outcome.REJECTED else None, death, again)

    @rule(which=INDEX, outcome=st.sampled_from(list(Outcome)), death=deaths("hub.verdict."), again=AGAIN)
    @precondition(lambda self: self.play.audits)
    def judge_late_or_twice(self, which: int, outcome: Outcome, death: str, again: bool) -> None:
        self.rule_on(self.play.audits[which % len(self.play.audits)], outcome, None, death, again)

    def rule_on(self, audit: Audit, outcome: Outcome, severity: Severity | None, death: str, again: bool) -> None:
        taken = self.perform(lambda: self.play.judge(audit, outcome, (0.0, 1.0), severity) or True, death, again)
        if taken is True:
            assert self.ruled.setdefault(audit.submission, outcome) == outcome, "the first verdict stands"

    @rule(lost=deaths("hub.batch."), death=deaths("hub.policy."), again=AGAIN)
    def train(self, lost: str, death: str, again: bool) -> None:
        with self.play.storage.read() as reader:
            step = reader.progress().next_step
        batch = self.perform(lambda: self.play.batch(step), lost, again)
        if batch is not None and not isinstance(batch, Refusal):
            self.perform(lambda: self.play.announce(step + 1), death, again)

    @rule(who=INDEX, death=deaths("hub.credit."), posted=deaths("hub.ledger."), again=AGAIN)
    def work_well_and_be_paid(self, who: int, death: str, posted: str, again: bool) -> None:
        """The whole way of credit, so that examples get there; only its end is dangerous."""
        self.work(who, 2, "", "", False)
        self.judge([Outcome.ACCEPTED] * 4, None, "", "", False)
        self.let_time_pass(WINDOW_S, death, again)
        self.post(posted, again)

    @rule(seconds=st.sampled_from([1, WINDOW_S, 2 * WINDOW_S]), death=deaths("hub.credit.", "hub.ledger."), again=AGAIN)
    def let_time_pass(self, seconds: int, death: str, again: bool) -> None:
        """Credit matures, the outbox is posted: nobody asks for it, so nobody asks again but the next second."""
        self.play.clock.advance(seconds)
        self.perform(lambda: self.play.hub.upkeep.tick(), death, again)

    @rule(death=deaths("hub.ledger."), again=AGAIN)
    def post(self, death: str, again: bool) -> None:
        self.perform(lambda: self.play.hub.posting.post(), death, again)

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def nothing_is_lost_and_nothing_happens_twice(self) -> None:
        self.records_are_kept_in_order_and_once_wherever_they_are()
        self.every_verdict_is_recorded_once_and_only_as_what_it_was()
        self.what_was_confirmed_is_in_force()
        self.accounts_are_the_sum_of_what_was_accepted()

    def records_are_kept_in_order_and_once_wherever_they_are(self) -> None:
        """Ledger and outbox together only ever grow: posting moves the border between them and nothing else."""
        with self.play.storage.read() as reader:
            entries, outgoing = reader.ledger_after(-1, 10**6), reader.outbox(10**6)
            ledger.verify(entries, ledger.head_of("run", reader.ledger_last()))
        now = [(row.kind, row.body, row.at_ms) for row in (*entries, *outgoing)]
        assert now[: len(self.history)] == self.history
        self.history = now

    def every_verdict_is_recorded_once_and_only_as_what_it_was(self) -> None:
        recorded = Counter((body["submission"], kind) for kind, body, _ in self.history if "submission" in body)
        with self.play.storage.read() as reader:
            rows = [reader.submission(name) for name in self.receipts]
        joined_ms = {body["node"]: at_ms for kind, body, at_ms in self.history if kind == "node"}
        for row in rows:
            assert row is not None, "a receipt is a promise"
            assert self.play.hub.context.blobs.get(row.submission)
            found = {kind: recorded[row.submission, kind] for kind in ("pending", "credit", "void", "rejected")}
            assert found in _records(row, joined_ms.get(row.node)), (row, found)

    def what_was_confirmed_is_in_force(self) -> None:
        with self.play.storage.read() as reader:
            for name, outcome in self.ruled.items():
                row = reader.submission(name)
                assert row is not None
                was = Outcome.ACCEPTED.value if row.state is SubmissionState.PULLED else row.state.value
                assert was == outcome.value

    def accounts_are_the_sum_of_what_was_accepted(self) -> None:
        accounts = ledger.fold(_chained(self.history))
        with self.play.storage.read() as reader:
            nodes = [row for row in reader.nodes() if row.role == "worker"]
            pending = {row.node: reader.pending_credit(row.node) for row in nodes}
            accepted = [reader.submission(body["submission"]) for kind, body, _ in self.history if kind in EARNED]
        earned = Counter[str]()
        for name, tokens in {(row.submission, row.node): row.generated_tokens for row in accepted if row}.items():
            earned[name[1]] += ledger.credit_for(tokens)
        for node in nodes:
            account = accounts.by_node.get(node.node, ledger.Account())
            assert (account.credit, account.pending) == (node.credit, node.pending)
            assert account.credit + account.pending + account.void == earned[node.node]
            assert node.pending == sum(ledger.credit_for(row.generated_tokens) for row in pending[node.node])
            assert account.banned == (node.state is NodeState.BANNED and node.on_chain)


EARNED = ("pending", "credit")


def _raise() -> None:
    raise Died


def _chained(history: list[tuple[str, dict[str, Any], int]]) -> list[Any]:
    """The ledger as it will be once all of the outbox is posted."""
    entries: list[Any] = []
    for kind, body, at_ms in history:
        entries.append(ledger.append(entries[-1] if entries else None, kind, body, at_ms))
    return entries


def _records(row: SubmissionRow, joined_ms: int | None) -> list[dict[str, int]]:
    """What the ledger and its outbox may say about a submission in this state: each at most once. Rejections of before
    its node was in the ledger (`joined_ms`) are not recorded."""
    none = {"pending": 0, "credit": 0, "void": 0, "rejected": 0}
    if row.state in UNDECIDED_SUBMISSIONS or row.state is SubmissionState.UNSURE:
        return [none]
    if row.state is SubmissionState.REJECTED:
        decided_ms = row.decided_at_ms or 0
        before = [] if joined_ms is not None and joined_ms < decided_ms else [none]
        return [*before, *([] if joined_ms is None or joined_ms > decided_ms else [{**none, "rejected": 1}])]
    if row.matures_at_ms is not None:
        return [{**none, "pending": 1}]
    return [{**none, "credit": 1}, {**none, "pending": 1, "credit": 1}, {**none, "pending": 1, "void": 1}]


CreditMachine.TestCase.settings = settings(
    max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCreditMachine = CreditMachine.TestCase
