"""A worker against a hub that is a few lists, on the scripted engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal import protocol
from shoal.client import Intervals
from shoal.engines.scripted import ScriptedEngine
from shoal.engines.shelf import EngineShelf, LoadedPolicy
from shoal.runtime.stop import StopToken
from shoal.worker import Outbox, Worker, WorkerSettings

HUB = protocol.SigningKey.from_seed(b"h" * 32)
KEY = protocol.SigningKey.from_seed(b"n" * 32)
RUN = "demo-000000000000"
SAMPLING = protocol.SamplingParameters(temperature=1.0, max_new_tokens=6, eos_token_id=1)
PROOFS = (protocol.ProofParameters(topk=8, rows=2), protocol.ProofParameters())
FAST = Intervals(poll_s=0, heartbeat_s=0.05, patience_s=20)


def policy(version: int = 0) -> protocol.PolicyRef:
    return protocol.PolicyRef(incarnation=0, version=version, digest="d" * 64)


def lease(unit: int, version: int = 0, lasts_ms: int = 60_000) -> protocol.Lease:
    return protocol.Lease(
        run=RUN, lease=f"lease-{unit}", node=KEY.node, unit=unit, attempt=0, policy=policy(version), task="t",
        prompt_ids=(10 + unit, 11), seeds=(f"{unit:016x}", f"{unit + 99:016x}"), sampling=SAMPLING,
        proof=PROOFS[unit % 2],
        environment_digest="e" * 64, issued_at_ms=0, deadline_ms=lasts_ms,
    )  # fmt: skip


class _Info:
    run = RUN
    profiles: tuple[str, ...] = ("torch/cpu/float32",)
    max_staleness = 1


class _Trusted:
    info = _Info()


Reply = list[protocol.Lease] | Exception | Callable[[], list[protocol.Lease]]


class ListHub:
    """Stands where the client stands: leases come from a list (then the run is finished), submissions go to another."""

    def __init__(self, *replies: Reply) -> None:
        self.key = KEY
        self.replies = list(replies)
        self.requests: list[protocol.LeaseRequest] = []
        self.released: list[protocol.LeaseRelease] = []
        self.submitted: list[protocol.Submission] = []
        self.refusals: dict[int, Exception] = {}
        self.view = protocol.NodeView(node=KEY.node, name="n", role="worker", state=protocol.NodeState.ACTIVE)
        self.beats: list[protocol.Heartbeat] = []
        self.deadlines: dict[str, int] = {}
        self.policy: protocol.PolicyRef | None = policy()
        self.finished = False
        self.gate = threading.Event()
        self.gate.set()

    def run_info(self) -> _Info:
        return _Info()

    def refreshed_run(self) -> _Trusted:
        return _Trusted()

    def patient(self, patience_s: float) -> ListHub:
        return self

    def heartbeat(self, heartbeat: protocol.Heartbeat) -> protocol.HeartbeatReply:
        self.beats.append(heartbeat)
        return protocol.HeartbeatReply(
            node=self.view, deadlines=self.deadlines, policy=self.policy, finished=self.finished
        )

    def lease(self, request: protocol.LeaseRequest) -> protocol.LeaseReply:
        self.requests.append(request)
        self.granted: list[protocol.Lease] = []
        if not self.replies:
            return protocol.LeaseReply(finished=True, policy=self.policy)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        self.granted = reply() if callable(reply) else reply
        signed = tuple(protocol.sign_document(granted, HUB) for granted in self.granted)
        return protocol.LeaseReply(leases=signed, policy=self.policy, waiting="" if signed else "nobody says why")

    def open_leases(self, reply: protocol.LeaseReply) -> list[tuple[protocol.Lease, Any]]:
        return list(zip(self.granted, reply.leases, strict=True))

    def release(self, release: protocol.LeaseRelease) -> None:
        self.released.append(release)

    def submit(self, lease_id: str, body: bytes) -> protocol.Receipt:
        assert self.gate.wait(20)
        submission = protocol.unpack(body, protocol.Submission, protocol.BodyLimits())
        assert submission.lease == lease_id
        if submission.unit in self.refusals:
            raise self.refusals[submission.unit]
        self.submitted.append(submission)
        return protocol.Receipt(
            run=RUN, node=KEY.node, lease=lease_id, unit=submission.unit, submission=protocol.submission_digest(body),
            size_bytes=len(body), received_at_ms=0,
        )  # fmt: skip


class CountingEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.failure: Exception | None = None
        self.broken: dict[int, float] = {}
        data = memoryview(np.ones(1, dtype="<f4")).cast("B")
        self.load_policy(policy(), {"w": protocol.TensorView("w", "F32", (1,), data)})

    def generate(self, requests, proof=None):  # type: ignore[no-untyped-def]
        if self.failure is not None:
            raise self.failure
        units = [request.prompt_ids[0] - 10 for request in requests]
        self.calls.append(units)
        groups = super().generate(requests, proof)
        for unit, group in zip(units, groups, strict=True):
            if unit in self.broken:
                group[-1].logprobs[-1] = self.broken[unit]
        return groups


class ListShelf(EngineShelf):
    def __init__(self, **missing: Exception) -> None:
        self.engine = CountingEngine()
        self.missing = missing
        self.patience: list[float] = []
        self.before_get: Callable[[], object] = lambda: None

    def get(self, ref: protocol.PolicyRef, deadline_s: float) -> LoadedPolicy:
        self.before_get()
        self.patience.append(deadline_s)
        if f"v{ref.version}" in self.missing:
            raise self.missing[f"v{ref.version}"]
        return LoadedPolicy(ref, self.engine, {})


class Bench:
    """A worker with everything around it."""

    def __init__(
        self,
        folder: Path,
        *replies: Reply,
        profile: str = "torch/cpu/float32",
        chosen: bool = False,
        **missing: Exception,
    ) -> None:
        self.hub = ListHub(*replies)
        self.shelf = ListShelf(**missing)
        self.outbox = Outbox(folder / "outbox")
        self.stop = StopToken()
        client: Any = self.hub
        settings = WorkerSettings(units_per_lease=4)
        self.shelf.engine.kind = profile
        self.worker = Worker(client, self.shelf, self.outbox, settings, self.stop, chosen=chosen, pace=FAST)

    @classmethod
    def worked(cls, *arguments: Any, **options: Any) -> Bench:
        """One whose worker has run to its end."""
        bench = cls(*arguments, **options)
        bench.worker.run()
        return bench

    @property
    def released(self) -> list[tuple[str, ...]]:
        return [release.leases for release in self.hub.released]

    @property
    def units(self) -> list[int]:
        return sorted(submission.unit for submission in self.hub.submitted)

    @property
    def waiting(self) -> list[int]:
        return [parcel.unit for parcel in self.outbox.waiting(RUN)]
