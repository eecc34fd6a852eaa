"""A hub in a process of its own that is told to die, and everybody else of a run, who live on.

HubLives   one life after the other over the same folder (and database), forked from a server that has imported the
           hub once: a start costs a tenth of a second.
Actors     two workers, a cheat, a validator and a trainer over real HTTP. A call that finds the hub dead starts it
           again and is made once more, as a real client's is: same request, same bytes, another nonce.
Books      what the actors were promised and what they decided. `Books.check` compares it with all that the hub has.

Actors ─ signed HTTP ─► hub, life 1 ─ point ─ ✝          Books ◄── check ── ledger, accounts, rows, files
  └──── the same again ───────► hub, life 2 ─ … ─ end ────────────────────────────▲
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pyarrow.compute as pc

from kit import eventually
from kit import hub as kit
from kit.fork import FORKS, started
from shoal import ledger
from shoal.hub.http.server import run_hub
from shoal.hub.service import Context
from shoal.hub.service.archiving import Archiving
from shoal.protocol import Batch, BatchReply, Lease, LeaseReply, LedgerEntry, LedgerPage, Registration, Role, SigningKey
from shoal.protocol.policy import LedgerHead, PolicyAnnouncement
from shoal.protocol.signing import Message, SignedDocument, open_document, sign_document, sign_request
from shoal.protocol.submission import Receipt, submission_digest
from shoal.protocol.verdict import Audit, AuditReply, Outcome, Severity, Verdict, VerdictReport
from shoal.records import FOLDER, Records
from shoal.runtime import SystemClock, crash, ensure_folder
from shoal.runtime.stop import stop_on_signals

DEADLINE_S = 240.0
POLL_S = 0.01
TICK_S = 0.05
LEADS_S = 0.5  # a hub that shares its database with others waits so long before it does a dead one's background work
BUSY = 503
RUN = {"steps": 3, "groups_per_step": 3, "max_staleness": 1}
SETTINGS = {
    "newcomer_share": 1.0,
    "audit": "reputation",  # so that credit is pending first
    "requests_per_key_s": 0,  # the actors are quick
    "requests_per_address_s": 0,
}
KIND = "torch/cpu/float32"
FINAL = {Outcome.ACCEPTED.value, Outcome.REJECTED.value, Outcome.UNSURE.value}
T = TypeVar("T", bound=Message)


@dataclass(frozen=True)
class Place:
    """Where a hub keeps things: its folder, settings that name a place elsewhere, what opens that; and its run."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    run: Mapping[str, int] = field(default_factory=lambda: RUN)

    def context(self) -> Context:
        """What the hub has, opened without one running."""
        return Context(_config(self), SystemClock())


def _config(place: Place) -> Any:
    config = kit.make_config(place.folder, run=dict(place.run), settings={**SETTINGS, **place.settings})
    return replace(config, credit_window_s=0.3, texts=kit.as_texts)


def serve(place: Place, environment: Mapping[str, str], ready: Connection) -> None:
    """One life of the hub, in a process of its own."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # no hub outlives its test
    from shoal.hub.service import archiving, context, upkeep

    upkeep.TICK_S, context.LEADS_S = TICK_S, LEADS_S
    archiving.FLUSH_MS, archiving.SETTLED_MS = 0, 50
    os.environ.update(environment)
    crash.arm()
    run_hub(_config(place), stop_on_signals(), ready.send)


def dies_of(asked: str, act: Callable[..., Any], *arguments: Any) -> bool:
    """Do something in a process of its own that may be told to die; whether it did."""
    process = FORKS.Process(target=_act, args=({crash.CRASH_AT: asked}, act, arguments), daemon=True)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode in (0, -signal.SIGKILL), f"it ended with {process.exitcode}"
    return process.exitcode != 0


def _act(environment: Mapping[str, str], act: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.environ.update(environment)
    crash.arm()
    act(*arguments)


class HubLives:
    """The hub, whichever life it is in.

    It dies at every point of `asked`, each time one of them is reached first, and at each only once; if `always`, again
    and again.
    """

    def __init__(self, place: Place, asked: Sequence[str] = (), always: bool = False) -> None:
        self.place = place
        self.deaths = 0
        self._environment = {**place.environment, crash.CRASH_AT: ",".join(asked)}
        self._marks = ensure_folder(place.folder.with_name("struck"))
        if not always:
            self._environment[crash.CRASH_FOLDER] = str(self._marks)
        self._lock = threading.Lock()
        self._process: Any = None
        self.url = ""
        while not self._begin():
            self._bury()

    def __enter__(self) -> "HubLives":
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process.exitcode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join(10)

    @property
    def struck(self) -> set[str]:
        """The points at which it has died."""
        return {path.name for path in self._marks.iterdir()}

    def revive(self, url: str) -> None:
        """A call to `url` failed: if nobody did so since, see the dead off and start the next life."""
        with self._lock:
            if url != self.url:
                return
            self._bury()
            while not self._begin():
                self._bury()

    def end(self) -> None:
        """Told to stop, the last life ends in order."""
        self._process.terminate()
        self._process.join(15)
        assert self._process.exitcode == 0, f"the hub ended with {self._process.exitcode}"

    def _begin(self) -> bool:
        """Start a life; False if it died before it could be reached."""
        self._process, self.url = started(serve, self.place, self._environment)
        return bool(self.url)

    def _bury(self) -> None:
        self._process.join(10)
        assert self._process.exitcode == -signal.SIGKILL, f"the hub did not die as told: {self._process.exitcode}"
        self.deaths += 1
        if crash.CRASH_FOLDER in self._environment:
            assert self.deaths == len(self.struck), "it died at a point, and of nothing else"


@dataclass
class Books:
    """What everybody but the hub knows: receipts by lease, what the validator decided, batches given to the trainer."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    draws: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def promise(self, receipt: Receipt) -> None:
        assert self.receipts.setdefault(receipt.lease, receipt) == receipt, "one lease, one receipt, whatever died when"

    def earned(self, node: str) -> int:
        """What the node's accepted submissions are worth, by the published formula."""
        accepted = [each for each in self.verdicts.values() if each.outcome is Outcome.ACCEPTED and each.node == node]
        return sum(ledger.credit_for(verdict.generated_tokens) for verdict in accepted)

    def is_settled_in(self, entries: Sequence[LedgerEntry], steps: int) -> bool:
        """Whether the ledger has come to the run's last version, and no credit is pending any more."""
        done = any(entry.kind == "policy" and entry.body["version"] == steps for entry in entries)
        accounts = ledger.fold(entries).by_node.values()
        earned = sum(self.earned(node) for node in {each.node for each in self.verdicts.values()} - TRUSTED)
        return done and sum(account.credit + account.void for account in accounts) == earned

    def check(self, place: Place, entries: list[LedgerEntry]) -> None:
        """0 lost receipts, 0 double credits, and the ledger, the accounts and the rows say the same."""
        context = place.context()
        try:
            self._check_receipts(context)
            self._check_credit(context, entries)
            self._check_batches(context)
            self._check_records(context)
        finally:
            context.close()

    def _check_records(self, context: Context) -> None:
        """Every judged group is among the records once; those that were pulled later a second time."""
        eventually(context.lead, DEADLINE_S, "the hubs were killed")
        Archiving(context).close()  # the hub may have been killed before its last ones
        table = Records(context.config.folder / FOLDER).table()
        firsts = table.filter(pc.equal(table["sample"], 0)).to_pylist()
        assert [row["group"] for row in firsts] == list(range(len(firsts)))
        found = Counter(row["submission"] for row in firsts if row["outcome"] != "pulled")
        pulled = {row["submission"] for row in firsts if row["outcome"] == "pulled"}
        assert set(found.values()) == {1}
        assert {*found, *pulled} == {receipt.submission for receipt in self.receipts.values()}

    def _check_receipts(self, context: Context) -> None:
        assert self.receipts, "somebody has worked"
        with context.storage.read() as reader:
            rows = {lease: reader.submission_of_lease(lease) for lease in self.receipts}
        for lease, receipt in self.receipts.items():
            row = rows[lease]
            assert row is not None, f"the hub promised {lease} and has lost it"
            assert row.submission == receipt.submission
            assert Receipt.model_validate(SignedDocument.model_validate_json(row.receipt).document) == receipt
            assert row.state.value in {*FINAL, "pulled"}, f"the hub promised {lease} and it was never judged"
            assert submission_digest(context.blobs.get(receipt.submission)) == receipt.submission
            decided = self.verdicts[receipt.submission]
            assert row.state.value in (decided.outcome.value, "pulled")

    def _check_credit(self, context: Context, entries: list[LedgerEntry]) -> None:
        accounts = ledger.fold(entries)
        settled = Counter(entry.body["submission"] for entry in entries if entry.kind in ("credit", "void"))
        found = {name: each for name, each in self.verdicts.items() if each.node not in TRUSTED}
        accepted = {name for name, each in found.items() if each.outcome is Outcome.ACCEPTED}
        assert settled == Counter(dict.fromkeys(accepted, 1)), "every accepted submission is paid, or taken back, once"
        with context.storage.read() as reader:
            nodes = [row for row in reader.nodes() if row.role == "worker"]
            assert reader.outbox_length() == 0
            assert entries == reader.ledger_after(-1, 10**6)
        for row in nodes:
            account = accounts.by_node.get(row.node, ledger.Account())
            assert (account.credit, account.pending) == (row.credit, row.pending) == (account.credit, 0)
            assert account.credit + account.void == self.earned(row.node)
            outcomes = Counter(each.outcome for each in self.verdicts.values() if each.node == row.node)
            counted = {Outcome.ACCEPTED: row.accepted, Outcome.REJECTED: row.rejected, Outcome.UNSURE: row.unsure}
            assert outcomes == +Counter(counted)
        banned = [entry.body["node"] for entry in entries if entry.kind == "sanction"]
        assert banned == [CHEAT.node], "punished once"
        assert accounts.by_node[CHEAT.node].void > 0, "its pending credit was taken"

    def _check_batches(self, context: Context) -> None:
        with context.storage.read() as reader:
            steps, progress = context.rules.steps, reader.progress()
            written = {step: reader.batch(step) for step in range(steps + 1)}
        assert written == {**self.batches, steps: None}
        assert progress.policy == kit.policy(steps)
        units = [group.unit for batch in self.batches.values() for group in batch.groups]
        assert len(units) == len(set(units)) == steps * context.rules.groups_per_step, (
            "no group is trained twice or lost"
        )
        names = {group.submission for batch in self.batches.values() for group in batch.groups}
        assert names <= {receipt.submission for receipt in self.receipts.values()}


WORKERS = (kit.worker_key(1), kit.worker_key(2))
CHEAT = kit.worker_key(3)
VALIDATORS = (kit.VALIDATOR, kit.worker_key(200))
TRUSTED = {key.node for key in VALIDATORS}


Body = Message | dict[str, Any] | bytes | None


class Actors:
    """All roles but the hub. `play` is a whole run, one call after the other; `run_at_once` is one with all at once."""

    def __init__(self, hub: Any, workers: Sequence[SigningKey] = WORKERS) -> None:
        self.hub, self.workers, self.steps = hub, workers, hub.place.run["steps"]
        self.books = Books()
        self._http = httpx2.Client(timeout=15)
        self._is_over, self._deciding = threading.Event(), threading.Lock()
        self._end_s = time.monotonic() + DEADLINE_S

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._http.close()

    def call(self, key: SigningKey | None, method: str, path: str, body: Body = None) -> bytes:
        """The body of a good answer, however often the hub has to be started for it."""
        content = kit.as_bytes(body)
        while time.monotonic() < self._end_s:
            url = self.hub.url
            now_ms = SystemClock().now_ms()
            headers = {} if key is None else sign_request(key, kit.RUN_ID, method, path, content, now_ms)
            try:
                response = self._http.request(method, url + path, content=content, headers=headers)
            except httpx2.TransportError:
                self.hub.revive(url)
                continue
            if response.status_code == BUSY:
                time.sleep(POLL_S)  # as a client does when the hub says "try again"
                continue
            assert response.status_code < 300, response.text
            return response.content
        raise AssertionError(f"{method} {path}: the hub died or was busy each time")

    def ask(self, kind: type[T], key: SigningKey | None, method: str, path: str, body: Body = None) -> T:
        return kind.model_validate_json(self.call(key, method, path, body))

    def play(self) -> list[LedgerEntry]:
        """A run from its first registration until its last credit is final; returns its ledger, verified."""
        self.begin()
        for step in range(self.steps):
            eventually(partial(self.turn, step), DEADLINE_S, f"there was no batch of step {step}")
            self.announce(step + 1)
        return self.finish()

    def run_at_once(self, after_batch: Callable[[int], None] = lambda _step: None) -> list[LedgerEntry]:
        """The same with everybody at once, each in a thread."""
        self.begin()
        with ThreadPoolExecutor(len(self.workers) + len(VALIDATORS)) as threads:
            roles = [threads.submit(self.keep, partial(self.work, key, 2)) for key in self.workers]
            roles += [threads.submit(self.keep, partial(self.judge, key)) for key in VALIDATORS]
            try:
                for step in range(self.steps):
                    batch = partial(self.take_batch, step, roles)
                    eventually(batch, DEADLINE_S, f"there was no batch of step {step}")
                    after_batch(step)
                    self.announce(step + 1)
            finally:
                self._is_over.set()
            for role in roles:
                role.result(DEADLINE_S)
        return self.finish()

    def keep(self, act: Callable[[], Any]) -> None:
        """Do the same until the run is over."""
        while not self._is_over.is_set():
            act()

    def begin(self) -> None:
        self.register(kit.TRAINER, "trainer")
        for key in VALIDATORS:
            self.register(key, "validator")
        for key in (*self.workers, CHEAT):
            self.register(key, "worker")
        self.announce(0)
        self.work(CHEAT, 2)

    def finish(self) -> list[LedgerEntry]:
        eventually(lambda: not self.judge(), DEADLINE_S, "there is always more to be judged")
        is_settled = partial(self.books.is_settled_in, steps=self.steps)
        eventually(lambda: is_settled(self.ledger()), DEADLINE_S, "the ledger is not complete")
        return self.ledger()

    def register(self, key: SigningKey, role: Role) -> None:
        signed = None if role == "worker" else kit.certificate(key, role)
        self.call(key, "POST", "/nodes", Registration(public_key=key.public_key, role=role, certificate=signed))

    def turn(self, step: int) -> bool:
        """Everybody does something; whether the batch of the step is there."""
        for key in self.workers:
            self.work(key, 2)
        self.judge()
        return self.take_batch(step)

    def work(self, key: SigningKey, count: int) -> None:
        body = {"request": kit.fresh_request(), "max_units": count, "wait_s": 0}
        self.generate(key, self.ask(LeaseReply, key, "POST", "/leases", body).leases)

    def generate(self, key: SigningKey, leases: Sequence[SignedDocument]) -> None:
        for lease in (open_document(signed, Lease, kit.HUB.public_key) for signed in leases):
            draw = (lease.task, lease.seeds)
            assert lease.node == key.node
            assert self.books.draws.setdefault(lease.unit, draw) == draw, "a unit keeps its task and its seeds"
            self.submit(key, lease)

    def submit(self, key: SigningKey, lease: Lease) -> None:
        signed = self.ask(SignedDocument, key, "PUT", f"/submissions/{lease.lease}", kit.submission_body(lease))
        self.books.promise(open_document(signed, Receipt, kit.HUB.public_key))

    def judge(self, key: SigningKey = kit.VALIDATOR) -> bool:
        """Whether there was anything to judge. What nobody could judge twice is generated."""
        reply = self.ask(AuditReply, key, "POST", "/audits", {"max_audits": 8, "wait_s": 0, "generates": KIND})
        self.generate(key, reply.generate)
        for audit in (audits := reply.audits):
            with self._deciding:
                if audit.submission not in self.books.verdicts:
                    self.books.verdicts[audit.submission] = self._verdict(audit)
        signed = [sign_document(self.books.verdicts[audit.submission], key) for audit in audits]
        if signed:
            answer = self.call(key, "POST", "/verdicts", VerdictReport(verdicts=tuple(signed)))
            assert b'"refused":[]' in answer, answer
        return bool(signed)

    def _verdict(self, audit: Audit) -> Verdict:
        """The cheat is caught with the second of its groups; one group meets broken machinery, one teaches nothing."""
        lease = open_document(audit.lease, Lease, kit.HUB.public_key)
        before = Counter(each.node for each in self.books.verdicts.values())[lease.node]
        caught = lease.node == CHEAT.node and before > 0
        broken = (lease.node == WORKERS[0].node and before == 1) or self.is_unsure(audit)
        dull = lease.node == WORKERS[1].node and before == 1
        outcome = Outcome.REJECTED if caught else Outcome.UNSURE if broken else Outcome.ACCEPTED
        return kit.verdict_on(
            lease, audit.submission, (1.0, 1.0) if dull else (0.0, 1.0), outcome=outcome, reason="test",
            severity=Severity.CERTAIN if caught else None, depth=audit.depth,
            generated_tokens=2 * kit.TOKENS_PER_ROLLOUT - lease.unit % 3, decided_at_ms=SystemClock().now_ms(),
        )  # fmt: skip

    def is_unsure(self, audit: Audit) -> bool:
        return False

    def take_batch(self, step: int, roles: Sequence[Future[None]] = ()) -> bool:
        for role in roles:
            assert not role.done(), role.exception()
        batch = self.ask(BatchReply, kit.TRAINER, "POST", f"/batches/{step}", {"wait_s": 0}).batch
        if batch is not None:
            assert self.books.batches.setdefault(step, batch) == batch, "a batch never changes"
        return batch is not None

    def announce(self, version: int) -> None:
        document = PolicyAnnouncement(run=kit.RUN_ID, policy=kit.policy(version), created_at_ms=0)
        self.call(kit.TRAINER, "POST", "/policies", sign_document(document, kit.TRAINER))

    def ledger(self) -> list[LedgerEntry]:
        """Every row, checked against the head that the hub signs."""
        head = open_document(self.ask(SignedDocument, None, "GET", "/ledger/head"), LedgerHead, kit.HUB.public_key)
        page = self.ask(LedgerPage, None, "GET", "/ledger?after=-1&limit=1000")
        ledger.verify(page.entries, head)
        return list(page.entries)
