"""`shoal admin`: act as the owner of a run (`run.owner`). `shoal key`: make, keep, vouch for keys (`run.owner`)."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Typer, echo

from shoal.cli import options
from shoal.cli.help import CONTEXT, Command, CommandGroup
from shoal.errors import UserError
from shoal.runtime.text import meant, visible

ORDERS = {
    "pause": ("", "give out no work and write no batch until resume; work that is out may still be submitted"),
    "resume": ("", "end a pause or a drain"),
    "drain": ("", "give out no new work; submit what is out, and train every step that it fills"),
    "suspend": ("NODE", "give a worker nothing to do for a while (--for)"),
    "ban": ("NODE", "exclude a worker; its leases go to others"),
    "pardon": ("NODE", "end a ban or a suspension: the node begins again on probation"),
    "add-relay": ("URL", "let nodes fetch weights from this relay, too"),
    "remove-relay": ("URL", "let nodes fetch no weights from this relay any more"),
    "add-validator": ("[KEY]", "certify one more validator, here or the one with this public key (--out)"),
    "add-worker": ("KEY", "certify a trusted worker: checked by sample, paid only for samples (--for, --out)"),
    "calibrate": ("FILE", "accept work of a kind of worker by limits that `shoal doctor --calibrate` measured"),
    "revoke": ("KEY", "stop trusting a key, or validator-N, for anything"),
    "rotate": ("NAME", "give hub, admin or validator-N a new key; the old one is trusted until revoked"),
}
EPILOG = "\n".join(
    ["Orders:", *(f"  {f'{verb} RUN {what}'.strip()}: {does}." for verb, (what, does) in ORDERS.items())]
)
ORDER = f"The order: {', '.join(ORDERS)}. They are explained below."
TARGET = "What the order is about: a node's id, the start of it, or its name; a URL, key, file or role."
KEYS = "A folder with admin.key and admin.json, or root.key. (default: keys/ of the run's folder)"
FOR = "With suspend: for how long; 0 follows the rules of the hub. With add-worker: until it ends; 0 is 30 days."
CERTIFICATE = "With add-worker, or add-validator and a public key: where to write the certificate."


def admin(
    order: Annotated[str, Argument(metavar="ORDER", help=ORDER)],
    run: options.Place,
    target: Annotated[str | None, Argument(metavar="TARGET", help=TARGET)] = None,
    reason: Annotated[str, options.value("--reason", "TEXT", "The reason, which everybody can read.")] = "",
    for_s: Annotated[float, options.number("--for", "SECONDS", FOR, 0)] = 0,
    out: Annotated[Path | None, options.value("--out", "FILE", CERTIFICATE)] = None,
    keys: Annotated[Path | None, options.value("--keys", "FOLDER", KEYS)] = None,
) -> None:
    """Give a run an order as its owner. Every order is signed and is written to the ledger."""
    if order not in ORDERS:
        raise UserError(f"there is no order {order!r}{meant(order, ORDERS)}: shoal admin --help lists them")
    wanted = ORDERS[order][0]
    if (target is None) != (not wanted) and wanted != "[KEY]":
        usage = f"shoal admin {order} RUN {wanted}".rstrip()
        raise UserError(f"this order is given so: {usage} (see: shoal admin --help)")
    from shoal.run import owner as orders

    given = orders.Order(run, order, target or "", reason, for_s, keys=keys)
    special: dict[str, Callable[[], Iterable[str]]] = {
        "add-validator": lambda: orders.add_validator(Path(run), target, out, reason),
        "add-worker": lambda: orders.add_worker(Path(run), given.target, out, for_s),
        "rotate": lambda: orders.rotate(Path(run), given.target, reason),
        "calibrate": lambda: [orders.calibrate(given)],
        "revoke": lambda: [orders.revoke(given)],
    }
    for line in special.get(order, lambda: [given.send()])():
        echo(visible(line))
    if order == "pardon":
        echo("a worker that ended because of it must be started again: shoal join, or stop and start shoal run")


key = Typer(
    name="key", help="Make, keep and vouch for keys: a node is its key, and credit belongs to it.", cls=CommandGroup,
    context_settings=CONTEXT,
)  # fmt: skip


@key.command(cls=Command, epilog="Example: shoal key new ~/owner.key")
def new(
    where: Annotated[Path, Argument(metavar="FILE", help="A key file, or a worker's folder, which holds node.key.")],
) -> None:
    """Make a key for an owner or a machine, and print its node id and its public key, which are no secrets. A key that
    is there is never overwritten."""
    from shoal.run.owner import new_key

    echo("\n".join(new_key(where)))


@key.command(cls=Command, epilog="Example: shoal key vouch ~/.shoal/RUN/worker --owner ~/owner.key > vouch.json")
def vouch(
    node: Annotated[str, Argument(metavar="NODE", help="A node id, a public key, a key file, or a worker's folder.")],
    owner: Annotated[Path, options.value("--owner", "FILE", "The file with the owner's key.")],
) -> None:
    """State that a machine is yours, as a line of text for `shoal join --vouch`. Your key stays where it is."""
    from shoal.protocol import load_key
    from shoal.run.owner import node_of, vouch_for

    echo(vouch_for(node_of(node), load_key(owner)).model_dump_json())
