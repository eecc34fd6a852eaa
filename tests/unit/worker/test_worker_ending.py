"""How the worker's loop ends and waits: stops, bans, a finished run, refusals, a hub that is away, a full outbox."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kit.worker import RUN, SAMPLING, Bench, CountingEngine, eventually, lease
from shoal.engines import GenerationRequest
from shoal.engines.submission import submission_of
from shoal.errors import DeadlineExceeded, HubRefused, HubUnreachable, ShutOut
from shoal.protocol import Lease, LeaseRelease, NodeState, pack, submission_digest
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


def test_a_ban_ends_it_with_the_hubs_sentence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)], ShutOut(403, "node.banned", "this node is banned: sampling.seed"))
    with pytest.raises(ShutOut, match=r"this node is banned: sampling\.seed"):
        bench.worker.run()


def test_a_ban_heard_of_by_the_heartbeat_ends_it_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *([[]] * 100_000))
    bench.hub.view = bench.hub.view.model_copy(update={"state": NodeState.BANNED, "reason": "sampling.seed: tokens"})
    with pytest.raises(ShutOut, match=r"banned this node: sampling\.seed: tokens"):
        bench.worker.run()


def test_a_ban_met_while_sending_keeps_the_parcel_and_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)], *([[]] * 100_000))
    bench.hub.refusals[1] = ShutOut(403, "node.banned", "this node is banned: x")
    with pytest.raises(ShutOut, match="banned"):
        bench.worker.run()
    assert bench.waiting == [1]


@pytest.mark.parametrize("road", ["lease", "heartbeat", "upload"])
def test_being_shut_out_leaves_the_outbox_to_other_runs(tmp_path: Path, road: str) -> None:
    refusal = ShutOut(403, "node.banned", "this node is banned: x")
    bench = Bench(tmp_path, [lease(1)], *([refusal] if road == "lease" else [[]] * 100_000))
    other = lease(5).model_copy(update={"run": "other-000000000000"})
    [group] = CountingEngine().generate([GenerationRequest(other.prompt_ids, other.seed_numbers, SAMPLING)])
    elsewhere = submission_of(other, group, "scripted")
    kept = bench.outbox.put(elsewhere)
    if road != "lease":
        bench.hub.refusals[1] = refusal
    if road == "heartbeat":
        bench.hub.view = bench.hub.view.model_copy(update={"state": NodeState.BANNED})
    with pytest.raises(ShutOut) as caught:
        bench.worker.run()
    assert caught.value.exit_code == 6
    assert bench.outbox.waiting("other-000000000000") == [kept]
    assert kept.path.read_bytes() == pack(elsewhere)
    assert list((tmp_path / "outbox" / "refused").iterdir()) == []


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


def test_a_receipt_is_noted_for_whoever_debugs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="shoal")
    bench = Bench(tmp_path, [lease(7)])
    bench.hub.gate.clear()
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    try:
        assert eventually(lambda: bench.waiting == [7])
        body = bench.outbox.waiting(RUN)[0].path.read_bytes()
        assert "receipt for" not in caplog.text
    finally:
        bench.hub.gate.set()
        thread.join(30)
    assert f"unit 7: receipt for {submission_digest(body)}" in [record.message for record in caplog.records]


@pytest.mark.parametrize("status", [403, 404, 409, 410, 413, 422])
def test_a_refused_group_is_set_aside_and_work_goes_on(tmp_path: Path, status: int) -> None:
    bench = Bench(tmp_path, [lease(1), lease(2)], [lease(3)])
    bench.hub.refusals[1] = HubRefused(status, "lease.late", "too late")
    bench.worker.run()
    assert bench.units == [2, 3]
    assert bench.waiting == []
    assert len(list((tmp_path / "outbox" / "refused").glob("*.submission"))) == 1
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


def test_generation_goes_on_while_an_upload_hangs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [lease(1)], [lease(2)], [lease(3)])
    bench.hub.gate.clear()
    thread = threading.Thread(target=bench.worker.run)
    thread.start()
    try:
        assert eventually(lambda: bench.shelf.engine.calls == [[1], [2], [3]])
        assert bench.units == []
    finally:
        bench.hub.gate.set()
        thread.join(30)
    assert bench.units == [1, 2, 3]
