"""Which protocol this shoal speaks, and how it speaks with a peer of the version before.

    hub (2) ──► answer in the peer's shape: fields since 2 left out ──► node (1), which refuses what it does not know
    hub (3) ──► fields since 3 are ignored ─────────────────────────► node (2): answers are read with tolerance
    node (2) ─► request in the hub's shape ─────────────────────────► hub (1): requests are read strictly, always

A field that came with version 2 is declared `Field(…, json_schema_extra=since(2))`; that is all there is to do. The hub
knows a node's version from its registration, and from the header `shoal-protocol` who else is asking. A node knows the
hub's from `RunInfo.protocol_version`. Two that are further apart than one version do not talk: `check_spoken` says
which of them is old, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel
from pydantic.config import JsonDict

from shoal.errors import ProtocolError

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL = 1
HEADER_PROTOCOL = "shoal-protocol"
UPGRADE = "pip install -U shoal"

Inner: TypeAlias = Mapping[type[BaseModel], Callable[[dict[str, Any]], dict[str, Any]]]
"""How messages inside others are reduced that cannot be told from their fields: signed documents."""


def since(version: int) -> JsonDict:
    """Marks a field as unknown to peers that speak an older version.

    >>> since(2)
    {'since': 2}
    """
    return {"since": version}


def fields_of(kind: type[BaseModel], version: int) -> list[str]:
    """The names of the fields that a peer of this version knows."""
    return [name for name, info in kind.model_fields.items() if _since(info.json_schema_extra) <= version]


def shaped(message: BaseModel, version: int) -> dict[str, Any]:
    """The message as JSON values, as a peer of `version` knows it. Documents that others signed are left as they are.

    >>> from shoal.protocol import Heartbeat
    >>> sorted(shaped(Heartbeat(), 2).keys() - shaped(Heartbeat(), 1).keys())
    ['progress']
    """
    values: dict[str, Any] = message.model_dump(mode="json")
    return values if version >= PROTOCOL_VERSION else reduced(type(message), values, version)


def reduced(kind: type[BaseModel], values: dict[str, Any], version: int, inner: Inner | None = None) -> dict[str, Any]:
    """`values` of a message of this kind without what a peer of `version` does not know, at any depth."""
    known = {name: values[name] for name in fields_of(kind, version) if name in values}
    for name, value in known.items():
        known[name] = _reduced(kind.model_fields[name].annotation, value, version, inner or {})
    if "protocol_version" in known:
        known["protocol_version"] = min(known["protocol_version"], version)
    return known


def _reduced(annotation: Any, value: Any, version: int, inner: Inner) -> Any:
    """A field's value by what it is declared to hold: a message, or messages in a tuple, a dict, or beside None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not isinstance(value, dict):
            return value
        return inner[annotation](value) if annotation in inner else reduced(annotation, value, version, inner)
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if not arguments:
        return value
    if isinstance(value, list):
        return [_reduced(arguments[0], item, version, inner) for item in value]
    if isinstance(value, dict) and len(arguments) == 2:
        return {key: _reduced(arguments[1], item, version, inner) for key, item in value.items()}
    return _reduced(arguments[0], value, version, inner)


def _since(extra: object) -> int:
    version = extra.get("since") if isinstance(extra, dict) else None
    return version if isinstance(version, int) else OLDEST_PROTOCOL


def asked_version(header: str | None) -> int | None:
    """The version in a `shoal-protocol` header, if there is one, brought into what is spoken here."""
    if header is None or not (header.isascii() and header.isdigit() and len(header) <= 6):
        return None
    return max(OLDEST_PROTOCOL, min(int(header), PROTOCOL_VERSION))


def check_spoken(who: str, version: int) -> None:
    """Raise `ProtocolError` unless `version` is spoken here. `who` speaks it: "hub" or "node".

    A newer peer comes down to our version by itself as long as it can, so one that does not cannot.
    """
    if OLDEST_PROTOCOL <= version <= PROTOCOL_VERSION:
        return
    ours = f"{OLDEST_PROTOCOL} and {PROTOCOL_VERSION}"
    if who == "hub":
        remedy = (
            f"shoal on this machine is too old: upgrade it with: {UPGRADE}"
            if version > PROTOCOL_VERSION
            else "the hub is too old: ask the run's owner to upgrade it, or install the shoal that the run uses"
        )
        raise ProtocolError(f"the hub speaks protocol {version}, this shoal speaks {ours}: {remedy}")
    remedy = (
        "the hub is too old: ask the run's owner to upgrade it, or install the shoal that the run uses"
        if version > PROTOCOL_VERSION
        else f"shoal on this node's machine is too old: upgrade it there with: {UPGRADE}"
    )
    raise ProtocolError(f"this hub speaks protocol {ours}, the node speaks {version}: {remedy}")
