"""Two hubs on one PostgreSQL, processes of their own, under a storm: nothing is given out or counted twice.

    workers, validators, a trainer (threads, signed HTTP) ──┬─► hub A ✝ killed half-way ──┐
      each call at any of the hubs, some at both at once    └─► hub B ────────────────────┴─► PostgreSQL

Same request at both hubs at once: the same leases. Same submission, same verdict at both at once: taken once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from kit import Patch, Request, eventually
from kit.fork import started
from kit.hub import (
    HUB,
    RUN_ID,
    TOKENS_PER_ROLLOUT,
    TRAINER,
    Actor,
    certificate,
    fresh_request,
    make_config,
    policy,
    submission_body,
    verdict_on,
    worker_key,
)
from shoal import ledger, protocol
from shoal.errors import ConfigError
from shoal.hub.http.server import run_hub
from shoal.hub.service import Hub
from shoal.hub.state.commands import Refusal, Save
from shoal.hub.state.reputation import NEWER, Suspicion
from shoal.hub.state.rows import LeaseRow, LeaseState, NodeRow, SubmissionState, UnitRow, UnitState
from shoal.hub.storage import postgres as postgres_module
from shoal.hub.storage import tables
from shoal.hub.storage.postgres import PostgresStorage
from shoal.protocol.verdict import Branches
from shoal.runtime.clock import ManualClock, SystemClock
from shoal.runtime.stop import stop_on_signals

DEADLINE_S = 120.0
KIND = "torch/cpu/float32"
HOUR_MS = 3_600_000
VALIDATORS = 2
SETTINGS = {"requests_per_key_s": 0, "requests_per_address_s": 0}
GROUP_TOKENS = 2 * TOKENS_PER_ROLLOUT
CHEAT, DRIFTER = worker_key(1).node, worker_key(2).node
REJECTED = {CHEAT: protocol.Severity.CERTAIN, DRIFTER: protocol.Severity.STATISTICAL}


@dataclass(frozen=True)
class Scale:
    steps: int = 4
    groups: int = 12
    workers: int = 8

    @property
    def run(self) -> dict[str, int]:
        return {"steps": self.steps, "groups_per_step": self.groups, "max_staleness": 1}


def serve(folder: Path, database: str, scale: Scale, ready: Connection) -> None:
    """One hub, in a process of its own; it does not outlive its test."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    config = make_config(folder, run=scale.run, settings={**SETTINGS, "database": database})
    run_hub(config, stop_on_signals(), ready.send)


class HubProcess:
    def __init__(self, folder: Path, database: str, scale: Scale) -> None:
        self.process, self.url = started(serve, folder, database, scale)

    def kill(self) -> None:
        assert self.process.pid is not None
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


@pytest.fixture(params=[Scale(), pytest.param(Scale(10, 24, 16), marks=pytest.mark.slow)], ids=["storm", "long storm"])
def scale(request: Request) -> Scale:
    scale: Scale = request.param
    return scale


@pytest.fixture
def hubs(tmp_path: Path, database_url: str, scale: Scale) -> Iterator[list[HubProcess]]:
    with ThreadPoolExecutor(2) as pool:  # started at once: one makes the tables, the other waits for it
        started = list(pool.map(lambda _: HubProcess(tmp_path / "hub", database_url, scale), range(2)))
    yield started
    for hub in started:
        hub.kill()


@dataclass
class Books:
    """What everybody was told, to compare with what is stored."""

    granted: dict[str, tuple[str, str]] = field(default_factory=dict)
    receipts: dict[str, str] = field(default_factory=dict)
    entrusted: set[int] = field(default_factory=set)
    trouble: list[str] = field(default_factory=list)
    busy: int = 0
    looks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def grant(self, node: str, request: str, leases: Sequence[protocol.Lease]) -> None:
        with self.lock:
            for lease in leases:
                holder = self.granted.setdefault(lease.lease, (node, request))
                if holder != (node, request) or lease.node != node:
                    self.trouble.append(f"{lease.lease} went to {holder} and to {(node, request)}")


class Player:
    """One key that knows both hubs. A call goes to any of them, and to the other if that one is gone."""

    def __init__(self, key: protocol.SigningKey, urls: Sequence[str], seed: int) -> None:
        self.key, self.random, self.busy = key, random.Random(seed), 0
        self.actors = [Actor(key, httpx.Client(base_url=url, timeout=60), SystemClock()) for url in urls]

    def close(self) -> None:
        for actor in self.actors:
            actor.http.close()

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            actor = self.random.choice(self.actors)
            try:
                answer = actor.call(method, path, body)
            except httpx.TransportError:
                if len(self.actors) > 1:
                    self.actors.remove(actor)
                    actor.http.close()
                continue
            if answer.status_code != 503:
                return answer
            self.busy += 1
            time.sleep(0.02)
        raise AssertionError(f"no hub answered {method} {path}")

    def at_both(self, method: str, path: str, body: Any = None) -> list[httpx.Response]:
        """The same call at every hub at the same moment; of those that answered."""
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(actor.call, method, path, body) for actor in self.actors]
            done = [call.result() for call in calls if call.exception() is None]
        return [answer for answer in done if answer.status_code != 503]


class Worker(Player):
    is_banned = False

    def work(self, books: Books, is_over: Callable[[], bool]) -> None:
        while not is_over() and not self.is_banned:
            leases = self.lease(books)
            if not leases:
                time.sleep(0.02)
            for lease in leases:
                if self.random.random() < 0.5:
                    self.beat(lease)
                self.hand_in(books, lease)

    def beat(self, lease: protocol.Lease) -> None:
        """Say twice how far one is, at the same moment: more time, once."""
        for answer in self.at_both("POST", "/heartbeat", {"progress": {lease.lease: self.random.randint(1, 4)}}):
            reply = protocol.HeartbeatReply.model_validate_json(answer.content)
            assert set(reply.deadlines) <= {lease.lease}
            assert all(ends <= lease.hard_deadline_ms for ends in reply.deadlines.values())

    def _is_shut_out(self, answer: httpx.Response) -> bool:
        self.is_banned = self.is_banned or (answer.status_code == 403 and self.key.node in REJECTED)
        return self.is_banned

    def lease(self, books: Books) -> list[protocol.Lease]:
        request = fresh_request()
        body = {"request": request, "max_units": self.random.randint(1, 4), "wait_s": 0}
        twice = self.random.random() < 0.3
        answers = self.at_both("POST", "/leases", body) if twice else [self.call("POST", "/leases", body)]
        replies = [self._opened(answer) for answer in answers]
        for reply in replies:
            books.grant(self.key.node, request, reply)
        return replies[0] if replies else []

    def _opened(self, answer: httpx.Response) -> list[protocol.Lease]:
        if self._is_shut_out(answer):
            return []
        assert answer.status_code == 200, answer.text
        found = protocol.LeaseReply.model_validate_json(answer.content).leases
        return [protocol.open_document(signed, protocol.Lease, HUB.public_key) for signed in found]

    def hand_in(self, books: Books, lease: protocol.Lease) -> None:
        if self.random.random() < 0.1:
            self.call("POST", "/leases/release", {"leases": [lease.lease]})
            return
        path, body = f"/submissions/{lease.lease}", submission_body(lease)
        twice = self.random.random() < 0.3
        answers = self.at_both("PUT", path, body) if twice else [self.call("PUT", path, body)]
        for answer in (answer for answer in answers if not self._is_shut_out(answer)):
            assert answer.status_code in (200, 201, 410), answer.text
            if answer.status_code != 410:
                signed = protocol.SignedDocument.model_validate_json(answer.content)
                with books.lock:
                    books.receipts[str(signed.document["submission"])] = self.key.node


class Validator(Player):
    def work(self, books: Books, is_over: Callable[[], bool]) -> None:
        while not is_over():
            answer = self.call("POST", "/audits", {"max_audits": 6, "wait_s": 0, "generates": KIND})
            reply = protocol.AuditReply.model_validate_json(answer.content)
            self.generate(
                books, [protocol.open_document(signed, protocol.Lease, HUB.public_key) for signed in reply.generate]
            )
            if not reply.audits:
                time.sleep(0.02)
                continue
            report = protocol.VerdictReport(verdicts=tuple(self._verdict(audit) for audit in reply.audits))
            if self.random.random() < 0.5:
                self.at_both("POST", "/verdicts", report)
            else:
                self.call("POST", "/verdicts", report)

    def generate(self, books: Books, leases: Sequence[protocol.Lease]) -> None:
        """Units that two workers' groups left unsure: only validators get them."""
        books.grant(self.key.node, "entrusted", leases)
        for lease in leases:
            answer = self.call("PUT", f"/submissions/{lease.lease}", submission_body(lease))
            assert answer.status_code in (200, 201, 410), answer.text
            with books.lock:
                books.entrusted.add(lease.unit)

    def _verdict(self, audit: protocol.Audit) -> protocol.SignedDocument:
        """By the submission's name, so that all validators find the same. Some of anybody's come to nothing; some of
        two workers are rejected: the one is banned at once, the other suspended, and banned the second time."""
        lease = protocol.open_document(audit.lease, protocol.Lease, HUB.public_key)
        drawn = int(audit.submission[:2], 16)
        severity = REJECTED.get(lease.node) if drawn >= 176 else None
        outcome = protocol.Outcome.REJECTED if severity else protocol.Outcome.ACCEPTED
        outcome = protocol.Outcome.UNSURE if drawn < 24 else outcome
        accepted = outcome is protocol.Outcome.ACCEPTED
        found = {"outcome": outcome, "severity": severity, "reason": "" if accepted else "test"}
        return protocol.sign_document(
            verdict_on(lease, audit.submission, (0.0, 1.0) if accepted else (), **found), self.key
        )


class Trainer(Player):
    def announce(self, version: int) -> None:
        document = protocol.PolicyAnnouncement(run=RUN_ID, policy=policy(version), created_at_ms=1)
        answer = self.call("POST", "/policies", protocol.sign_document(document, TRAINER))
        assert answer.status_code == 204, answer.text

    def batch(self, books: Books, step: int) -> protocol.Batch:
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            assert not books.trouble, books.trouble
            answer = self.call("POST", f"/batches/{step}", {"wait_s": 2})
            assert answer.status_code == 200, answer.text
            if answer.json()["batch"] is not None:
                return protocol.Batch.model_validate(answer.json()["batch"])
        raise AssertionError(f"step {step} got no batch: {answer.text}")


def register(player: Player, role: Any, **more: Any) -> None:
    body = protocol.Registration(public_key=player.key.public_key, role=role, **more)
    answers = player.at_both("POST", "/nodes", body)
    assert [answer.status_code for answer in answers] in ([200, 200], [200]), [answer.text for answer in answers]


def leader_of(storage: PostgresStorage) -> str:
    with storage.read() as reader:
        holder: str = reader._connection.execute(tables.leaders.select()).one().holder
    return holder


def the_chain(player: Player) -> list[protocol.LedgerEntry]:
    """All of the ledger, from a hub that leads: it posts what is outgoing before it answers."""
    entries: list[protocol.LedgerEntry] = []
    while True:
        page = protocol.LedgerPage.model_validate_json(player.call("GET", f"/ledger?after={len(entries) - 1}").content)
        entries += page.entries
        if not page.entries:
            ledger.verify(entries, page.head)
            return entries


def play(player: Worker | Validator, books: Books, is_over: Callable[[], bool]) -> None:
    """To the end, or until something is not as it should be, which ends it for all."""
    try:
        player.work(books, is_over)
    except Exception as error:
        books.trouble.append(f"{type(player).__name__}: {error!r}")
        raise


def storm(hubs: list[HubProcess], scale: Scale, books: Books, half_way: Callable[[], None]) -> Trainer:
    """A whole run; `half_way` is called in its middle. Returns the trainer, who still knows who is there."""
    urls = [hub.url for hub in hubs]
    over = threading.Event()
    trainer = Trainer(TRAINER, urls, 0)
    workers = [Worker(worker_key(number + 1), urls, number) for number in range(scale.workers)]
    judges = [Validator(protocol.SigningKey.from_seed(bytes([200 + n]) * 32), urls, 100 + n) for n in range(VALIDATORS)]
    register(trainer, "trainer", certificate=certificate(TRAINER, "trainer"))
    for judge in judges:
        register(judge, "validator", certificate=certificate(judge.key, "validator"))
    for worker in workers:
        register(worker, "worker")
    players: list[Worker | Validator] = [*workers, *judges]
    with ThreadPoolExecutor(len(players)) as pool:
        playing = [pool.submit(play, player, books, over.is_set) for player in players]
        try:
            trainer.announce(0)
            for step in range(scale.steps):
                trainer.batch(books, step)
                if step == scale.steps // 2 - 1:
                    half_way()
                trainer.announce(step + 1)
        finally:
            over.set()
        for done in playing:
            done.result(DEADLINE_S)
    for player in players:
        player.close()
    books.busy = sum(player.busy for player in players)
    return trainer


def test_nothing_twice_and_nothing_lost_though_the_leader_is_killed(
    hubs: list[HubProcess], scale: Scale, database_url: str, record_property: Callable[[str, object], None]
) -> None:
    books, storage, killed_s = Books(), PostgresStorage(database_url), list[float]()
    led = leader_of(storage)
    first = next(hub for hub in hubs if f"/{hub.process.pid}/" in led)

    def half_way() -> None:
        first.kill()
        killed_s.append(time.monotonic())
        eventually(lambda: leader_of(storage) != led, DEADLINE_S, "nobody else leads")
        killed_s.append(time.monotonic())

    with watching(storage, scale, books):
        trainer = storm(hubs, scale, books, half_way)
    assert not books.trouble, books.trouble
    assert books.looks > 0
    entries = the_chain(trainer)
    trainer.close()
    check_rows(storage, scale, books, ledger.fold(entries))
    assert [entry.body["step"] for entry in entries if entry.kind == "batch"] == list(range(scale.steps))
    storage.close()
    counts = (
        f"{len(books.granted)} leases, {len(books.receipts)} submissions, {len(books.entrusted)} units by validators, "
        f"{books.busy} times busy"
    )
    taken_s = killed_s[1] - killed_s[0]
    record_property("table", f"two hubs: {counts}; the other led {taken_s:.1f} s after the leader was killed")


@contextmanager
def watching(storage: PostgresStorage, scale: Scale, books: Books) -> Iterator[None]:
    """Somebody who looks all the while: never more units than may be, never one in two active leases."""
    over = threading.Event()
    active = select(tables.leases.c.unit).where(tables.leases.c.state == LeaseState.ACTIVE.value)

    def watch() -> None:
        while not over.wait(0.02) and not books.trouble:
            with storage.read() as reader:
                held = Counter(reader._connection.execute(active).scalars())
                progress = reader.progress()
            books.looks += 1
            served = 0 if progress.policy is None else min(progress.policy.version + 1, scale.steps - 1) + 1
            most = scale.groups * max(0, served - progress.next_step)
            if progress.alive > most:
                books.trouble.append(f"{progress.alive} units are alive, {most} may be: {progress}")
            if twice := [unit for unit, count in held.items() if count > 1]:
                books.trouble.append(f"units {twice} are in two active leases")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(DEADLINE_S)


def check_rows(storage: PostgresStorage, scale: Scale, books: Books, accounts: ledger.Accounts) -> None:
    with storage.read() as reader:
        rows = {row.submission: row for row in reader.submissions_in(SubmissionState, 10**6)}
        nodes = [row for row in reader.nodes() if row.role == "worker"]
        leases = [(row.unit, row.state) for row in reader._connection.execute(tables.leases.select())]
        batches = [batch for step in range(scale.steps) if (batch := reader.batch(step)) is not None]
    active = Counter(unit for unit, state in leases if state == LeaseState.ACTIVE.value)
    assert all(count == 1 for count in active.values()), "a unit is in two active leases"
    assert {name for name, node in books.receipts.items() if rows[name].node == node} == set(books.receipts)
    accepted = [row for row in rows.values() if row.state == SubmissionState.ACCEPTED]
    assert len({row.unit for row in accepted}) == len(accepted), "a unit was accepted twice"
    told = [accounts.by_node.get(node.node, ledger.Account()) for node in nodes]
    assert [(node.credit, node.pending) for node in nodes] == [(each.credit, each.pending) for each in told]
    assert all(node.rejected >= each.rejected for node, each in zip(nodes, told, strict=True)), "those since it earned"
    for node in (node for node in nodes if node.node not in REJECTED):
        assert node.credit + node.pending == GROUP_TOKENS * sum(row.node == node.node for row in accepted)
        assert (node.state, node.rejected) == (protocol.NodeState.ACTIVE, 0)
    for node in (node for node in nodes if node.node in REJECTED):
        assert (node.state is protocol.NodeState.BANNED) == (node.certain > 0 or node.statistical > 1)
    assert not [row for row in rows.values() if row.node not in REJECTED and row.state == SubmissionState.REJECTED]
    trained = [group.unit for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == scale.steps * scale.groups


def row_of(hub: Hub, key: protocol.SigningKey) -> NodeRow:
    with hub.context.storage.read() as reader:
        row = reader.node(key.node)
    assert row is not None
    return row


class TestTogether:
    """Two hubs in this process, on one database."""

    def hub(self, folder: Path, database: str, clock: ManualClock) -> Hub:
        return Hub(make_config(folder, settings={"database": database}), clock)

    def test_one_leads_and_posts_and_the_other_takes_over(self, tmp_path: Path, database_url: str) -> None:
        clock = ManualClock()
        first, second = (self.hub(tmp_path / "hub", database_url, clock) for _ in range(2))
        for hub in (first, second):
            hub.upkeep.tick()
        assert (first.context.leads, second.context.leads) == (True, False)
        key = worker_key(1)
        trusted = {"role": "validator", "certificate": certificate(key, "validator")}  # in the ledger at once
        second.membership.register(protocol.Registration(public_key=key.public_key, **trusted))
        assert second.reporting.ledger_page(-1, 9).head.index == 0, "who does not lead shows what is posted"
        assert first.reporting.ledger_page(-1, 9).entries[-1].body["node"] == key.node
        first.close()
        second.upkeep.tick()
        assert second.context.leads
        second.close()

    def test_branches_seen_at_once_all_count_for_newcomers(
        self, tmp_path: Path, database_url: str, monkeypatch: Patch
    ) -> None:
        """Their evidence is in one row: before, each of two reports at one time put its own in place of the other's."""
        clock = ManualClock()
        hubs = [self.hub(tmp_path / "hub", database_url, clock) for _ in range(2)]
        trusted = {TRAINER: "trainer", worker_key(11): "validator", worker_key(12): "validator"}
        for key, role in trusted.items():
            body = protocol.Registration(public_key=key.public_key, role=role, certificate=certificate(key, role))
            hubs[0].membership.register(body)
        announcement = protocol.PolicyAnnouncement(run=RUN_ID, policy=policy(0), created_at_ms=0)
        hubs[0].training.announce(row_of(hubs[0], TRAINER), protocol.sign_document(announcement, TRAINER))
        for number in (1, 2):
            hubs[0].membership.register(protocol.Registration(public_key=worker_key(number).public_key))
            worker = row_of(hubs[0], worker_key(number))
            [signed] = hubs[0].work.lease(worker, protocol.LeaseRequest(request=fresh_request())).leases
            lease = protocol.Lease.model_validate(signed.document)
            hubs[0].work.submit(worker, lease.lease, submission_body(lease))
        met, after = threading.Barrier(2), Suspicion.after

        def meeting(suspicion: Suspicion, verdict: protocol.Verdict) -> Suspicion:
            with contextlib.suppress(threading.BrokenBarrierError):
                met.wait(2)  # both have read the row, unless one waits for the other
            return after(suspicion, verdict)

        def reported(hub: Hub, key: protocol.SigningKey) -> protocol.VerdictReply:
            node = row_of(hub, key)
            [audit] = hub.checking.audits(node, protocol.AuditRequest(max_audits=1)).audits
            lease = protocol.Lease.model_validate(audit.lease.document)
            seen = {"depth": audit.depth, "branches": Branches(looked=1, differences=(1.0,))}
            verdict = verdict_on(lease, audit.submission, **seen)
            return hub.checking.verdicts(node, protocol.VerdictReport(verdicts=(protocol.sign_document(verdict, key),)))

        monkeypatch.setattr(Suspicion, "after", meeting)
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(reported, hubs, (worker_key(11), worker_key(12))))
        assert [reply.refused for reply in replies] == [(), ()]
        with hubs[0].context.storage.read() as reader:
            stored = reader.setting(NEWER)
        assert stored is not None
        assert Suspicion.model_validate_json(stored).evidence.differing == 2
        for hub in hubs:
            hub.close()

    def test_another_secret_or_a_blob_folder_of_its_own_is_refused(self, tmp_path: Path, database_url: str) -> None:
        clock, secret = ManualClock(), tmp_path / "b" / "secret"
        self.hub(tmp_path / "a", database_url, clock).close()
        with pytest.raises(ConfigError, match=r"secret .* is missing: .* copy another hub's"):
            self.hub(tmp_path / "b", database_url, clock)
        secret.parent.mkdir(exist_ok=True)
        secret.write_text("ab" * 32)
        with pytest.raises(ConfigError, match="secret from the hub that began the run"):
            self.hub(tmp_path / "b", database_url, clock)
        secret.write_text((tmp_path / "a" / "secret").read_text())
        with pytest.raises(ConfigError, match=r"b/blobs: share one folder among all hubs, or .*hub\.storage"):
            self.hub(tmp_path / "b", database_url, clock)
        (tmp_path / "b" / "blobs").rmdir()
        (tmp_path / "b" / "blobs").symlink_to(tmp_path / "a" / "blobs")
        self.hub(tmp_path / "b", database_url, clock).close()

    def test_machines_whose_clocks_disagree_go_by_the_databases(self, tmp_path: Path, database_url: str) -> None:
        """An hour ahead, an hour behind: neither ends the other's leases, nor drags the next one along."""
        now_ms = SystemClock().now_ms()
        clocks = [ManualClock(now_ms + hours * HOUR_MS) for hours in (1, -1, 0)]
        hubs = [self.hub(tmp_path / "hub", database_url, clock) for clock in clocks[:2]]
        hubs[0].membership.register(protocol.Registration(public_key=worker_key(1).public_key))
        for hub in hubs:
            hub.upkeep.tick()
        hubs.append(self.hub(tmp_path / "hub", database_url, clocks[2]))
        for hub in hubs:
            assert abs(hub.context.clock.now_ms() - SystemClock().now_ms()) < HOUR_MS / 6
            hub.close()

    def test_naming_leases_of_others_waits_for_none(
        self, tmp_path: Path, database_url: str, monkeypatch: Patch
    ) -> None:
        """Nor makes others wait: they are not locked."""
        monkeypatch.setattr(postgres_module, "LIMITS", {**postgres_module.LIMITS, "lock_timeout": "100ms"})
        hub = self.hub(tmp_path / "hub", database_url, ManualClock())
        for number in (1, 2):
            hub.membership.register(protocol.Registration(public_key=worker_key(number).public_key))
        with hub.context.storage.write() as transaction:
            alice, eve = (transaction.node(worker_key(number).node) for number in (1, 2))
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
        hub.close()
