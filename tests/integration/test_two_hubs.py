"""Two hubs on one PostgreSQL, processes of their own, under load: nothing is given out or counted twice.

    workers, validators, a trainer (threads, signed HTTP) ──┬─► hub A ✝ killed half-way ──┐
      each call at any of the hubs, some at both at once    └─► hub B ────────────────────┴─► PostgreSQL

Same request at both hubs at once: the same leases. Same submission, same verdict at both at once: taken once.
"""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kit import Patch, eventually
from kit import hub as kit
from kit.crash import DEADLINE_S, VALIDATORS, Actors, Body, Place, serve
from kit.fork import started
from shoal import protocol
from shoal.errors import ConfigError, UnusableTask
from shoal.hub.service import Hub, retry, stock
from shoal.hub.state.commands import AddBatch, Refusal, Save
from shoal.hub.state.reputation import NEWER, Suspicion
from shoal.hub.state.rows import PROBATION_AUDITS, LeaseRow, LeaseState, NodeRow, UnitRow, UnitState
from shoal.hub.storage import postgres as postgres_module
from shoal.hub.storage import tables
from shoal.hub.storage.postgres import PostgresStorage
from shoal.protocol.verdict import Branches
from shoal.runtime.clock import ManualClock, SystemClock

HOUR_MS = 3_600_000
TWICE = ("/heartbeat", "/leases", "/submissions", "/verdicts")


class Pair:
    """Two hubs on one database. Calls go to them in turn; one that has failed is not called again."""

    def __init__(self, place: Place) -> None:
        with ThreadPoolExecutor(2) as pool:  # started at once: one makes the tables, the other waits for it
            begun = list(pool.map(lambda _: started(serve, place, {}), range(2)))
        self.place, self.processes, self.urls = place, [process for process, _ in begun], [url for _, url in begun]
        self._turns = itertools.count()

    @property
    def url(self) -> str:
        urls = self.urls
        return urls[next(self._turns) % len(urls)]

    def revive(self, url: str) -> None:
        self.urls = [each for each in self.urls if each != url]

    def kill(self, number: int) -> None:
        pid = self.processes[number].pid
        assert pid is not None
        if self.processes[number].exitcode is None:
            os.kill(pid, signal.SIGKILL)
        self.processes[number].join(10)


class Load(Actors):
    """Everybody knows both hubs, and makes some calls at both at the same moment; one group in ten is unsure."""

    def __init__(self, pair: Pair, workers: int) -> None:
        super().__init__(pair, [kit.worker_key(number) for number in (1, 2, *range(4, workers + 2))])
        self._random = random.Random(0)
        self._pool = ThreadPoolExecutor(2 * len(self.workers))
        self.doubled = 0

    def call(self, key: protocol.SigningKey | None, method: str, path: str, body: Body = None) -> bytes:
        once = super().call
        if not path.startswith(TWICE) or self._random.random() > 0.3:
            return once(key, method, path, body)
        self.doubled += 1
        calls = [self._pool.submit(once, key, method, path, body) for _ in range(2)]
        first, second = (call.result(DEADLINE_S) for call in calls)
        if path == "/leases":  # one of them may have got units that were free only later
            asked = [protocol.LeaseReply.model_validate_json(each).leases for each in (first, second)]
            assert not all(asked) or asked[0] == asked[1]
            return first if asked[0] else second
        assert path == "/heartbeat" or first == second
        return first

    def submit(self, key: protocol.SigningKey, lease: protocol.Lease) -> None:
        if key in self.workers and self._random.random() < 0.5:
            said = {"progress": {lease.lease: self._random.randint(1, 4)}}
            deadlines = self.ask(protocol.HeartbeatReply, key, "POST", "/heartbeat", said).deadlines
            assert set(deadlines) <= {lease.lease}
            assert all(ends <= lease.hard_deadline_ms for ends in deadlines.values())
        if key in self.workers and self._random.random() < 0.1:
            self.call(key, "POST", "/leases/release", {"leases": [lease.lease]})
        else:
            super().submit(key, lease)

    def is_unsure(self, audit: protocol.Audit) -> bool:
        """By the submission's name: some of anybody's come to nothing."""
        is_ours = audit.lease.document["node"] in {key.node for key in self.workers}
        return is_ours and int(audit.submission[:2], 16) < 24


def leader_of(storage: PostgresStorage) -> str:
    with storage.read() as reader:
        holder: str = reader._connection.execute(tables.leaders.select()).one().holder
    return holder


@pytest.mark.parametrize(("run", "workers"), [
    ({"steps": 4, "groups_per_step": 12, "max_staleness": 1}, 8),
    pytest.param({"steps": 10, "groups_per_step": 24, "max_staleness": 1}, 16, marks=pytest.mark.slow),
], ids=["short", "long"])  # fmt: skip
def test_killed_leader_loses_and_doubles_nothing(tmp_path, database_url, run, workers, record_property):
    place = Place(tmp_path / "hub", {"database": database_url}, run=run)
    pair, storage, killed_s = Pair(place), PostgresStorage(database_url), list[float]()

    def kill_the_leader(step: int) -> None:
        if step == run["steps"] // 2 - 1:
            led = leader_of(storage)
            pair.kill(next(n for n, process in enumerate(pair.processes) if f"/{process.pid}/" in led))
            killed_s.append(time.monotonic())
            eventually(lambda: leader_of(storage) != led, DEADLINE_S, "nobody else leads")
            killed_s.append(time.monotonic())

    try:
        with watching(storage, run), Load(pair, workers) as actors:
            entries = actors.run_at_once(kill_the_leader)
    finally:
        for number in range(2):
            pair.kill(number)
    actors.books.check(place, entries)
    assert actors.doubled > 0
    generated = sum(verdict.node in {key.node for key in VALIDATORS} for verdict in actors.books.verdicts.values())
    storage.close()
    counts = f"{len(actors.books.receipts)} submissions, {generated} by validators, {actors.doubled} calls at both"
    taken_s = killed_s[1] - killed_s[0]
    record_property("table", f"two hubs: {counts}; the other led {taken_s:.1f} s after the leader was killed")


@contextmanager
def watching(storage: PostgresStorage, run: dict[str, int]) -> Iterator[None]:
    """Somebody who looks all the while: never more units than may be, never one in two active leases."""
    over, looks, trouble = threading.Event(), itertools.count(), list[str]()
    active = select(tables.leases.c.unit).where(tables.leases.c.state == LeaseState.ACTIVE.value)

    def watch() -> None:
        while not over.wait(0.02) and not trouble:
            with storage.read() as reader:
                held = Counter(reader._connection.execute(active).scalars())
                progress = reader.progress()
            next(looks)
            served = 0 if progress.policy is None else min(progress.policy.version + 1, run["steps"] - 1) + 1
            most = run["groups_per_step"] * max(0, served - progress.next_step)
            if progress.alive > most:
                trouble.append(f"{progress.alive} units are alive, {most} may be: {progress}")
            if twice := [unit for unit, count in held.items() if count > 1]:
                trouble.append(f"units {twice} are in two active leases")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(DEADLINE_S)
    assert not trouble, trouble
    assert next(looks) > 0


def row_of(hub: Hub, key: protocol.SigningKey) -> NodeRow:
    with hub.context.storage.read() as reader:
        row = reader.node(key.node)
    assert row is not None
    return row


@pytest.fixture
def hub_at(tmp_path: Path, database_url: str) -> Iterator[Callable[..., Hub]]:
    """Starts a hub on the database, by a clock that all share unless told otherwise; all are closed at the end."""
    shared, hubs = ManualClock(), list[Hub]()

    def start(
        name: str = "hub", run_id: str = kit.RUN_ID, clock: ManualClock = shared, cap: int = 4, **run: int
    ) -> Hub:
        config = kit.make_config(tmp_path / name, run, {"database": database_url, "refill_cap": cap})
        hubs.append(Hub(replace(config, run_id=run_id), clock))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


def announce(hub: Hub, policy: protocol.PolicyRef) -> None:
    announcement = protocol.PolicyAnnouncement(run=kit.RUN_ID, policy=policy, created_at_ms=0)
    hub.training.announce(row_of(hub, kit.TRAINER), protocol.sign_document(announcement, kit.TRAINER))


def begun(hub: Hub) -> NodeRow:
    """The first version is out; a worker that nobody keeps waiting, and that may hold 64 units."""
    trusted = {"role": "trainer", "certificate": kit.certificate(kit.TRAINER, "trainer")}
    hub.membership.register(protocol.Registration(public_key=kit.TRAINER.public_key, **trusted))
    announce(hub, kit.policy(0))
    hub.membership.register(protocol.Registration(public_key=kit.worker_key(1).public_key))
    with hub.context.storage.write() as transaction:
        row = transaction.node(kit.worker_key(1).node)
        assert row is not None
        transaction.apply([Save(replace(row, passed=PROBATION_AUDITS, window=64), row.state)])
    return row_of(hub, kit.worker_key(1))


def leased(hub: Hub, worker: NodeRow, count: int = 1) -> list[int]:
    reply = retry(lambda: hub.work.lease(worker, protocol.LeaseRequest(request=kit.fresh_request(), max_units=count)))
    return [int(signed.document["unit"]) for signed in reply.leases]


def test_two_hubs_give_out_all_units_once_and_no_more_than_may_be_alive(hub_at: Callable[..., Hub]) -> None:
    """Each has units of its own, so that neither waits for the other; in the end one takes what the other has left."""
    first, second = hub_at(groups_per_step=50), hub_at(groups_per_step=50)
    worker = begun(first)
    assert (leased(first, worker), leased(second, worker), leased(first, worker)) == ([0], [32], [1])
    found = [0, 32, 1]
    while units := leased(second, worker, 5):
        found += units
    assert sorted(found) == list(range(50))
    assert leased(first, worker) == []


def test_new_incarnation_voids_what_a_hub_has_made_ahead_and_it_makes_more(hub_at: Callable[..., Hub]) -> None:
    hub = hub_at(groups_per_step=50)
    worker = begun(hub)
    assert leased(hub, worker) == [0]
    assert len(hub.work._stock.units()) == stock.STOCK - 1
    announce(hub, kit.policy(0, incarnation=1))
    assert leased(hub, worker)


def lose(hub: Hub, number: int) -> None:
    """The unit's group was submitted and is dropped: there is room for one more."""
    with hub.context.storage.write() as transaction:
        transaction._execute("UPDATE leases SET state = 'submitted'", {})
        transaction._execute("UPDATE units SET state = 'submitted'", {})
        unit = transaction.unit(number)
        assert unit is not None
        transaction.apply([Save(unit.to(UnitState.DROPPED, lost_step=0, reason="equal rewards"), unit.state)])


def test_hub_that_lost_a_race_for_the_last_room_makes_units_once_there_is_room(hub_at, monkeypatch):
    first, second = (hub_at(cap=1, groups_per_step=40) for _ in range(2))
    monkeypatch.setattr(stock, "STOCK", 4)
    worker = begun(second)
    assert leased(second, worker) == [0]
    prepare = second.work.drawing.prepare

    def overtaken(number: int, count: int) -> None:
        prepare(number, count)
        monkeypatch.setattr(second.work.drawing, "prepare", prepare)
        monkeypatch.setattr(stock, "STOCK", 64)
        first.work._stock.refill()  # all the room that is left
        monkeypatch.setattr(stock, "STOCK", 4)

    monkeypatch.setattr(second.work.drawing, "prepare", overtaken)
    second.work._stock.refill()
    while leased(first, worker, 8):  # those of the second, too
        pass
    first.close()
    lose(second, 0)
    assert leased(second, worker)


def test_units_of_a_dead_hub_are_given_out_where_no_new_one_can_be_made(hub_at, monkeypatch):
    first, second = (hub_at(cap=1, groups_per_step=40) for _ in range(2))
    monkeypatch.setattr(stock, "STOCK", 4)
    worker = begun(first)
    assert leased(first, worker) == [0]
    first.close()
    prompt = second.work.drawing.prompt

    def unreadable_from_4(task: Any, run: Any, number: int) -> Any:
        if number >= 4:
            raise UnusableTask("it cannot be read")
        return prompt(task, run, number)

    monkeypatch.setattr(second.work.drawing, "prompt", unreadable_from_4)
    assert leased(second, worker) == [1]


def test_units_of_a_hub_that_is_gone_do_not_lie_about(hub_at: Callable[..., Hub], monkeypatch: Patch) -> None:
    for name, size in {"STOCK": 4, "FEW": 2, "FAR": 8}.items():
        monkeypatch.setattr(stock, name, size)
    first, second = hub_at(groups_per_step=60), hub_at(groups_per_step=60)
    worker = begun(first)
    assert leased(first, worker) == [0]
    first.close()
    found = [unit for _ in range(20) for unit in leased(second, worker)]
    assert {1, 2, 3} < set(found), "though there is room for 40 more"


def test_hub_sees_settings_and_batches_that_another_one_wrote(database_url: str) -> None:
    first, second = (PostgresStorage(database_url) for _ in range(2))

    def seen() -> tuple[str | None, int]:
        with first.write() as transaction:
            return transaction.setting("a"), transaction.standing().next_step

    assert seen() == (None, 0)
    with second.write() as transaction:
        transaction.put_setting("a", "1")
    assert seen() == ("1", 0)
    with contextlib.suppress(KeyError), second.write() as transaction:
        transaction.put_setting("a", "2")
        raise KeyError
    assert seen() == ("1", 0)
    with second.write(exclusive=True) as transaction:
        transaction.apply([AddBatch(protocol.Batch(step=0, groups=(), dropped_groups=0, written_at_ms=1))])
    assert seen() == ("1", 1)
    with first.write() as reading:
        assert reading.setting("a") == "1"
        with second.write() as transaction:
            transaction.put_setting("a", "3")
        reading.frontier()
        assert reading.setting("a") == "3", "who holds the frontier relies on what the last one there wrote"
    first.close()
    second.close()


def test_second_hub_takes_over_the_lead(hub_at: Callable[..., Hub]) -> None:
    first, second = hub_at(), hub_at()
    for hub in (first, second):
        hub.upkeep.tick()
    assert (first.context.leads, second.context.leads) == (True, False)
    key = kit.worker_key(1)
    trusted = {"role": "validator", "certificate": kit.certificate(key, "validator")}  # in the ledger at once
    second.membership.register(protocol.Registration(public_key=key.public_key, **trusted))
    assert second.reporting.ledger_page(-1, 9).head.index == 0, "who does not lead shows what is posted"
    assert first.reporting.ledger_page(-1, 9).entries[-1].body["node"] == key.node
    first.close()
    second.upkeep.tick()
    assert second.context.leads


def test_branches_reported_at_once_are_all_counted(hub_at: Callable[..., Hub], monkeypatch: Patch) -> None:
    """Their evidence is in one row: before, each of two reports at one time put its own in place of the other's."""
    hubs = [hub_at(), hub_at()]
    trusted = {kit.TRAINER: "trainer", kit.worker_key(11): "validator", kit.worker_key(12): "validator"}
    for key, role in trusted.items():
        body = protocol.Registration(public_key=key.public_key, role=role, certificate=kit.certificate(key, role))
        hubs[0].membership.register(body)
    announce(hubs[0], kit.policy(0))
    for number in (1, 2):
        hubs[0].membership.register(protocol.Registration(public_key=kit.worker_key(number).public_key))
        worker = row_of(hubs[0], kit.worker_key(number))
        [signed] = hubs[0].work.lease(worker, protocol.LeaseRequest(request=kit.fresh_request())).leases
        lease = protocol.Lease.model_validate(signed.document)
        hubs[0].work.submit(worker, lease.lease, kit.submission_body(lease))
    met, after = threading.Barrier(2), Suspicion.after

    def meeting(suspicion: Suspicion, verdict: protocol.Verdict) -> Suspicion:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.5)  # both have read the row, unless one waits for the other
        return after(suspicion, verdict)

    def reported(hub: Hub, key: protocol.SigningKey) -> protocol.VerdictReply:
        node = row_of(hub, key)
        [audit] = hub.checking.audits(node, protocol.AuditRequest(max_audits=1)).audits
        lease = protocol.Lease.model_validate(audit.lease.document)
        seen = {"depth": audit.depth, "branches": Branches(looked=1, differences=(1.0,))}
        verdict = kit.verdict_on(lease, audit.submission, **seen)
        return hub.checking.verdicts(node, protocol.VerdictReport(verdicts=(protocol.sign_document(verdict, key),)))

    monkeypatch.setattr(Suspicion, "after", meeting)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(reported, hubs, (kit.worker_key(11), kit.worker_key(12))))
    assert [reply.refused for reply in replies] == [(), ()]
    with hubs[0].context.storage.read() as reader:
        stored = reader.setting(NEWER)
    assert stored is not None
    assert Suspicion.model_validate_json(stored).evidence.differing == 2


def test_hub_with_another_secret_or_blob_folder_is_refused(tmp_path: Path, hub_at: Callable[..., Hub]) -> None:
    secret = tmp_path / "b" / "secret"
    hub_at("a").close()
    with pytest.raises(ConfigError, match=r"secret .* is missing: .* copy another hub's"):
        hub_at("b")
    with pytest.raises(ConfigError, match=rf"holds another run, {kit.RUN_ID}, not other-1: give each run a database"):
        hub_at("c", "other-1")
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("ab" * 32)
    with pytest.raises(ConfigError, match="secret from the hub that began the run"):
        hub_at("b")
    secret.write_text((tmp_path / "a" / "secret").read_text())
    with pytest.raises(ConfigError, match=r"b/blobs: share one folder among all hubs, or .*hub\.storage"):
        hub_at("b")
    (tmp_path / "b" / "blobs").rmdir()
    (tmp_path / "b" / "blobs").symlink_to(tmp_path / "a" / "blobs")
    hub_at("b")


def test_hubs_go_by_the_databases_clock(hub_at: Callable[..., Hub]) -> None:
    """An hour ahead, an hour behind: neither ends the other's leases, nor drags the next one along."""
    now_ms = SystemClock().now_ms()
    clocks = [ManualClock(now_ms + hours * HOUR_MS) for hours in (1, -1, 0)]
    hubs = [hub_at(clock=clock) for clock in clocks[:2]]
    hubs[0].membership.register(protocol.Registration(public_key=kit.worker_key(1).public_key))
    for hub in hubs:
        hub.upkeep.tick()
    for hub in (*hubs, hub_at(clock=clocks[2])):
        assert abs(hub.context.clock.now_ms() - SystemClock().now_ms()) < HOUR_MS / 6


def test_release_of_foreign_leases_takes_no_lock(hub_at: Callable[..., Hub], monkeypatch: Patch) -> None:
    """Nor makes others wait: they are not locked."""
    monkeypatch.setattr(postgres_module, "LIMITS", {**postgres_module.LIMITS, "lock_timeout": "100ms"})
    hub = hub_at()
    for number in (1, 2):
        hub.membership.register(protocol.Registration(public_key=kit.worker_key(number).public_key))
    with hub.context.storage.write() as transaction:
        alice, eve = (transaction.node(kit.worker_key(number).node) for number in (1, 2))
        assert eve is not None
        lease = LeaseRow("u0a0", 0, alice.node, 0, "request", 0, 0, "d" * 64, issued_at_ms=1, deadline_ms=10**15)
        transaction.apply([Save(UnitRow(0, "t", UnitState.LEASED), None), Save(lease, None)])
    with hub.context.storage.write() as transaction:
        assert transaction.holding("u0a0") is not None
        with pytest.raises(Refusal, match=r"lease\.not_yours"):
            hub.work.release(eve, protocol.LeaseRelease(leases=("u0a0",)))
    hub.work.release(alice, protocol.LeaseRelease(leases=("u0a0", "u0a0", "nonsense")))
    with hub.context.storage.read() as reader:
        assert reader.holdings(alice.node) == []
