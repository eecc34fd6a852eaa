"""Protocol 2 beside protocol 1: nothing that a peer of version 1 does not know is ever part of what it is sent.

`tests/data/protocol_v1.json` holds the field names of every message as version 1 had them; it refuses any other.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from pydantic import BaseModel, Field

import shoal.protocol as protocol
from shoal.errors import ProtocolError
from shoal.protocol import (
    PROTOCOL_VERSION,
    Heartbeat,
    HeartbeatReply,
    Lease,
    Message,
    NodeState,
    NodeView,
    PolicyRef,
    Registration,
    RunInfo,
    SamplingParameters,
    SigningKey,
    open_document,
    sign_document,
)
from shoal.protocol.versions import asked_version, check_spoken, fields_of, reduced, shaped, since

OLD = json.loads((Path(__file__).parents[2] / "data" / "protocol_v1.json").read_text())
KEY = SigningKey.from_seed(b"k" * 32)


def declared(base: type) -> dict[str, type]:
    """Every class of a kind in the protocol's modules, by name."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(protocol.__path__):
        for name, kind in inspect.getmembers(importlib.import_module(f"shoal.protocol.{module.name}"), inspect.isclass):
            if issubclass(kind, base) and kind is not base:
                found[name] = kind
    return found


MESSAGES, STRUCTS = declared(Message), declared(msgspec.Struct)


def inside(annotation: Any) -> list[type[BaseModel]]:
    """The messages that a field of this type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in inside(argument)]


@pytest.mark.parametrize("name", OLD["messages"])
def test_a_peer_of_version_1_knows_exactly_the_fields_that_it_had(name: str) -> None:
    assert sorted(fields_of(MESSAGES[name], 1)) == sorted(OLD["messages"][name])


@pytest.mark.parametrize("name", OLD["structs"])
def test_bulk_bodies_without_what_came_later_are_those_of_version_1(name: str) -> None:
    kind, old = STRUCTS[name], OLD["structs"][name]
    fields = msgspec.structs.fields(kind)  # type: ignore[arg-type]
    assert [field.name for field in fields][: len(old)] == old
    for later in fields[len(old) :]:
        assert later.default is not msgspec.NODEFAULT, f"{name}.{later.name} has no default"
        assert kind.__struct_config__.omit_defaults, f"{name}.{later.name} is sent even where it says nothing"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OLD["messages"])
def test_no_message_of_version_1_holds_one_that_came_later(name: str) -> None:
    kind = MESSAGES[name]
    for field in fields_of(kind, 1):
        for held in inside(kind.model_fields[field].annotation):  # type: ignore[attr-defined]
            assert held.__name__ in OLD["messages"], f"{name}.{field} can hold a {held.__name__}"


def test_every_field_that_came_later_can_be_left_out() -> None:
    for name, fields in OLD["messages"].items():
        for field, info in MESSAGES[name].model_fields.items():  # type: ignore[attr-defined]
            assert field in fields or not info.is_required(), f"{name}.{field} has no default"


def view(**changes: Any) -> NodeView:
    return NodeView(node="ab" * 16, name="n", role="worker", state=NodeState.ACTIVE, **changes)


def test_messages_inside_others_are_reduced_too() -> None:
    reply = HeartbeatReply(node=view(window=3, owner="ab" * 32), deadlines={"u1a0": 5})
    assert shaped(reply, 2) == reply.model_dump(mode="json")
    old = shaped(reply, 1)
    assert set(old) == set(OLD["messages"]["HeartbeatReply"])
    assert set(old["node"]) == set(OLD["messages"]["NodeView"])


class Shelf(Message):
    """Messages in every place in which a field can hold some."""

    one: NodeView | None = None
    many: tuple[NodeView, ...] = ()
    named: dict[str, NodeView] = Field(default={})
    words: dict[str, list[str]] = Field(default={})


def test_messages_are_found_wherever_a_field_holds_them() -> None:
    values = Shelf(one=view(), many=(view(), view()), named={"a": view()}, words={"x": ["y"]}).model_dump(mode="json")
    old = reduced(Shelf, values, 1)
    for found in (old["one"], *old["many"], old["named"]["a"]):
        assert set(found) == set(OLD["messages"]["NodeView"])
    assert old["words"] == {"x": ["y"]}
    assert reduced(Shelf, Shelf().model_dump(mode="json"), 1)["one"] is None


def test_whoever_names_its_version_names_the_one_that_it_speaks_with_the_peer() -> None:
    assert shaped(Registration(public_key="ab" * 32), 1)["protocol_version"] == 1
    assert shaped(Registration(public_key="ab" * 32), 2)["protocol_version"] == PROTOCOL_VERSION == 2


def a_lease() -> Lease:
    return Lease(
        run="r", lease="l", node="n", unit=1, attempt=0, policy=PolicyRef(incarnation=0, version=0, digest="a" * 64),
        task="t", prompt_ids=(1,), seeds=("0" * 16,), environment_digest="e" * 64, issued_at_ms=1, deadline_ms=2,
        sampling=SamplingParameters(temperature=1, max_new_tokens=1, eos_token_id=0), hard_deadline_ms=9,
    )  # fmt: skip


def test_a_document_is_signed_in_the_shape_of_whom_it_is_for() -> None:
    signed = sign_document(a_lease(), KEY, version=1)
    assert set(signed.document) == set(OLD["messages"]["Lease"])
    assert open_document(signed, Lease, KEY.public_key) == a_lease().model_copy(update={"hard_deadline_ms": 0})


def test_what_a_newer_peer_adds_is_ignored_in_answers_and_refused_in_requests() -> None:
    future = {**Heartbeat().model_dump(mode="json"), "mood": "good"}
    assert Heartbeat.model_validate(future, extra="ignore") == Heartbeat()
    with pytest.raises(ValueError, match="mood"):
        Heartbeat.model_validate(future)


@pytest.mark.parametrize(
    ("who", "version", "remedy"),
    [
        ("hub", 3, "shoal on this machine is too old: upgrade it with: pip install -U shoal"),
        ("hub", 0, "the hub is too old: ask the run's owner to upgrade it"),
        ("node", 3, "the hub is too old: ask the run's owner to upgrade it"),
        ("node", 0, "shoal on this node's machine is too old: upgrade it there with: pip install -U shoal"),
    ],
)
def test_versions_that_are_too_far_apart_are_told_who_has_to_do_what(who: str, version: int, remedy: str) -> None:
    with pytest.raises(ProtocolError, match=f"(speaks|speak) {version}.*: {remedy}|protocol {version}, .*: {remedy}"):
        check_spoken(who, version)


@pytest.mark.parametrize("version", [1, 2])
def test_this_version_and_the_one_before_are_spoken(version: int) -> None:
    check_spoken("hub", version)
    check_spoken("node", version)


@pytest.mark.parametrize(
    ("header", "version"),
    [(None, None), ("1", 1), ("2", 2), ("7", 2), ("0", 1), ("", None), ("x", None), ("9" * 9, None), ("²", None)],
)
def test_a_header_that_names_a_version(header: str | None, version: int | None) -> None:
    assert asked_version(header) == version


def test_a_field_that_came_with_this_version_is_marked_as_such() -> None:
    assert RunInfo.model_fields["hubs"].json_schema_extra == since(2)
