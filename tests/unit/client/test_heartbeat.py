"""What a process does with its hub beside its work: the heartbeat thread, and looking for new sources of weights."""

import threading
from typing import Any

from fake_run import REPLY, ScriptedHub, answer, refusal, run_info, signed

from shoal.client import Activity, RegularHeartbeat
from shoal.client.weights import LOOK_EVERY_S, RefreshingDownloader
from shoal.protocol import HeartbeatReply, PolicyRef
from shoal.runtime.clock import ManualClock


def test_it_beats_until_the_role_ends() -> None:
    hub = ScriptedHub(script=[answer(REPLY)] * 1000)
    heard: list[HeartbeatReply] = []
    enough = threading.Event()

    def on_reply(reply: HeartbeatReply) -> None:
        heard.append(reply)
        if len(heard) == 3:
            enough.set()

    activity = Activity()
    with activity.busy("generating"), RegularHeartbeat(hub.client(), 0.01, activity, on_reply) as heartbeat:
        assert enough.wait(10)
    assert heard[0] == REPLY
    assert heartbeat.refusal is None
    assert b"generating" in hub.requests[0].content
    assert not heartbeat._thread.is_alive()


def test_a_beat_that_is_wanted_soon_comes_before_the_regular_one() -> None:
    hub = ScriptedHub(script=[answer(REPLY)] * 10)
    beats = [threading.Event() for _ in range(3)]
    waiting = iter(beats)
    with RegularHeartbeat(hub.client(), 60, Activity(), lambda _: next(waiting).set()) as heartbeat:
        assert beats[0].wait(10)
        heartbeat.soon(0.01)
        assert beats[1].wait(10)
        heartbeat.soon(600)
        heartbeat.soon()
        assert beats[2].wait(10)
    assert not heartbeat._thread.is_alive()


def test_a_refusal_is_kept_for_the_role_to_see() -> None:
    hub = ScriptedHub(script=[refusal(403, "node.banned", "this node is banned: sampling.seed")])
    heartbeat = RegularHeartbeat(hub.client(), 5, Activity(), lambda _: None)
    with heartbeat:
        heartbeat._thread.join(10)
    assert heartbeat.refusal.code == "node.banned"


def test_activity_tells_busy_from_idle_time() -> None:
    clock = ManualClock()
    activity = Activity(clock)
    clock.advance(2)
    with activity.busy("generating 3 groups"):
        clock.advance(5)
        inside = activity.heartbeat()
    with activity.waiting("the hub"):
        clock.advance(1)
        waiting = activity.heartbeat()
    activity.count("tokens", 7)
    activity.count("tokens")
    assert (inside.doing, inside.counters) == ("generating 3 groups", {"busy_s": 5, "idle_s": 2})
    assert (waiting.doing, waiting.waiting_for, waiting.waiting_s) == ("", "the hub", 1.0)
    with activity.waiting("the hub"):
        assert activity.heartbeat().waiting_s == 0, "another wait for the same thing begins anew"
    assert activity.heartbeat().counters == {"busy_s": 5, "idle_s": 3, "tokens": 8}
    assert activity.heartbeat().waiting_for == ""


def test_a_long_description_is_cut_to_what_the_protocol_allows() -> None:
    activity = Activity()
    with activity.busy("x" * 1000), activity.waiting("y" * 1000):
        assert len(activity.heartbeat().doing) == len(activity.heartbeat().waiting_for) == 200


POLICY = PolicyRef(incarnation=0, version=1, digest="a" * 64)


class Downloads:
    def __init__(self) -> None:
        self.fetched: list[PolicyRef] = []
        self.sources: list[tuple[Any, Any]] = []

    def fetch(self, policy: PolicyRef, _deadline_s: float) -> None:
        self.fetched.append(policy)

    def set_sources(self, sources: Any, last_resort: Any = ()) -> None:
        self.sources.append((sources, last_resort))


def test_the_hub_is_asked_now_and_then_and_new_relays_are_used_if_it_can_be_believed() -> None:
    hub, downloads = ScriptedHub(), Downloads()
    fetch = RefreshingDownloader(hub.client(), downloads, hub.clock)  # type: ignore[arg-type]
    hub.info = signed(run_info(steps=4)).model_copy(update={"signature": "0" * 128})
    hub.clock.advance(LOOK_EVERY_S)
    fetch(POLICY, 5)
    assert (downloads.sources, downloads.fetched) == ([], [POLICY])
    hub.info = signed(run_info(sources=("http://relay", "http://origin")))
    fetch(POLICY, 5)
    assert downloads.sources == [], "not so soon"
    hub.clock.advance(LOOK_EVERY_S)
    fetch(POLICY, 5)
    fetch(POLICY, 5)
    assert downloads.sources == [(("http://relay", "http://origin"), ())]
    hub.clock.advance(LOOK_EVERY_S)
    fetch(POLICY, 5)
    assert len(downloads.sources) == 1, "nothing is new"
    assert downloads.fetched == [POLICY] * 5
