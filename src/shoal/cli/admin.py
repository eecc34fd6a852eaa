"""`shoal admin`: act as the owner of a run (`run.owner`). `shoal key`: make, keep, vouch for keys (`run.owner`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer, echo

from shoal.cli import options
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
TARGET = "A node's id, the start of it, or its name; or what the order names."
KEYS = "A folder with admin.key and admin.json, or root.key."
PASSPHRASE = "Where the passphrase is. (default: SHOAL_PASSPHRASE, or asked for)"


def admin(
    order: Annotated[str, Argument(metavar="ORDER", help=f"One of {', '.join(ORDERS)}; see below.")],
    run: Annotated[str, Argument(metavar="RUN|URL", help="The run's folder; or its join URL, with --keys.")],
    target: Annotated[str | None, Argument(metavar="TARGET", help=TARGET)] = None,
    reason: Annotated[str, Option(help="Why; everybody concerned is told.")] = "",
    for_s: Annotated[float, Option("--for", min=0, metavar="SECONDS", help="Of suspend; 0: as the rules say.")] = 0,
    out: Annotated[Path | None, Option(metavar="FILE", help="Of add-validator: where the certificate goes.")] = None,
    keys: Annotated[Path | None, Option(metavar="FOLDER", help=KEYS)] = None,
) -> None:
    """Act as the owner of a run: every order is signed, and is written into the ledger."""
    if order not in ORDERS:
        raise UserError(f"there is no order {order!r}; there are {', '.join(ORDERS)}")
    wanted = ORDERS[order][0]
    if (target is None) != (not wanted) and wanted != "[KEY]":
        raise UserError(f"expected: shoal admin {order} RUN {wanted}".rstrip())
    from shoal.run import owner as orders

    given = orders.Order(run, order, target or "", reason, for_s, keys=keys)
    special: dict[str, Callable[[], Iterable[str]]] = {
        "add-validator": lambda: orders.add_validator(Path(run), target, out, reason),
        "rotate": lambda: orders.rotate(Path(run), given.target, reason),
        "calibrate": lambda: [orders.calibrate(given)],
        "revoke": lambda: [orders.revoke(given)],
    }
    for line in special.get(order, lambda: [given.send()])():
        echo(visible(line))


key = Typer(
    name="key", help="Make, keep and vouch for keys: a node is its key, and credit belongs to it.",
    no_args_is_help=True, context_settings=options.HELP,
)  # fmt: skip
Where = Annotated[Path, Argument(metavar="FILE", help="A key file, or a worker's folder.")]
PassphraseFile = Annotated[Path | None, Option("--passphrase-file", help=PASSPHRASE)]


@key.command()
def new(where: Where) -> None:
    """Make a key where there is none yet, of an owner or of a machine that is to work, and say whose it is: its node id
    and its public key are no secret."""
    from shoal.run.owner import new_key

    echo("\n".join(new_key(where)))


@key.command(name="export")
def export_(
    where: Where,
    out: Annotated[Path | None, Option(help="The file to write. (default: standard output)")] = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Write a key, sealed with a passphrase, as one line of text: to keep it, or to move to another machine."""
    from shoal.run.owner import export_key

    echo(export_key(where, out, passphrase_file))


@key.command(name="import")
def import_(
    sealed: Annotated[str, Argument(metavar="SEALED", help="An exported key; - for standard input.")],
    to: Annotated[Path, Argument(metavar="FILE", help="The key file to write, or a worker's folder.")],
    passphrase_file: PassphraseFile = None,
) -> None:
    """Open an exported key and write it as a key file. None is ever overwritten."""
    from shoal.run.owner import import_key

    echo("\n".join(import_key(sealed, to, passphrase_file)))


@key.command()
def vouch(
    node: Annotated[str, Argument(metavar="NODE", help="A node id, a public key, a key file or a folder.")],
    owner: Annotated[Path, Option(metavar="FILE", help="The owner's key.")],
) -> None:
    """Say that a machine is yours, as a line of text for `shoal join --vouch`: your key need not go there."""
    from shoal.protocol import load_key
    from shoal.run.owner import node_of, vouch_for

    echo(vouch_for(node_of(node), load_key(owner)).model_dump_json())
