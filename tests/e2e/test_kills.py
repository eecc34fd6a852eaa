"""`shoal run` for real, each of its processes killed by SIGKILL at its worst moment, and the run comes out right.

One run serves all tests here (starting the processes costs more than they do). A moment is seen, not guessed: the
process is stopped, the moment is looked at once more, and only then is it killed (`kit.run.kill_when`).

    worker      finished groups lie in its outbox            trainer   a step's batch is written, the step is not saved
    validator   it holds audits that it has not judged       trainer   a version is at the origin, the hub knows it not
    relay       the origin has a version that it lacks       hub       a submission is on disk, its row is not
    origin      while a relay lacks its newest version       hub       a batch was written, its step is not saved

Slower runs: one in which the supervisor is killed, too (its children end by themselves, and `shoal run RUN` resumes),
one that kills anyone at any time, and two in which trainer, workers and validator die at every named point of theirs,
each once (`SHOAL_CRASH_FOLDER`). The hub's points, one by one, are in tests/integration/test_crash_hub.py. The same
must hold. Nobody dies more than four times in one run: five short lives in a row would be a crash loop and end it.
"""

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from replay import announced_digests, batches, replayed_digests

from kit import Request, TempPaths, eventually
from kit import run as runs
from shoal.cli.main import main
from shoal.ledger import fold, verify
from shoal.protocol import submission_digest
from shoal.run.folder import RunFolder
from shoal.runtime.crash import CRASH_AT, CRASH_FOLDER, POINTS

STALENESS = 2
WORKERS = 2
GROUPS = 16
OVERRIDES = (
    f"run.max_staleness={STALENESS}", f"run.groups_per_step={GROUPS}", f"worker.count={WORKERS}",
    "trainer.evaluate_every=5",
)  # fmt: skip
POINTS_STEPS, POINTS_GROUPS = 8, 8
POINTS_OVERRIDES = (
    f"run.steps={POINTS_STEPS}", f"run.groups_per_step={POINTS_GROUPS}", f"run.max_staleness={STALENESS}",
    f"worker.count={WORKERS}", "worker.units_per_lease=4", "trainer.evaluate_every=4", "trainer.evaluate_tasks=16",
)  # fmt: skip
POINTS_OF = {
    "first": ("trainer.step.recorded:2", "trainer.checkpoint.before_rename:2", "trainer.publish.before_manifest:2",
        "trainer.publish.before_announce:2", "worker.lease.received:2", "worker.outbox.written:3",
        "validator.verdict.before_report:2", "hub.submit.after_blob:5", "hub.batch.before_commit:2"),
    "second": ("trainer.checkpoint.after_rename:2", "trainer.publish.before_head:2", "trainer.publish.after_announce:2",
        "worker.outbox.before_send:3", "worker.outbox.after_receipt:3", "validator.verdict.after_report:2",
        "hub.verdict.after_commit:3", "hub.ledger.after_commit:3"),
}  # fmt: skip
LOG_RECEIPTS = {"SHOAL_DEBUG": "1"}
FINAL = {"accepted", "rejected", "unsure"}
ROLES = {"hub", "origin", "relay-0", "trainer", "validator-0", "worker-0"}
RANDOM_KILLS = 28
MOST_PER_ROLE = 4

pytestmark = pytest.mark.timeout(600)  # setting up the run counts as part of the first test, on a busy machine too


@dataclass
class Outcome:
    """A finished run, and who was killed in it how often, or at which points it was to die and did."""

    path: Path
    steps: int
    groups: int = GROUPS
    learns: bool = True
    killed: Counter[str] = field(default_factory=Counter)
    asked: set[str] = field(default_factory=set)
    struck: set[str] = field(default_factory=set)


def is_within_step(path: Path) -> bool:
    """Whether a batch is written down whose step the trainer has not saved."""
    step = newest(path, "step", "batches")
    return step >= 0 and step + 1 not in runs.checkpoints(path)


def is_publishing(path: Path) -> bool:
    """Whether the origin has a version that the hub has not heard of."""
    known = newest(path, "version", "policies")
    return 0 <= known < newest_manifest(path, "origin")


def is_between_blob_and_row(path: Path) -> bool:
    """Whether the hub has the bytes of a submission on disk and has not promised it yet."""
    names = {blob.name for blob in (path / "hub" / "blobs").iterdir() if not blob.name.startswith(".")}
    return bool(names - {name for (name,) in runs.glimpse(path, "SELECT submission FROM submissions")})


def lacks_version(path: Path, relay: str) -> bool:
    """Whether the origin has a version that this relay has not got all of."""
    version = newest_manifest(path, "origin")
    if newest_manifest(path, relay) < version:
        return version > 0
    manifest = json.loads((path / relay / "manifests" / f"0.{version}.json").read_text())
    hashes = [chunk["hash"] for chunk in manifest["document"]["chunks"]]
    return not all((path / relay / "chunks" / name[:2] / name).exists() for name in hashes)


def newest_manifest(path: Path, source: str) -> int:
    """The newest version that a source has the manifest of; -1 for none."""
    names = [manifest.name for manifest in (path / source / "manifests").glob("[0-9]*.json")]
    return max((int(name.split(".")[1]) for name in names), default=-1)


def newest(path: Path, column: str, table: str) -> int:
    (value,) = (runs.glimpse(path, f"SELECT MAX({column}) FROM {table}") or [(None,)])[0]
    return -1 if value is None else value


def awkward_run(path: Path) -> Outcome:
    """Every role killed at its worst moment, with scripted engines: processes that load no torch are there sooner."""
    outcome = Outcome(path, steps=5, learns=False)  # the kills are over by the third
    with runs.start_run(
        path, [f"run.steps={outcome.steps}", *OVERRIDES, *runs.scripted(path.parent)], env=LOG_RECEIPTS
    ) as run:
        kill_everyone(run, outcome.killed)
        finish(run)
    return outcome


def orphaned_run(path: Path) -> Outcome:
    """The same with the real engine, then the supervisor is killed; the resumed run goes to the end."""
    outcome = Outcome(path, steps=8)
    with runs.start_run(path, [f"run.steps={outcome.steps}", *OVERRIDES], env=LOG_RECEIPTS) as run:
        kill_everyone(run, outcome.killed)
        kill_supervisor(run)
    with runs.start_run(path, env=LOG_RECEIPTS, recipe=None) as run:
        finish(run)
    return outcome


def kill_everyone(run: runs.Run, killed: Counter[str]) -> None:
    path = run.path

    def kill(name: str, moment: str, condition: Callable[[], bool]) -> None:
        run.kill_when(name, moment, condition)
        killed[name] += 1

    run.wait_until("the first batch", lambda: is_within_step(path))
    kill("trainer", "a step that is not saved", lambda: is_within_step(path))
    kill("worker-0", "finished groups in its outbox", lambda: bool(runs.parcels(path, "worker-0")))
    auditing = "SELECT 1 FROM submissions WHERE state = 'auditing' LIMIT 1"
    kill("validator-0", "audits not judged", lambda: bool(runs.glimpse(path, auditing)))
    kill("relay-0", "a version that it lacks", lambda: lacks_version(path, "relay-0"))
    kill("origin", "a version that the relay lacks", lambda: lacks_version(path, "relay-0"))
    kill("hub", "bytes without a row", lambda: is_between_blob_and_row(path))
    run.wait_until("that step to be saved", lambda: not is_within_step(path))
    kill("hub", "a batch whose step is not saved", lambda: is_within_step(path))
    kill("trainer", "a version that the hub does not know", lambda: is_publishing(path))


def kill_supervisor(run: runs.Run) -> None:
    """Its children notice and end by themselves, without a signal of ours."""
    run.process.kill()
    run.process.wait()
    eventually(lambda: not runs.processes_of(run.path), 30.0, "the children of a supervisor that is gone did not end")


def random_run(path: Path) -> Outcome:
    """Anyone killed at any time, the same ones for the same seed as far as clocks allow."""
    outcome = Outcome(path, steps=30)
    with runs.start_run(path, [f"run.steps={outcome.steps}", *OVERRIDES], env=LOG_RECEIPTS) as run:
        run.wait_until("the first batch", lambda: is_within_step(path))
        kill_at_random(run, outcome.killed, random.Random(20))
        finish(run)
    return outcome


def kill_at_random(run: runs.Run, killed: Counter[str], rng: random.Random) -> None:
    for _ in range(RANDOM_KILLS):
        with suppress(subprocess.TimeoutExpired):
            run.wait(rng.uniform(1, 9))
            return
        names = sorted(name for name in run.pids() if killed[name] < MOST_PER_ROLE)
        name = rng.choice(names)
        with suppress(KeyError, ProcessLookupError):  # it ended just now
            os.kill(run.pids()[name], signal.SIGKILL)
            killed[name] += 1


def run_to_points(which: str, path: Path) -> Outcome:
    """A run that dies at named points, once at each."""
    asked, struck = POINTS_OF[which], path.with_name("struck")
    struck.mkdir()
    env = {**LOG_RECEIPTS, CRASH_AT: ",".join(asked), CRASH_FOLDER: str(struck)}
    with runs.start_run(path, POINTS_OVERRIDES, env=env) as run:
        finish(run)
    died = {mark.name for mark in struck.iterdir()}
    return Outcome(path, POINTS_STEPS, POINTS_GROUPS, learns=False, asked=names_of(asked), struck=died)


def names_of(asked: tuple[str, ...]) -> set[str]:
    return {point.partition(":")[0] for point in asked}


def finish(run: runs.Run) -> None:
    assert run.wait(800) == 0, run.said()
    assert runs.processes_of(run.path) == {}, "a run that is over leaves no process"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(awkward_run, id="awkward"),
        pytest.param(orphaned_run, id="orphaned", marks=pytest.mark.slow),
        pytest.param(random_run, id="random", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        *(pytest.param(partial(run_to_points, which), id=which, marks=[pytest.mark.slow,
            pytest.mark.timeout(900)]) for which in POINTS_OF),
    ],
)  # fmt: skip
def run(request: Request, tmp_path_factory: TempPaths) -> Outcome:
    outcome: Outcome = request.param(tmp_path_factory.mktemp("e2e") / "tiny")
    return outcome


def test_every_crash_point_is_in_a_run() -> None:
    asked = [name for points in POINTS_OF.values() for name in names_of(points)]
    assert {name for name in POINTS if name.startswith(("trainer.", "worker.", "validator."))} <= set(asked)
    for points in POINTS_OF.values():
        assert max(Counter(name.partition(".")[0] for name in points).values()) <= MOST_PER_ROLE


def test_every_role_or_point_was_killed(run: Outcome) -> None:
    assert run.struck == run.asked
    assert run.asked or set(run.killed) >= ROLES, run.killed


def test_no_submission_with_a_receipt_is_lost_and_accepted_groups_are_paid_once(run: Outcome) -> None:
    promised = runs.receipts(run.path)
    assert len(set(promised)) >= run.steps * run.groups
    states = dict(runs.rows(run.path, "SELECT submission, state FROM submissions"))
    assert {states.get(digest) for digest in promised} <= FINAL
    blobs = run.path / "hub" / "blobs"
    assert all(submission_digest((blobs / digest).read_bytes()) == digest for digest in promised)
    paid = Counter(
        (entry.body["submission"], entry.body["node"], entry.body["credit"])
        for entry in runs.ledger(run.path)
        if entry.kind == "credit"
    )
    columns = "SELECT submission, node, generated_tokens FROM submissions WHERE state = 'accepted'"
    assert paid == Counter(runs.rows(run.path, columns))


def test_ledger_verifies_and_gives_the_hubs_accounts(run: Outcome) -> None:
    entries = runs.ledger(run.path)
    verify(entries)
    accounts = fold(entries)
    nodes = runs.rows(run.path, "SELECT node, credit, accepted FROM nodes WHERE role = 'worker'")
    assert len(nodes) == WORKERS
    for node, credit, accepted in nodes:
        assert (accounts.by_node[node].credit, accounts.by_node[node].accepted) == (credit, accepted)
        assert credit > 0 or run.asked, "both workers took part"
    assert runs.rows(run.path, "SELECT count(*) FROM ledger_outbox") == [(0,)]


def test_no_honest_worker_is_punished(run: Outcome) -> None:
    judged = runs.rows(run.path, "SELECT state, reason, message FROM submissions WHERE state != 'accepted'")
    assert [row for row in judged if row[0] == "rejected"] == []
    nodes = runs.rows(run.path, "SELECT state, rejected, certain, statistical FROM nodes WHERE role = 'worker'")
    assert set(nodes) == {("active", 0, 0, 0)}


def test_steps_are_trained_once_in_time_and_give_the_weights_of_a_run_never_killed(run: Outcome) -> None:
    written = batches(run.path)
    assert [row["step"] for row in runs.metrics(run.path) if "loss" in row] == list(range(run.steps))
    assert [batch.step for batch in written] == list(range(run.steps))
    units = [group.unit for batch in written for group in batch.groups]
    assert len(units) == len(set(units)) == run.steps * run.groups
    ages = [batch.step - group.policy.version for batch in written for group in batch.groups]
    assert max(ages) <= STALENESS
    assert max(ages) > 0 or run.asked
    announced = announced_digests(run.path)
    assert len(announced) == run.steps + 1
    assert announced == replayed_digests(RunFolder.open(run.path))


def test_held_out_score_rises(run: Outcome) -> None:
    """But in a run of few groups, or of a scripted engine."""
    scores = [row["held_out"] for row in runs.metrics(run.path) if "held_out" in row]
    assert not run.learns or scores[-1] > scores[0] + 0.1, scores


def test_export_is_the_last_version_and_loads_with_transformers(run: Outcome, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run.path), str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model" / "shoal.json").read_text())["digest"] == announced_digests(run.path)[-1]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(run.path / "trainer" / "export").state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)
