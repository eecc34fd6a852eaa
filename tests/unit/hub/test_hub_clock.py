"""The hub on a machine whose wall clock jumps by an hour, in both directions, while it runs and while it is away."""

import shutil
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from kit.asgi import AppTransport, InProcess
from kit.hub import HUB, ROOT, Actor, Bench, certificate, code_of, make_config, ok, worker_key
from shoal import protocol
from shoal.client import HubClient
from shoal.errors import SignatureError
from shoal.hub.http.app import App
from shoal.ledger import verify
from shoal.runtime import ManualClock, StopToken

HOUR_S = 3600.0
LEASE_S = 60.0
LATE_S = LEASE_S * 1.1 + 1  # by a clock that follows the wall clock a tenth slower
SPARED_S = 21

pytestmark = pytest.mark.hub()


def on_time(bench: Bench, actor: Actor) -> Actor:
    """An actor who has heard what time it is at the hub."""
    hub_ms = bench.status().now_ms
    return Actor(actor.key, bench.http, ManualClock(hub_ms))


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_leases_run_out_when_their_time_is_over_and_not_before(bench: Bench, jump_s: float) -> None:
    (lease,) = bench.alice.lease()
    bench.clock.jump(jump_s)
    bench.clock.advance(LEASE_S / 2)
    assert bench.status().units["leased"] == 1
    bench.clock.advance(LATE_S - LEASE_S / 2)
    assert bench.status().units["open"] == 1
    (again,) = on_time(bench, bench.bob).lease()
    assert again.unit == lease.unit


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_hub_that_restarts_after_a_jump_keeps_no_lease_for_an_hour(bench: Bench, jump_s: float) -> None:
    bench.alice.lease()
    bench.close()
    bench.clock.jump(jump_s)
    app = App(make_config(bench.folder), bench.clock)
    with httpx2.Client(transport=AppTransport(app), base_url="http://hub", timeout=20) as http:
        for _ in range(round(LATE_S) + SPARED_S):  # it was away: what runs out meanwhile has a little more time
            bench.clock.advance(1)
            app.hub.upkeep.tick()
        status = protocol.RunStatus.model_validate_json(http.get("/status").content)
        assert status.units["open"] == 1
        carol = Actor(worker_key(3), http, ManualClock(status.now_ms))
        ok(carol.register())
        page = protocol.LedgerPage.model_validate_json(http.get("/ledger").content)
    verify(page.entries)
    times = [entry.at_ms for entry in page.entries]
    assert times == sorted(times)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_machine_whose_clock_is_wrong_is_told_the_time_and_takes_part(bench: Bench, jump_s: float) -> None:
    clock = ManualClock(bench.clock.now_ms())
    clock.jump(jump_s)
    root, http = protocol.fingerprint(ROOT.public_key), InProcess(bench.http.send)
    client = HubClient("http://hub", worker_key(9), StopToken(), root, http=http, clock=clock)
    client.register("wrong clock", "worker", None)
    assert len(client.lease(protocol.LeaseRequest(request="request-1")).leases) == 1
    clock.jump(-2 * jump_s)  # and wrong again, the other way
    assert len(client.lease(protocol.LeaseRequest(request="request-1")).leases) == 1


NEXT = protocol.SigningKey.from_seed(b"n" * 32)


def test_leases_and_receipts_of_before_are_signed_by_the_key_of_now(bench: Bench) -> None:
    [lease], [other] = bench.alice.lease(), bench.bob.lease(request="request-of-bob")
    ok(bench.alice.submit(lease))
    bench.close()
    certificates = (*make_config(bench.folder).certificates, certificate(NEXT, "hub"))
    now = Bench(bench.folder, clock=bench.clock, changes={"key": NEXT, "certificates": certificates})
    [audit] = now.audits()
    assert protocol.open_document(audit.lease, protocol.Lease, NEXT.public_key) == lease
    with pytest.raises(SignatureError):
        protocol.open_document(audit.lease, protocol.Lease, HUB.public_key)
    again = protocol.SignedDocument.model_validate_json(ok(now.alice.submit(lease)).content)
    assert protocol.open_document(again, protocol.Receipt, NEXT.public_key).lease == lease.lease
    assert replace(now.bob, hub_key=NEXT.public_key).lease(request="request-of-bob") == [other]
    now.close()


def test_a_worker_goes_on_with_a_hub_from_before_it_came(tmp_path: Path) -> None:
    Bench(tmp_path / "hub").close()
    shutil.copytree(tmp_path / "hub", tmp_path / "backup")
    bench = Bench(tmp_path / "hub")
    there = [bench]

    http = InProcess(lambda request: there[-1].http.send(request))
    client = HubClient("http://hub", worker_key(3), StopToken(), http=http, clock=bench.clock)
    client.register("late", "worker", None)
    client.heartbeat(protocol.Heartbeat())
    bench.close()

    restored = Bench(tmp_path / "backup")
    there.append(restored)
    try:
        assert client.patient(5.0).heartbeat(protocol.Heartbeat()).node.state is protocol.NodeState.ACTIVE
        assert client.lease(protocol.LeaseRequest(request="request-1", max_units=1)).leases == ()
        assert [node.name for node in restored.status().nodes if node.role == "worker"].count("late") == 1
    finally:
        restored.close()


def test_a_request_cannot_be_replayed_by_setting_the_clock_forth_and_back(bench: Bench) -> None:
    recorded: list[httpx2.Request] = []
    bench.http.event_hooks["request"].append(recorded.append)
    bench.alice.lease()
    bench.clock.jump(HOUR_S)
    bench.clock.advance(90)
    bench.hub.upkeep.tick()
    bench.clock.jump(-HOUR_S)
    assert code_of(bench.http.send(recorded[0])) == (401, "auth.replay")


def test_a_request_that_changes_something_cannot_be_replayed_after_a_restart(bench: Bench) -> None:
    """Its nonce is written down with what it did, at the latest."""
    recorded: list[httpx2.Request] = []
    bench.http.event_hooks["request"].append(recorded.append)
    [lease] = bench.alice.lease()
    bench.alice.call("POST", "/heartbeat", {})
    folder = bench.folder.with_name("copied")
    shutil.copytree(bench.folder, folder)  # as it is on disk after a kill
    again = Bench(folder, clock=bench.clock)
    asked, beaten = recorded
    assert code_of(again.http.send(asked)) == (401, "auth.replay")
    assert again.http.send(beaten).status_code == 200, "harmless, so it is remembered in memory only"
    assert again.alice.submit(lease).status_code == 201
    again.close()
