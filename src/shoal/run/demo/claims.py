"""The claims of the demo, decided from the files of the run alone; a claim that does not hold fails the demo.

ledger.jsonl ──► who was paid; whose groups were trained on
hub.db ────────► who was rejected and banned, and why (nodes without accepted work are not in the ledger)
metrics.jsonl ─► the held-out score before and after
recount ───────► the score of the exported model, by other code
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal.adversary import Cheat
from shoal.errors import ConfigError, LedgerError, ShoalError
from shoal.ledger import Account, fold
from shoal.protocol import LedgerEntry, NodeState, PolicyManifest, load_key
from shoal.run.demo.recount import Recount, recount
from shoal.run.folder import RunFolder
from shoal.run.launch import METRICS
from shoal.run.ledger.check import check_source, export_ledger
from shoal.run.ledger.sources import FolderLedger
from shoal.run.recipe import Recipe
from shoal.run.roles import role_names
from shoal.runtime import FolderLock, StopToken, ensure_folder, resource_error, write_atomically
from shoal.runtime.config import parse_config
from shoal.runtime.metrics import MetricsLog
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key
from shoal.trainer.folder import scores_of

LEAST_RISE = 0.20
SCORE_TOLERANCE_TASKS = 1  # another engine may break one tie between two next tokens otherwise
RECOUNT_S = 180.0
MARK = "demo.json"
LOCK_WAIT_S = 15.0  # for a demo that is just ending


@dataclass(frozen=True)
class Claim:
    name: str
    holds: bool
    sentence: str


@dataclass(frozen=True)
class Participants:
    honest: Mapping[str, str]
    cheater: str
    cheater_name: str
    cheat: Cheat


Accounts = Mapping[str, Account]  # of all nodes, by node id: credit by the ledger, the rest by the hub's rows


def learned(scores: Sequence[float]) -> Claim:
    if len(scores) < 2:
        return Claim("it learned", False, f"the held-out score was measured {len(scores)} times; two are needed")
    rise = scores[-1] - scores[0]
    sentence = f"held-out score {scores[0]:.3f} → {scores[-1]:.3f} ({100 * rise:+.1f} points)"
    if rise < LEAST_RISE:
        sentence += f"; at least {100 * LEAST_RISE:+.0f} were expected"
    return Claim("it learned", rise >= LEAST_RISE, sentence)


def cheater_caught(
    entries: Sequence[LedgerEntry], accounts: Accounts, shut_out_at_ms: int, participants: Participants
) -> Claim:
    """Banned for what it did; or suspended, if the run ended before it could fail twice."""
    name, who = "the cheater", f"{participants.cheater_name} ({participants.cheat.what})"
    account = accounts.get(participants.cheater, Account())
    shut_out = "banned" if account.banned else "suspended" if account.suspended_until_ms else ""
    if not shut_out:
        return Claim(name, False, f"{who} was not caught: {account.accepted} accepted, {account.rejected} rejected")
    if account.reason.partition(":")[0] not in participants.cheat.reasons:
        expected = " or ".join(sorted(participants.cheat.reasons))
        return Claim(name, False, f"{who} was {shut_out} for {account.reason}, not for {expected}")
    after_s = (shut_out_at_ms - entries[0].at_ms) / 1000
    when = f"{who} was {shut_out} {after_s:.0f} s after the hub began"
    sentence = f"{when}, for {account.reason}; {account.rejected} rejected"
    if not account.accepted:
        return Claim(name, True, f"{sentence}, none accepted")
    theirs = {
        entry.body["unit"] for entry in entries if entry.kind == "credit" and entry.body["node"] == participants.cheater
    }
    trained = sum(unit in theirs for entry in entries if entry.kind == "batch" for unit in entry.body["units"])
    passed = f"{account.accepted} accepted, being what honest seeds give as well ({trained} of them trained on)"
    return Claim(name, True, f"{sentence}, {passed}")


def honest_unpunished(accounts: Accounts, participants: Participants) -> Claim:
    of = {name: accounts.get(node, Account()) for name, node in participants.honest.items()}
    punished = [
        f"{name}: {account.rejected} rejected{f', banned: {account.reason}' if account.banned else ''}"
        for name, account in of.items()
        if account.banned or account.rejected
    ]
    idle = [name for name, account in of.items() if not account.accepted]
    if punished:
        return Claim("the honest", False, "punished without cause: " + "; ".join(punished))
    if idle:
        return Claim("the honest", False, f"{' and '.join(idle)} had nothing accepted")
    accepted, credit = sum(a.accepted for a in of.values()), sum(a.credit for a in of.values())
    return Claim("the honest", True, f"{' and '.join(of)}: {accepted:,} groups accepted, 0 rejected, credit {credit:,}")


def model_scores_as_claimed(claimed: float | None, counted: Recount) -> Claim:
    sentence = f"loads with plain transformers, scores {counted.score:.3f} on {counted.tasks} held-out tasks"
    if claimed is None:
        return Claim("the model", False, f"{sentence}; the trainer made no claim")
    off = abs(counted.score - claimed) * counted.tasks
    if off > SCORE_TOLERANCE_TASKS + 1e-6:
        return Claim("the model", False, f"{sentence}; the trainer claimed {claimed:.3f}")
    return Claim("the model", True, f"{sentence}, as claimed")


def replace_earlier_demo(path: Path, facts: dict[str, object]) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{path} is not a folder; give another RUN")
    if path.exists() and any(path.iterdir()):
        if not (path / MARK).is_file():
            raise ConfigError(f"the folder {path} is not empty and not an earlier demo's; give another RUN")
        if Path.cwd().is_relative_to(path.resolve()):
            raise ConfigError(f"this is called from within {path}, which it replaces: go elsewhere, or name another")
        with FolderLock(path).acquire(StopToken(), LOCK_WAIT_S):
            for lock in path.glob("*/.lock"):  # processes of a supervisor that was killed take a moment to end
                FolderLock(lock.parent).acquire(StopToken(), LOCK_WAIT_S).release()
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise resource_error("replace the earlier demo in", path, error) from error
    ensure_folder(path)
    write_atomically(path / MARK, json.dumps(facts, indent=2).encode() + b"\n")


def demo_recipe(seed: int, staleness: int, steps: int) -> Recipe:
    text = (files("shoal.run.demo") / "recipe.toml").read_text()
    overrides = [f"run.seed={seed}", f"run.max_staleness={staleness}", f"run.steps={steps}"]
    return parse_config(text, Recipe, "the demo's recipe", overrides)


def cheater_name(folder: RunFolder) -> str:
    return f"worker-{folder.recipe.worker.count}"  # after the recipe's own


def participants_of(folder: RunFolder, cheat: Cheat) -> Participants:
    """Node ids from the workers' own key files, because names can be chosen."""
    ids = {path.parent.name: load_key(path).node for path in sorted(folder.path.glob("worker-*/node.key"))}
    cheater = cheater_name(folder)
    honest = {name: ids.get(name, "") for name in role_names(folder) if name.startswith("worker-")}
    return Participants(honest=honest, cheater=ids.get(cheater, ""), cheater_name=cheater, cheat=cheat)


def check(folder: RunFolder, participants: Participants, stop: StopToken) -> Iterator[Claim]:
    scores = list(scores_of(MetricsLog(folder.path / METRICS)).values())
    with closing(FolderLedger(folder.path)) as place:
        entries = list(place.entries())
        accounts, shut_out_at_ms = fold(entries).by_node, {}
        for row in place.reader.nodes():
            account = accounts.setdefault(row.node, Account())
            account.rejected, account.banned, account.reason = row.rejected, row.state is NodeState.BANNED, row.reason
            account.suspended_until_ms = row.until_ms if row.state is NodeState.SUSPENDED else None
            if account.banned or account.suspended_until_ms:
                refused = place.reader.submissions_of(row.node, refused=True, limit=1)
                shut_out_at_ms[row.node] = refused[0].decided_at_ms or 0 if refused else row.registered_at_ms
    yield learned(scores)
    yield cheater_caught(entries, accounts, shut_out_at_ms.get(participants.cheater, 0), participants)
    yield honest_unpunished(accounts, participants)
    try:
        yield _records(folder, entries)
    except ShoalError as error:
        yield Claim("the records", False, str(error))
    if stop.is_set():
        return
    try:
        counted = recount(folder.path / "trainer" / "export", folder.recipe, RECOUNT_S, stop)
        yield model_scores_as_claimed(scores[-1] if scores else None, counted)
    except ShoalError as error:
        yield Claim("the model", False, str(error))


def _records(folder: RunFolder, entries: Sequence[LedgerEntry]) -> Claim:
    if signed_manifest(folder).ledger_head is None:
        return Claim("the records", False, "the last version was signed without the ledger's head")
    with closing(FolderLedger(folder.path)) as place:
        check_source(place, remember=False)
    export_ledger(str(folder.path), folder.path / "ledger.jsonl")
    rows, steps = rollouts_archived(folder, entries), folder.recipe.run.steps
    chain = f"{len(entries):,} ledger entries, every hash fits, through the head that was signed with the model"
    trained = f"{rows:,} rollouts trained on, in {steps} Parquet files, are those of the ledger"
    return Claim("the records", True, f"{chain}, each credit with its receipt and verdict; {trained}")


def signed_manifest(folder: RunFolder) -> PolicyManifest:
    """The last version's manifest at the origin; the exported model must be that version."""
    path = folder.path / "trainer" / "export" / "shoal.json"
    try:
        card: dict[str, Any] = json.loads(path.read_bytes())
        place, digest = (int(card["progress"]["incarnation"]), folder.recipe.run.steps), str(card["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
    if (data := Tree(folder.path / "origin").read(manifest_key(place))) is None:
        raise LedgerError(f"the origin in {folder.path / 'origin'} does not have the last version")
    manifest = read_manifest(data, folder.run_id, folder.trainer_key)
    if manifest.policy.digest != digest:
        raise LedgerError(f"the model in {path.parent} is not the version that was signed")
    return manifest


def rollouts_archived(folder: RunFolder, entries: Sequence[LedgerEntry]) -> int:
    """The number of rollouts trained on. Every step's file must hold whole groups of the units in the ledger."""
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
