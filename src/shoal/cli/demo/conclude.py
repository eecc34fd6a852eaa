"""The end of the demo: records are written, every claim is checked, and what is so is said.

Each claim is decided and shown in turn; what cannot be decided does not hold. The exit code is 0 only if all hold.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.accounting.exporting import leave_ledger
from shoal.cli.demo import claims
from shoal.cli.demo.claims import Cast, Claim, Standing
from shoal.cli.demo.plot import draw_plot
from shoal.cli.demo.records import read_ledger, read_standing, rollouts_archived, signed_manifest
from shoal.cli.demo.recount import recount
from shoal.cli.folder import RunFolder
from shoal.cli.program import python_command, shoal_command
from shoal.errors import ShoalError
from shoal.ledger import verify
from shoal.protocol import LedgerEntry
from shoal.runtime.files import write_atomically
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

RECOUNT_S = 180.0
STOPPED = 130


def conclude(folder: RunFolder, cast: Cast, elapsed_s: float, stop: StopToken, console: Console) -> int:
    """Write the records, check every claim, say what is so; returns the exit code."""
    console.print("checking what came out: the ledger, the rollouts, the exported model …")
    found = []
    for claim in check(folder, cast, stop):
        found.append(claim)
        _say(claim, console)
    if stop.is_set():
        console.print("stopped before everything was checked")
        return STOPPED
    results = {"elapsed_s": round(elapsed_s, 1), "claims": [asdict(claim) for claim in found]}
    write_atomically(folder.path / "summary.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    _draw(folder, cast, console)
    _say_where(folder.path, console)
    return 0 if all(claim.holds for claim in found) else 1


def check(folder: RunFolder, cast: Cast, stop: StopToken) -> Iterator[Claim]:
    """Every claim in turn."""
    scores = held_out_scores(folder.path / "trainer" / "metrics.jsonl")
    entries, standing = _ledger(folder), _standing(folder)
    yield claims.learned(scores)
    yield _decided("the cheater", lambda: claims.cheater_caught(entries, standing, cast))
    yield _decided("the honest", lambda: claims.honest_unpunished(standing, cast))
    yield _decided("the records", lambda: _records(folder, entries))
    if not stop.is_set():
        yield _decided("the model", lambda: _model(folder, scores[-1] if scores else None, stop))


def held_out_scores(metrics: Path) -> list[float]:
    """Every score that was measured; none if the file cannot be read."""
    try:
        rows = MetricsLog(metrics).rows()
    except OSError:
        return []
    return [float(row["held_out"]) for row in rows if isinstance(row.get("held_out"), int | float)]


def _decided(name: str, decide: Callable[[], Claim]) -> Claim:
    """The claim, or that it cannot be upheld, and why."""
    try:
        return decide()
    except ShoalError as error:
        return Claim(name, False, str(error))


def _ledger(folder: RunFolder) -> list[LedgerEntry]:
    """The ledger as it is; empty if it cannot be read, and then no claim that needs it holds."""
    try:
        return read_ledger(folder.path / "hub" / "hub.db")
    except ShoalError as error:
        log.warning("the ledger cannot be read: %s", error)
        return []


def _standing(folder: RunFolder) -> Standing:
    """What became of every node; nothing if it cannot be read, and then no claim that needs it holds."""
    try:
        return read_standing(folder.path / "hub" / "hub.db", _ledger(folder))
    except ShoalError as error:
        log.warning("how the nodes stand cannot be read: %s", error)
        return Standing({}, {})


def _records(folder: RunFolder, entries: list[LedgerEntry]) -> Claim:
    manifest = signed_manifest(folder)
    if manifest.ledger_head is None:
        return Claim("the records", False, "the last version was signed without the ledger's head")
    verify(entries, manifest.ledger_head)
    leave_ledger(folder.path)
    rows, steps = rollouts_archived(folder, entries), folder.recipe.run.steps
    return Claim(
        "the records",
        True,
        f"{len(entries):,} ledger entries, every hash fits, through the head that was signed with the model; "
        f"{rows:,} rollouts trained on, in {steps} Parquet files, are those of the ledger",
    )


def _model(folder: RunFolder, claimed: float | None, stop: StopToken) -> Claim:
    counted = recount(folder.path / "trainer" / "export", folder.recipe, RECOUNT_S, stop)
    return claims.model_scores_as_claimed(claimed, counted)


def _draw(folder: RunFolder, cast: Cast, console: Console) -> None:
    """The picture proves nothing, so that failing to draw it is said and no more."""
    metrics, run, entries = folder.path / "trainer" / "metrics.jsonl", folder.recipe.run, _ledger(folder)
    title = f"shoal demo: sorting digits, seed {run.seed}, staleness ≤ {run.max_staleness}"
    try:
        banned_ms = _standing(folder).banned_at_ms.get(cast.cheater)
        marks = [((banned_ms - entries[0].at_ms) / 1000, "cheater banned")] if banned_ms and entries else []
        draw_plot(metrics, folder.path / "plot.png", title, marks, entries[0].at_ms if entries else None)
    except ShoalError as error:
        console.print(f"the plot could not be drawn: {error}", markup=False)


def _say(claim: Claim, console: Console) -> None:
    """In a terminal, wrapped beside its name; elsewhere one line, for whoever searches it."""
    sign = "[green]✓[/]" if claim.holds else "[bold red]✗[/]"
    if not console.is_terminal:
        console.print(f"{sign} {claim.name:<11} {escape(claim.sentence)}", highlight=False, soft_wrap=True)
        return
    line = Table.grid(padding=(0, 1))
    line.add_row(sign, f"[bold]{claim.name:<11}[/]", escape(claim.sentence))
    console.print(line)


def _say_where(path: Path, console: Console) -> None:
    shoal, python = shoal_command(), python_command()
    lines = (
        f"{path}",
        "  plot.png  summary.json  ledger.jsonl       what you just saw, as files",
        "  trainer/export/                            the model, for transformers",
        "  trainer/rollouts/  trainer/metrics.jsonl   what it was trained on (Parquet), and how it went",
        "next: your own reward is one Python function:",
        f"  {shoal} run recipes/tiny.toml --dir runs/mine --set environment.file=examples/custom_reward.py",
        f"the algorithm in one file: {python} examples/one_file_rl.py",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
