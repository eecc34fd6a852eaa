"""Accounts and shares as people read them; every number is counted here, from entries that were verified on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

from shoal.cli.accounting.places import Place, open_place
from shoal.cli.sheet import Sheet
from shoal.errors import UserError
from shoal.ledger import Account, Chain, Shares, fold, shares_of
from shoal.protocol import LedgerEntry
from shoal.runtime.text import printable

LEAST_PREFIX = 4
MAX_ROWS = 50


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


def account_of(where: str, who: str, wait_s: float) -> tuple[Sheet, dict[str, Any]]:
    """What the ledger says about a node, or about all nodes of an owner: as a table, and for programs."""
    book = Book(where, wait_s)
    nodes = book.find(who)
    heads = ("node", "name", "credit", "pending", "void", "accepted", "rejected", "standing")
    total, rows = Account(), []
    for node in nodes:
        account = book.accounts.by_node[node]
        total = total.plus(account)
        rows.append((node[:16], book.names.get(node, ""), *_sums(account), _standing(account)))
    if len(nodes) > 1:
        rows.append(("together", f"owner {total.owner[:16]}…" if total.owner else "", *_sums(total), ""))
    values = {node: asdict(book.accounts.by_node[node]) for node in nodes}
    sheet = Sheet(heads, rows, {"standing": len("suspended:"), "name": 8})
    return sheet, {"nodes": values, "together": asdict(total)}


def _sums(account: Account) -> tuple[str, ...]:
    return tuple(
        f"{number:,}" for number in (account.credit, account.pending, account.void, account.accepted, account.rejected)
    )


def _standing(account: Account) -> str:
    if account.banned:
        return f"banned: {printable(account.reason)}"
    return f"suspended: {printable(account.reason)}" if account.suspended_until_ms is not None else ""


def shares_at(where: str, step: int | None, wait_s: float) -> tuple[Sheet, str]:
    """Who owns which part of the run, and since which row: as a table and as JSON."""
    names: dict[str, str] = {}
    with closing(open_place(where, wait_s)) as place:
        shares = shares_of(verified(place, names), step)
    return _shares_table(shares, names), json.dumps(_shares_values(shares), indent=2)


def _shares_table(shares: Shares, names: Mapping[str, str]) -> Sheet:
    rows = []
    for share in shares.shares[:MAX_ROWS]:
        part, whole = share.fraction
        owner = share.holder not in share.nodes
        whose = f"owner {share.holder[:16]}…" if owner else f"{names.get(share.holder, '')} {share.holder[:8]}"
        counted = f"{share.credit:,}", whose.strip(), str(len(share.nodes))
        rows.append((f"{share.credit / share.total:.2%}", f"{part}/{whole}", *counted))
    if len(shares.shares) > MAX_ROWS:
        rows.append(("", "", "", f"and {len(shares.shares) - MAX_ROWS} more (--json has all)", ""))
    title = f"rows 0–{shares.index}, {shares.total:,} credit"  # noqa: RUF001
    return Sheet(("share", "exactly", "credit", "whose", "machines"), rows, {"whose": 12}, title)


def _shares_values(shares: Shares) -> dict[str, Any]:
    rows = [
        {"holder": each.holder, "nodes": list(each.nodes), "credit": each.credit, "fraction": list(each.fraction)}
        for each in shares.shares
    ]
    return {"index": shares.index, "total": shares.total, "shares": rows}
