"""One protocol version is spoken; a peer with another one is told who has to upgrade."""

from __future__ import annotations

import pytest

from shoal.errors import ProtocolError
from shoal.protocol import PROTOCOL_VERSION, Heartbeat
from shoal.protocol.node import check_spoken

NEWER, OLDER = PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1


def test_unknown_fields_are_ignored_in_answers_and_refused_in_requests() -> None:
    future = {**Heartbeat().model_dump(mode="json"), "mood": "good"}
    assert Heartbeat.model_validate(future, extra="ignore") == Heartbeat()
    with pytest.raises(ValueError, match="mood"):
        Heartbeat.model_validate(future)


@pytest.mark.parametrize(
    ("who", "version", "remedy"),
    [
        ("hub", NEWER, "shoal on this machine is too old: upgrade it with: pip install -U shoal"),
        ("hub", OLDER, "the hub is too old: ask the run's owner to upgrade it"),
        ("node", NEWER, "the hub is too old: ask the run's owner to upgrade it"),
        ("node", OLDER, "shoal on this node's machine is too old: upgrade it there with: pip install -U shoal"),
    ],
)
def test_another_version_is_refused_with_what_to_do(who: str, version: int, remedy: str) -> None:
    with pytest.raises(ProtocolError, match=f"speaks (protocol )?{version}.*: {remedy}"):
        check_spoken(who, version)


def test_this_version_is_spoken() -> None:
    check_spoken("hub", PROTOCOL_VERSION)
    check_spoken("node", PROTOCOL_VERSION)
