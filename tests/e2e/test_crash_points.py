"""`shoal run` for real, its trainer, workers and validator killed by SIGKILL at every named point of theirs.

A point strikes once in a run (`SHOAL_CRASH_FOLDER`), the supervisor starts the process again, and the run comes out as
if nothing had happened. Nobody dies more than four times in one run: five short lives in a row would be a crash loop,
and would rightly end it. The hub's points, one by one, are in tests/integration/test_crash_hub.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from replay import announced_digests, batches, replayed_digests

from kit import Request, TempPaths
from kit.run import ledger, metrics, processes_of, receipts, rows, start_run
from shoal.ledger import fold, verify
from shoal.protocol import submission_digest
from shoal.run.folder import RunFolder
from shoal.runtime.crash import CRASH_AT, CRASH_FOLDER, POINTS

STEPS = 8
GROUPS = 8
MOST_DEATHS = 4
OVERRIDES = (
    f"run.steps={STEPS}",
    f"run.groups_per_step={GROUPS}",
    "run.max_staleness=2",
    "worker.count=2",
    "worker.units_per_lease=4",
    "trainer.evaluate_every=4",
    "trainer.evaluate_tasks=16",
)
RUNS = {
    "first": (
        "trainer.step.recorded:2",
        "trainer.checkpoint.before_rename:2",
        "trainer.publish.before_manifest:2",
        "trainer.publish.before_announce:2",
        "worker.lease.received:2",
        "worker.outbox.written:3",
        "validator.verdict.before_report:2",
        "hub.submit.after_blob:5",
        "hub.batch.before_commit:2",
    ),
    "second": (
        "trainer.checkpoint.after_rename:2",
        "trainer.publish.before_head:2",
        "trainer.publish.after_announce:2",
        "worker.outbox.before_send:3",
        "worker.outbox.after_receipt:3",
        "validator.verdict.after_report:2",
        "hub.verdict.after_commit:3",
        "hub.ledger.after_commit:3",
    ),
}
FINAL = {"accepted", "rejected", "unsure"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def names_of(asked: tuple[str, ...]) -> set[str]:
    return {point.partition(":")[0] for point in asked}


def test_every_point_of_theirs_is_in_a_run_and_nobody_dies_too_often() -> None:
    asked = [name for points in RUNS.values() for name in names_of(points)]
    assert {name for name in POINTS if name.startswith(("trainer.", "worker.", "validator."))} <= set(asked)
    for points in RUNS.values():
        assert max(Counter(name.partition(".")[0] for name in points).values()) <= MOST_DEATHS


@dataclass(frozen=True)
class Survived:
    """A finished run, at which points it was told to die, and at which it did."""

    path: Path
    asked: set[str]
    struck: set[str]


@pytest.fixture(scope="module", params=list(RUNS))
def run(request: Request, tmp_path_factory: TempPaths) -> Survived:
    folder = tmp_path_factory.mktemp("crash")
    struck = folder / "struck"
    struck.mkdir()
    asked = RUNS[request.param]
    env = {CRASH_AT: ",".join(asked), CRASH_FOLDER: str(struck), "SHOAL_DEBUG": "1"}  # the logs name every receipt
    with start_run(folder / "tiny", OVERRIDES, env=env) as started:
        assert started.wait(800) == 0, started.said()
    assert processes_of(folder / "tiny") == {}, "a run that is over leaves no process"
    return Survived(folder / "tiny", names_of(asked), {path.name for path in struck.iterdir()})


def test_it_died_everywhere(run: Survived) -> None:
    assert run.struck == run.asked


def test_nothing_with_a_receipt_is_lost(run: Survived) -> None:
    promised = set(receipts(run.path))
    assert len(promised) >= STEPS * GROUPS
    states = dict(rows(run.path, "SELECT submission, state FROM submissions"))
    assert {states.get(digest) for digest in promised} <= FINAL
    blobs = run.path / "hub" / "blobs"
    assert all(submission_digest((blobs / digest).read_bytes()) == digest for digest in promised)


def test_what_was_accepted_is_paid_once_and_the_ledger_says_so(run: Survived) -> None:
    entries = ledger(run.path)
    verify(entries)
    paid = Counter(
        (entry.body["submission"], entry.body["node"], entry.body["credit"])
        for entry in entries
        if entry.kind == "credit"
    )
    columns = "SELECT submission, node, generated_tokens FROM submissions WHERE state = 'accepted'"
    assert paid == Counter(rows(run.path, columns))
    accounts = fold(entries).by_node
    for node, credit, accepted in rows(run.path, "SELECT node, credit, accepted FROM nodes WHERE role = 'worker'"):
        assert (accounts[node].credit, accounts[node].accepted) == (credit, accepted)
    assert rows(run.path, "SELECT count(*) FROM ledger_outbox") == [(0,)]


def test_nobody_honest_is_punished(run: Survived) -> None:
    assert rows(run.path, "SELECT submission FROM submissions WHERE state = 'rejected'") == []
    nodes = rows(run.path, "SELECT state, rejected, certain, statistical FROM nodes WHERE role = 'worker'")
    assert set(nodes) == {("active", 0, 0, 0)}


def test_every_step_was_made_once_of_groups_used_once(run: Survived) -> None:
    written = batches(run.path)
    assert [batch.step for batch in written] == list(range(STEPS))
    units = [group.unit for batch in written for group in batch.groups]
    assert len(units) == len(set(units)) == STEPS * GROUPS
    assert [row["step"] for row in metrics(run.path)] == list(range(STEPS + 1))


def test_the_weights_are_those_of_a_trainer_that_was_never_killed(run: Survived) -> None:
    announced = announced_digests(run.path)
    assert len(announced) == STEPS + 1
    assert announced == replayed_digests(RunFolder.open(run.path))
