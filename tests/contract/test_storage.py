"""What every storage must do, run against each implementation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from kit import at_once
from kit.storage import POLICY, Stored, apply, lease, leased, node, post, submission
from shoal import ledger
from shoal.errors import ConfigError, LedgerError, ResourceError
from shoal.hub.state import AddBatch, AddPolicy, AddVerdict, Command, RunProgress, Save, ShownRow, TaskRow
from shoal.hub.state.commands import RaiseAlarm, Record
from shoal.hub.state.rows import EvaluationRow, EvaluationState, LeaseState, Pool, SubmissionState, UnitRow, UnitState
from shoal.hub.storage import Presence, SqliteStorage, StaleRow, Storage
from shoal.protocol import Batch, NodeState, PolicyRef, StepReport, Sums, Tally


def test_new_storage_is_empty(storage: Storage, stored: Stored) -> None:
    assert stored.progress() == RunProgress()
    assert stored.ledger_last() is None
    assert stored.batch(0) is None
    assert stored.unit(0) is None
    assert stored.holding("u0a0") is None
    assert stored.submission("x") is None
    assert stored.policy(0, 0) is None
    assert stored.setting("absent") is None


def test_rows_are_read_as_written(storage: Storage, stored: Stored) -> None:
    unit = UnitRow(3, "t", UnitState.LEASED, attempt=2, failures=1, reason="x")
    row = replace(submission(3), rewards=(0.5, -1.0), generated_tokens=7, message="m", decided_at_ms=9)
    tally = Tally(tokens=9, proofs=2, accidents=1, channels={"mantissa": Sums(seen=0.3, expected=0.1, shared=0.5)})
    known = replace(node(1), pending=5, streak=12, passed=40, record=tally)
    apply(storage, Save(unit, None), Save(lease(3), None), Save(row, None), Save(known, NodeState.ACTIVE))
    assert stored.unit(3) == unit
    assert stored.submission(row.submission) == row
    assert stored.submission_of_lease("u3a0") == row
    assert stored.submissions_named([row.submission, "absent"]) == {row.submission: row}
    holding = stored.holding("u3a0")
    assert (holding.lease, holding.unit) == (lease(3), unit)
    assert stored.node(node(1).node) == known
    assert stored.nodes() == [known, node(2)]


def test_failed_transaction_changes_nothing(storage: Storage, stored: Stored) -> None:
    apply(storage, Record("run", {}, 1))

    def fail_at_the_end() -> None:
        with storage.write(exclusive=True) as transaction:
            (row,) = transaction.outbox(9)
            transaction.post([ledger.append(None, row.kind, row.body, row.at_ms)], row.id)
            task = TaskRow("math/1", groups=1)
            transaction.apply([*leased(0), Record("credit", {"node": "x"}, 1), task])
            transaction.put_setting("key", "value")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_at_the_end()
    assert stored.progress().next_unit == 0
    assert (stored.outbox_length(), stored.ledger_last()) == (1, None)
    assert stored.setting("key") is None
    assert stored.pool_counts() == {}


BATCH = Batch(step=0, groups=(), written_at_ms=1)
SUBMITTED = UnitRow(0, "task-0", UnitState.SUBMITTED)
SHOWN = ShownRow("u0a0", 0, (32, 0), b"a")

CONTRADICTIONS: dict[str, tuple[list[Command], Command]] = {
    "the same unit twice": ([], Save(UnitRow(0, "t"), None)),
    "one submission in two units": ([Save(UnitRow(1, "t", UnitState.SUBMITTED, submission="s"), None)],
        Save(UnitRow(2, "t", UnitState.SUBMITTED, submission="s"), None)),
    "two leases of one attempt": ([], Save(replace(lease(0, who=2), lease="other"), None)),
    "one request, one unit, two leases": ([], Save(lease(0, attempt=1), None)),
    "a lease of no unit": ([], Save(lease(7), None)),
    "a second submission of a lease": ([Save(submission(0), None)], Save(submission(0, name="b"), None)),
    "the same bytes for two leases": ([Save(submission(0), None), *leased(1)],
        Save(submission(1, name=submission(0).submission), None)),
    "a submission of no lease": ([], Save(submission(7), None)),
    "two digests of one version": ([AddPolicy(POLICY, 1)],
        AddPolicy(POLICY.model_copy(update={"digest": "e" * 64}), 1)),
    "two batches of a step": ([AddBatch(BATCH)], AddBatch(BATCH)),
    "two verdicts on a submission": ([Save(submission(0), None), AddVerdict(submission(0).submission, "{}")],
        AddVerdict(submission(0).submission, "{}")),
    "a node registered twice": ([], Save(node(1), None)),
    "a row that is not in that state yet": ([], Save(SUBMITTED, UnitState.OPEN)),
    "a row that has left that state": ([Save(SUBMITTED, UnitState.LEASED)], Save(SUBMITTED, UnitState.LEASED)),
    "two bodies of one part": ([SHOWN], replace(SHOWN, body=b"other")),
    "a part of no lease": ([], replace(SHOWN, lease="u9a0")),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_constraints_hold(storage: Storage, name: str) -> None:
    before, forbidden = CONTRADICTIONS[name]
    apply(storage, *leased(0), *before)
    with pytest.raises(StaleRow):
        apply(storage, forbidden)


def test_progress_counts_units(storage: Storage, stored: Stored) -> None:
    rows = [
        UnitRow(0, "t", UnitState.OPEN), UnitRow(1, "t", UnitState.LEASED), UnitRow(2, "t", UnitState.SUBMITTED),
        UnitRow(3, "t", UnitState.ACCEPTED), UnitRow(4, "t", UnitState.ACCEPTED, step=0),
        UnitRow(5, "t", UnitState.DROPPED, lost_step=0), UnitRow(6, "t", UnitState.DROPPED, lost_step=1),
        UnitRow(7, "t", UnitState.VOID, lost_step=1, reason="attempts"),
        UnitRow(8, "t", UnitState.VOID, reason="stale"), UnitRow(9, "t", UnitState.TRAINED, step=0),
    ]  # fmt: skip
    newest = PolicyRef(incarnation=1, version=0, digest="f" * 64)
    older = PolicyRef(incarnation=0, version=7, digest="e" * 64)
    apply(storage, *(Save(row, None) for row in rows), AddBatch(BATCH), AddPolicy(newest, 1), AddPolicy(older, 2))
    progress = stored.progress()
    assert progress == RunProgress(policy=newest, next_step=1, next_unit=10, alive=4, dropped=1, failed=1)
    assert [row.unit for row in stored.alive_units()] == [0, 1, 2, 3]
    undecided = {UnitState.OPEN: 1, UnitState.LEASED: 1, UnitState.SUBMITTED: 1}
    assert stored.alive_counts() == {**undecided, UnitState.ACCEPTED: 1}
    assert [row.unit for row in stored.batched_units()] == [4]
    counts = stored.unit_counts()
    assert (counts["void"], counts["void_stale"], counts["void_attempts"], counts["accepted"]) == (2, 1, 1, 2)


def test_queries_are_ordered_and_limited(storage: Storage, stored: Stored) -> None:
    units = [Save(UnitRow(number, "t"), None) for number in (5, 3, 4)]
    apply(storage, *units, *leased(2, deadline_ms=50), *leased(1, deadline_ms=60), *leased(0, deadline_ms=90))
    apply(storage, *(Save(submission(number), None) for number in (2, 0, 1)))
    assert [row.unit for row in stored.open_units(2)] == [3, 4]
    assert [held.lease.unit for held in stored.holdings()] == [0, 1, 2]
    assert stored.holdings(node(2).node) == []
    assert [held.lease.unit for held in stored.overdue_holdings(60)] == [1, 2]
    assert [row.unit for row in stored.submissions_in([SubmissionState.RECEIVED], 2)] == [0, 1]
    assert stored.submissions_in([SubmissionState.AUDITING], 2) == []
    assert [held.lease.unit for held in stored.holdings(node(1).node, "request-1")] == [0, 1, 2]
    assert stored.holdings(node(2).node, "request-1") == []
    assert stored.submission_counts()["received"] == 3


def test_units_unsure_twice_are_for_validators_only(storage: Storage) -> None:
    failures = {0: 0, 1: 2, 2: 1, 3: 5, 4: 2}
    apply(storage, *(Save(UnitRow(unit, "t", failures=count), None) for unit, count in failures.items()))
    with storage.write() as transaction:
        assert [row.unit for row in transaction.open_units(9)] == [0, 2]
        assert [row.unit for row in transaction.open_units(2, for_validators=True)] == [1, 3]


def test_work_of_validators_is_not_of_newcomers(storage: Storage, stored: Stored) -> None:
    apply(storage, *leased(0), Save(submission(0), None))
    row = replace(node(1), role="validator", passed=0)
    apply(storage, Save(row, NodeState.ACTIVE))
    assert [each.unit for each in stored.waiting_audits(on_probation=False, limit=9)] == [0]
    assert stored.waiting_audits(on_probation=True, limit=9) == []
    assert stored.newcomers_in_hand(node(1).node).own == 0


def test_kin_are_present_nodes_of_one_kind(storage: Storage, stored: Stored) -> None:
    alike: dict[int, dict[str, Any]] = {
        3: {"passed": 1}, 4: {"failed_check": "proofs.drift", "failed_at_ms": 100},
        5: {"failed_check": "proofs.drift", "failed_at_ms": 99},
        6: {"failed_check": "sampling.seed", "failed_at_ms": 100}, 7: {"passed": 1, "kind": "torch/cpu/float32"},
        8: {"passed": 1}, 9: {"passed": 1, "role": "validator"},
    }  # fmt: skip
    for number, fields in alike.items():
        row = replace(node(number), **{"passed": 0, "kind": "torch/cuda/bfloat16", "doubt": 0.5, **fields})
        apply(storage, Save(row, None))
        stored.put_presence(Presence(row.node, last_seen_ms=99 if number == 8 else 100))
    found = stored.same_kind("torch/cuda/bfloat16", "proofs.drift", 100)
    assert [row.node for row in found] == [node(3).node, node(4).node]
    assert found[0].doubt == 0.5


def proven(number: int, **changes: Any) -> Command:
    return Save(replace(node(number), passed=8, **changes), NodeState.ACTIVE)


def test_newcomers_units_by_node_and_network(storage: Storage, stored: Stored) -> None:
    def in_hand(who: int) -> tuple[int, dict[str, int], dict[str, int]]:
        found = stored.newcomers_in_hand(node(who).node)
        return found.own, dict(found.networks), {name: units for name, units in found.unproven.items() if units}

    here, there = "192.0.2.0/24", "198.51.100.0/24"
    apply(storage, *(Save(replace(node(who), network=here), NodeState.ACTIVE) for who in (1, 2)))
    apply(storage, *leased(0), *leased(1), *leased(2, who=2))
    assert in_hand(1) == (2, {here: 3}, {here: 3})
    assert in_hand(2)[0] == 1
    assert in_hand(9)[0] == 0
    passed = replace(node(1), network=here, passed=1)
    apply(storage, Save(passed, NodeState.ACTIVE))
    assert in_hand(1) == (2, {here: 3}, {here: 1})
    apply(storage, Save(replace(passed, passed=0, network=there), NodeState.ACTIVE))
    assert in_hand(1) == (2, {here: 1, there: 2}, {here: 1, there: 2})
    apply(storage, Save(replace(passed, passed=8), NodeState.ACTIVE))
    assert in_hand(1) == (0, {here: 1}, {here: 1})


def test_established_worker_is_present(storage: Storage, stored: Stored) -> None:
    def here(since_ms: int = 5) -> bool:
        return stored.is_established_here(since_ms)

    with storage.write() as transaction:
        for number in (1, 2):
            transaction.touch_presence(node(number).node, 5)
        transaction.apply([Save(replace(node(3), role="validator", passed=99), None)])
        transaction.touch_presence(node(3).node, 5)
    assert not here(), "newcomers and trusted roles do not count"
    apply(storage, proven(1))
    assert here()
    assert not here(since_ms=6)
    apply(storage, proven(1, state=NodeState.BANNED))
    assert not here()


def test_waiting_audits_by_probation(storage: Storage, stored: Stored) -> None:
    apply(storage, proven(1), *leased(2), *leased(0, who=2), *leased(1), *leased(3), *leased(4, who=2))
    for unit, who in ((2, 1), (0, 2), (1, 1), (4, 2)):
        apply(storage, Save(replace(submission(unit), node=node(who).node), None))
    claimed = replace(submission(3), state=SubmissionState.AUDITING)
    apply(storage, Save(claimed, None))
    assert [row.unit for row in stored.waiting_audits(on_probation=False, limit=9)] == [1, 2]
    assert [row.unit for row in stored.waiting_audits(on_probation=True, limit=9)] == [0, 4]
    assert [row.unit for row in stored.waiting_audits(on_probation=True, limit=1)] == [0]


def test_untrained_groups_and_pending_credit_of_a_node(storage: Storage, stored: Stored) -> None:
    """Of node 1: a light audit waiting and one under way, and of accepted groups those that are in no batch."""
    accepted, light = SubmissionState.ACCEPTED, "light"
    rows = [
        replace(submission(0), depth=light), replace(submission(1), depth=light, state=SubmissionState.AUDITING),
        submission(2), replace(submission(3), depth=light, state=accepted, matures_at_ms=20),
        replace(submission(4), state=accepted, matures_at_ms=10), replace(submission(5), state=accepted),
        replace(submission(6), node=node(2).node, depth=light, state=accepted, matures_at_ms=15),
    ]  # fmt: skip
    states = [UnitState.SUBMITTED] * 3 + [UnitState.ACCEPTED] * 4
    units = [UnitRow(n, "t", state, submission=rows[n].submission) for n, state in enumerate(states)]
    units[5] = replace(units[5], step=0)
    apply(storage, *(Save(row, None) for row in units))
    apply(storage, *(Save(lease(n, who=2 if n == 6 else 1), None) for n in range(7)))
    apply(storage, *(Save(row, None) for row in rows))
    who = node(1).node
    assert stored.light_audits(who) == rows[:2]
    assert [(filled.unit, filled.submission) for filled in stored.untrained(who)] == [
        (units[3], rows[3]),
        (units[4], rows[4]),
    ]
    assert stored.pending_credit(who) == [rows[3], rows[4]]
    assert stored.due_credit(20, 9) == [rows[4], rows[6], rows[3]]
    assert stored.due_credit(15, 9) == [rows[4], rows[6]]
    assert stored.due_credit(20, 1) == [rows[4]]
    assert stored.due_credit(9, 9) == []


def test_leases_of_silent_nodes(storage: Storage, stored: Stored) -> None:
    apply(storage, *leased(2), *leased(1), *leased(0))  # issued at 2, 1 and 0

    def silent(since_ms: int) -> list[int]:
        return [held.lease.unit for held in stored.silent_holdings(since_ms)]

    assert silent(2) == [0, 1], "nobody is gone for longer than it has had its lease"
    assert silent(3) == [0, 1, 2], "not heard of at all"
    stored.touch_presence(node(1).node, 10)
    assert silent(10) == []
    assert silent(11) == [0, 1, 2]
    apply(storage, Save(replace(lease(1), state=LeaseState.SUBMITTED), LeaseState.ACTIVE))
    assert silent(11) == [0, 2]


def test_records_wait_in_the_outbox_until_posted(storage: Storage, stored: Stored) -> None:
    apply(storage, Record("run", {"run": "r"}, 7), Record("node", {"node": "n"}, 8))
    assert (stored.outbox_length(), stored.ledger_last(), stored.written_ms()) == (2, None, 8)
    assert [(row.kind, row.body, row.at_ms) for row in stored.outbox(1)] == [("run", {"run": "r"}, 7)]
    first = post(storage, 9)
    apply(storage, Record("policy", {}, 3))
    assert stored.outbox(9)[0].id > first[-1].id, "a number is never used again"
    last = stored.ledger_last()
    assert (stored.outbox_length(), stored.written_ms()) == (1, 8)
    assert (last.index, last.body) == (1, {"node": "n"})


def test_record_that_cannot_be_chained_is_refused(storage: Storage, stored: Stored) -> None:
    for record in (Record("no such kind", {}, 1), Record("run", {"x": float("nan")}, 1)):
        with pytest.raises(LedgerError):
            apply(storage, record)
    assert stored.outbox_length() == 0


def test_ledger_is_one_chain_in_pages(storage: Storage, stored: Stored) -> None:
    for number in range(5):
        apply(storage, Record("policy", {"version": number, "name": "ü", "x": 0.1}, number))
    assert [row.id for row in post(storage, 2)] == [1, 2]
    assert [row.kind for row in post(storage, 9)] == ["policy"] * 3
    assert post(storage, 9) == []
    entries = stored.ledger_after(-1, 100)
    ledger.verify(entries, ledger.head_of("run", stored.ledger_last()))
    assert [entry.body["version"] for entry in entries] == [0, 1, 2, 3, 4]
    assert [entry.index for entry in stored.ledger_after(1, 2)] == [2, 3]


def test_nonce_is_taken_once_per_node(storage: Storage) -> None:
    with storage.write(durable=False) as transaction:
        assert transaction.take_nonce("a", "n", 100)
        assert not transaction.take_nonce("a", "n", 100)
        assert transaction.take_nonce("b", "n", 50)
    with storage.write() as transaction:
        assert transaction.forget_nonces(100, 9) == 1
        assert not transaction.take_nonce("a", "n", 100)
        assert transaction.take_nonce("b", "n", 50)


def test_presence_reports_and_alarms(storage: Storage, stored: Stored) -> None:
    said = Presence("a", 5, "doing", "waiting", 4, {"tokens": 1.5})
    with storage.write() as transaction:
        transaction.touch_presence("b", 1)
        transaction.put_presence(said)
        transaction.touch_presence("a", 9)
        for step, value in ((1, 1.0), (0, 2.0), (1, 3.0)):
            transaction.put_report(StepReport(step=step, metrics={"r": value}), 1)
        alarms = ((0, "kind.a", "first"), (1, "kind.b", "second"), (0, "kind.a", "third"))
        transaction.apply([RaiseAlarm(*each, at_ms) for at_ms, each in enumerate(alarms)])
    assert stored.presences_named(["a", "b"]) == {"a": replace(said, last_seen_ms=9), "b": Presence("b", 1)}
    assert stored.presence("a") == replace(said, last_seen_ms=9)
    assert [(report.step, report.metrics["r"]) for report in stored.reports(5)] == [(0, 2.0), (1, 3.0)]
    assert [report.step for report in stored.reports(1)] == [1]
    assert stored.alarms(5) == ["third", "second"]
    assert stored.alarm_counts() == {("kind",): 2}


def test_arrivals_are_written_once_even_if_the_transaction_that_took_them_fails(storage, stored):
    said = Presence("b", last_seen_ms=7, doing="work")
    storage.arrivals.heard("a", 5)
    storage.arrivals.said(said)
    with pytest.raises(StaleRow), storage.write() as transaction:
        transaction.apply([Save(UnitRow(1, "t"), UnitState.OPEN)])
    storage.flush()
    storage.arrivals.heard("a", 4)
    storage.flush()
    assert (stored.presence("a"), stored.presence("b")) == (Presence("a", last_seen_ms=5), said)


def test_a_nonce_in_memory_is_taken_once_until_it_is_forgotten(storage: Storage, stored: Stored) -> None:
    arrivals = storage.arrivals
    assert arrivals.take_nonce("a", "n", 100_000, lasting=True)
    assert not arrivals.take_nonce("a", "n", 100_000, lasting=False)
    assert arrivals.take_nonce("b", "n", 100_000, lasting=False)
    storage.flush()
    assert stored.nonces() == [("a", "n", 100_000)]
    arrivals.forget_nonces(100_000)
    assert not arrivals.take_nonce("a", "n", 100_000, lasting=True)
    arrivals.forget_nonces(110_000)
    assert arrivals.take_nonce("a", "n", 100_000, lasting=True)


def test_a_known_node_is_the_one_of_the_last_commit(storage: Storage) -> None:
    row = node(9)
    assert (storage.known(row.node), storage.find(row.node)) == (None, None)
    apply(storage, Save(row, None))
    assert storage.find(row.node) == storage.known(row.node) == row
    with pytest.raises(StaleRow):
        apply(storage, Save(replace(row, credit=9), row.state), Save(UnitRow(1, "t"), UnitState.OPEN))
    assert storage.find(row.node) == row


def test_exclusive_writers_wait_for_each_other(storage: Storage, stored: Stored) -> None:
    """Read, decide, write from 4 threads: without exclusion some increments would be lost."""

    def count_up() -> None:
        for _ in range(10):
            with storage.write(durable=False, exclusive=True) as transaction:
                seen = int(transaction.setting("count") or 0)
                transaction.put_setting("count", str(seen + 1))

    at_once(*[count_up] * 4)
    assert stored.setting("count") == "40"


def test_reader_keeps_its_view_while_others_write(storage: Storage) -> None:
    with storage.read() as reader:
        assert reader.progress().next_unit == 0
        apply(storage, *leased(0))
        assert reader.progress().next_unit == 0
    with storage.read() as reader:
        assert reader.progress().next_unit == 1


@pytest.mark.parametrize(("durable", "synchronous"), [(True, 2), (False, 1)])
def test_commits_are_as_durable_as_promised(tmp_path: Path, durable: bool, synchronous: int) -> None:
    storage = SqliteStorage(tmp_path / "hub.db")
    with storage.write(durable=durable) as transaction:
        pragma = transaction._connection.exec_driver_sql
        assert pragma("PRAGMA journal_mode").scalar() == "wal"
        assert pragma("PRAGMA synchronous").scalar() == synchronous
        assert pragma("PRAGMA foreign_keys").scalar() == 1
        assert int(pragma("PRAGMA busy_timeout").scalar() or 0) >= 1000
    storage.close()


def test_foreign_database_and_file_that_is_no_database_are_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'hub.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE meta (key TEXT, value TEXT)"))
    engine.dispose()
    with pytest.raises(ConfigError, match="not a hub's database"):
        SqliteStorage(tmp_path / "hub.db")
    (tmp_path / "hub.db").write_bytes(b"this is not a database, it only looks long enough" * 100)
    with pytest.raises(ResourceError, match=r"hub\.db"):
        SqliteStorage(tmp_path / "hub.db")


def test_shown_progress_is_kept_in_parts(storage: Storage, stored: Stored) -> None:
    apply(storage, *leased(0), *leased(1, deadline_ms=50), *leased(2))
    parts = [
        ShownRow("u0a0", 0, (32, 0), b"\x00\xff"),
        ShownRow("u0a0", 1, (64, 32), b"b"),
        ShownRow("u1a0", 0, (1, 0), b"c"),
    ]
    apply(storage, *parts)
    assert stored.shown("u0a0") == parts[:2]
    assert stored.last_shown("u0a0") == parts[1]
    assert (stored.shown("u2a0"), stored.last_shown("u2a0")) == ([], None)
    assert [row.lease for row in stored.showing()] == ["u1a0", "u0a0"]


def test_shown_progress_is_dropped_after_the_verdict(storage: Storage) -> None:
    apply(storage, *leased(0), *leased(1), *leased(2))
    apply(storage, *(ShownRow(f"u{number}a0", part, (1,), b"x") for number in range(3) for part in range(2)))
    ended = [lease(0).to(LeaseState.EXPIRED, ended_at_ms=100), lease(1).to(LeaseState.SUBMITTED, ended_at_ms=100)]
    apply(storage, *(Save(row, LeaseState.ACTIVE) for row in ended), Save(submission(1), None))
    with storage.write() as transaction:
        assert transaction.forget_shown(100) == 0
        assert transaction.forget_shown(101) == 2, "not of the lease at work, nor of what is to be judged"
    judged = submission(1).to(SubmissionState.AUDITING).to(SubmissionState.UNSURE)
    apply(storage, Save(submission(1).to(SubmissionState.AUDITING), SubmissionState.RECEIVED))
    apply(storage, Save(judged, SubmissionState.AUDITING))
    with storage.write() as transaction:
        assert transaction.forget_shown(101) == 2
        assert len(transaction.shown("u2a0")) == 2


EASY = TaskRow("math/1", groups=3, rate=0.95, solved=1, pool=Pool.EASY, last_unit=2**40)


def evaluation(version: int, first: int = 0, **changes: Any) -> EvaluationRow:
    fields = {"incarnation": 0, "version": version, "first": first, "digest": "d", "tasks": 16}
    return EvaluationRow(**{**fields, **changes})


def new(*rows: EvaluationRow) -> list[Command]:
    return [Save(row, None) for row in rows]


def test_row_of_a_task_is_overwritten_and_thousands_are_read_at_once(storage: Storage, stored: Stored) -> None:
    apply(storage, EASY, TaskRow("math/2", 1, 0.5))
    hard = replace(EASY, groups=4, rate=1 / 3, solved=0, pool=Pool.HARD)
    apply(storage, hard)
    assert stored.task_rows(["math/1", "math/3"]) == {"math/1": hard}, "to the last bit of its rate"
    assert stored.task_rows(["math/2", "math/3", "math/1"]) == {"math/1": hard, "math/2": TaskRow("math/2", 1, 0.5)}
    assert stored.pool_counts() == {"hard": 1, "normal": 1}
    apply(storage, *[TaskRow(f"t/{number}", 1) for number in range(1200)])
    assert len(stored.task_rows([f"t/{number}" for number in range(0, 2400, 2)])) == 600


def test_units_by_number_and_pass_rates(storage: Storage, stored: Stored) -> None:
    row = replace(submission(1), pass_rate=0.1 + 0.2)
    apply(storage, *leased(1), *leased(2), Save(row, None))
    tasks = {number: unit.task for number, unit in stored.units_named([2, 1, 9]).items()}
    assert tasks == {1: "task-1", 2: "task-2"}
    found = stored.submission(row.submission)
    assert found.pass_rate == 0.1 + 0.2


def test_slice_is_claimed_by_one_validator(storage: Storage, stored: Stored) -> None:
    done = evaluation(0, 0, state=EvaluationState.DONE, scores=(1.0, None, 0.25), document="{}", decided_at_ms=5)
    apply(storage, *new(done, evaluation(0, 16), evaluation(2, 0), evaluation(4, 0, state=EvaluationState.VOID)))
    assert stored.evaluation(0, 0, 0) == done
    assert stored.evaluation(1, 0, 0) is None
    assert [row.key for row in stored.evaluations_under_way()] == [(0, 0, 0), (0, 0, 16), (0, 2, 0)]
    claimed = evaluation(2, 0).to(EvaluationState.CLAIMED, validator="v", claimed_until_ms=9)
    apply(storage, Save(claimed, EvaluationState.OPEN))
    with pytest.raises(StaleRow):
        apply(storage, Save(replace(claimed, validator="w"), EvaluationState.OPEN))
    with pytest.raises(StaleRow):
        apply(storage, *new(evaluation(2, 0)))
    apply(storage, Save(evaluation(0, 16).to(EvaluationState.VOID), EvaluationState.OPEN))
    with storage.write() as transaction:
        assert transaction.evaluation(0, 2, 0) == claimed
        assert transaction.evaluations_under_way() == [claimed], "nothing of version 0 is to come"


def test_newest_slices_in_order(storage: Storage, stored: Stored) -> None:
    rows = [evaluation(version, first, incarnation=version // 4) for version in range(6) for first in (0, 16)]
    apply(storage, *new(*rows))
    assert stored.evaluations_since(0, 100) == rows
    assert [row.version for row in stored.evaluations_since(4, 100)] == [4, 4, 5, 5]
    assert stored.evaluations_since(0, 2) == rows[-4:], "no version in part"
