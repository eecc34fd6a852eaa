"""Where weights come from while a run goes on: relays that its owner adds are used, a silent hub changes nothing."""

from __future__ import annotations

from typing import Any

from fake_run import ScriptedHub, run_info, signed

from shoal.client.weights import LOOK_EVERY_S, Following
from shoal.protocol import PolicyRef

POLICY = PolicyRef(incarnation=0, version=1, digest="a" * 64)


class Downloads:
    def __init__(self) -> None:
        self.fetched: list[PolicyRef] = []
        self.sources: list[tuple[Any, Any]] = []

    def fetch(self, policy: PolicyRef, _deadline_s: float) -> None:
        self.fetched.append(policy)

    def set_sources(self, sources: Any, last_resort: Any = ()) -> None:
        self.sources.append((sources, last_resort))


def test_the_hub_is_asked_now_and_then_and_new_relays_are_used() -> None:
    hub, downloads = ScriptedHub(), Downloads()
    fetch = Following(hub.client(), downloads, hub.clock)  # type: ignore[arg-type]
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
    assert downloads.fetched == [POLICY] * 4


def test_a_hub_that_cannot_be_believed_or_asked_changes_nothing() -> None:
    hub, downloads = ScriptedHub(), Downloads()
    fetch = Following(hub.client(), downloads, hub.clock)  # type: ignore[arg-type]
    hub.info = signed(run_info(steps=4)).model_copy(update={"signature": "0" * 128})
    hub.clock.advance(LOOK_EVERY_S)
    fetch(POLICY, 5)
    assert downloads.sources == []
    assert downloads.fetched == [POLICY]
