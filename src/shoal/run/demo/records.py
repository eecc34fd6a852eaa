"""Every claim of the demo in turn, from what the run left: ledger, hub's rows, rollouts, model; and its picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.errors import LedgerError, ShoalError
from shoal.ledger import Account, fold
from shoal.protocol import LedgerEntry, NodeState, PolicyManifest
from shoal.run.demo import claims
from shoal.run.demo.claims import Cast, Claim, Standing
from shoal.run.demo.plot import draw_plot
from shoal.run.demo.recount import recount
from shoal.run.folder import RunFolder
from shoal.run.ledger.check import check_place
from shoal.run.ledger.export import leave_ledger
from shoal.run.ledger.places import FolderPlace
from shoal.run.outcome import METRICS
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key

RECOUNT_S = 180.0


def check(folder: RunFolder, cast: Cast, stop: StopToken) -> Iterator[Claim]:
    scores = [float(row["held_out"]) for row in MetricsLog(folder.path / METRICS).rows() if "held_out" in row]
    entries, standing = standing_of(folder.path)
    yield claims.learned(scores)
    yield claims.cheater_caught(entries, standing, cast)
    yield claims.honest_unpunished(standing, cast)
    yield _decided("the records", lambda: _records(folder, entries))
    if not stop.is_set():
        export = folder.path / "trainer" / "export"
        claimed = scores[-1] if scores else None
        yield _decided(
            "the model",
            lambda: claims.model_scores_as_claimed(claimed, recount(export, folder.recipe, RECOUNT_S, stop)),
        )


def _decided(name: str, decide: Callable[[], Claim]) -> Claim:
    """The claim, or that it cannot be upheld, and why."""
    try:
        return decide()
    except ShoalError as error:
        return Claim(name, False, str(error))


def _records(folder: RunFolder, entries: Sequence[LedgerEntry]) -> Claim:
    if signed_manifest(folder).ledger_head is None:
        return Claim("the records", False, "the last version was signed without the ledger's head")
    with closing(FolderPlace(folder.path)) as place:
        check_place(place, remember=False)
    leave_ledger(folder.path)
    rows, steps = rollouts_archived(folder, entries), folder.recipe.run.steps
    return Claim(
        "the records",
        True,
        f"{len(entries):,} ledger entries, every hash fits, through the head that was signed with the model, each "
        f"credit with its receipt and verdict; {rows:,} rollouts trained on, in {steps} Parquet files, are those of "
        "the ledger",
    )


def draw(folder: RunFolder, cast: Cast) -> None:
    """The run as a picture, `plot.png`."""
    run, (entries, standing) = folder.recipe.run, standing_of(folder.path)
    title = f"shoal demo: sorting digits, seed {run.seed}, staleness ≤ {run.max_staleness}"
    banned_ms, began_ms = standing.banned_at_ms.get(cast.cheater), entries[0].at_ms
    marks = [((banned_ms - began_ms) / 1000, "cheater banned")] if banned_ms else []
    draw_plot(folder.path / METRICS, folder.path / "plot.png", title, began_ms, marks)


def standing_of(path: Path) -> tuple[list[LedgerEntry], Standing]:
    """The ledger, and what became of every node: credit by the ledger, the rest by the hub's rows."""
    with closing(FolderPlace(path)) as place:
        entries = list(place.entries())
        accounts, banned_at_ms = fold(entries).by_node, {}
        for row in place.reader.nodes():
            account = accounts.setdefault(row.node, Account())
            account.rejected, account.banned, account.reason = row.rejected, row.state is NodeState.BANNED, row.reason
            if account.banned:
                refused = place.reader.submissions_of(row.node, refused=True, limit=1)
                banned_at_ms[row.node] = refused[0].decided_at_ms or 0 if refused else row.registered_at_ms
    return entries, Standing(accounts, banned_at_ms)


def signed_manifest(folder: RunFolder) -> PolicyManifest:
    """The last version's manifest as the origin has it, signed by the trainer; the exported model is that version."""
    path = folder.path / "trainer" / "export" / "shoal.json"
    try:
        card: dict[str, Any] = json.loads(path.read_bytes())
        place, digest = (int(card["progress"]["incarnation"]), folder.recipe.run.steps), str(card["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
    data = Tree(folder.path / "origin").read(manifest_key(place))
    if data is None:
        raise LedgerError(f"the origin in {folder.path / 'origin'} does not have the last version")
    manifest = read_manifest(data, folder.run_id, folder.trainer_key)
    if manifest.policy.digest != digest:
        raise LedgerError(f"the model in {path.parent} is not the version that was signed")
    return manifest


def rollouts_archived(folder: RunFolder, entries: Sequence[LedgerEntry]) -> int:
    """How many rollouts were trained on: every step's file holds the units that the ledger says, each a whole group."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    batches = [(entry.body["step"], entry.body["units"]) for entry in entries if entry.kind == "batch"]
    if [step for step, _ in batches] != list(range(folder.recipe.run.steps)):
        raise LedgerError(f"the ledger has {len(batches)} batches, not one for each of {folder.recipe.run.steps} steps")
    rows = 0
    for step, units in batches:
        path = folder.path / "trainer" / "rollouts" / f"step-{step:05d}.parquet"
        try:
            archived = sorted(read_table(path, columns=["unit"])["unit"].to_pylist())
        except (OSError, ArrowException) as error:
            raise LedgerError(f"the rollouts in {path} cannot be read: {error}") from error
        if archived != sorted(unit for unit in units for _ in range(folder.recipe.run.group_size)):
            raise LedgerError(f"{path} does not hold the {len(units)} groups that the ledger names for step {step}")
        rows += len(archived)
    return rows
