"""`shoal ledger`: verify, read and witness the ledger. What each command does is in `shoal.run.ledger`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer, echo

from shoal.cli import options
from shoal.cli.help import CONTEXT, Command, CommandGroup
from shoal.errors import UserError
from shoal.runtime.extras import require
from shoal.runtime.text import count_of, visible, visible_json

if TYPE_CHECKING:
    from shoal.ledger.evidence import Checked

MAX_ROWS = 50

ledger = Typer(
    name="ledger", help="Verify and read the ledger: who did what work, and what it earned.",
    cls=CommandGroup, context_settings=CONTEXT,
    epilog="Nothing that a hub says is believed: hashes, heads and accounts are computed again on this machine.",
)  # fmt: skip

HEAD = "A file of ledger heads that you kept; the ledger must contain them."
WITNESS = "A witness that you trust; the ledger must contain the heads that it signed. Repeatable."
WITHOUT = "Do not check receipts and verdicts. No credit is proven then."
EXPORT = "Write the ledger to this file first, one entry per line; beside it go receipts, verdicts and the hub's head."
RECHECK = "Also judge N accepted units again, drawn at random, by the validator's checks. Needs the run's folder."
DRAWN = "With --recheck: draw the same units again. (default: random)"
WHO = "A node's id or name, or an owner's public key. (default: everybody's shares of the run)"
STEP = "The shares as they were when the batch of this step was written. (default: now)"
SIGNED = "A folder of a relay to publish in. Repeatable. (default: the folder of --folder)"
EVERY = "The time between two looks."


@ledger.command(cls=Command, epilog="Example: shoal ledger verify http://HOST:8470/#KEY --out ledger.jsonl")
def verify(
    where: options.Ledger,
    head: Annotated[Path | None, options.value("--head", "FILE", HEAD)] = None,
    witnesses: Annotated[list[str] | None, options.value("--witness", "KEY[@URL]", WITNESS)] = None,
    without_evidence: Annotated[bool, Option("--without-evidence", help=WITHOUT)] = False,
    out: Annotated[Path | None, options.value("--out", "FILE", EXPORT)] = None,
    sample: Annotated[int | None, options.whole("--recheck", RECHECK, 1)] = None,
    seed: Annotated[int | None, options.whole("--seed", DRAWN)] = None,
    wait_s: options.Wait = 3,
) -> None:
    """Check every hash, account, order, receipt, verdict and head of a ledger. The exit code is 5 if anything is
    wrong."""
    from shoal.run.ledger.check import check_ledger, export_ledger
    from shoal.run.ledger.sources import beside

    if sample is not None and not Path(where).is_dir():
        raise UserError(f"--recheck needs the run's folder, with its hub's submissions and its origin, not {where}")
    if sample is not None:
        require("trainer", "--recheck")
    if out is not None:
        rows = export_ledger(where, out, wait_s)
        files = [path.name for path in (beside(out, "evidence"), beside(out, "head")) if path.exists()]
        echo(f"wrote {rows:,} entries to {out}" + (f", and beside it {' and '.join(files)}" if files else ""))
    checked = check_ledger(where, head, wait_s, not without_evidence, witnesses or ())
    echo("\n".join(map(visible, checked_lines(checked))))
    if sample is not None:
        from shoal.run.ledger.recheck import recheck_ledger
        from shoal.run.roles import start_role

        drawn = secrets.randbelow(2**31) if seed is None else seed
        for line in recheck_ledger(Path(where), sample, drawn, start_role("recheck", None, verbose=False)):
            echo(visible(line))


@ledger.command(cls=Command, epilog="Example: shoal ledger show demo worker-1")
def show(
    where: options.OptionalLedger = None,
    who: Annotated[str | None, Argument(metavar="NODE|OWNER", help=WHO)] = None,
    step: Annotated[int | None, options.whole("--step", STEP)] = None,
    as_json: options.Json = False,
    wait_s: options.Wait = 3,
) -> None:
    """Show who owns which part of the run, as exact fractions of the credit; or what one node, or all
    nodes of an owner, have earned and lost."""
    from shoal.run.folder import find_run

    place = find_run(where)
    if who is not None and step is not None:
        raise UserError("--step shows everybody's shares at a step: leave the node out")
    return _show_shares(place, step, as_json, wait_s) if who is None else _show_accounts(place, who, as_json, wait_s)


def _show_accounts(where: str, who: str, as_json: bool, wait_s: float) -> None:
    from dataclasses import asdict

    from shoal.cli.printing import console, sheet
    from shoal.ledger import Account
    from shoal.run.ledger.check import Book

    book = Book(where, wait_s)
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


def _show_shares(where: str, step: int | None, as_json: bool, wait_s: float) -> None:
    from shoal.cli.printing import console, sheet
    from shoal.run.ledger.check import shares_at

    found, names = shares_at(where, step, wait_s)
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


@ledger.command(cls=Command, epilog="Example: shoal ledger witness http://HOST:8470/#KEY --folder witness")
def witness(
    url: Annotated[str, Argument(metavar="URL", help="The hub's URL, best the whole join URL.")],
    folder: Annotated[
        Path, options.value("--folder", "FOLDER", "Keep the witness's key and what it signed here.")
    ] = Path("witness"),
    out: Annotated[list[Path] | None, options.value("--out", "FOLDER", SIGNED)] = None,
    every_s: Annotated[float, options.number("--every", "SECONDS", EVERY, 1, options.DAY_S)] = 60,
    once: Annotated[bool, Option("--once", help="Look once, sign, and end.")] = False,
) -> None:
    """Watch that a ledger only grows, and sign its head with a key of your own. The exit code is 5 if it was
    rewritten."""
    if "://" not in url:
        raise UserError(f"a witness watches a hub: give its URL, http://HOST:8470/#KEY, not {url}")
    from shoal.run.ledger.witness import run_witness
    from shoal.run.roles import start_role

    run_witness(url, folder, out or (), every_s, once, start_role("witness", None, verbose=False))


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
            "anybody with the hub's key may have invented them"
        )
    if checked.orders:
        found.append(f"orders of the owner: {checked.orders}, each signed by the root key or an admin it certified")
    if checked.compared:
        found.append("the hub's own rows agree with the accounts")
    return [*found, *(f"note: {note}" for note in checked.notes)]
