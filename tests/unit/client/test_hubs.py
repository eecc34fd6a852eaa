"""Several hubs of one run: who is asked, who rests, who is never asked again; and hubs that are there and of no use."""

import threading
from collections.abc import Callable
from dataclasses import replace

import fake_run
import httpx2
import pytest
from fake_run import HUB, REPLY, RUN, STRANGER, VIEW, Network, ScriptedHub, answer, lease, refusal, run_info, signed

from kit.asgi import InProcess
from shoal.client import Activity, ClientOptions, HubClient, RegularHeartbeat
from shoal.client.transport import LEAST_ATTEMPT_S, Hubs
from shoal.client.trust import parse_join_urls, run_id
from shoal.errors import ConfigError, HubRefused, HubUnreachable, SignatureError
from shoal.protocol import Heartbeat, HeartbeatReply, LeaseReply, LeaseRequest, Receipt, fingerprint, submission_digest
from shoal.runtime.clock import Backoff
from shoal.runtime.targets import Nearness, Reach

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_the_present_hub_is_left_only_when_it_fails_and_by_one_thread() -> None:
    hubs = Hubs([A, B + "/", A])
    assert hubs.urls == [A, B]
    first = hubs.present
    hubs.failed(first)
    assert hubs.present.url == B
    hubs.failed(first)
    assert hubs.present.url == B, "this thread's call was to the one that was left meanwhile"
    hubs.failed(hubs.present)
    assert hubs.present is first


def test_named_addresses_come_behind_those_given_and_replace_those_named_before_but_for_the_present_one() -> None:
    hubs = Hubs([A])
    hubs.named([B + "/", A, "ftp://x", "", B])
    assert hubs.urls == [A, B]
    for number in range(100):
        hubs.named([f"http://named-{number}:1", B])
    assert hubs.urls == [A, "http://named-99:1", B]
    hubs.failed(hubs.present)
    assert hubs.present.url == "http://named-99:1"
    for named, urls in (([C], [A, "http://named-99:1", C]), ([], [A, "http://named-99:1"])):
        hubs.named(named)
        assert (hubs.urls, hubs.present.url) == (urls, "http://named-99:1")


def test_the_last_address_is_not_dropped_and_no_address_at_all_is_said_to_be_so() -> None:
    hubs = Hubs([A, B])
    assert hubs.drop(hubs.present)
    assert not hubs.drop(hubs.present)
    assert hubs.urls == [B]
    with pytest.raises(ConfigError, match="join URL"):
        Hubs([])


def test_join_urls_of_one_run_are_put_together_and_of_two_refused() -> None:
    pin = "ab" * 20
    assert parse_join_urls([f"{A}/#{pin}", B, f"{A}/#{pin}"]) == ((A, B), pin)
    assert parse_join_urls([A, B]) == ((A, B), None)
    with pytest.raises(ConfigError, match="different runs"):
        parse_join_urls([f"{A}/#{pin}", f"{B}/#{'cd' * 20}"])


HONEST = signed(run_info())
OTHER_RUN = run_id("demo", fingerprint(STRANGER.public_key))


@pytest.mark.parametrize("how", ["down", "broken"])
def test_when_a_hub_fails_the_next_is_asked_at_once_after_it_has_shown_the_same_run(how: str) -> None:
    net = Network(a=HONEST, b=HONEST)
    client = net.client(A, B)
    client.heartbeat(Heartbeat())
    net.down |= {"a"} if how == "down" else set()
    net.broken |= {"a": refusal(503, "hub.failed", "the disk is full")} if how == "broken" else {}
    client.heartbeat(Heartbeat())
    client.heartbeat(Heartbeat())
    assert net.asked == ["a/run", "a/heartbeat", "a/heartbeat", "b/run", "b/heartbeat", "b/heartbeat"]
    assert set(net.stop.waits) <= {0.0}
    assert client.url == B


def test_a_hub_of_another_root_key_is_never_sent_anything_signed() -> None:
    impostor = signed(run_info(root_key=STRANGER.public_key, run=OTHER_RUN, certificates=()), STRANGER)
    net = Network(a=HONEST, b=impostor, c=HONEST)
    client = net.client(A, B, C)
    client.heartbeat(Heartbeat())
    net.down.add("a")
    client.heartbeat(Heartbeat())
    assert net.asked[2:] == ["a/heartbeat", "b/run", "c/run", "c/heartbeat"]
    net.down.add("c")
    with pytest.raises(HubUnreachable, match="http://a:1, http://c:1"):
        client.heartbeat(Heartbeat())
    assert "b/heartbeat" not in net.asked
    assert net.asked.count("b/run") == 1
    with pytest.raises(SignatureError, match="not certified"):  # the only hub is a wrong one
        Network(a=signed(run_info(), STRANGER)).client(A).trusted_run()


def test_further_hubs_that_the_run_names_are_used() -> None:
    net = Network(a=signed(run_info(hubs=(B,))), b=HONEST)
    client = net.client(A)
    client.heartbeat(Heartbeat())
    net.down.add("a")
    client.heartbeat(Heartbeat())
    assert net.asked[-2:] == ["b/run", "b/heartbeat"]


def test_when_all_are_down_it_waits_and_comes_back_to_whichever_is_up_first() -> None:
    net = Network(a=HONEST, b=HONEST)
    client = net.client(A, B, patience_s=600)
    client.heartbeat(Heartbeat())
    net.down |= {"a", "b"}
    up_at_s = net.clock.monotonic_s() + 30

    def until_it_is_up(request: httpx2.Request) -> httpx2.Response:
        if net.clock.monotonic_s() >= up_at_s:
            net.down.discard("a")
        return net.handle(request)

    client._transport.http.transport = httpx2.MockTransport(until_it_is_up)  # type: ignore[attr-defined]
    client.heartbeat(Heartbeat())
    assert client.url == A
    assert 30 <= sum(net.stop.waits) < 60


def test_a_refusal_or_too_many_requests_is_no_reason_to_ask_elsewhere() -> None:
    hub = ScriptedHub(script=[refusal(429, "rate.key", "slow down", retry_after="3"), answer(fake_run.REPLY),
                              refusal(403, "auth.role", "no")])  # fmt: skip
    options = ClientOptions(backoff=Backoff(0.1, 5.0))
    urls, http = ["http://hub:1", "http://other:1"], InProcess(hub.handle)
    client = HubClient(urls, fake_run.NODE, hub.stop, None, http, hub.clock, options)
    client.heartbeat(Heartbeat())
    assert hub.stop.waits == [3.0]
    with pytest.raises(HubRefused):
        client.heartbeat(Heartbeat())
    assert {request.url.host for request in hub.requests} == {"hub"}


NEW_HUB = fake_run.key(9)


def test_rotated_key_is_fetched_once_and_a_revoked_key_stays_untrusted() -> None:
    hub = ScriptedHub()
    client = hub.client(fingerprint(fake_run.ROOT.public_key))
    assert client.open_lease(signed(lease())).unit == 7
    both = (*fake_run.CERTIFICATES, fake_run.certificate("hub", NEW_HUB))
    hub.info = signed(run_info(certificates=both, revoked=(HUB.public_key,)), NEW_HUB)
    assert client.open_lease(signed(lease(), NEW_HUB)).unit == 7
    assert client.patient(1.0).open_lease(signed(lease(), NEW_HUB)).unit == 7, "copies of a client share what it knows"
    with pytest.raises(SignatureError, match="not trusted"):
        client.open_lease(signed(lease(), HUB))
    hub.info = signed(run_info(certificates=both), HUB)  # whoever has the old key says that nothing was revoked
    hub.clock.advance(60)
    with pytest.raises(SignatureError, match="was revoked"):
        client.open_lease(signed(lease(), STRANGER))
    assert client.trusted_run().hub_keys == {NEW_HUB.public_key}


def test_strange_signatures_do_not_make_it_ask_all_the_time() -> None:
    net = Network(a=HONEST)
    client = net.client(A)
    for _ in range(5):
        with pytest.raises(SignatureError, match="not trusted"):
            client.open_lease(signed(lease(), STRANGER))
    assert net.asked == ["a/run", "a/run"]


def test_reach_of_a_near_hub_stays_after_an_answer_of_a_far_hub() -> None:
    """The relays of a run on a local network are there, whichever of its hubs answers."""
    transport, content = Network(a=HONEST).client(A, B)._transport, HONEST.model_dump_json().encode()
    found = []
    for url, near in ((A, Nearness.PUBLIC), (B, Nearness.PRIVATE), (A, Nearness.PUBLIC)):
        transport.admit(url, content, near)
        found.append(transport.run().reach)
    assert found == [Reach(Nearness.PUBLIC), Reach(Nearness.PRIVATE), Reach(Nearness.PRIVATE)]


PERIOD_S = 5.0


def network() -> tuple[Network, HubClient]:
    naming = signed(run_info(hubs=(B,)))
    net = Network(a=naming, b=naming)
    return net, net.client(A)


@pytest.mark.parametrize(
    ("frozen", "asked"),
    [({"a": "read"}, 3), ({"a": "connect"}, 3), ({"a": "read", "b": "read"}, 2)],  # of both, `b` answers nothing
)
def test_frozen_hubs_cost_a_heartbeat_at_most_its_period(frozen: dict[str, str], asked: int) -> None:
    (hubs, client), heard = network(), list[HeartbeatReply]()
    heartbeat = RegularHeartbeat(client, PERIOD_S, Activity(hubs.clock), heard.append)
    heartbeat.once()
    hubs.frozen |= frozen
    began_s = hubs.clock.monotonic_s()
    heartbeat.once()
    assert hubs.clock.monotonic_s() - began_s <= PERIOD_S
    assert (len(heard), heartbeat.refusal) == (asked - 1, None)
    assert hubs.asked[2 : 2 + asked] == ["a/heartbeat", "b/run", "b/heartbeat"][:asked]


def test_a_short_patience_leaves_an_attempt_the_time_that_an_answer_needs() -> None:
    hubs, client = network()
    client.trusted_run()
    hubs.frozen |= {"a": "read", "b": "read"}
    began_s = hubs.clock.monotonic_s()
    with pytest.raises(HubUnreachable):
        client.patient(0.01).heartbeat(Heartbeat())
    assert hubs.clock.monotonic_s() - began_s == LEAST_ATTEMPT_S


def test_refreshing_the_run_blocks_no_other_call() -> None:
    _, client = network()
    trusted = client.trusted_run()
    found: list[object] = []
    with client._transport.known.fetching:  # as another thread has it for a minute, with the hub frozen
        caller = threading.Thread(target=lambda: found.append(client.trusted_run()))
        caller.start()
        caller.join(10)
        assert found == [trusted]


PAGES = [
    httpx2.Response(302, headers={"location": "http://portal/login"}), httpx2.Response(400, text="Bad Request"),
    httpx2.Response(401, json={"message": "Unauthorized"}), httpx2.Response(403, html="<h1>Forbidden</h1>"),
    httpx2.Response(404, json={"code": 404, "message": "no backend"}), httpx2.Response(407, text=""),
    httpx2.Response(413, html="<h1>Request Entity Too Large</h1>"),
    httpx2.Response(200, html="<h1>Welcome to the hotel</h1>"),
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.status_code)
def test_a_page_that_is_not_the_hubs_is_no_refusal(page: httpx2.Response) -> None:
    hub = ScriptedHub(script=[page, page, answer(REPLY)])
    assert (hub.client().heartbeat(Heartbeat()), len(hub.stop.waits)) == (REPLY, 2)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.status_code)
def test_behind_such_a_page_the_next_hub_is_asked(page: httpx2.Response) -> None:
    hubs, client = network()
    hubs.broken["a"] = page
    assert client.heartbeat(Heartbeat()) == REPLY
    assert (client.url, hubs.stop.waits) == (B, [0.0])


def test_a_page_that_stays_is_told_in_the_end() -> None:
    hub = ScriptedHub(script=[httpx2.Response(404, text="<h1>Not\nFound</h1>")] * 100)
    with pytest.raises(HubUnreachable, match=r"answers, but it is no shoal hub \[HTTP 404\]; check the address"):
        hub.client(patience_s=20).status()
    assert hub.stop.waits, "a worker asks again: the page may be a network's, for a while"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.status_code)
def test_a_person_is_told_at_once_that_no_hub_answers_and_waits_where_a_proxy_cannot_reach_it(page) -> None:
    hub = ScriptedHub(script=[page, httpx2.Response(502, html="<h1>Bad Gateway</h1>"), answer(REPLY)])
    client = hub.client()
    client._transport = replace(client._transport, options=ClientOptions.of_a_person(10.0))
    with pytest.raises(HubUnreachable, match="answers, but it is no shoal hub") as caught:
        client.status()
    assert hub.stop.waits == []
    assert "<" not in str(caught.value)
    assert client.heartbeat(Heartbeat()) == REPLY


FORGOTTEN = refusal(401, "auth.unknown_node", "node is not registered: register it with POST /nodes")
BODY = b"packed"
RECEIPT = Receipt(
    run=RUN, node=fake_run.NODE.node, lease="lease-1", unit=7, submission=submission_digest(BODY), size_bytes=6,
    received_at_ms=5,
)  # fmt: skip
CALLS: dict[str, tuple[Callable[[HubClient], object], httpx2.Response]] = {
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


def test_a_hub_that_forgets_at_once_or_was_never_registered_with_has_refused() -> None:
    hub = ScriptedHub(script=[FORGOTTEN, answer(VIEW), FORGOTTEN, answer(VIEW), FORGOTTEN])
    client = hub.client()
    with pytest.raises(HubRefused, match="register it"):
        client.heartbeat(Heartbeat())
    client.register("my-laptop", "worker", None)
    with pytest.raises(HubRefused, match="not registered"):
        client.heartbeat(Heartbeat())
    assert not hub.script


def test_concurrent_refused_calls_register_once() -> None:
    def refused_meanwhile(_request: httpx2.Request) -> httpx2.Response:
        assert client.heartbeat(Heartbeat()) == REPLY
        return FORGOTTEN

    script = [answer(VIEW), refused_meanwhile, FORGOTTEN, answer(VIEW), answer(REPLY), answer(LeaseReply())]
    hub = ScriptedHub(script=script)
    client = hub.client()
    client.register("my-laptop", "worker", None)
    client.lease(LeaseRequest(request="request-1", max_units=1))
    assert [request.url.path for request in hub.requests].count("/nodes") == 2
