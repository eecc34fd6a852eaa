"""The worker's loop: what it asks for, generates and gives back; how it ends and waits; what its owner is told."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from kit import Logs, Patch, eventually
from kit.stubs import StubClient
from shoal import errors, protocol
from shoal.client import Intervals
from shoal.engines import EngineShelf, GenerationRequest, LoadedPolicy
from shoal.engines.dialogue import dialogue_for
from shoal.engines.groups import submission_of
from shoal.engines.scripted import ScriptedEngine
from shoal.environments.tools import TOOLS
from shoal.protocol import NodeState, unpack_spans
from shoal.runtime import ManualClock, StopToken
from shoal.runtime.limits import PAUSED, Allowance, Hours
from shoal.toploc import split_proofs
from shoal.worker import loop
from shoal.worker.earnings import Earnings, Standing
from shoal.worker.loop import NotTaken, Worker
from shoal.worker.outbox import Outbox
from shoal.worker.settings import WorkerSettings, units_that_fit

HUB = protocol.SigningKey.from_seed(b"h" * 32)
KEY = protocol.SigningKey.from_seed(b"n" * 32)
RUN = "demo-000000000000"
SAMPLING = protocol.SamplingParameters(temperature=1.0, max_new_tokens=6, eos_token_ids=(1,))
PROOFS = (protocol.ProofParameters(topk=8, rows=2), protocol.ProofParameters())
NOON_MS = int(time.mktime((2026, 1, 15, 12, 0, 0, 0, 0, -1))) * 1000
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


Reply = list[protocol.Lease] | Exception | Callable[[], list[protocol.Lease]]


class ListHub(StubClient):
    """Leases come from a list (then the run is finished), submissions go to another."""

    def __init__(self, *replies: Reply) -> None:
        info = {"run": RUN, "profiles": ("torch/cpu/float32",), "max_staleness": 1}
        super().__init__(KEY, "worker", info, *replies)
        self.released: list[protocol.LeaseRelease] = []
        self.submitted: list[protocol.Submission] = []
        self.refusals: dict[int, Exception] = {}
        self.policy = policy()
        self.gate = threading.Event()
        self.gate.set()

    def lease(self, request: protocol.LeaseRequest) -> protocol.LeaseReply:
        self.granted: list[protocol.Lease] = []
        if (granted := self.next_reply(request, None)) is None:
            return protocol.LeaseReply(finished=True, policy=self.policy)
        self.granted = granted
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

    def clear(self) -> None:
        self.patience.append(-1.0)


class Bench:
    """A worker with everything around it."""

    def __init__(
        self, folder: Path, *replies: Reply, profile: str = "torch/cpu/float32", chosen: bool = False,
        allowance: Allowance = Allowance(), **missing: Exception,
    ) -> None:  # fmt: skip
        self.hub = ListHub(*replies)
        self.shelf = ListShelf(**missing)
        self.outbox = Outbox(folder / "outbox")
        self.stop = StopToken()
        client: Any = self.hub
        settings = WorkerSettings(units_per_lease=4)
        self.shelf.engine.kind = profile
        given = (client, self.shelf, self.outbox, settings, self.stop)
        self.worker = Worker(*given, chosen=chosen, pace=FAST, allowance=allowance)

    @classmethod
    def worked(cls, *arguments: Any, **options: Any) -> "Bench":
        """One whose worker has run to its end."""
        bench = cls(*arguments, **options)
        bench.worker.run()
        return bench

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """It works, in a thread, and the hub takes nothing before the end of the block."""
        self.hub.gate.clear()
        thread = threading.Thread(target=self.worker.run)
        thread.start()
        try:
            yield
        finally:
            self.hub.gate.set()
            thread.join(30)

    @property
    def released(self) -> list[tuple[str, ...]]:
        return [release.leases for release in self.hub.released]

    @property
    def units(self) -> list[int]:
        return sorted(submission.unit for submission in self.hub.submitted)

    @property
    def waiting(self) -> list[int]:
        return [parcel.unit for parcel in self.outbox.waiting(RUN)]


def test_it_generates_what_was_leased_in_one_call_and_hands_it_in(tmp_path: Path) -> None:
    bench = Bench.worked(tmp_path, [lease(1), lease(3), lease(5)], [], [lease(4)])
    assert (bench.units, bench.waiting) == ([1, 3, 4, 5], [])
    assert bench.shelf.engine.calls == [[1, 3, 5], [4]]
    assert [request.max_units for request in bench.hub.requests[:2]] == [1, 4]
    assert len({request.request for request in bench.hub.requests}) == len(bench.hub.requests)
    counters = bench.worker.activity.heartbeat().counters
    tokens = sum(len(r.token_ids) for s in bench.hub.submitted for r in s.rollouts)
    assert (counters["groups"], counters["submitted"], counters["tokens"]) == (4, 4, tokens)


def test_a_request_names_the_leases_that_are_answered_but_not_sent(tmp_path: Path) -> None:
    """The others of an earlier start are lost, and the hub learns it."""
    bench = Bench(tmp_path, [lease(1)], lambda: bench.hub.gate.set() or [])
    bench.hub.gate.clear()
    bench.worker.run()
    assert [request.held for request in bench.hub.requests[:2]] == [(), ("lease-1",)]


def test_a_submission_is_the_leases_group_under_its_seeds(tmp_path: Path) -> None:
    [submission] = Bench.worked(tmp_path, [lease(7)]).hub.submitted
    [group] = CountingEngine().generate([GenerationRequest((17, 11), lease(7).seed_numbers, SAMPLING)], lease(7).proof)
    assert submission == submission_of(lease(7), group, "scripted")
    assert all(rollout.proofs for rollout in submission.rollouts)
    assert (submission.run, submission.node, submission.policy_digest) == (RUN, KEY.node, policy().digest)


def test_every_lease_gets_proofs_of_the_size_that_it_asks_for(tmp_path: Path) -> None:
    bench = Bench.worked(tmp_path, [lease(1), lease(2), lease(3)])
    assert bench.shelf.engine.calls == [[1, 3], [2]]  # one call per size
    for submission in bench.hub.submitted:
        proof = lease(submission.unit).proof
        for rollout in submission.rollouts:
            assert split_proofs(rollout.proofs, len(rollout.token_ids), 64, proof.topk, proof.rows)


def test_leases_of_a_missing_policy_are_released(tmp_path: Path) -> None:
    bench = Bench.worked(tmp_path, [lease(1, version=1), lease(2)], [lease(3)], v1=errors.VersionNotFound("nobody"))
    assert bench.units == [2, 3]
    assert bench.shelf.engine.calls == [[2], [3]]  # the oldest policy first
    [release] = bench.hub.released
    assert release.leases == ("lease-1",)
    assert "policy 0.1" in release.reason
    assert bench.shelf.patience[1] == pytest.approx(60, abs=5)


def test_a_finished_run_is_left_without_fetching_its_last_policy(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)])
    bench.hub.finished = True
    bench.worker.run()
    assert (bench.shelf.patience, bench.hub.requests) == ([], [])


def test_no_lease_is_asked_for_before_the_run_has_a_policy_and_it_is_loaded(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loop, "PAUSE_S", 0.0)
    bench = Bench(tmp_path, [lease(1)])
    bench.hub.policy = None
    asked_before: list[int] = []
    bench.shelf.before_get = lambda: asked_before.append(len(bench.hub.requests))
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    eventually(lambda: len(bench.hub.beats) > 3)
    assert bench.hub.requests == []
    bench.hub.policy = policy()
    thread.join(30)
    assert asked_before[0] == 0
    assert (bench.hub.requests[0].policy, bench.hub.requests[0].behind) == (policy(), False)
    assert bench.units == [1]


def test_a_worker_that_cannot_have_the_newer_policy_soon_asks_under_its_own_until_the_hub_gives_none_for_it(tmp_path):
    bench = Bench(tmp_path, [lease(1)], v1=errors.VersionNotFound("it comes slowly"))

    def second() -> list[protocol.Lease]:
        bench.hub.policy = policy(1)
        return [lease(2)]

    def nothing_for_it() -> list[protocol.Lease]:
        bench.shelf.missing = {}
        return []

    bench.hub.replies += [second, [lease(3)], nothing_for_it, [lease(4, version=1)]]
    bench.worker.run()
    assert bench.units == [1, 2, 3, 4]
    asked = [(request.policy and request.policy.version, request.behind) for request in bench.hub.requests[:5]]
    assert asked == [(0, False), (0, False), (0, True), (0, True), (1, False)]
    at_first, soon, at_last = bench.shelf.patience[0], loop.FOLLOW_S, loop.FETCH_S
    assert (at_first, at_last) == (loop.FETCH_S, loop.FETCH_S)
    fetches = [patience for patience in bench.shelf.patience if patience in (soon, at_last)]
    assert fetches == [at_first, soon, soon, at_last]


@pytest.mark.parametrize("moved", [False, True])
def test_a_lease_that_ran_out_is_not_begun_unless_its_deadline_was_moved(tmp_path: Path, moved: bool) -> None:
    bench = Bench(tmp_path, [lease(1, lasts_ms=0), lease(2)])
    if moved:
        bench.hub.deadlines = {"lease-1": lease(1, lasts_ms=0).deadline_ms + 60_000}
        reply = protocol.HeartbeatReply(node=bench.hub.view, deadlines=bench.hub.deadlines)
        bench.shelf.before_get = lambda: bench.worker._hear(reply)
    bench.worker.run()
    assert (bench.units, bench.released) == (([1, 2], []) if moved else ([2], [("lease-1",)]))


@pytest.mark.parametrize(("newest", "continues"), [((0, 1), True), ((0, 2), False), ((1, 1), False)])
def test_groups_of_a_policy_that_has_become_too_old_are_not_generated_any_further(tmp_path, newest, continues):
    """Staleness of the run: 1. Another incarnation voids every lease."""
    bench = Bench(tmp_path, [lease(1), lease(2)], [lease(3)])
    incarnation, version = newest
    found = policy(version).model_copy(update={"incarnation": incarnation})

    def published() -> None:
        if bench.hub.requests:  # the leases are in hand
            bench.hub.policy = found
            bench.worker._hear(protocol.HeartbeatReply(node=bench.hub.view, policy=found))
            bench.shelf.before_get = lambda: None

    bench.shelf.before_get = published
    bench.worker.run()
    assert bench.units == ([1, 2, 3] if continues else [])
    assert bench.released[:1] == ([] if continues else [("lease-1", "lease-2")])


def test_a_policy_at_the_sources_is_asked_for_at_once_if_it_makes_the_work_useless(tmp_path: Path) -> None:
    """The hub announces it three answers later. Staleness of the run: 1."""
    bench = Bench(tmp_path)
    worker, soon = bench.worker, list[float]()
    worker._heartbeat.soon = lambda after_s=0.0: soon.append(after_s)  # type: ignore[method-assign]

    def hear(version: int) -> None:
        worker._hear(protocol.HeartbeatReply(node=bench.hub.view, policy=policy(version)))

    worker.hear_published(policy(2))
    hear(0)
    assert soon == [], "nothing is being generated"
    worker._at_work = policy(0)
    worker.hear_published(policy(1))
    assert soon == [], "it can still be trained on"
    worker.hear_published(policy(2))
    for version in (0, 1, 2, 2):
        hear(version)
    assert soon == [0.0, loop.ASK_AGAIN_S, loop.ASK_AGAIN_S]


def test_a_stopping_worker_generates_for_a_few_seconds_more(tmp_path: Path) -> None:
    bench, clock = Bench(tmp_path), ManualClock()
    bench.worker._clock = clock
    bench.stop.set("SIGTERM")
    bench.worker._check(policy())
    clock.advance(loop.STOP_GENERATION_S - 0.1)
    bench.worker._check(policy())
    clock.advance(0.1)
    with pytest.raises(loop.Interrupted, match="SIGTERM"):
        bench.worker._check(policy())


def test_a_pause_gives_running_work_back_and_nothing_is_leased_until_it_ends(tmp_path, monkeypatch, caplog):
    """It begins when the leases are there; the hub hears why, and a newer version waits."""
    caplog.set_level("INFO")
    monkeypatch.setattr(loop, "PAUSE_S", 0.01)
    allowance, waited = Allowance(tmp_path), threading.Event()

    def granted() -> list[protocol.Lease]:
        (tmp_path / PAUSED).touch()
        return [lease(1), lease(2)]

    bench = Bench(tmp_path, granted, [lease(3)], allowance=allowance)
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    eventually(lambda: bool(bench.hub.beats and bench.hub.beats[-1].doing == "paused by its owner"))
    newer = threading.Thread(target=lambda: (bench.worker.hear_published(policy()), waited.set()))
    newer.start()
    before = len(bench.hub.beats)
    eventually(lambda: len(bench.hub.beats) > before + 2)
    assert (bench.released, bench.units, len(bench.hub.requests)) == ([("lease-1", "lease-2")], [], 1)
    assert bench.hub.released[0].reason == "paused by its owner"
    assert bench.shelf.patience == [loop.FETCH_S, pytest.approx(60, abs=5), -1.0], "the engine is given up"
    assert not waited.is_set()
    (tmp_path / PAUSED).unlink()
    thread.join(30)
    assert waited.wait(20)
    assert bench.units == [3]
    assert caplog.messages.count("paused by its owner") == 1
    assert bench.hub.beats[-1].doing == ""


def test_hours_that_end_give_running_work_back_and_a_run_that_ends_ends_the_pause(tmp_path: Path) -> None:
    clock = ManualClock(NOON_MS)

    def granted() -> list[protocol.Lease]:
        clock.advance(60)
        bench.hub.finished = True
        return [lease(1)]

    bench = Bench(tmp_path, granted, allowance=Allowance(hours=Hours.parse("22-12:01"), clock=clock))
    bench.worker.run()
    assert (bench.released, bench.units, bench.worker.finished) == ([("lease-1",)], [], True)
    assert bench.hub.released[0].reason == "paused until 22:00"


def test_deadlines_may_be_heard_while_those_of_ended_leases_are_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)])
    worker = bench.worker
    heard = iter(range(100, 110))

    class Hand(dict[str, Any]):
        def __contains__(self, name: object) -> bool:  # asked while old deadlines are looked through
            if threading.current_thread() is not threading.main_thread():
                return True
            beat = protocol.HeartbeatReply(node=bench.hub.view, deadlines={f"lease-{next(heard)}": 9})
            thread = threading.Thread(target=worker._hear, args=[beat])
            thread.start()
            thread.join(10)
            return super().__contains__(name)

    worker._hand = Hand()
    worker._deadlines_ms.update({"lease-1": 1_000, "lease-0": 1_000})
    worker._lease()
    assert worker._deadlines_ms == {"lease-1": 1_000, "lease-100": 9, "lease-101": 9}


def test_a_heartbeat_says_how_many_tokens_of_each_lease_are_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1), lease(3)])
    with bench.held_up():
        eventually(lambda: bench.waiting == [1, 3])
        before = len(bench.hub.beats) + 1  # one may be under way
        eventually(lambda: len(bench.hub.beats) > before)
        assert set(bench.hub.beats[-1].progress) == {"lease-1", "lease-3"}
        assert min(bench.hub.beats[-1].progress.values()) > 0
    tokens = {f"lease-{s.unit}": sum(len(r.token_ids) for r in s.rollouts) for s in bench.hub.submitted}
    assert max(bench.hub.beats, key=lambda beat: sum(beat.progress.values())).progress == tokens
    assert bench.worker.activity.heartbeat().progress == {}, "what is submitted is over"


def test_a_suspended_worker_waits_and_resumes(tmp_path: Path, caplog: Logs) -> None:
    bench = Bench(tmp_path, [lease(1)])
    active = bench.hub.view
    changes = {"state": NodeState.SUSPENDED, "reason": "leases.lapsed: 8", "until_ms": 5}
    bench.hub.view = active.model_copy(update=changes)

    def still_out() -> list[protocol.Lease]:
        eventually(lambda: "is suspended" in caplog.text)
        return []

    def lifted() -> list[protocol.Lease]:
        bench.hub.view = active
        return [lease(2)]

    bench.hub.replies += [still_out, lifted]
    bench.worker.run()
    assert bench.units == [1, 2], "what it held was submitted, and it got more when the time was over"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_group_with_nan_or_infinity_is_released(tmp_path: Path, caplog: Logs, value: float) -> None:
    bench = Bench(tmp_path, [lease(1), lease(3)], [lease(4)])
    bench.shelf.engine.broken = {1: value}
    bench.worker.run()
    assert bench.units == [3, 4]
    reason = "log-probabilities that are NaN or infinite"
    assert bench.hub.released == [protocol.LeaseRelease(leases=("lease-1",), reason=reason)]
    assert f"1 of 2 groups have {reason}" in caplog.text


def dialogue_lease(unit: int, tool: str) -> protocol.Lease:
    terms = protocol.DialogueTerms(tool=tool, max_turns=3, before=(7,), after=(8,))
    sampling = SAMPLING.model_copy(update={"max_new_tokens": 30})
    return lease(unit).model_copy(update={"dialogue": terms, "sampling": sampling})


def test_the_turns_of_a_dialogue_are_answered_by_the_leases_tool(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(TOOLS, "count", lambda turns: "\n" * len(turns))  # type: ignore[misc]
    of = dialogue_lease(1, "count")
    bench = Bench.worked(tmp_path, [of, lease(2), dialogue_lease(3, "count")])
    assert bench.units == [1, 2, 3]
    spoken = {submission.unit: submission.rollouts for submission in bench.hub.submitted}
    assert any(rollout.given for rollout in spoken[1])
    assert not any(rollout.given for rollout in spoken[2])
    talk = dialogue_for(of, {})
    assert talk is not None
    for rollout in spoken[1]:
        reading = talk.read(rollout.token_ids.tolist())
        assert (reading.problem, reading.finish) == ("", rollout.finish)
        assert unpack_spans(rollout.given, len(rollout.token_ids)) == reading.given


TWO, BOTH = [lease(1), lease(2)], [("lease-1", "lease-2")]
LATER = [lease(1, version=1), lease(2, version=1)]
OTHER = errors.PolicyMismatch("another digest")
UNKNOWN = errors.HubRefused(403, "profile.unknown", "this run has no profile for warp/tpu/int3")


@pytest.mark.parametrize(("replies", "engine", "missing", "error", "said", "released"), [
    ([TWO], {"failure": errors.ResourceError("too large")}, {}, errors.ResourceError,
     r"elsewhere or in another format \(--device, --dty", BOTH),
    ([TWO], {"failure": RuntimeError("device-side assert")}, {}, errors.ResourceError, "doctor --selftest", BOTH),
    ([TWO], {"failure": ValueError("token 500 is outside")}, {}, errors.ProtocolError, "do not fit policy", BOTH),
    ([[lease(1)]] * 4, {"broken": {1: np.nan}}, {}, errors.ResourceError, "another device or number format",
     [("lease-1",)] * 3),
    ([TWO], {}, {"v0": OTHER}, errors.PolicyMismatch, "another digest", []),
    ([LATER], {}, {"v1": OTHER}, errors.PolicyMismatch, "another digest", BOTH),
    ([[dialogue_lease(1, "aba\ncus"), lease(2)]], {}, {}, errors.ConfigError,
     r"the tool 'aba\\ncus', which this shoal does not have", BOTH),
    ([[lease(1)], UNKNOWN], {}, {}, errors.ConfigError, "this run has no profile for warp/tpu/int3", []),
])  # fmt: skip
def test_failed_worker_gives_everything_back_and_says_what_to_do(
    tmp_path, replies, engine, missing, error, said, released
):
    bench = Bench(tmp_path, *replies, **missing)
    for name, value in engine.items():
        setattr(bench.shelf.engine, name, value)
    with pytest.raises(error, match=said):
        bench.worker.run()
    assert (bench.released, bench.hub.requests == []) == (released, "v0" in missing)
    assert bench.units == ([1] if UNKNOWN in replies else []), "what was done before is submitted"


@pytest.mark.parametrize(
    ("profile", "chosen", "ends"),
    [("torch/cpu/bfloat16", True, True), ("torch/cpu/bfloat16", False, False), ("torch/cpu/float32", True, False)],
)
def test_a_worker_without_work_chooses_again_if_the_run_does_not_take_its_kind(tmp_path, profile, chosen, ends):
    """The hub's run takes float32 alone. A number format that its owner asked for stays."""
    bench = Bench(tmp_path, [], [], profile=profile, chosen=chosen)
    with pytest.raises(NotTaken) if ends else nullcontext():
        bench.worker.run()
    assert len(bench.hub.requests) == (1 if ends else 3)


def long_lease(prompt: int, seeds: int) -> protocol.Lease:
    sampling = protocol.SamplingParameters(temperature=1.0, max_new_tokens=90, eos_token_ids=(1,))
    sizes = {"prompt_ids": (5,) * prompt, "seeds": tuple(f"{i:016x}" for i in range(seeds))}
    return lease(1).model_copy(update={"sampling": sampling, **sizes})


class Small(ScriptedEngine):
    memory_bytes: int | None = None

    def rows_at_once(self, tokens_each: int) -> int:
        return 4000 // tokens_each


def test_as_many_units_as_fit_into_memory_together() -> None:
    assert units_that_fit(Small(), [long_lease(10, 8), long_lease(3, 8)]) == 5  # 40 rows of 100 tokens
    assert units_that_fit(Small(), [long_lease(10, 64)]) == 1, "a group that does not fit is split"
    unbounded = cast(Any, ScriptedEngine())
    assert units_that_fit(unbounded, [long_lease(10, 64)]) > 100


@pytest.mark.parametrize(
    ("took_s", "most", "hard_ms", "units"),
    [(20, 9, 0, 2), (45, 9, 0, 1), (300, 9, 0, 1), (9, 9, 0, 4), (0, 9, 0, 4), (60, 9, 240_000, 3), (9, 3, 0, 3)],
)
def test_it_asks_for_as_many_groups_as_fit_into_a_lease_and_into_memory(tmp_path, took_s, most, hard_ms, units):
    """60 s for a lease (one that is renewed lasts until its hard deadline), three quarters of them planned with."""
    worker = Bench(tmp_path).worker
    worker._size_up([lease(1).model_copy(update={"hard_deadline_ms": hard_ms})], took_s, most)
    assert worker._units == units


def test_a_stop_gives_back_what_was_not_begun_and_sends_what_was_done(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1), lease(2)])

    def stop_after_leasing() -> list[protocol.Lease]:
        bench.stop.set("SIGTERM")
        return [lease(3), lease(4)]

    bench.hub.replies.append(stop_after_leasing)
    bench.worker.run()
    assert bench.units == [1, 2]
    assert bench.hub.released == [protocol.LeaseRelease(leases=("lease-3", "lease-4"), reason="SIGTERM")]


def test_a_stop_while_the_hub_is_away_keeps_the_outbox_for_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "STOP_FLUSH_S", 0.0)
    bench = Bench(tmp_path, [lease(1)])
    bench.hub.refusals[1] = errors.DeadlineExceeded("stopped")
    bench.hub.replies.append(lambda: bench.stop.set("SIGTERM") or [])
    bench.worker.run()
    assert bench.units == []
    again = Bench(tmp_path)
    again.worker.run()
    assert (again.units, again.waiting) == ([1], [])


SHUT_OUT = errors.ShutOut(403, "node.banned", "this node is banned: x")


@pytest.mark.parametrize(("route", "refusal", "sentence"), [
    ("lease", SHUT_OUT, "this node is banned: x"), ("heartbeat", SHUT_OUT, r"banned this node: sampling\.seed"),
    ("upload", SHUT_OUT, "this node is banned: x"), ("upload", errors.HubUnreachable("gone"), "gone"),
])  # fmt: skip
def test_being_shut_out_or_alone_ends_it_and_leaves_the_outbox_to_other_runs(tmp_path, route, refusal, sentence):
    bench = Bench(tmp_path, [lease(1)], *([refusal] if route == "lease" else [[]] * 100_000))
    other = lease(5).model_copy(update={"run": "other-000000000000"})
    [group] = CountingEngine().generate([GenerationRequest(other.prompt_ids, other.seed_numbers, SAMPLING)])
    elsewhere = submission_of(other, group, "scripted")
    kept = bench.outbox.put(elsewhere)
    if route == "upload":
        bench.hub.refusals[1] = refusal
    if route == "heartbeat":
        bench.hub.view = bench.hub.view.model_copy(update={"state": NodeState.BANNED, "reason": "sampling.seed"})
    with pytest.raises(type(refusal), match=sentence) as caught:
        bench.worker.run()
    assert (caught.value.exit_code == 6) is (refusal is SHUT_OUT)
    assert route != "upload" or bench.waiting == [1], "what was not taken stays"
    assert bench.outbox.waiting("other-000000000000") == [kept]
    assert kept.path.read_bytes() == protocol.pack(elsewhere)


def test_a_finished_run_is_said_to_be_finished_with_what_it_earned(tmp_path, caplog):
    caplog.set_level("INFO")
    Bench.worked(tmp_path, [lease(1)])
    nothing = "0 groups accepted, credit +0; in all 0 groups, credit 0"
    waiting = "1 group not judged yet, which may still earn"
    assert caplog.records[-1].message == f"the run is finished: {nothing}; {waiting}"
    stopped = Bench(tmp_path)
    stopped.stop.set("SIGTERM")
    stopped.worker.run()
    assert caplog.records[-1].message == f"this start: {nothing}"


@pytest.mark.parametrize("status", [403, 404, 409, 410, 413, 422])
def test_a_refused_group_is_given_up_and_work_continues(tmp_path: Path, status: int) -> None:
    bench = Bench(tmp_path, [lease(1), lease(2)], [lease(3)])
    bench.hub.refusals[1] = errors.HubRefused(status, "lease.late", "too late")
    bench.worker.run()
    assert (bench.units, bench.waiting, bench.worker.activity.heartbeat().counters["refused"]) == ([2, 3], [], 1)


def test_a_full_outbox_pauses_work(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loop, "OUTBOX_LIMIT", 2)
    bench = Bench(tmp_path, [lease(1), lease(2), lease(3)], [lease(4)])
    with bench.held_up():
        eventually(lambda: any("hub to take" in beat.waiting_for for beat in bench.hub.beats))
        assert len(bench.hub.requests) == 1
    assert bench.units == [1, 2, 3, 4]


VIEW = protocol.NodeView(node="n" * 32, name="n", role="worker", state=NodeState.ACTIVE, accepted=10, credit=1000)


def status_hub(*verdicts: protocol.RecentVerdict, away: bool = False) -> Mock:
    """Stands where the client stands, and answers `status` only."""
    hub = Mock(patient=lambda _patience_s: hub)
    hub.status = Mock(side_effect=errors.HubUnreachable("gone")) if away else lambda: Mock(verdicts=verdicts)
    return hub


def verdict(unit: int, node: str = "n" * 32, at_ms: int = 1) -> protocol.RecentVerdict:
    words = {"outcome": "rejected", "reason": "prompt.mismatch", "message": "another prompt"}
    return protocol.RecentVerdict(unit=unit, node=node, decided_at_ms=at_ms, **words)


def heard(hub: Mock, *changes: dict[str, Any]) -> Earnings:
    earnings = Earnings(hub)
    for change in ({}, *changes):
        earnings.hear(protocol.HeartbeatReply(node=VIEW.model_copy(update=change)))
    return earnings


NAMED = [verdict(3, at_ms=1), verdict(5, at_ms=9), verdict(7, node="m" * 32, at_ms=20)]
OUT = {"state": NodeState.SUSPENDED, "reason": "leases.lapsed: 8", "until_ms": 70_000, "last_seen_ms": 27_000}
LONGER = {**OUT, "until_ms": 90_000}


@pytest.mark.parametrize(("hub", "changes", "told"), [
    (status_hub(), [{"accepted": 11, "credit": 1010}, {"accepted": 15, "credit": 1050, "pending": 3}],
     ["1 group accepted, credit +10; in all 11 groups, credit 1010",
      "4 groups accepted, credit +40; in all 15 groups, credit 1050 and 3 pending"]),
    (status_hub(*NAMED), [{"rejected": 2}], ["2 groups rejected: unit 5, prompt.mismatch: another prompt"]),
    (status_hub(), [{"rejected": 1, "reason": "sampling.seed: x"}], ["1 group rejected: sampling.seed: x"]),
    (status_hub(away=True), [{"rejected": 1}], ["1 group rejected: the reason could not be asked for (gone)"]),
    (status_hub(), [OUT, {**OUT, "last_seen_ms": 32_000}, LONGER, {}],
     ["this node is suspended for 43 s more: leases.lapsed: 8; it waits, and resumes by itself",
      "this node is suspended for 63 s more: leases.lapsed: 8; it waits, and resumes by itself",
      "the suspension is over: this node gets work again"]),
])  # fmt: skip
def test_the_owner_is_told_each_change_once_with_its_reason(hub, changes, told, caplog: Logs) -> None:
    caplog.set_level("INFO")
    heard(hub, *changes)
    assert [record.message for record in caplog.records] == told


def test_the_standing_has_what_it_does_and_why_something_was_not_accepted(tmp_path: Path) -> None:
    earnings = Earnings(status_hub(*NAMED), tmp_path)
    for change, reason, refused in (
        ({}, "", (0, 0)), ({"unsure": 2}, "2 groups could not be judged; that costs nothing", (0, 2)),
        ({"unsure": 3, "rejected": 1}, "1 group rejected: unit 5, prompt.mismatch: another prompt", (1, 3)),
        ({"unsure": 3, "rejected": 1}, "1 group rejected: unit 5, prompt.mismatch: another prompt", (1, 3)),
    ):  # fmt: skip
        earnings.hear(protocol.HeartbeatReply(node=VIEW.model_copy(update=change)), 40, "paused until 22:00")
        found = Standing.read(tmp_path)
        assert found is not None
        assert (found.reason, (found.rejected, found.unsure), found.tokens) == (reason, refused, 40)
        assert found.doing == "paused until 22:00"


def test_a_suspension_from_before_this_start_is_told_too_and_only_a_ban_ends_it(caplog: Logs) -> None:
    assert heard(status_hub(), OUT).shut_out is None
    banned = heard(status_hub(), {"state": NodeState.BANNED, "reason": "sampling.seed: tokens"}).shut_out
    assert isinstance(banned, errors.ShutOut)
    assert banned.code == "node.banned"
    assert "banned this node: sampling.seed: tokens" in str(banned)
    view = VIEW.model_copy(update={"state": NodeState.SUSPENDED, "reason": "x"})
    Earnings(status_hub()).hear(protocol.HeartbeatReply(node=view))
    assert "suspended until the run's owner pardons it: x; it waits, and resumes by itself" in caplog.text


def test_the_last_line_has_the_sum_of_this_start_and_the_groups_that_are_not_judged_yet() -> None:
    earnings = heard(status_hub(), {"accepted": 12, "unsure": 1, "credit": 1020, "pending": 3})
    gained = "2 groups accepted, credit +20; in all 12 groups, credit 1020 and 3 pending"
    assert earnings.summary(submitted=5) == f"{gained}; 2 groups not judged yet, which may still earn"
    assert earnings.summary(submitted=3) == earnings.summary() == gained
