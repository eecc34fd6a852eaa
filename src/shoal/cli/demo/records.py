"""What a run leaves for others to read: its ledger as `ledger.jsonl`, its rollouts; verified against each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.cli.demo.claims import Standing
from shoal.cli.folder import RunFolder
from shoal.errors import LedgerError
from shoal.hub.storage import SqliteStorage
from shoal.ledger import Account, fold
from shoal.protocol import LedgerEntry, NodeState, PolicyManifest
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key

PAGE = 1000


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
