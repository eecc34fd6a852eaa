"""`shoal admin`: act as the owner of a run. What each command sends is made in `shoal.run.orders`.

RUN is the run's folder, whose keys/admin.key signs (keys/root.key where the root is needed). To act from elsewhere,
give the hub's join URL and a folder with the keys: `--keys FOLDER`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.runtime.text import visible

admin = typer.Typer(
    name="admin",
    help="Act as the owner of a run: every order is signed, and is written into the ledger.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Run = Annotated[str, typer.Argument(metavar="RUN|URL", help="The run's folder; or its join URL, with --keys.")]
Keys = Annotated[
    Path | None, typer.Option("--keys", metavar="FOLDER", help="A folder with admin.key and admin.json, or root.key.")
]
Reason = Annotated[str, typer.Option("--reason", help="Why; everybody concerned is told.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="A node's id, the start of it, or its name.")]
Address = Annotated[str, typer.Argument(metavar="URL", help="The relay's address: http://host:port")]


def _order(run: str, verb: str, keys: Path | None, target: str = "", reason: str = "", for_s: float = 0.0) -> None:
    from shoal.run.orders import Order, give

    typer.echo(visible(give(run, Order(verb, target, reason, for_s), keys)))


@admin.command()
def pause(run: Run, reason: Reason = "", keys: Keys = None) -> None:
    """Give out no work and write down no batch until `resume`; what is out may still come in and be judged."""
    _order(run, "pause", keys, reason=reason)


@admin.command()
def resume(run: Run, reason: Reason = "", keys: Keys = None) -> None:
    """End a pause or a drain."""
    _order(run, "resume", keys, reason=reason)


@admin.command()
def drain(run: Run, reason: Reason = "", keys: Keys = None) -> None:
    """Give out no new work; what is out comes in, and every step that it fills is trained. Nothing is thrown away."""
    _order(run, "drain", keys, reason=reason)


@admin.command()
def suspend(
    run: Run,
    node: Node,
    for_s: Annotated[
        float, typer.Option("--for", min=0, metavar="SECONDS", help="For how long.  [default: as the rules say]")
    ] = 0,
    reason: Reason = "",
    keys: Keys = None,
) -> None:
    """Give a worker nothing to do for a while."""
    _order(run, "suspend", keys, node, reason, for_s)


@admin.command()
def ban(run: Run, node: Node, reason: Reason = "", keys: Keys = None) -> None:
    """Shut a worker out; its leases go to others. (A validator's key is revoked.)"""
    _order(run, "ban", keys, node, reason)


@admin.command()
def pardon(run: Run, node: Node, reason: Reason = "", keys: Keys = None) -> None:
    """Take a ban or a suspension back: the node begins again on probation."""
    _order(run, "pardon", keys, node, reason)


@admin.command("add-relay")
def add_relay(run: Run, url: Address, reason: Reason = "", keys: Keys = None) -> None:
    """Have weights fetched from this relay, too."""
    _order(run, "add-relay", keys, url, reason)


@admin.command("remove-relay")
def remove_relay(run: Run, url: Address, reason: Reason = "", keys: Keys = None) -> None:
    """Have no weights fetched from this relay any more."""
    _order(run, "remove-relay", keys, url, reason)


@admin.command("add-validator")
def add_validator(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, with keys/root.key.")],
    public_key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="The public key of one elsewhere.  [default: one here]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the certificate of KEY is written.")
    ] = None,
    reason: Reason = "",
) -> None:
    """Have the root key certify one validator more; the hub trusts it at once."""
    from shoal.run.orders import add_validator as add

    for line in add(run, public_key, out, reason):
        typer.echo(visible(line))


@admin.command()
def calibrate(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Limits that `shoal doctor --calibrate --out FILE` measured.")
    ],
    keys: Keys = None,
) -> None:
    """Take work of a kind that no validator can measure, by limits that the root key signs."""
    from shoal.run.orders import open_kind

    typer.echo(visible(open_kind(run, file, keys)))


@admin.command()
def revoke(
    run: Run,
    key: Annotated[str, typer.Argument(metavar="KEY", help="A public key (64 hex digits), or validator-N.")],
    reason: Reason = "",
    keys: Keys = None,
) -> None:
    """Trust a key for nothing any more; a validator's by the admin key, others' by the root key."""
    from shoal.run.orders import revoke as give_revocation

    typer.echo(visible(give_revocation(run, key, reason, keys)))


@admin.command()
def rotate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, with keys/root.key.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="hub, admin or validator-N.")],
    reason: Reason = "",
) -> None:
    """Give a process another key; the old one is trusted until it is revoked, so that nothing is interrupted."""
    from shoal.run.orders import rotate as give_rotation

    for line in give_rotation(run, name, reason):
        typer.echo(visible(line))
