"""The owner's orders as services see them: read from the database, so that a restart and another hub see the same."""

from __future__ import annotations

from functools import lru_cache

from shoal.hub.settings import HubConfig
from shoal.hub.state.orders import Estate, Orders
from shoal.hub.state.refusals import Refusal
from shoal.hub.storage import Reader, Writer

SETTING = "orders"


def orders_of(reader: Reader) -> Orders:
    """What is in force; asked for with every lease, so that the last few are kept parsed."""
    return _parsed(reader.setting(SETTING) or "{}")


@lru_cache(maxsize=8)
def _parsed(text: str) -> Orders:
    return Orders.model_validate_json(text)


def put_orders(transaction: Writer, orders: Orders) -> None:
    transaction.put_setting(SETTING, orders.model_dump_json())


def require_trusted(reader: Reader, public_key: str) -> Orders:
    """What is in force; raise if it says that this key is trusted for nothing.

    To be asked inside of the decision: the key may have been revoked since its request was let in.
    """
    orders = orders_of(reader)
    if public_key in orders.revoked:
        raise Refusal(403, "auth.revoked", "the run's owner has revoked this key: ask for another certificate")
    return orders


def estate_of(config: HubConfig) -> Estate:
    return Estate(
        run=config.run_id,
        root_key=config.root_key,
        hub_key=config.key.public_key,
        sources=config.sources,
        last_resort=config.last_resort,
        certificates=config.certificates,
    )
