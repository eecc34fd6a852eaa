"""The simulated world: a heap of events, the hub in its midst, and who waits for it. Of its actors it knows nothing.

at(delay, action) ─► heap ─► the clock jumps to the next event ─► action ─► hub
                                                                   │
waiting (like long polls) ◄── nothing to do ◄──────────────────────┤
    └─ the hub notes a change ─► those who waited longest ask again, until several get nothing
"""

import hashlib
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from shoal.environments import Score, Split, Task
from shoal.hub import HubConfig, HubSettings, RunSettings
from shoal.hub.changes import Topic
from shoal.hub.service import Hub
from shoal.hub.state.commands import Save
from shoal.hub.state.rows import PROBATION_AUDITS, NodeRow, Rules
from shoal.hub.storage import SqliteStorage
from shoal.protocol import Batch, Registration, Role, RoleCertificate, SigningKey, sign_document
from shoal.protocol.submission import Receipt, submission_digest
from shoal.runtime.clock import ManualClock


@dataclass(frozen=True)
class WorkerKind:
    """Times are means; each worker's pace is its own, and `spread` says how much they differ. `proven`: past probation
    when they arrive. `lies`: the part of its groups that fail the audit. One that does not `deliver` takes leases and
    submits nothing; if it `pretends`, it still shows progress. `network` and `address` are where they ask from.
    One dies after about `lives_s`, and is back `away_s` later: with its key, or, if it is banned and `fresh_keys`, with
    a new one."""

    count: int
    group_s: float = 60.0
    spread: float = 0.3
    proven: bool = False
    lies: float = 0.0
    delivers: bool = True
    pretends: bool = False
    network: str = ""
    address: str = ""
    lives_s: float = math.inf
    away_s: float = 120.0
    fresh_keys: bool = False


@dataclass(frozen=True)
class Scenario:
    """A run of at most `seconds` simulated seconds. Workers arrive within `arrive_s`. Each of `validators` needs
    `audit_s` for a group and claims `claims` at a time; one group in `equal` teaches nothing. The trainer needs
    `train_s` for a step and dies in the middle of one step in `trainer_dies`. The hub is stopped every `restarts_s` and
    is back after `down_s`."""

    workers: tuple[WorkerKind, ...]
    seed: int = 0
    seconds: float = 600.0
    run: RunSettings = field(default_factory=lambda: RunSettings(steps=20, groups_per_step=16, group_size=2))
    hub: HubSettings = field(default_factory=HubSettings)
    arrive_s: float = 5.0
    heartbeat_s: float = 10.0
    validators: int = 1
    audit_s: float = 0.25
    claims: int = 8
    equal: float = math.inf
    train_s: float = 10.0
    trainer_dies: float = math.inf
    restarts_s: float = math.inf
    down_s: float = 5.0


class MemoryBlobs(dict[str, bytes]):
    def put(self, body: bytes) -> str:
        name = submission_digest(body)
        self[name] = body
        return name

    def get(self, name: str) -> bytes:  # type: ignore[override]
        return self[name]

    def has(self, name: str) -> bool:
        return name in self


TICK_S = 1.0
RETRY_S = 2.0
POLL_S = 20.0  # a long poll that got nothing is made again after this time
GATHER_S = 0.05
EMPTY_ASKS = {Topic.LEASES: 3, Topic.AUDITS: 1, Topic.BATCHES: 1}
"""After so many actors of a kind in a row got nothing, the others of that kind are not tried. Some workers get
nothing because of their own windows, so one is not enough for them; the hub treats all validators alike."""
RUN = "simulated"
TOPICS = tuple(Topic)  # an enumeration is slow to go through, after every event


class HubDown(Exception):
    """The hub does not answer at the moment. An action that meets this has changed nothing yet: it is done again."""


class WaitingActor(Protocol):
    """Waits again if it gets nothing. The hub treats actors of one `kind` alike."""

    @property
    def kind(self) -> str: ...

    def ask(self) -> None: ...


@dataclass(frozen=True)
class SimulationResult:
    seconds: float
    events: int
    steps: int
    ledger: str
    counts: dict[str, int]
    """What workers did and met: leases, receipts, lies, late, deaths, bans, …"""


class World:
    """One simulated run in `folder` (which holds the run's secret only)."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.scenario, self.random = scenario, random.Random(scenario.seed)
        self.clock, self.storage = ManualClock(), SqliteStorage(None)
        self.blobs = MemoryBlobs()  # a simulated hour submits hundreds of thousands, and trains on none of them
        self.counts: Counter[str] = Counter()
        self.receipts: dict[str, Receipt] = {}
        self.lies: set[str] = set()
        self.batches: dict[int, Batch] = {}
        self.events = self._made = 0
        self._began_ms = self._now_ms = self.clock.now_ms()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._waiting: dict[Topic, deque[WaitingActor]] = {topic: deque() for topic in Topic}
        self._seen: dict[Topic, int] = {}
        self._due: set[Topic] = set()
        self._root = self.key("root")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "secret").write_text(hashlib.sha256(f"{self.scenario.seed}/secret".encode()).hexdigest())
        self._config = HubConfig(
            folder=folder, run_id=RUN, run=self.scenario.run, settings=self.scenario.hub,
            environment=NumberedTasks(), encode=lambda task: list(task.prompt.encode()), eos_token_ids=(0,),
            key=self.key("hub"), root_key=self._root.public_key,
        )  # fmt: skip
        self._hub: Hub | None = None
        self._start_hub()
        self.at(TICK_S, self._tick)
        self.at(POLL_S, self._poll)
        self.at(scenario.restarts_s, self._stop_hub)

    @property
    def now_s(self) -> float:
        return (self._now_ms - self._began_ms) / 1000

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        if delay_s < math.inf:
            self._made += 1
            heapq.heappush(self._heap, (self._now_ms + max(1, round(delay_s * 1000)), self._made, action))

    def about(self, mean_s: float) -> float:
        return self.random.expovariate(1 / mean_s) if mean_s < math.inf else math.inf

    def run(self, until: Callable[[], bool]) -> SimulationResult:
        end_ms = self._began_ms + round(self.scenario.seconds * 1000)
        while self._heap and self._heap[0][0] <= end_ms and not until():
            at_ms, _number, action = heapq.heappop(self._heap)
            self.clock.advance((at_ms - self._now_ms) / 1000)
            self._now_ms = at_ms
            self.events += 1
            try:
                action()
            except HubDown:
                self.at(RETRY_S, action)
            self._notice()
        return self.outcome()

    def outcome(self) -> SimulationResult:
        if self._hub is not None:
            self._hub.posting.post()
        with self.storage.read() as reader:
            last, steps = reader.ledger_last(), reader.progress().next_step
        return SimulationResult(self.now_s, self.events, steps, last.hash if last else "", dict(self.counts))

    @property
    def hub(self) -> Hub:
        if self._hub is None:
            raise HubDown
        return self._hub

    def known(self, node: str) -> NodeRow:
        with self.hub.context.storage.read() as reader:
            row = reader.node(node)
        assert row is not None, "actors register first"
        return row

    def signed_in(self, node: str) -> NodeRow:
        """What the hub knows of a node that calls it, and note that the node was heard of."""
        with self.hub.context.storage.write(durable=False) as transaction:
            transaction.touch_presence(node, self.hub.context.clock.now_ms())
            row = transaction.node(node)
        assert row is not None, "actors register first"
        return row

    def register(self, key: SigningKey, role: Role = "worker") -> str:
        certificate = None
        if role != "worker":
            document = RoleCertificate(run=RUN, role=role, public_key=key.public_key, issued_at_ms=0)
            certificate = sign_document(document, self._root)
        registration = Registration(public_key=key.public_key, role=role, certificate=certificate)
        return self.hub.membership.register(registration).node

    def prove(self, node: str) -> None:
        row = self.known(node)
        with self.storage.write() as transaction:
            transaction.apply([Save(replace(row, passed=PROBATION_AUDITS), row.state)])

    def key(self, name: str) -> SigningKey:
        return SigningKey.from_seed(hashlib.sha256(f"{self.scenario.seed}/{name}".encode()).digest())

    def wait(self, topic: Topic, waiter: WaitingActor) -> None:
        self._waiting[topic].append(waiter)

    def _notice(self) -> None:
        if self._hub is None:
            return
        counts = self._hub.context.changes.counts
        for topic in TOPICS:
            if self._seen.get(topic) != (count := counts[topic]):
                self._seen[topic] = count
                if self._waiting[topic] and topic not in self._due:
                    self._due.add(topic)
                    self.at(GATHER_S, lambda topic=topic: self._serve(topic))  # type: ignore[misc]

    def _serve(self, topic: Topic) -> None:
        """Who waits asks again, longest wait first; see `EMPTY_ASKS`."""
        self._due.discard(topic)
        if self._hub is None:
            return  # they are served as soon as it is back
        waiting, self._waiting[topic] = self._waiting[topic], deque()
        empty: Counter[str] = Counter()
        skipped: list[WaitingActor] = []
        for waiter in waiting:
            if empty[waiter.kind] >= EMPTY_ASKS[topic]:
                skipped.append(waiter)
                continue
            before = len(self._waiting[topic])
            waiter.ask()
            empty[waiter.kind] = empty[waiter.kind] + 1 if len(self._waiting[topic]) > before else 0
        self._waiting[topic].extendleft(reversed(skipped))

    def _poll(self) -> None:
        for topic in Topic:
            self._serve(topic)
        self.at(POLL_S, self._poll)

    def _tick(self) -> None:
        if self._hub is not None:
            self._hub.upkeep.tick()
        self.at(TICK_S, self._tick)

    def _start_hub(self) -> None:
        self._hub = Hub(self._config, self.clock, self.storage)
        self._hub.context.blobs = self.blobs
        self._seen.clear()

    def _stop_hub(self) -> None:
        """A restart: all that the hub's process remembers beside its database is gone."""
        self.counts["restarts"] += 1
        self.hub.close()
        self._hub = None
        self.at(self.scenario.down_s, self._start_hub)
        self.at(self.scenario.restarts_s + self.scenario.down_s, self._stop_hub)

    @property
    def rules(self) -> Rules:
        return self._config.rules


class NumberedTasks:
    name = "numbers"
    digest = "ab" * 32

    def __init__(self) -> None:
        self._tasks = {str(number): Task(id=str(number), prompt=f"{number}=", answer="") for number in range(1000)}
        self._listed = list(self._tasks.values())

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._listed if split == "train" else []

    def task(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def score(self, task: Task, completion: str) -> Score:
        raise NotImplementedError("a simulated validator knows who lied")
