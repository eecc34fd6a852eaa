"""How the worker's loop ends and waits: stops, bans, a finished run, refusals, a hub that is away, a full outbox."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kit.worker import SAMPLING, Bench, CountingEngine, eventually, lease
from shoal.engines import GenerationRequest
from shoal.engines.groups import submission_of
from shoal.errors import DeadlineExceeded, HubRefused, HubUnreachable, ShutOut
from shoal.protocol import Lease, LeaseRelease, NodeState, pack
from shoal.worker import loop


def test_a_stop_gives_back_what_was_not_begun_and_sends_what_was_done(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1), lease(2)])

    def stop_after_leasing() -> list[Lease]:
        bench.stop.set("SIGTERM")
        return [lease(3), lease(4)]

    bench.hub.replies.append(stop_after_leasing)
    bench.worker.run()
    assert bench.units == [1, 2]
    assert bench.hub.released == [LeaseRelease(leases=("lease-3", "lease-4"), reason="SIGTERM")]


def test_a_stop_while_the_hub_is_away_keeps_the_outbox_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STOP_FLUSH_S", 0.0)
    bench = Bench(tmp_path, [lease(1)])
    bench.hub.refusals[1] = DeadlineExceeded("stopped")
    bench.hub.replies.append(lambda: bench.stop.set("SIGTERM") or [])
    bench.worker.run()
    assert bench.units == []
    again = Bench(tmp_path)
    again.worker.run()
    assert again.units == [1]
    assert again.waiting == []


@pytest.mark.parametrize("route", ["lease", "heartbeat", "upload"])
def test_being_shut_out_ends_it_and_leaves_the_outbox_to_other_runs(tmp_path: Path, route: str) -> None:
    refusal = ShutOut(403, "node.banned", "this node is banned: x")
    bench = Bench(tmp_path, [lease(1)], *([refusal] if route == "lease" else [[]] * 100_000))
    other = lease(5).model_copy(update={"run": "other-000000000000"})
    [group] = CountingEngine().generate([GenerationRequest(other.prompt_ids, other.seed_numbers, SAMPLING)])
    elsewhere = submission_of(other, group, "scripted")
    kept = bench.outbox.put(elsewhere)
    if route == "upload":
        bench.hub.refusals[1] = refusal
    if route == "heartbeat":
        bench.hub.view = bench.hub.view.model_copy(update={"state": NodeState.BANNED, "reason": "sampling.seed"})
    sentence = r"banned this node: sampling\.seed" if route == "heartbeat" else "this node is banned: x"
    with pytest.raises(ShutOut, match=sentence) as caught:
        bench.worker.run()
    assert caught.value.exit_code == 6
    assert route != "upload" or bench.waiting == [1], "what was not taken stays"
    assert bench.outbox.waiting("other-000000000000") == [kept]
    assert kept.path.read_bytes() == pack(elsewhere)


def test_a_finished_run_is_said_to_be_finished_with_what_it_earned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = Bench(tmp_path, [lease(1)])
    bench.worker.run()
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
    bench.hub.refusals[1] = HubRefused(status, "lease.late", "too late")
    bench.worker.run()
    assert bench.units == [2, 3]
    assert bench.waiting == []
    assert bench.worker.activity.heartbeat().counters["refused"] == 1


def test_a_hub_that_is_gone_ends_it_and_keeps_the_work(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)], *([[]] * 100_000))
    bench.hub.refusals[1] = HubUnreachable("gone")
    with pytest.raises(HubUnreachable):
        bench.worker.run()
    assert bench.waiting == [1]


def test_a_full_outbox_pauses_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "OUTBOX_LIMIT", 2)
    bench = Bench(tmp_path, [lease(1), lease(2), lease(3)], [lease(4)])
    bench.hub.gate.clear()
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    try:
        assert eventually(lambda: any("hub to take" in beat.waiting_for for beat in bench.hub.beats))
        assert len(bench.hub.requests) == 1
    finally:
        bench.hub.gate.set()
        thread.join(30)
    assert bench.units == [1, 2, 3, 4]
