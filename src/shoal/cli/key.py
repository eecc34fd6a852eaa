"""`shoal key`: make, keep and vouch for keys. What each command does is in `keyring`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

key = typer.Typer(
    name="key",
    help="Make, keep and vouch for keys: a node is its key, and credit belongs to it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Where = Annotated[Path, typer.Argument(metavar="FILE", help="A key file, or a worker's folder.")]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="Where the passphrase is.  [default: SHOAL_PASSPHRASE, or asked for]"),
]


@key.command()
def new(where: Where) -> None:
    """Make a key where there is none yet, of an owner or of a machine that is to work, and say whose it is: its node id
    and its public key are no secret."""
    from shoal.run.keyring import new_key

    typer.echo("\n".join(new_key(where)))


@key.command(name="export")
def export_(
    where: Where,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write.  [default: standard output]")] = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Write a key, sealed with a passphrase, as one line of text: to keep it, or to move to another machine."""
    from shoal.run.keyring import export_key

    text = export_key(where, out, passphrase_file)
    typer.echo(text if text is not None else f"wrote {out}; without its passphrase nobody can open it")


@key.command(name="import")
def import_(
    sealed: Annotated[str, typer.Argument(metavar="SEALED", help="An exported key; - for standard input.")],
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The key file to write, or a worker's folder.")],
    passphrase_file: PassphraseFile = None,
) -> None:
    """Open an exported key and write it as a key file. None is ever overwritten."""
    from shoal.run.keyring import import_key

    typer.echo("\n".join(import_key(sealed, to, passphrase_file)))


@key.command()
def vouch(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node id, a public key, a key file or a folder.")],
    owner: Annotated[Path, typer.Option("--owner", metavar="FILE", help="The owner's key.")],
) -> None:
    """Say that a machine is yours, as a line of text for `shoal join --vouch`: your key need not go there."""
    from shoal.protocol import load_key
    from shoal.run.keyring import node_of, vouch_for

    typer.echo(vouch_for(node_of(node), load_key(owner)).model_dump_json())
