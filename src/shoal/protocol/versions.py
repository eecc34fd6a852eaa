"""Which protocol this shoal speaks. Both sides must speak the same version; a peer with another one is told what to do.

A hub learns a node's version from its registration, a node the hub's from `RunInfo.protocol_version`. Unknown
fields are ignored in answers and signed documents, and refused in requests.
"""

from __future__ import annotations

from shoal.errors import ProtocolError

PROTOCOL_VERSION = 3
HEADER_PROTOCOL = "shoal-protocol"
UPGRADE = "pip install -U shoal"


def check_spoken(who: str, version: int) -> None:
    """Raise `ProtocolError` unless the peer `who` ("hub" or "node") speaks this version. The message says which is old.

    >>> check_spoken("hub", PROTOCOL_VERSION)
    """
    if version == PROTOCOL_VERSION:
        return
    if who == "hub":
        remedy = (
            f"shoal on this machine is too old: upgrade it with: {UPGRADE}"
            if version > PROTOCOL_VERSION
            else "the hub is too old: ask the run's owner to upgrade it, or install the shoal that the run uses"
        )
        raise ProtocolError(f"the hub speaks protocol {version}, this shoal speaks {PROTOCOL_VERSION}: {remedy}")
    remedy = (
        "the hub is too old: ask the run's owner to upgrade it, or install the shoal that the run uses"
        if version > PROTOCOL_VERSION
        else f"shoal on this node's machine is too old: upgrade it there with: {UPGRADE}"
    )
    raise ProtocolError(f"this hub speaks protocol {PROTOCOL_VERSION}, the node speaks {version}: {remedy}")
