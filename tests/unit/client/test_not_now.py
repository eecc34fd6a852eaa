"""Hubs that are there and of no use: frozen, behind a page of somebody else, or without any memory of this node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from fake_run import NODE, REPLY, RUN, VIEW, Network, ScriptedHub, answer, refusal, run_info, signed

from shoal.client import Activity, ClientOptions, HubClient, RegularHeartbeat
from shoal.client.transport import LEAST_ATTEMPT_S
from shoal.errors import HubRefused, HubUnreachable
from shoal.protocol import Heartbeat, HeartbeatReply, LeaseReply, LeaseRequest, Receipt, submission_digest

A, B = "http://a:1", "http://b:1"
PERIOD_S = 5.0


# ── a hub that takes connections and never answers ───────────────────────────────────────────────────────────────


HONEST = signed(run_info(hubs=(B,)))


def network() -> tuple[Network, HubClient]:
    net = Network(a=HONEST, b=HONEST)
    return net, net.client(A)


@pytest.mark.parametrize("how", ["read", "connect"])
def test_a_frozen_hub_costs_a_heartbeat_less_than_its_period_and_the_next_hub_hears_it(how: str) -> None:
    (hubs, client), heard = network(), list[HeartbeatReply]()
    heartbeat = RegularHeartbeat(client, PERIOD_S, Activity(hubs.clock), heard.append)
    heartbeat.once()
    hubs.frozen["a"] = how
    began_s = hubs.clock.monotonic_s()
    heartbeat.once()
    assert hubs.clock.monotonic_s() - began_s < PERIOD_S
    assert len(heard) == 2
    assert hubs.asked[-3:] == ["a/heartbeat", "b/run", "b/heartbeat"]


def test_with_all_hubs_frozen_a_heartbeat_is_given_up_after_its_period() -> None:
    hubs, client = network()
    heartbeat = RegularHeartbeat(client, PERIOD_S, Activity(hubs.clock), lambda _: None)
    heartbeat.once()
    hubs.frozen |= {"a": "read", "b": "read"}
    began_s = hubs.clock.monotonic_s()
    heartbeat.once()
    assert hubs.clock.monotonic_s() - began_s <= PERIOD_S
    assert heartbeat.refusal is None


def test_a_short_patience_leaves_an_attempt_the_time_that_an_answer_needs() -> None:
    hubs, client = network()
    client.trusted_run()
    hubs.frozen |= {"a": "read", "b": "read"}
    began_s = hubs.clock.monotonic_s()
    with pytest.raises(HubUnreachable):
        client.patient(0.01).heartbeat(Heartbeat())
    assert hubs.clock.monotonic_s() - began_s == LEAST_ATTEMPT_S


def test_who_asks_for_the_run_anew_keeps_nobody_from_calling() -> None:
    _, client = network()
    trusted = client.trusted_run()
    found: list[object] = []
    with client._transport.known.fetching:  # as another thread has it for a minute, with the hub frozen
        caller = threading.Thread(target=lambda: found.append(client.trusted_run()))
        caller.start()
        caller.join(10)
        assert found == [trusted]


# ── a page of somebody else ──────────────────────────────────────────────────────────────────────────────────────

PAGES = [
    httpx.Response(302, headers={"location": "http://portal/login"}),
    httpx.Response(400, text="Bad Request"),
    httpx.Response(401, json={"message": "Unauthorized"}),
    httpx.Response(403, html="<h1>Forbidden</h1>"),
    httpx.Response(404, json={"code": 404, "message": "no backend"}),
    httpx.Response(407, text=""),
    httpx.Response(413, html="<h1>Request Entity Too Large</h1>"),
    httpx.Response(200, html="<h1>Welcome to the hotel</h1>"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.status_code)
def test_a_page_that_is_not_the_hubs_is_no_refusal(page: httpx.Response) -> None:
    hub = ScriptedHub(script=[page, page, answer(REPLY)])
    assert hub.client().heartbeat(Heartbeat()) == REPLY
    assert len(hub.stop.waits) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.status_code)
def test_behind_such_a_page_the_next_hub_is_asked(page: httpx.Response) -> None:
    hubs, client = network()
    hubs.broken["a"] = page
    assert client.heartbeat(Heartbeat()) == REPLY
    assert (client.url, hubs.stop.waits) == (B, [0.0])


def test_a_page_that_stays_is_told_in_the_end() -> None:
    hub = ScriptedHub(script=[httpx.Response(404, text="<h1>Not\nFound</h1>")] * 100)
    with pytest.raises(HubUnreachable, match=r"answers, but it is no shoal hub \[HTTP 404\]; check the address"):
        hub.client(patience_s=20).status()
    assert hub.stop.waits, "a worker asks again: the page may be a network's, for a while"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.status_code)
def test_a_person_is_told_at_once_that_no_hub_answers(page: httpx.Response) -> None:
    hub = ScriptedHub(script=[page])
    client = hub.client()
    client._transport = replace(client._transport, options=ClientOptions.of_a_person(10.0))
    with pytest.raises(HubUnreachable, match="answers, but it is no shoal hub") as caught:
        client.status()
    assert hub.stop.waits == []
    assert "<" not in str(caught.value)


def test_a_person_waits_for_a_hub_that_its_proxy_cannot_reach() -> None:
    hub = ScriptedHub(script=[httpx.Response(502, html="<h1>Bad Gateway</h1>"), answer(REPLY)])
    client = hub.client()
    client._transport = replace(client._transport, options=ClientOptions.of_a_person(10.0))
    assert client.heartbeat(Heartbeat()) == REPLY


# ── a hub that was restored from a backup ────────────────────────────────────────────────────────────────────────

FORGOTTEN = refusal(401, "auth.unknown_node", "node is not registered: register it with POST /nodes")
BODY = b"packed"
RECEIPT = Receipt(
    run=RUN, node=NODE.node, lease="lease-1", unit=7, submission=submission_digest(BODY), size_bytes=6, received_at_ms=5
)
CALLS: dict[str, tuple[Callable[[HubClient], object], httpx.Response]] = {
    "/heartbeat": (lambda client: client.heartbeat(Heartbeat()), answer(REPLY)),
    "/leases": (lambda client: client.lease(LeaseRequest(request="request-1", max_units=1)), answer(LeaseReply())),
    "/submissions/lease-1": (lambda client: client.submit("lease-1", BODY), answer(signed(RECEIPT))),
}


@pytest.mark.parametrize("path", CALLS)
def test_a_hub_that_has_forgotten_this_node_is_told_again_and_then_asked_again(path: str) -> None:
    call, done = CALLS[path]
    hub = ScriptedHub(script=[answer(VIEW), FORGOTTEN, answer(VIEW), done])
    client = hub.client()
    beside = client.patient(5.0)  # copies of a client share what it registered as
    client.register("my-laptop", "worker", None, signed(run_info()))
    assert call(beside) is not None
    assert [request.url.path for request in hub.requests] == ["/nodes", path, "/nodes", path]
    assert hub.requests[2].content == hub.requests[0].content
    assert not hub.stop.waits


def test_one_that_forgets_at_once_has_refused() -> None:
    hub = ScriptedHub(script=[answer(VIEW), FORGOTTEN, answer(VIEW), FORGOTTEN])
    client = hub.client()
    client.register("my-laptop", "worker", None)
    with pytest.raises(HubRefused, match="not registered"):
        client.heartbeat(Heartbeat())
    assert not hub.script


def test_who_never_registered_is_told_to() -> None:
    hub = ScriptedHub(script=[FORGOTTEN])
    with pytest.raises(HubRefused, match="register it"):
        hub.client().heartbeat(Heartbeat())


def test_of_several_calls_that_are_refused_together_one_registers() -> None:
    def refused_meanwhile(_request: httpx.Request) -> httpx.Response:
        assert client.heartbeat(Heartbeat()) == REPLY
        return FORGOTTEN

    hub = ScriptedHub(
        script=[answer(VIEW), refused_meanwhile, FORGOTTEN, answer(VIEW), answer(REPLY), answer(LeaseReply())]
    )
    client = hub.client()
    client.register("my-laptop", "worker", None)
    client.lease(LeaseRequest(request="request-1", max_units=1))
    assert [request.url.path for request in hub.requests].count("/nodes") == 2
