"""`shoal ledger`: verify, export and read the ledger. What each command does is in `shoal.run.ledger`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer, echo

from shoal.cli import options
from shoal.runtime.text import count_of, visible, visible_json

if TYPE_CHECKING:
    from shoal.ledger.evidence import Checked

MAX_ROWS = 50

ledger = Typer(
    name="ledger", help="Verify, export and read the ledger.", no_args_is_help=True, context_settings=options.HELP,
    epilog="Nothing that a hub says is believed: hashes, heads and accounts are recomputed here.",
)  # fmt: skip

WHERE = "A hub's address, a run's folder, or an exported file."
HEAD = "Heads that you kept: the ledger must contain them."
WITNESS = "A witness that you trust: its heads must fit."
WITHOUT = "Leave out receipts and verdicts: then no credit is proven."
OUT = "A relay's folder to publish in; repeatable. (default: --folder)"
Where = Annotated[str, Argument(metavar="URL|RUN|FILE", help=WHERE)]
OptionalWhere = Annotated[str | None, Argument(metavar="URL|RUN|FILE", help=f"{WHERE} {options.DefaultRun}")]


@ledger.command()
def verify(
    where: Where,
    head: Annotated[Path | None, Option(metavar="FILE", help=HEAD)] = None,
    witnesses: Annotated[list[str] | None, Option("--witness", metavar="KEY[@URL]", help=WITNESS)] = None,
    without_evidence: Annotated[bool, Option("--without-evidence", help=WITHOUT)] = False,
    wait_s: options.Wait = 3,
) -> None:
    """Check every hash, account, order, receipt and verdict, and every head; exit 5 if anything is wrong."""
    from shoal.run.ledger.check import check_ledger

    checked = check_ledger(where, head, wait_s, not without_evidence, witnesses or ())
    echo("\n".join(map(visible, checked_lines(checked))))


@ledger.command()
def export(
    where: Where,
    out: Annotated[Path, Argument(metavar="OUT", help="The file to write: one entry per line (JSON).")],
    wait_s: options.Wait = 3,
) -> None:
    """Write the ledger to a file; beside it the signed receipts and verdicts, and the hub's signed head."""
    from shoal.run.ledger.check import export_ledger
    from shoal.run.ledger.sources import evidence_file, head_file

    rows = export_ledger(where, out, wait_s)
    beside = [path.name for path in (evidence_file(out), head_file(out)) if path.exists()]
    echo(f"wrote {rows:,} entries to {out}" + (f", and beside it {' and '.join(beside)}" if beside else ""))


@ledger.command()
def show(
    who: Annotated[str, Argument(metavar="NODE|OWNER", help="A node's id or name, or an owner's public key.")],
    where: OptionalWhere = None,
    as_json: options.Json = False,
    wait_s: options.Wait = 3,
) -> None:
    """Show what a node, or all nodes of an owner, have earned and lost."""
    from dataclasses import asdict

    from shoal.cli.printing import console, sheet
    from shoal.ledger import Account
    from shoal.run.folder import find_run
    from shoal.run.ledger.check import Book

    book = Book(find_run(where), wait_s)
    accounts = {node: book.accounts.by_node[node] for node in book.find(who)}
    total, sums = Account(), ("credit", "pending", "void", "accepted", "rejected")
    rows = []
    for node, account in accounts.items():
        total = total.plus(account)
        state = "banned" if account.banned else "suspended" if account.suspended_until_ms is not None else ""
        numbers = [f"{getattr(account, name):,}" for name in sums]
        rows.append((node[:16], book.names.get(node, ""), *numbers, f"{state}: {account.reason}" if state else ""))
    if as_json:
        nodes = {node: asdict(account) for node, account in accounts.items()}
        return echo(json.dumps({"nodes": nodes, "together": asdict(total)}, indent=2))
    if len(rows) > 1:
        whose = f"owner {total.owner[:16]}…" if total.owner else ""
        rows.append(("together", whose, *(f"{getattr(total, name):,}" for name in sums), ""))
    return console().print(sheet(("node", "name", *sums, "standing"), rows, ("standing", "name")))


@ledger.command()
def shares(
    where: OptionalWhere = None,
    step: Annotated[int | None, Option(min=0, help="As they were when this step's batch was written down.")] = None,
    as_json: options.Json = False,
    wait_s: options.Wait = 3,
) -> None:
    """Show which part of the run is whose: credit by owner, as exact fractions."""
    from shoal.cli.printing import console, sheet
    from shoal.run.folder import find_run
    from shoal.run.ledger.check import shares_at

    found, names = shares_at(find_run(where), step, wait_s)
    if as_json:
        shown = ("holder", "nodes", "credit", "fraction")
        shares = [{name: getattr(each, name) for name in shown} for each in found.shares]
        values = {"index": found.index, "total": found.total, "shares": shares}
        return echo(visible_json(json.dumps(values, indent=2)))
    rows = []
    for share in found.shares[:MAX_ROWS]:
        part, whole = share.fraction
        alone = share.holder in share.nodes
        whose = f"{names.get(share.holder, '')} {share.holder[:8]}".strip() if alone else f"owner {share.holder[:16]}…"
        percent = f"{share.credit / found.total:.2%}"
        rows.append((percent, f"{part}/{whole}", f"{share.credit:,}", whose, str(len(share.nodes))))
    if len(found.shares) > MAX_ROWS:
        rows.append(("", "", "", f"and {len(found.shares) - MAX_ROWS} more (--json has all)", ""))
    title = f"rows 0 to {found.index}, {found.total:,} credit"
    return console().print(sheet(("share", "exactly", "credit", "whose", "machines"), rows, ("whose",), title))


@ledger.command()
def witness(
    url: Annotated[str, Argument(metavar="URL", help="The hub's address, best the whole join URL.")],
    folder: Annotated[Path, Option(help="The witness's key, and what it has signed for.")] = Path("witness"),
    out: Annotated[list[Path] | None, Option(metavar="DIR", help=OUT)] = None,
    every_s: Annotated[float, Option("--every", min=1, max=86_400, help="Seconds between two looks.")] = 60,
    once: Annotated[bool, Option("--once", help="Look once, sign and end.")] = False,
) -> None:
    """Watch that a ledger only grows, and sign its head with a key of your own; exit 5 if it was rewritten."""
    from shoal.run.ledger.witness import run_witness
    from shoal.run.roles import start_role

    run_witness(url, folder, out or (), every_s, once, start_role("witness", None, verbose=False))


@ledger.command()
def recheck(
    run: Annotated[Path, Argument(metavar="RUN", help="A run's folder, with its hub's blobs and its origin.")],
    sample: Annotated[int, Option(min=1, help="Accepted units to judge again.")] = 8,
    seed: Annotated[int | None, Option(help="Draws the same units again. (default: random)")] = None,
) -> None:
    """Judge accepted units again, drawn at random, and compare with the signed verdicts; exit 5 if one differs."""
    from shoal.run.ledger.recheck import recheck_ledger
    from shoal.run.roles import start_role

    drawn = secrets.randbelow(2**31) if seed is None else seed
    for line in recheck_ledger(run, sample, drawn, start_role("recheck", None, verbose=False)):
        echo(visible(line))


def checked_lines(checked: Checked) -> list[str]:
    from shoal.ledger import Account
    from shoal.run.ledger.sources import MANIFEST

    accounts, rows = checked.accounts.by_node.values(), 0 if checked.last is None else checked.last.index + 1
    owners, total = len({account.owner for account in accounts if account.owner}), Account()
    for account in accounts:
        total = total.plus(account)
    found = [f"ledger of {checked.run}: {count_of(rows, 'row')}, every hash fits"]
    manifests = [pin for pin in checked.pins if pin.source.startswith(MANIFEST)]
    if len(manifests) > 1:
        first, last = manifests[0], manifests[-1]
        what = f"{len(manifests)} policy manifests (the last of {last.source.removeprefix(MANIFEST)})"
        found.append(f"passes through rows {first.head.index} to {last.head.index}: {what}")
    single = [pin for pin in checked.pins if len(manifests) < 2 or pin not in manifests]
    found += [f"passes through row {pin.head.index}: {pin.source}" for pin in single]
    found.append(
        f"accounts: {count_of(len(accounts), 'node')}, {count_of(owners, 'owner')}; {total.credit:,} credit, "
        f"{total.pending:,} pending, {total.void:,} void; each by the formula, once per submission"
    )
    evidence = f"{count_of(checked.credited, 'row')} of credit and {checked.rejections:,} of rejections"
    if checked.is_proven:
        found.append(
            f"evidence: {evidence}, each with a verdict by a validator that the root key certified, credit also with "
            "the hub's receipt; each node registered before, each unit paid once, within the run's limits"
        )
    else:
        found.append(
            f"NOT PROVEN: {evidence}. Their signed receipts and verdicts were not looked at (--without-evidence): "
            "whoever holds the hub's key may have invented them"
        )
    if checked.orders:
        found.append(f"orders of the owner: {checked.orders}, each signed by the root key or an admin it certified")
    if checked.compared:
        found.append("the hub's own rows agree with the accounts")
    return [*found, *(f"note: {note}" for note in checked.notes)]
