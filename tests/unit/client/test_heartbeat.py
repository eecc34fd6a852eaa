"""The heartbeat thread: it tells, it hears, it survives a silent hub and ends on a refusal."""

from __future__ import annotations

import threading

from fake_run import NODE, ScriptedHub, answer, no_answer, refusal

from shoal.client import Activity, RegularHeartbeat
from shoal.protocol import HeartbeatReply, NodeState, NodeView
from shoal.runtime.clock import ManualClock

REPLY = HeartbeatReply(
    node=NodeView(node=NODE.node, name="n", role="worker", state=NodeState.ACTIVE, credit=12), finished=True
)


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
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_a_silent_hub_is_no_reason_to_end() -> None:
    hub = ScriptedHub(script=[no_answer] * 50)
    heartbeat = RegularHeartbeat(hub.client(), 0.5, Activity(), lambda _: None)
    heartbeat.once()
    assert heartbeat.refusal is None


def test_a_refusal_is_kept_for_the_role_to_see() -> None:
    hub = ScriptedHub(script=[refusal(403, "node.banned", "this node is banned: sampling.seed")])
    heartbeat = RegularHeartbeat(hub.client(), 5, Activity(), lambda _: None)
    with heartbeat:
        heartbeat._thread.join(10)
    assert heartbeat.refusal is not None
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
