"""What one caller may ask for: buckets, connections, bytes in hand; and that each refusal says how long to wait."""

import asyncio
import inspect
import logging
import re
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.asgi import in_loop
from kit.hub import Actor, Bench, code_of, make_config, ok, worker_key
from shoal.errors import ConfigError
from shoal.hub.buckets import Buckets
from shoal.hub.http.limits import READ_AT_ONCE, Addresses, Edge, Intake
from shoal.hub.service import reporting
from shoal.hub.state.commands import Refusal


@given(rate_s=st.floats(0.1, 100), gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=200))
def test_nobody_gets_more_than_the_burst_and_the_rate(rate_s: float, gaps_s: list[float]) -> None:
    buckets, now_s, got = Buckets(rate_s), 0.0, 0
    for gap_s in gaps_s:
        now_s += gap_s
        got += buckets.take("alice", now_s) == 0.0
    assert got <= max(1.0, rate_s * 10) + now_s * rate_s + 1e-6


@given(rate_s=st.floats(0.1, 100), taken=st.integers(0, 2000))
def test_whoever_waits_as_long_as_it_was_told_is_let_in(rate_s: float, taken: int) -> None:
    buckets = Buckets(rate_s)
    waits_s = [buckets.take("alice", 1.0) for _ in range(taken)]
    wait_s = buckets.take("alice", 1.0, only_look=True)
    assert wait_s <= 1 / rate_s
    assert buckets.take("alice", 1.0 + wait_s + 1e-6) == 0.0
    assert all(wait == 0.0 for wait in waits_s[: max(1, int(rate_s * 10))])


def test_looking_costs_nothing_callers_do_not_share_and_a_clock_that_goes_back_fills_nothing() -> None:
    buckets = Buckets(rate_s=1.0, burst_s=1.0)
    assert [buckets.take("alice", 0.0, only_look=True) for _ in range(5)] == [0.0] * 5
    assert (buckets.take("alice", 0.0), buckets.take("alice", 0.0), buckets.take("bob", 0.0)) == (0.0, 1.0, 0.0)
    buckets.take("carol", 100.0)
    assert (buckets.take("carol", 50.0), buckets.take("carol", 50.5)) == (1.0, 0.5)


def test_a_million_callers_are_not_remembered() -> None:
    buckets = Buckets(rate_s=1.0, remembered=100)
    for number in range(10_000):
        buckets.take(f"stranger-{number}", 0.0)
        buckets.take("regular", 0.0)
    assert len(buckets._buckets) == 100
    assert buckets.take("regular", 0.0, only_look=True) > 0  # who comes all the time is not the one that is forgotten


def test_this_machines_own_processes_count_under_no_address() -> None:
    addresses = Addresses()
    assert [addresses.client(each) for each in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "")] == [""] * 4
    assert addresses.client("127.0.0.2") == "127.0.0.2"
    assert addresses.client("2001:db8:1:2::5") == addresses.client("2001:db8:1:2:ffff::1") == "2001:db8:1:2::/64"


def test_a_trusted_proxy_speaks_for_the_last_address_that_is_no_proxy() -> None:
    addresses = Addresses(["10.0.0.0/8"])
    assert addresses.forwarded("10.0.0.1", "198.51.100.1, 203.0.113.5, 10.0.0.2") == "203.0.113.5"
    assert addresses.forwarded("192.0.2.1", "203.0.113.5") == "192.0.2.1", "it is no proxy of ours"
    assert [addresses.forwarded("10.0.0.1", hops) for hops in ("", " , ")] == ["10.0.0.1"] * 2


def test_a_proxy_that_is_none() -> None:
    assert Addresses(["10.0.0.0/8", "::1"]).is_proxy("10.255.0.1")
    assert Addresses(["10.0.0.0/8"]).is_proxy("::ffff:10.255.0.1"), "of a socket for IPv6 and IPv4 alike"
    assert not Addresses(["10.0.0.0/8"]).is_proxy("11.0.0.1")
    assert not Addresses(["10.0.0.0/8"]).is_proxy("nonsense")
    with pytest.raises(ConfigError, match=r"hub\.trusted_proxies: 'my-proxy' does not appear to be"):
        Addresses(["my-proxy"])


@in_loop
async def test_reading_at_once_is_bounded_by_address_and_addresses_are_forgotten(tmp_path: Path) -> None:
    edge, within, most = Edge(make_config(tmp_path)), Counter[str](), Counter[str]()

    async def read(client: str) -> None:
        async with edge.reading_of(client):
            within[client] += 1
            most[client] = max(most[client], within[client])
            await asyncio.sleep(0)
            within[client] -= 1

    await asyncio.gather(*(read("mallory") for _ in range(20)), read("alice"))
    assert most == {"mallory": READ_AT_ONCE, "alice": 1}
    assert not edge.reading


def test_what_is_being_received_is_bounded_in_all_and_of_one() -> None:
    intake = Intake(most_bytes=400)
    intake.add("mallory", 90, body_bytes=90)
    with pytest.raises(Refusal, match=r"rate\.uploads"):
        intake.add("mallory", 20, body_bytes=20)
    for number in range(3):
        intake.add(f"worker-{number}", 90, body_bytes=90)
    with pytest.raises(Refusal, match=r"hub\.busy"):
        intake.add("late", 90, body_bytes=90)


def test_a_body_is_never_refused_for_its_own_size_and_nothing_stays_counted() -> None:
    intake = Intake(most_bytes=100)
    for number in range(1, 11):
        intake.add("alice", 100, body_bytes=number * 100)
    intake.release("alice", 1000)
    assert (intake.held_bytes, intake.held, intake.received_bytes) == (0, {}, 1000)


SLOW_KEYS = pytest.mark.hub(settings={"requests_per_key_s": 1 / 60})  # once, and again after a minute


@SLOW_KEYS
def test_a_known_key_that_registers_over_and_over_is_held_to_its_rate(bench: Bench) -> None:
    answers = [bench.alice.register().status_code for _ in range(40)]
    assert answers[0] == 200
    assert 429 in answers
    for _ in range(5):  # whoever the run's owner has certified is not
        bench.validator.beat()


@SLOW_KEYS
def test_nobody_else_can_use_up_a_key(bench: Bench) -> None:
    """Neither by its name, nor by a request of its that was seen on the wire."""
    forged = Actor(worker_key(9), bench.http, bench.clock)
    for _ in range(3):
        assert code_of(forged.call("POST", "/heartbeat", {}))[0] == 401
        headers = {"shoal-node": bench.alice.key.node}
        assert bench.http.post("/heartbeat", content=b"{}", headers=headers).status_code == 401
    bench.alice.beat()


@pytest.mark.hub
def test_the_network_that_a_worker_asks_from_is_noted_and_told_nobody(bench: Bench) -> None:
    noted = {"192.0.2.7": "192.0.2.0/24", "2001:db8:1:2::3": "2001:db8:1::/48", "127.0.0.1": ""}
    for address, network in noted.items():
        bench.http._transport.peer = address
        bench.alice.lease()
        bench.http._transport.peer = "127.0.0.1"
        assert bench.row(bench.alice).network == network
        if network:
            pages = ["/status", "/ledger", f"/nodes/{bench.alice.key.node}", "/nodes", "/metrics"]
            found = bench.hub.context.turns._networks.within[network].within
            assert len(found) == 1, "the address is known while the hub runs"
            assert not any(each in ok(bench.http.get(page)).text for page in pages for each in (network, *found))


def test_nobody_waits_for_ever_while_others_are_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.hub.http.limits.TURN_WAIT_S", 0.05)
    ok(bench.announce(0))
    [lease] = bench.alice.lease(request="request-1")
    edge = bench.app.edge
    before, edge.uploads = edge.uploads, asyncio.Semaphore(0)
    answer = bench.alice.submit(lease)
    assert (code_of(answer), answer.headers["retry-after"]) == ((503, "hub.busy"), "2")
    edge.uploads = before
    assert bench.alice.submit(lease).status_code == 201


def metrics_of(bench: Bench) -> dict[str, float]:
    lines = ok(bench.http.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_every_figure_of_a_run_is_in_the_operators_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/operate.md").read_text()
    assert [name for name in re.findall(r'Figure\("(\w+)"', inspect.getsource(reporting)) if name not in guide] == []


def test_metrics_tell_requests_refusals_and_how_the_run_stands(bench: Bench) -> None:
    ok(bench.announce(0))
    [lease] = bench.alice.lease(request="request-one")
    ok(bench.alice.submit(lease))
    ok(bench.trainer.call("POST", "/steps", {"step": 0, "metrics": {}, "alarms": {"guard.kl": "too far"}}))
    bench.http.get("/nowhere/at/all")
    bench.http.request("BREW", "/health")
    seen = metrics_of(bench)
    assert seen['shoal_hub_requests_total{method="POST",route="/leases",status="200"}'] == 1
    assert seen['shoal_hub_requests_total{method="PUT",route="/submissions/{lease}",status="201"}'] == 1
    assert seen['shoal_hub_requests_total{method="GET",route="other",status="404"}'] == 1
    assert seen['shoal_hub_refusals_total{code="http.404"}'] == 1
    assert seen['shoal_hub_requests_total{method="other",route="/health",status="405"}'] == 1
    assert seen['shoal_hub_request_seconds_count{method="POST",route="/leases"}'] == 1
    assert seen['shoal_hub_submissions{state="received"}'] == 1
    assert seen['shoal_hub_nodes{presence="here",role="worker",state="active"}'] >= 1
    assert seen["shoal_hub_ledger_rows"] + seen["shoal_hub_outbox_rows"] >= 4  # run, trainer, validator, policy
    assert (seen["shoal_hub_leader"], seen['shoal_hub_alarms{about="guard"}']) == (1, 1)
    assert seen["shoal_hub_bodies_held_bytes"] == 0
    assert seen["shoal_hub_bodies_bytes_total"] > 500
    assert seen["process_resident_memory_bytes"] > 10_000_000
    assert not any(bench.alice.key.node in name for name in seen)


def test_every_answer_has_a_number_and_the_log_names_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "shoal.hub.requests"):
        fine = ok(bench.http.get("/health"))
        refused = bench.actor(worker_key(9)).call("POST", "/heartbeat", {})
        known = bench.alice.call("POST", "/audits", {})
    numbers = [answer.headers["shoal-request"] for answer in (fine, refused, known)]
    assert len(set(numbers)) == 3
    records = [next(each for each in caplog.records if f"request={number}" in each.message) for number in numbers]
    assert [record.levelno for record in records] == [logging.DEBUG, logging.INFO, logging.INFO]
    assert records[1].message.startswith(f"POST /heartbeat 401: request={numbers[1]} code=auth.unknown_node")
    assert "node=" not in records[1].message, "it was not proven"


def test_what_a_stranger_calls_a_path_reaches_no_terminal_and_a_flood_does_not_fill_the_log(bench, caplog):
    with caplog.at_level(logging.INFO, "shoal.hub.requests"):
        bench.http.get("/%1b%5b2J%0afake" + "x" * 500)
        [record] = caplog.records[:]
        for _ in range(200):
            bench.http.get("/nowhere")
    assert 2 <= len(caplog.records) < 100
    assert "\x1b" not in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 300


def test_a_defect_is_counted_and_named_by_its_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.hub.reporting, "status", Mock(side_effect=RuntimeError("of the test")))
    answer = bench.http.get("/status")
    assert code_of(answer) == (500, "hub.defect")
    assert answer.headers["shoal-request"] in answer.json()["message"]
    assert "of the test" not in answer.text, "what went wrong is for the log"
    assert metrics_of(bench)['shoal_hub_requests_total{method="GET",route="/status",status="500"}'] == 1
