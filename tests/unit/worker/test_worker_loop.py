"""The worker's loop: what it asks for, generates and gives back."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kit.worker import KEY, RUN, SAMPLING, Bench, CountingEngine, eventually, lease, policy
from shoal.engines import GenerationRequest
from shoal.engines.dialogue import dialogue_for
from shoal.engines.scripted import ScriptedEngine
from shoal.environments.tools import TOOLS
from shoal.errors import ConfigError, HubRefused, PolicyMismatch, ProtocolError, ResourceError, VersionNotFound
from shoal.protocol import DialogueTerms, HeartbeatReply, Lease, LeaseRelease, NodeState, PolicyRef, SamplingParameters
from shoal.protocol.submission import unpack_spans
from shoal.toploc import split_proofs
from shoal.worker import loop
from shoal.worker.loop import NotTaken
from shoal.worker.settings import units_that_fit

Logs = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch


def test_it_generates_what_was_leased_in_one_call_and_hands_it_in(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1), lease(3), lease(5)], [], [lease(4)])
    bench.worker.run()
    assert bench.units == [1, 3, 4, 5]
    assert bench.shelf.engine.calls == [[1, 3, 5], [4]]
    assert bench.waiting == []
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
    first, second = bench.hub.requests[:2]
    assert (first.held, second.held) == ((), ("lease-1",))


def test_a_submission_is_the_leases_group_under_its_seeds(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(7)])
    bench.worker.run()
    [submission] = bench.hub.submitted
    [group] = CountingEngine().generate([GenerationRequest((17, 11), lease(7).seed_numbers, SAMPLING)], lease(7).proof)
    assert [rollout.token_ids.tolist() for rollout in submission.rollouts] == [c.token_ids.tolist() for c in group]
    assert [rollout.finish for rollout in submission.rollouts] == [c.finish for c in group]
    assert [rollout.proofs for rollout in submission.rollouts] == [c.proofs for c in group]
    assert all(rollout.proofs for rollout in submission.rollouts)
    assert submission.prompt_ids.tolist() == [17, 11]
    assert (submission.run, submission.node, submission.policy_digest) == (RUN, KEY.node, policy().digest)
    assert (submission.version, submission.engine) == (0, "scripted")


def test_every_lease_gets_proofs_of_the_size_that_it_asks_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1), lease(2), lease(3)])
    bench.worker.run()
    assert bench.shelf.engine.calls == [[1, 3], [2]]  # one call per size
    for submission in bench.hub.submitted:
        proof = lease(submission.unit).proof
        for rollout in submission.rollouts:
            assert split_proofs(rollout.proofs, len(rollout.token_ids), 64, proof.topk, proof.rows)


def test_a_run_that_does_not_know_its_kind_ends_it_with_the_hubs_sentence(tmp_path: Path) -> None:
    refusal = HubRefused(403, "profile.unknown", "this run has no profile for warp/tpu/int3")
    bench = Bench(tmp_path, [lease(1)], refusal)
    with pytest.raises(ConfigError, match="this run has no profile for warp/tpu/int3") as caught:
        bench.worker.run()
    assert caught.value.exit_code == 2
    assert bench.units == [1]  # what was done before is handed in


def test_a_policy_that_cannot_be_had_gives_its_leases_back_and_work_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1, version=1), lease(2)], [lease(3)], v1=VersionNotFound("nobody has it"))
    bench.worker.run()
    assert bench.units == [2, 3]
    assert bench.shelf.engine.calls == [[2], [3]]  # the oldest policy first
    [release] = bench.hub.released
    assert release.leases == ("lease-1",)
    assert "policy 0.1" in release.reason
    assert bench.shelf.patience[1] == pytest.approx(60, abs=5)


@pytest.mark.parametrize(("version", "requests", "released"), [(0, 0, []), (1, 1, [("lease-1", "lease-2")])])
def test_other_weights_than_promised_end_it_and_give_everything_back(
    tmp_path: Path, version: int, requests: int, released: list[tuple[str, ...]]
) -> None:
    wrong: Any = {f"v{version}": PolicyMismatch("another digest")}
    bench = Bench(tmp_path, [lease(1, version=version), lease(2, version=version)], **wrong)
    with pytest.raises(PolicyMismatch):
        bench.worker.run()
    assert (len(bench.hub.requests), [release.leases for release in bench.hub.released]) == (requests, released)


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

    def loading() -> None:
        asked_before.append(len(bench.hub.requests))

    bench.shelf.before_get = loading
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    assert eventually(lambda: len(bench.hub.beats) > 3)
    assert bench.hub.requests == []
    bench.hub.policy = policy()
    thread.join(30)
    assert asked_before[0] == 0
    assert (bench.hub.requests[0].policy, bench.hub.requests[0].behind) == (policy(), False)
    assert bench.units == [1]


def test_a_worker_that_cannot_have_the_newer_policy_soon_asks_under_its_own_until_the_hub_gives_nothing_for_it(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, [lease(1)], v1=VersionNotFound("it comes slowly"))

    def second() -> list[Lease]:
        bench.hub.policy = policy(1)
        return [lease(2)]

    def nothing_for_it() -> list[Lease]:
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


@pytest.mark.parametrize(
    ("failure", "expected", "hint"),
    [
        (
            ResourceError("one completion does not fit"),
            ResourceError,
            r"elsewhere or in another format \(--device, --dty",
        ),
        (RuntimeError("device-side assert"), ResourceError, "doctor --selftest"),
        (ValueError("token 500 is outside"), ProtocolError, "do not fit policy"),
    ],
)
def test_an_engine_that_fails_gives_everything_back_and_says_what_to_do(
    tmp_path: Path, failure: Exception, expected: type[Exception], hint: str
) -> None:
    bench = Bench(tmp_path, [lease(1), lease(2)])
    bench.shelf.engine.failure = failure
    with pytest.raises(expected, match=hint):
        bench.worker.run()
    assert bench.hub.released[0].leases == ("lease-1", "lease-2")


def test_a_lease_that_has_run_out_is_not_begun(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1, lasts_ms=0), lease(2)])
    bench.worker.run()
    assert bench.units == [2]
    assert [release.leases for release in bench.hub.released] == [("lease-1",)]


def test_a_lease_whose_deadline_the_hub_has_moved_is_still_done(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1, lasts_ms=0)])
    renewed = {"lease-1": lease(1, lasts_ms=0).deadline_ms + 60_000}
    bench.hub.deadlines = renewed
    bench.shelf.before_get = lambda: bench.worker._hear(HeartbeatReply(node=bench.hub.view, deadlines=renewed))
    bench.worker.run()
    assert bench.units == [1]
    assert bench.hub.released == []


def test_deadlines_may_be_heard_while_those_of_ended_leases_are_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)])
    worker = bench.worker
    heard = iter(range(100, 110))

    class Hand(dict[str, Any]):
        def __contains__(self, name: object) -> bool:  # asked while old deadlines are looked through
            if threading.current_thread() is not threading.main_thread():
                return True
            beat = HeartbeatReply(node=bench.hub.view, deadlines={f"lease-{next(heard)}": 9})
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
    bench.hub.gate.clear()
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    try:
        assert eventually(lambda: bench.waiting == [1, 3])
        before = len(bench.hub.beats) + 1  # one may be under way
        assert eventually(lambda: len(bench.hub.beats) > before)
        assert set(bench.hub.beats[-1].progress) == {"lease-1", "lease-3"}
        assert min(bench.hub.beats[-1].progress.values()) > 0
    finally:
        bench.hub.gate.set()
        thread.join(30)
    tokens = {f"lease-{s.unit}": sum(len(r.token_ids) for r in s.rollouts) for s in bench.hub.submitted}
    assert max(bench.hub.beats, key=lambda beat: sum(beat.progress.values())).progress == tokens
    assert bench.worker.activity.heartbeat().progress == {}, "what is handed in is over"


def test_a_suspended_worker_waits_and_goes_on(tmp_path: Path, caplog: Logs) -> None:
    bench = Bench(tmp_path)
    active = bench.hub.view

    def lifted() -> list[Lease]:
        bench.hub.view = active
        return [lease(2)]

    bench.hub.view = active.model_copy(
        update={"state": NodeState.SUSPENDED, "reason": "leases.lapsed: 8", "until_ms": 5}
    )

    def still_out() -> list[Lease]:
        assert eventually(lambda: "is suspended" in caplog.text)
        return []

    bench.hub.replies = [[lease(1)], still_out, lifted]
    bench.worker.run()
    assert bench.units == [1, 2], "what it held was handed in, and it got more when the time was over"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_given_back_and_not_handed_in(tmp_path: Path, caplog: Logs, value: float) -> None:
    bench = Bench(tmp_path, [lease(1), lease(3)], [lease(4)])
    bench.shelf.engine.broken = {1: value}
    bench.worker.run()
    assert bench.units == [3, 4]
    reason = "log-probabilities that are NaN or infinite"
    assert bench.hub.released == [LeaseRelease(leases=("lease-1",), reason=reason)]
    assert f"1 of 2 groups have {reason}" in caplog.text


def test_a_machine_that_computes_no_numbers_at_all_ends_with_what_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)], [lease(1)], [lease(1)], [lease(1)])
    bench.shelf.engine.broken = {1: np.nan}
    with pytest.raises(ResourceError, match="another device or number format"):
        bench.worker.run()
    assert [release.leases for release in bench.hub.released] == [("lease-1",)] * 3
    assert bench.units == []


def dialogue_lease(unit: int, tool: str) -> Lease:
    terms = DialogueTerms(tool=tool, max_turns=3, before=(7,), after=(8,))
    sampling = SAMPLING.model_copy(update={"max_new_tokens": 30})
    return lease(unit).model_copy(update={"dialogue": terms, "sampling": sampling})


def test_the_turns_of_a_dialogue_are_answered_by_the_leases_tool(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(TOOLS, "count", lambda turns: "\n" * len(turns))  # type: ignore[misc]
    of = dialogue_lease(1, "count")
    bench = Bench(tmp_path, [of, lease(2), dialogue_lease(3, "count")])
    bench.worker.run()
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


def test_a_lease_with_a_tool_that_it_does_not_have_ends_it_and_gives_everything_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [dialogue_lease(1, "aba\ncus"), lease(2)])
    with pytest.raises(ConfigError, match=r"the tool 'aba\\ncus', which this shoal does not have"):
        bench.worker.run()
    assert bench.hub.released[0].leases == ("lease-1", "lease-2")


@pytest.mark.parametrize(
    ("profile", "chosen", "ends"),
    [("torch/cpu/bfloat16", True, True), ("torch/cpu/bfloat16", False, False), ("torch/cpu/float32", True, False)],
)
def test_a_worker_without_work_chooses_again_if_the_run_does_not_take_its_kind(
    tmp_path: Path, profile: str, chosen: bool, ends: bool
) -> None:
    """The hub's run takes float32 alone. A number format that its owner asked for stays."""
    bench = Bench(tmp_path, [], [], profile=profile, chosen=chosen)
    with pytest.raises(NotTaken) if ends else nullcontext():
        bench.worker.run()
    assert len(bench.hub.requests) == (1 if ends else 3)


def long_lease(prompt: int, seeds: int) -> Lease:
    return Lease(
        run="r-000000000000", lease="l", node="n" * 32, unit=1, attempt=0, task="t", prompt_ids=(5,) * prompt,
        policy=PolicyRef(incarnation=0, version=0, digest="0" * 64), seeds=tuple(f"{i:016x}" for i in range(seeds)),
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=90, eos_token_id=1), environment_digest="e" * 64,
        issued_at_ms=0, deadline_ms=1,
    )  # fmt: skip


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
    [
        (20.0, 9, 0, 2),
        (45.0, 9, 0, 1),
        (300.0, 9, 0, 1),
        (9.0, 9, 0, 4),
        (0.0, 9, 0, 4),
        (60.0, 9, 240_000, 3),
        (9.0, 3, 0, 3),
    ],
)
def test_it_asks_for_as_many_groups_as_fit_into_a_lease_and_into_memory(
    tmp_path: Path, took_s: float, most: int, hard_ms: int, units: int
) -> None:
    """60 s for a lease (one that is renewed lasts until its hard deadline), three quarters of them planned with."""
    worker = Bench(tmp_path).worker
    worker._size_up([lease(1).model_copy(update={"hard_deadline_ms": hard_ms})], took_s, most)
    assert worker._units == units
