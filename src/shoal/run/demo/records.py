"""What a run leaves for others to read: its ledger as `ledger.jsonl`, its rollouts; verified against each other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.errors import LedgerError, ShoalError
from shoal.hub.storage import SqliteStorage
from shoal.ledger import Account, fold, verify
from shoal.protocol import LedgerEntry, NodeState, PolicyManifest
from shoal.run.demo import claims
from shoal.run.demo.claims import Cast, Claim, Standing
from shoal.run.demo.plot import draw_plot
from shoal.run.demo.recount import recount
from shoal.run.folder import RunFolder
from shoal.run.ledger.export import leave_ledger
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key

PAGE = 1000


log = logging.getLogger(__name__)
RECOUNT_S = 180.0


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


def draw(folder: RunFolder, cast: Cast) -> None:
    """The run as a picture, `plot.png`."""
    metrics, run, entries = folder.path / "trainer" / "metrics.jsonl", folder.recipe.run, _ledger(folder)
    title = f"shoal demo: sorting digits, seed {run.seed}, staleness ≤ {run.max_staleness}"
    banned_ms = _standing(folder).banned_at_ms.get(cast.cheater)
    marks = [((banned_ms - entries[0].at_ms) / 1000, "cheater banned")] if banned_ms and entries else []
    draw_plot(metrics, folder.path / "plot.png", title, marks, entries[0].at_ms if entries else None)


def read_ledger(database: Path) -> list[LedgerEntry]:
    if not database.is_file():
        raise LedgerError(f"there is no hub database {database}")
    with closing(SqliteStorage(database)) as storage, storage.read() as reader:
        entries: list[LedgerEntry] = []
        while page := reader.ledger_after(len(entries) - 1, PAGE):
            entries += page
        return entries


def read_standing(database: Path, entries: Sequence[LedgerEntry]) -> Standing:
    """What became of every node: credit by the ledger, which the hub's rows must agree with; the rest by those rows."""
    accounts, banned_at_ms = fold(entries).by_node, {}
    with closing(SqliteStorage(database)) as storage, storage.read() as reader:
        for row in reader.nodes():
            account = accounts.setdefault(row.node, Account())
            if (account.credit, account.pending) != (row.credit, row.pending):
                raise LedgerError(f"node {row.node} has {row.credit} credit; by the ledger it has {account.credit}")
            account.rejected, account.banned, account.reason = row.rejected, row.state is NodeState.BANNED, row.reason
            if account.banned:
                refused = reader.submissions_of(row.node, refused=True, limit=1)
                banned_at_ms[row.node] = refused[0].decided_at_ms or 0 if refused else row.registered_at_ms
    return Standing(accounts, banned_at_ms)


def signed_manifest(folder: RunFolder) -> PolicyManifest:
    """The last version's manifest as the origin has it: signed by the trainer, with the ledger's head at that time."""
    progress = _card(folder)["progress"]
    data = Tree(folder.path / "origin").read(manifest_key((progress["incarnation"], folder.recipe.run.steps)))
    if data is None:
        raise LedgerError(f"the origin in {folder.path / 'origin'} does not have the last version")
    manifest = read_manifest(data, folder.run_id, folder.key("trainer").public_key)
    if manifest.policy.digest != _card(folder)["digest"]:
        raise LedgerError(f"the model in {folder.path / 'trainer' / 'export'} is not the version that was signed")
    return manifest


def _card(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / "trainer" / "export" / "shoal.json"
    try:
        card = json.loads(path.read_bytes())
        return {"progress": dict(card["progress"]), "digest": str(card["digest"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error


def rollouts_archived(folder: RunFolder, entries: Sequence[LedgerEntry]) -> int:
    """How many rollouts were trained on: every step's file holds the units that the ledger says, each a whole group."""
    batches = [(entry.body["step"], entry.body["units"]) for entry in entries if entry.kind == "batch"]
    if [step for step, _ in batches] != list(range(folder.recipe.run.steps)):
        raise LedgerError(f"the ledger has {len(batches)} batches, not one for each of {folder.recipe.run.steps} steps")
    rows = 0
    for step, units in batches:
        path = folder.path / "trainer" / "rollouts" / f"step-{step:05d}.parquet"
        archived = _units_in(path)
        if archived != sorted(unit for unit in units for _ in range(folder.recipe.run.group_size)):
            raise LedgerError(f"{path} does not hold the {len(units)} groups that the ledger names for step {step}")
        rows += len(archived)
    return rows


def _units_in(path: Path) -> list[int]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        return sorted(read_table(path, columns=["unit"])["unit"].to_pylist())
    except (OSError, ArrowException) as error:
        raise LedgerError(f"the rollouts in {path} cannot be read: {error}") from error
