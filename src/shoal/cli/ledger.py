"""`shoal ledger`: verify, export and read the ledger. What each command does is in `shoal.cli.accounting`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.runtime.text import visible, visible_json

ledger = typer.Typer(
    name="ledger",
    help="Verify, export and read the ledger.",
    epilog="Nothing that a hub says is believed: hashes, heads and accounts are recomputed here.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WHERE = "A hub's address, a run's folder, or an exported file."
Where = Annotated[str, typer.Argument(metavar="URL|RUN|FILE", help=WHERE)]
OptionalWhere = Annotated[
    str | None,
    typer.Argument(metavar="[URL|RUN|FILE]", help=f"{WHERE}  [default: the run in this folder, or in runs/]"),
]
Wait = Annotated[float, typer.Option("--wait", min=0, max=86_400, help="Seconds to try to reach the hub.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@ledger.command()
def verify(
    where: Where,
    head: Annotated[
        Path | None, typer.Option("--head", metavar="FILE", help="Heads that you kept: the ledger must contain them.")
    ] = None,
    witnesses: Annotated[
        list[str] | None,
        typer.Option("--witness", metavar="KEY[@URL]", help="A witness that you trust: its heads must fit."),
    ] = None,
    without_evidence: Annotated[
        bool,
        typer.Option("--without-evidence", help="Leave out receipts and verdicts: then no credit is proven."),
    ] = False,
    wait_s: Wait = 3,
) -> None:
    """Check every hash, account, order, receipt and verdict, and every head; exit 5 if anything is wrong."""
    from shoal.cli.accounting.checking import check_ledger

    for line in check_ledger(where, head, wait_s, not without_evidence, witnesses or ()).lines:
        typer.echo(visible(line))


@ledger.command()
def export(
    where: Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: one entry per line (JSON).")],
    wait_s: Wait = 3,
) -> None:
    """Write the ledger to a file; beside it the signed receipts and verdicts, and the hub's signed head."""
    from shoal.cli.accounting.exporting import export_ledger
    from shoal.cli.accounting.places import evidence_file, head_file

    rows = export_ledger(where, out, wait_s)
    beside = [path.name for path in (evidence_file(out), head_file(out)) if path.exists()]
    typer.echo(f"wrote {rows:,} entries to {out}" + (f", and beside it {' and '.join(beside)}" if beside else ""))


@ledger.command()
def show(
    who: Annotated[str, typer.Argument(metavar="NODE|OWNER", help="A node's id or name, or an owner's public key.")],
    where: OptionalWhere = None,
    as_json: Json = False,
    wait_s: Wait = 3,
) -> None:
    """Show what a node, or all nodes of an owner, have earned and lost."""
    import json

    from shoal.cli.accounting.places import find_run
    from shoal.cli.accounting.telling import account_of
    from shoal.cli.sheet import console

    table, values = account_of(find_run(where), who, wait_s)
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        console().print(table)


@ledger.command()
def shares(
    where: OptionalWhere = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="As they were when this step's batch was written down.")
    ] = None,
    as_json: Json = False,
    wait_s: Wait = 3,
) -> None:
    """Show which part of the run is whose: credit by owner, as exact fractions."""
    from shoal.cli.accounting.places import find_run
    from shoal.cli.accounting.telling import shares_at
    from shoal.cli.sheet import console

    table, text = shares_at(find_run(where), step, wait_s)
    if as_json:
        typer.echo(visible_json(text))
    else:
        console().print(table)


@ledger.command()
def witness(
    url: Annotated[str, typer.Argument(metavar="URL", help="The hub's address, best the whole join URL.")],
    folder: Annotated[Path, typer.Option("--folder", help="The witness's key, and what it has signed for.")] = Path(
        "witness"
    ),
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", metavar="DIR", help="A relay's folder to publish in; repeatable.  [default: --folder]"),
    ] = None,
    every_s: Annotated[float, typer.Option("--every", min=1, max=86_400, help="Seconds between two looks.")] = 60,
    once: Annotated[bool, typer.Option("--once", help="Look once, sign and end.")] = False,
) -> None:
    """Watch that a ledger only grows, and sign its head with a key of your own; exit 5 if it was rewritten."""
    from shoal.cli.accounting.witnessing import run_witness
    from shoal.cli.roles import begin

    run_witness(url, folder, out or (), every_s, once, begin("witness", None, verbose=False))


@ledger.command()
def recheck(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, with its hub's blobs and its origin.")],
    sample: Annotated[int, typer.Option("--sample", min=1, help="Accepted units to judge again.")] = 8,
    seed: Annotated[int | None, typer.Option("--seed", help="Draws the same units again.  [default: random]")] = None,
) -> None:
    """Judge accepted units again, drawn at random, and compare with the signed verdicts; exit 5 if one differs."""
    import secrets

    from shoal.cli.accounting.rechecking import recheck_ledger
    from shoal.cli.roles import begin

    stop = begin("recheck", None, verbose=False)
    for line in recheck_ledger(run, sample, secrets.randbelow(2**31) if seed is None else seed, stop):
        typer.echo(visible(line))
