"""`shoal admin`: act as the owner of a run. What each order is made of is in `shoal.run.orders`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import UserError
from shoal.runtime.text import visible

ORDERS = {
    "pause": ("", "give out no work and write down no batch until resume; what is out may still come in"),
    "resume": ("", "end a pause or a drain"),
    "drain": ("", "give out no new work; what is out comes in, and every step that it fills is trained"),
    "suspend": ("NODE", "give a worker nothing to do for a while (--for)"),
    "ban": ("NODE", "shut a worker out; its leases go to others"),
    "pardon": ("NODE", "take a ban or a suspension back: the node begins again on probation"),
    "add-relay": ("URL", "have weights fetched from this relay, too"),
    "remove-relay": ("URL", "have no weights fetched from this relay any more"),
    "add-validator": ("[KEY]", "certify one validator more, here or the one with this public key (--out)"),
    "calibrate": ("FILE", "take work of a kind by limits that `shoal doctor --calibrate` measured"),
    "revoke": ("KEY", "trust a key, or validator-N, for nothing any more"),
    "rotate": ("NAME", "give hub, admin or validator-N another key; the old one is trusted until revoked"),
}
EPILOG = "\n\n".join(f"{verb} RUN {what}: {does}." for verb, (what, does) in ORDERS.items())


def admin(
    order: Annotated[str, typer.Argument(metavar="ORDER", help=f"One of {', '.join(ORDERS)}; see below.")],
    run: Annotated[str, typer.Argument(metavar="RUN|URL", help="The run's folder; or its join URL, with --keys.")],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="A node's id, the start of it, or its name; or what the order names."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody concerned is told.")] = "",
    for_s: Annotated[
        float, typer.Option("--for", min=0, metavar="SECONDS", help="Of suspend.  [default: as the rules say]")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Of add-validator: where the certificate goes.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FOLDER", help="A folder with admin.key and admin.json, or root.key."),
    ] = None,
) -> None:
    """Act as the owner of a run: every order is signed, and is written into the ledger."""
    if order not in ORDERS:
        raise UserError(f"there is no order {order!r}; there are {', '.join(ORDERS)}")
    wanted = ORDERS[order][0]
    if (target is None) != (not wanted) and wanted != "[KEY]":
        raise UserError(f"expected: shoal admin {order} RUN {wanted}".rstrip())
    for line in _given(order, run, target or "", reason, for_s, out, keys):
        typer.echo(visible(line))


def _given(
    order: str, run: str, target: str, reason: str, for_s: float, out: Path | None, keys: Path | None
) -> Iterator[str]:
    """What there is to say of an order, while it is carried out."""
    from shoal.run import orders

    if order == "add-validator":
        yield from orders.add_validator(Path(run), target or None, out, reason)
    elif order == "rotate":
        yield from orders.rotate(Path(run), target, reason)
    elif order == "calibrate":
        yield orders.open_kind(run, Path(target), keys)
    elif order == "revoke":
        yield orders.revoke(run, target, reason, keys)
    else:
        yield orders.send(orders.Office.of(run, keys), orders.Order(order, target, reason, for_s))
