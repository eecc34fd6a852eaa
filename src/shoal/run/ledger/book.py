"""The accounts and shares of a ledger; every number is counted here, from entries that were verified on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from shoal.errors import UserError
from shoal.ledger import Chain, Shares, fold, shares_of
from shoal.protocol import LedgerEntry
from shoal.run.ledger.places import Place, open_place
from shoal.runtime.text import printable

LEAST_PREFIX = 4


def verified(place: Place, names: dict[str, str]) -> Iterator[LedgerEntry]:
    """The entries of a ledger, each checked to follow from the one before; `names` takes what nodes call themselves."""
    chain = Chain()
    for entry in place.entries():
        chain.add(entry)
        if entry.kind == "node":
            names[str(entry.body["node"])] = printable(str(entry.body.get("name", "")))
        yield entry


class Book:
    """The accounts of a ledger, with the names that nodes gave themselves."""

    def __init__(self, where: str, wait_s: float) -> None:
        self.names: dict[str, str] = {}
        with closing(open_place(where, wait_s)) as place:
            self.accounts = fold(verified(place, self.names))

    def find(self, who: str) -> list[str]:
        """The nodes that `who` means: an id or its start, a name, or an owner's public key or its start."""
        nodes = self.accounts.by_node
        if who in nodes:
            return [who]
        named = [node for node, name in self.names.items() if name == who and node in nodes]
        if named and not any(node.startswith(who) and node not in named for node in nodes):
            return named
        if named:  # whoever chose that name may want to be taken for another
            raise UserError(f"{who} is the name of one node and the start of another's id: give more of the id")
        if len(who) >= LEAST_PREFIX:
            owned = [node for node, account in nodes.items() if account.owner and account.owner.startswith(who)]
            if owned:
                return owned
            found = [node for node in nodes if node.startswith(who)]
            if len(found) == 1:
                return found
            if found:
                raise UserError(f"{who} is the start of {len(found)} node ids: give more of it")
        raise UserError(f"the ledger knows no node and no owner {who!r}; give its id, its name, or an owner's key")


def shares_at(where: str, step: int | None, wait_s: float) -> tuple[Shares, dict[str, str]]:
    """Who owns which part of the run, and since which row; with the names that nodes gave themselves."""
    names: dict[str, str] = {}
    with closing(open_place(where, wait_s)) as place:
        return shares_of(verified(place, names), step), names
