"""A whole run in this process, to be attacked: real hub, origin, trainer, validator and honest worker, each a thread.

    honest worker ──────── works all the time ─────────────────────────────►
    cheaters ───────────── a few at a time, each until the hub shuts it out, or has refused what it sends

Everything goes through `run_role` and real sockets, as the processes of `shoal run` do. What is seen of it is what the
hub tells anyone, the batches, which it tells the trainer, and the verdicts, on their way from validator to hub.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import shoal.trainer.loop  # noqa: F401 - torch and transformers cannot be imported first by several threads at once
from kit import eventually
from kit.roles import Sections, prepared, whole_ledger
from kit.trial import farthest
from shoal import protocol
from shoal.client import ClientOptions, HubClient
from shoal.engines import GenerationRequest
from shoal.engines.shelf import LoadedPolicy
from shoal.errors import HubRefused, ShutOut
from shoal.hub.state import nodes
from shoal.run.roles import run_role
from shoal.runtime.stop import StopToken
from shoal.validator.case import BODY_LIMITS
from shoal.validator.judge import Judge
from shoal.validator.verdicts import AuditJob
from shoal.worker.outbox import Parcel, Uploader

DEADLINE_S = 400
ATTACK_S = 240.0  # of a busy machine; otherwise seconds
SUSPENDED_MS = 500  # the first time; nobody here waits a minute for a cheater to come back
POLL_S = 0.05
NEAR = 1e-4  # of the interval of its token under the right policy, every uniform
AT_ONCE = 6
HONEST = "worker-0"
NEEDED = ("hub", "origin", "trainer", "validator-0")
WORKING = ("trainer", "validator-0", HONEST)
RECIPE: Sections = {
    "run": {"steps": 10_000, "groups_per_step": 8, "group_size": 8, "max_staleness": 2, "max_new_tokens": 10},
    "trainer": {"learning_rate": 1e-4, "grad_clip": 1.0, "weight_decay": 0, "minibatches": 2, "evaluate_every": 0},
    "hub": {"port": 0, "newcomer_share": 0.5}, "relay": {"count": 0}, "worker": {"count": 1, "units_per_lease": 2},
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """One verdict of the run's validator, and what a test finds out beside it.

    `is_honest`: token by token what the seeds give. `is_near`: that, or another token where the uniform is so near an
    edge (1e-4) that rounding could have decided it.
    """

    node: str
    version: int
    verdict: protocol.Verdict
    tokens: int
    is_honest: bool
    is_near: bool

    @property
    def outcome(self) -> protocol.Outcome:
        return self.verdict.outcome


class Watch:
    """Listens in on the validator: `judged` has every verdict it gave, in order."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []
        self.bodies: list[protocol.Submission] = []
        self._lock = threading.Lock()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this lasts, every `Judge` is listened to."""
        honest, judges = Judge.verdicts, list[Judge]()

        def verdicts(judge: Judge, audit_jobs: Sequence[AuditJob], loaded: LoadedPolicy) -> list[protocol.Verdict]:
            given = honest(judge, audit_jobs, loaded)
            judges.append(judge)
            if judge is judges[0]:  # others judge canaries, which nobody submitted
                by_name = {audit_job.audit.submission: audit_job for audit_job in audit_jobs}
                for verdict in given:  # of shown progress that holds there is none
                    self._note(by_name[verdict.submission], verdict, loaded)
            return given

        Judge.verdicts = verdicts  # type: ignore[method-assign]
        try:
            yield
        finally:
            Judge.verdicts = honest  # type: ignore[method-assign]

    def _note(self, audit_job: AuditJob, verdict: protocol.Verdict, loaded: LoadedPolicy) -> None:
        body = protocol.unpack(audit_job.body, protocol.Submission, BODY_LIMITS)
        tokens = sum(len(rollout.tokens) // 4 for rollout in body.rollouts)
        accepted = verdict.outcome is protocol.Outcome.ACCEPTED
        # the honest worker, who is the first to be judged, is looked at now and then: it would take half the time
        is_known = bool(self.judged) and audit_job.lease.node == self.judged[0].node and len(self.judged) % 16 > 0
        is_honest = accepted and (is_known or is_what_the_seeds_give(audit_job, body, loaded))
        is_near = accepted and (is_honest or farthest(loaded.engine, audit_job.lease, body) <= NEAR)
        judged = Judged(audit_job.lease.node, audit_job.lease.policy.version, verdict, tokens, is_honest, is_near)
        with self._lock:
            self.judged.append(judged)
            self.bodies.append(body)

    def of(self, node: str) -> list[Judged]:
        with self._lock:
            return [each for each in self.judged if each.node == node]

    def bodies_of(self, node: str) -> list[protocol.Submission]:
        with self._lock:
            return [body for body in self.bodies if body.node == node]


def is_what_the_seeds_give(audit_job: AuditJob, body: protocol.Submission, loaded: LoadedPolicy) -> bool:
    """Whether the right policy, asked again, gives token by token what was submitted."""
    lease = audit_job.lease
    [group] = loaded.engine.generate([GenerationRequest(lease.prompt_ids, lease.seed_numbers, lease.sampling)])
    return [rollout.token_ids.tolist() for rollout in body.rollouts] == [each.token_ids.tolist() for each in group]


@dataclass
class Attack:
    """One cheater: its name in the run, and how it ended."""

    cheat: str
    name: str
    ending: BaseException | None = None
    refusals: list[str] = field(default_factory=list)


class Attacked:
    """The run under attack."""

    def __init__(self, folder: Path, **changes: dict[str, Any]) -> None:
        self.folder = prepared(folder, RECIPE, **changes)
        self.stop, self.enough = StopToken(), StopToken()
        self.watch = Watch()
        self.attacks: list[Attack] = []
        self.threads = ThreadPoolExecutor(max_workers=16)
        self.needed = {name: self.start(name) for name in NEEDED}

    @classmethod
    @contextmanager
    def running(cls, folder: Path, **changes: dict[str, Any]) -> "Iterator[Attacked]":
        """A run with an honest worker that has had something accepted."""
        run = cls(folder, **changes)
        with run.watch.listening(), run.refusing(), patch.object(nodes, "FIRST_MS", SUSPENDED_MS):
            try:
                run.needed[HONEST] = run.start(HONEST)
                run.wait_until("honest work", lambda: any(each.is_honest for each in run.watch.judged))
                yield run
            finally:
                run.close()

    def start(self, name: str, cheat: str | None = None, stop: StopToken | None = None) -> Future[None]:
        default = self.enough if name in WORKING else self.stop
        return self.threads.submit(run_role, self.folder, name, stop or default, cheat)

    def rest(self) -> None:
        """Nobody works any more; the hub still answers. Else the run would take the time of those who look at it."""
        self.enough.set("enough was seen")
        for name in WORKING:
            self.needed.pop(name).exception(DEADLINE_S)

    def attack(self, cheats: Sequence[str]) -> None:
        """Let cheaters come, a few at a time, and each continue until it is shut out or refused."""
        first = len(self.attacks) + 1
        new = [Attack(cheat, f"worker-{first + index}") for index, cheat in enumerate(cheats)]
        self.attacks += new
        with ThreadPoolExecutor(max_workers=AT_ONCE) as crowd:
            list(crowd.map(self._attack, new))

    def _attack(self, attack: Attack) -> None:
        stop, end_s = StopToken(), time.monotonic() + ATTACK_S
        role = self.start(attack.name, attack.cheat, stop)
        while not role.done() and time.monotonic() < end_s and len(attack.refusals) < 2:
            self._raise_failure()
            time.sleep(POLL_S)  # polling with a deadline
        stop.set("enough was seen of it")
        attack.ending = role.exception(DEADLINE_S)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """While this lasts, what the hub says to parcels that it does not take is noted with their attack."""
        send = Uploader._send

        def noted(uploader: Uploader, parcel: Parcel) -> None:
            client = uploader._client

            def submit(lease: str, body: bytes) -> Any:
                try:
                    return client.submit(lease, body)
                except ShutOut:  # which ends the worker, and is about no parcel
                    raise
                except HubRefused as refusal:
                    for attack in self.attacks:
                        if parcel.path.is_relative_to(self.folder.path / attack.name):
                            attack.refusals.append(refusal.code)
                    raise

            with patch.object(uploader, "_client", SimpleNamespace(submit=submit)):
                send(uploader, parcel)

        with patch.object(Uploader, "_send", noted):
            yield

    def wait_until(self, what: str, condition: Any) -> None:
        def holds() -> bool:
            self._raise_failure()
            return bool(condition())

        eventually(holds, DEADLINE_S, what)

    def _raise_failure(self) -> None:
        """At once, if a role that everybody needs has ended: nothing would come of waiting."""
        for name, role in self.needed.items():
            assert not role.done(), f"{name} ended: {role.exception()!r}"

    def close(self) -> None:
        for stop in (self.enough, self.stop):
            stop.set("the test ends")
        for role in self.needed.values():
            role.exception(DEADLINE_S)
        self.threads.shutdown()

    # ── what anyone can see ──────────────────────────────────────────────────────────────────────────────────────

    def client(self, key: protocol.SigningKey | None = None) -> HubClient:
        """Of anybody, if no key is given."""
        key = key or protocol.SigningKey.generate()
        url, pinned = self.folder.endpoints.hub, protocol.fingerprint(self.folder.root_key)
        return HubClient(url, key, self.stop, pinned, options=ClientOptions(patience_s=DEADLINE_S))

    def nodes(self) -> dict[str, protocol.NodeView]:
        with closing(self.client()) as anyone:
            return {node.name: node for node in anyone.status().nodes}

    def story(self, node: str) -> protocol.NodeStory:
        """What the hub holds of a node, with the signed verdicts on what was refused."""
        with closing(self.client()) as anyone:
            return anyone.node(node)

    def ledger(self) -> list[protocol.LedgerEntry]:
        """The whole ledger, verified."""
        with closing(self.client()) as anyone:
            return whole_ledger(anyone)

    def trained(self) -> list[protocol.BatchGroup]:
        """Every group of every batch so far."""
        groups: list[protocol.BatchGroup] = []
        with closing(self.client(self.folder.key("trainer"))) as trainer:
            for step in range(trainer.status().step):
                batch = trainer.batch(step, 0).batch
                groups += batch.groups if batch is not None else ()
        return groups


@dataclass(frozen=True)
class Result:
    """One row of the table. `caught_at` counts the cheater's own groups, from 1; None if it was never caught."""

    cheat: str
    node: str
    caught_at: int | None
    tokens: int
    reason: str
    severity: str
    banned: bool
    accepted: int
    near: int
    wrong: int

    @classmethod
    def of(cls, run: Attacked, attack: Attack, node: protocol.NodeView) -> "Result":
        judged = run.watch.of(node.node)
        at = next((i for i, each in enumerate(judged) if each.outcome is protocol.Outcome.REJECTED), None)
        accepted = [each for each in judged if each.outcome is protocol.Outcome.ACCEPTED]
        caught = judged[at].verdict if at is not None else None
        refused = attack.refusals[0] if attack.refusals and at is None else ""
        return cls(
            cheat=attack.cheat, node=node.node, caught_at=at + 1 if at is not None else (1 if refused else None),
            tokens=sum(each.tokens for each in judged[: len(judged) if at is None else at + 1]),
            reason=caught.reason if caught is not None else refused,
            severity=str(caught.severity or "") if caught is not None else ("refused" if refused else ""),
            banned=node.state == "banned", accepted=len(accepted),
            near=sum(each.is_near and not each.is_honest for each in accepted),
            wrong=sum(not each.is_near for each in accepted),
        )  # fmt: skip


def results(run: Attacked) -> dict[str, Result]:
    nodes = run.nodes()
    return {attack.cheat: Result.of(run, attack, nodes[attack.name]) for attack in run.attacks}


def table(run: Attacked) -> str:
    """The table in Markdown, and a line on the honest worker."""
    lines = [
        "| attack | caught at unit | tokens until then | reason | severity | accepted before |",
        "|---|--:|--:|---|---|--:|",
    ]
    for result in results(run).values():
        caught = "never" if result.caught_at is None else result.caught_at
        lines.append(
            f"| {result.cheat} | {caught} | {result.tokens} | {result.reason} | {result.severity} | {result.accepted} |"
        )
    honest = run.nodes()[HONEST]
    lines += ["", f"honest worker beside them: {honest.accepted} accepted, {honest.rejected} rejected, "
              f"{honest.unsure} unsure, {honest.strikes} strikes"]  # fmt: skip
    return "\n".join(lines)
