"""What the run's owner ordered: `admin` entries carry the signed document, so nobody else can have written them."""

from __future__ import annotations

from typing import Any

from shoal.errors import LedgerError, ProtocolError
from shoal.protocol import AdminAction, AdminRequest, open_admin


def open_order(body: dict[str, Any], run: str, root_key: str) -> AdminAction:
    """The action in the body of an `admin` entry, if the run's root key, or a key that it certified, signed it."""
    try:
        return open_admin(AdminRequest.model_validate(body["order"]), run, root_key)
    except (KeyError, ValueError, ProtocolError) as error:
        raise LedgerError(f"an order of the run's owner does not hold: {error}") from error
