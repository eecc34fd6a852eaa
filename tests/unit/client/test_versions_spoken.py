"""A client with hubs of other versions: it ignores fields that it does not know, and refuses another protocol."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_run import HUB, NODE, ScriptedHub, answer, lease, run_info

from shoal.errors import ProtocolError
from shoal.protocol import (
    PROTOCOL_VERSION,
    Document,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    NodeView,
    SignedDocument,
)
from shoal.protocol.signing import sign_values

VIEW = {"node": NODE.node, "name": "n", "role": "worker", "state": "active"}


def test_a_hub_of_this_version_gets_all_of_it_and_is_told_the_version() -> None:
    hub = ScriptedHub(script=[answer(HeartbeatReply(node=NodeView.model_validate(VIEW)))])
    hub.client().heartbeat(Heartbeat(progress={"u1a0": 3}))
    assert json.loads(hub.requests[0].content)["progress"] == {"u1a0": 3}
    assert hub.requests[0].headers["shoal-protocol"] == str(PROTOCOL_VERSION)
    assert hub.requests[0].headers["user-agent"].startswith("shoal/")


def later(document: Document, **added: Any) -> SignedDocument:
    return sign_values(document.kind, {**document.model_dump(mode="json"), **added}, HUB)


def test_what_a_newer_hub_adds_is_left_alone() -> None:
    reply = {"leases": [later(lease(), colour="grey").model_dump()], "mood": "good"}
    hub = ScriptedHub(info=later(run_info(), colour="grey"), script=[httpx.Response(200, json=reply)])
    client = hub.client()
    got = client.lease(LeaseRequest(request="request-1"))
    assert isinstance(got, LeaseReply)
    assert client.open_leases(got)[0][0] == lease()


def test_a_role_that_came_later_can_have_a_certificate_without_harm() -> None:
    extra = later(run_info()).model_copy()
    certificate = sign_values("role-certificate", {"run": "x", "role": "gardener", "public_key": "0" * 64}, HUB)
    certificates = [*extra.document["certificates"], certificate.model_dump(mode="json")]
    hub = ScriptedHub(info=later(run_info(), certificates=certificates))
    assert hub.client().trusted_run().hub_keys == {HUB.public_key}


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(PROTOCOL_VERSION + 1, "pip install -U shoal"), (PROTOCOL_VERSION - 1, "ask the run's owner to upgrade it")],
)
def test_a_version_too_far_away_says_who_has_to_upgrade(version: int, remedy: str) -> None:
    hub = ScriptedHub(info=later(run_info(), protocol_version=version))
    with pytest.raises(ProtocolError, match=f"the hub speaks protocol {version}.*{remedy}"):
        hub.client().run_info()
