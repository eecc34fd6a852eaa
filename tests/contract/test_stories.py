"""What every storage tells those who ask why, run against each implementation."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kit import storage as kit
from shoal.hub.state.commands import AddVerdict, Command, Record, Save
from shoal.hub.state.rows import LeaseRow, LeaseState, NodeRow, SubmissionRow, SubmissionState, UnitRow, UnitState
from shoal.hub.storage import Presence, Reader, Storage
from shoal.hub.storage.reader import NodeGroup
from shoal.ledger import node_subject, unit_subject
from shoal.protocol import NodeState


def node(number: int, **changes: object) -> NodeRow:
    return replace(kit.node(number), **changes)  # type: ignore[arg-type]


def lease(unit: int, attempt: int, who: int) -> LeaseRow:
    row = kit.lease(unit, attempt, who, request=f"r{attempt}")
    return replace(row, issued_at_ms=attempt, hard_deadline_ms=900)


def submission(unit: int, attempt: int, who: int, state: SubmissionState) -> SubmissionRow:
    row = kit.submission(unit, attempt, f"{unit:032x}{attempt:032x}")
    return replace(row, node=node(who).node, received_at_ms=attempt, state=state)


@pytest.fixture
def reader(storage: Storage) -> Iterator[Reader]:
    commands: list[Command] = [
        Save(node(3, credit=5), None), Save(node(4, state=NodeState.BANNED, credit=50), None),
        Save(node(5, role="trainer"), None), Save(UnitRow(7, "task-7", UnitState.LEASED, attempt=3), None),
        Save(replace(lease(7, 0, 1), state=LeaseState.SUBMITTED), None),
        Save(replace(lease(7, 1, 2), state=LeaseState.EXPIRED, ended_at_ms=50), None),
        Save(lease(7, 2, 1), None), Save(submission(7, 0, 1, SubmissionState.REJECTED), None),
        Save(submission(7, 1, 2, SubmissionState.ACCEPTED), None),
        AddVerdict(submission(7, 0, 1, SubmissionState.REJECTED).submission, '{"signed": 1}'),
        Record("node", {"node": node(1).node}, 1), Record("credit", {"node": node(1).node, "unit": 7}, 2),
        Record("rejected", {"node": node(1).node, "unit": 7}, 3),
        Record("credit", {"node": node(2).node, "unit": 8}, 4), Record("batch", {"step": 0, "units": [7, 8]}, 5),
    ]  # fmt: skip
    with storage.write() as transaction:
        transaction.apply(commands)
        for number, (seen, waits) in enumerate([(10, "x"), (30, ""), (20, "y")], start=1):
            transaction.put_presence(Presence(node(number).node, seen, "", waits, waiting_since_ms=-number))
    kit.post(storage)
    with storage.read() as found:
        yield found


def test_leases_submissions_verdicts_and_sums_of_the_fleet(reader: Reader) -> None:
    assert [row.lease for row in reader.leases_of_unit(7)] == ["u7a0", "u7a1", "u7a2"]
    assert reader.leases_of_unit(7)[1] == replace(lease(7, 1, 2), state=LeaseState.EXPIRED, ended_at_ms=50)
    assert [row.lease for row in reader.leases_of(node(1).node, 5)] == ["u7a2", "u7a0"]
    assert [row.lease for row in reader.leases_of(node(1).node, 1)] == ["u7a2"]
    assert reader.leases_of_unit(8) == []
    assert [held.lease.lease for held in reader.oldest_holdings(5)] == ["u7a2"]
    refused, accepted = reader.submissions_of_unit(7)
    assert (refused.state, accepted.state) == (SubmissionState.REJECTED, SubmissionState.ACCEPTED)
    assert reader.submissions_of(node(1).node, True, 5) == [refused]
    assert reader.submissions_of(node(2).node, False, 5) == [accepted]
    assert reader.submissions_of(node(2).node, True, 5) == []
    assert reader.verdicts_of([refused.submission, accepted.submission]) == {refused.submission: '{"signed": 1}'}
    assert reader.fleet(since_ms=20) == [
        NodeGroup("trainer", "active", here=False, count=1, credit=0, pending=0, lapsed=0),
        NodeGroup("worker", "active", here=False, count=1, credit=0, pending=0, lapsed=0),
        NodeGroup("worker", "active", here=True, count=2, credit=5, pending=0, lapsed=0),
        NodeGroup("worker", "banned", here=False, count=1, credit=50, pending=0, lapsed=0),
    ]


def test_ledger_entries_about_a_subject(reader: Reader) -> None:
    def kinds(subject: str, *but: str, limit: int = 9) -> list[str]:
        return [entry.kind for entry in reader.ledger_about(subject, but, limit)]

    assert kinds(unit_subject(7)) == ["credit", "rejected", "batch"]
    assert kinds(unit_subject(8)) == ["credit", "batch"]
    assert kinds(node_subject(node(1).node), "credit") == ["node", "rejected"]
    assert kinds(unit_subject(7), limit=2) == ["rejected", "batch"]
    assert kinds(unit_subject(70)) == []


def test_nodes_in_pages_and_by_rank(reader: Reader) -> None:
    names = [node(number).node for number in range(6)]
    assert [row.node for row in reader.nodes_after("", 2)] == names[1:3]
    assert [row.node for row in reader.nodes_after(names[4], 9)] == names[5:]
    assert [row.node for row in reader.nodes_ranked("trusted", 9)] == [names[5]]
    assert [row.node for row in reader.nodes_ranked("sanctioned", 9)] == [names[4]]
    assert [row.node for row in reader.nodes_ranked("credit", 2)] == [names[4], names[3]]
    assert [row.node for row in reader.nodes_ranked("seen", 3)] == [names[2], names[3], names[1]]
    assert reader.node_counts() == {"worker.active": 3, "worker.banned": 1, "trainer.active": 1}
    assert set(reader.nodes_named([names[1], "f" * 32])) == {names[1]}
