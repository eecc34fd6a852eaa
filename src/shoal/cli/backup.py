"""`shoal backup RUN OUT.tar` and `shoal restore OUT.tar FOLDER`: a whole run as one file, taken while it is going on.

    1. held     the newest and the best checkpoints and what the origin has published: immutable files, held by a
                second name while the trainer may remove the first
    2. rows     one snapshot of the database, of whichever kind, as an SQLite file
    3. blobs    what the rows of that snapshot name: a blob is there before its row
    4. rest     recipe, keys, the run's secret, addresses, metrics, the outboxes of workers that run here

The order is what makes it continue exactly: the hub of a backup is never behind its trainer, as after any crash, so the
trainer replays the batches since its checkpoint. A restored run has SQLite and a folder (`shoal migrate` moves it on).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal import __version__
from shoal.cli.bundle import BundleWriter, Contents, read_bundle, unpack
from shoal.cli.folder import RunFolder
from shoal.cli.recipe import Recipe, paths_of
from shoal.errors import CheckpointError, LedgerError, ProtocolError
from shoal.hub.storage import Blobs, open_blobs
from shoal.hub.storage.copying import snapshot
from shoal.ledger.chain import Chain
from shoal.protocol import LedgerEntry
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.config import dump_config
from shoal.runtime.files import PRIVATE, resource_error
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.retention import Retention, scores_of

Say = Callable[[str], None]

DATABASE = "hub/hub.db"
BLOB_FOLDER = "hub/blobs"
CHECKPOINT = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)
CHECKPOINTS_KEPT = 2
"""The newest, and one before it should the disk have damaged that. Beside them: the best that the run keeps."""
TRIES = 5
BLOBS_AT_A_TIME = 64
SCRATCH = ".backup-"
REST = (
    "endpoints.json", "keys/*", "hub/secret", "trainer/metrics.jsonl", "trainer/rollouts/*",
    "worker-*/node.key", "worker-*/outbox/*", "worker-*/outbox/refused/*",
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """What is in a backup, as its own database tells it."""

    contents: Contents
    submissions: int
    ledger: int
    version: int | None

    @property
    def line(self) -> str:
        size = sum(member.size_bytes for member in self.contents.members.values())
        policy = "no policy yet" if self.version is None else f"policy version {self.version}"
        return (
            f"run {self.contents.run}: {policy}, {self.submissions} submissions, {self.ledger} ledger rows, "
            f"{len(self.contents.members)} files, {size / 1e6:.1f} MB"
        )


def backup_run(directory: Path, out: Path, say: Say, clock: Clock = SystemClock()) -> Summary:
    """Write the backup of a run to `out`, and read it back."""
    folder = RunFolder.open(directory)
    hub = folder.recipe.hub
    with BundleWriter(out) as bundle, _scratch(folder.path) as scratch:
        _hold_checkpoints(folder.path, scratch, folder.recipe.trainer.keep_best)
        _hold_origin(folder.path, scratch)
        held_files = sorted(path for path in scratch.rglob("*") if path.is_file())
        snapshot(hub.database, folder.path / "hub", scratch / "hub.db")
        for path in held_files:
            bundle.add_file(path.relative_to(scratch).as_posix(), path)
        bundle.add_file(DATABASE, scratch / "hub.db")
        names = _submissions(scratch / "hub.db")
        say(f"copying {len(names)} submissions")
        _add_blobs(bundle, open_blobs(hub.storage, hub.storage_endpoint, folder.path / BLOB_FOLDER), names)
        _add_rest(bundle, folder)
        bundle.seal(folder.run_id, clock.now_ms(), f"shoal {__version__}")
    return verify_backup(out)


def verify_backup(path: Path) -> Summary:
    """Read a backup as a restore would: every hash, the database, the ledger's chain, a blob for every row."""
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as scratch:
        database = Path(scratch) / "hub.db"

        def keep_database(name: str, _mode: int, data: Iterator[bytes]) -> None:
            with (database if name == DATABASE else Path(os.devnull)).open("wb") as file:
                file.writelines(data)

        return _checked(path, read_bundle(path, keep_database), database)


def restore_run(path: Path, folder: Path) -> Summary:
    """Make a run's folder of a backup. It goes on with `shoal run --dir FOLDER`."""
    summary = verify_backup(path)  # before anything is there that looks like a run
    unpack(path, folder)
    return summary


def missing_inputs(recipe: Recipe) -> list[str]:
    """What the recipe names by its path and is not here: a backup has the run, not what it was made from."""
    from shoal.models import BUILTIN
    from shoal.validator.profiles import ON_REQUEST

    named = [] if recipe.model.path in BUILTIN else [Path(recipe.model.path)]
    named += paths_of(recipe.environment)
    named += [file for file in recipe.validator.profiles if file.as_posix() not in ON_REQUEST]
    return [str(found) for found in named if not found.exists()]


# ── what is held while it is copied ──────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _scratch(run: Path) -> Iterator[Path]:
    """A hidden folder on the run's own disk, so that holding a file costs a name and no space."""
    for left_over in run.glob(f"{SCRATCH}*"):  # of a backup that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=run))
    except OSError as error:
        raise resource_error("write to the folder", run, error) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _hold(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without second names
        shutil.copy2(path, target)


def _hold_checkpoints(run: Path, scratch: Path, keep_best: int) -> None:
    """Whole ones, newest first: the trainer removes some as it saves new ones, so look again if one goes."""
    source, target = run / "trainer" / "checkpoints", scratch / "trainer" / "checkpoints"
    rule = Retention(CHECKPOINTS_KEPT, keep_best)
    for _ in range(TRIES):
        found = [match for entry in source.glob("*") if (match := CHECKPOINT.fullmatch(entry.name))]
        places = [(int(version), int(incarnation)) for version, incarnation in (match.groups() for match in found)]
        scores = scores_of(MetricsLog(run / "trainer" / "metrics.jsonl"))
        try:
            for version, incarnation in sorted(rule.kept(places, scores), reverse=True):
                name = f"{version}.{incarnation}"
                for path in sorted((source / name).iterdir()):
                    _hold(path, target / name / path.name)
            return
        except FileNotFoundError:
            shutil.rmtree(target, ignore_errors=True)
    raise CheckpointError(f"the checkpoints in {source} change too fast to be copied: try again")


def _hold_origin(run: Path, scratch: Path) -> None:
    """The published tree. Manifests go before their chunks: one that is still there afterwards has all of its own."""
    source, target = run / "origin", scratch / "origin"
    with contextlib.suppress(FileNotFoundError):  # nothing is published yet
        target.mkdir(parents=True)
        shutil.copy2(source / "head.json", target / "head.json")  # the one file that is replaced
    for pattern in ("manifests/*.json", "chunks/??/*"):
        for path in source.glob(pattern):
            if not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    _hold(path, target / path.relative_to(source))
    for path in target.glob("manifests/*.json"):
        if not (source / "manifests" / path.name).exists():
            path.unlink()


# ── what goes in ─────────────────────────────────────────────────────────────────────────────────────────────────


def _add_blobs(bundle: BundleWriter, blobs: Blobs, names: list[str]) -> None:
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="backup") as pool:
        for start in range(0, len(names), BLOBS_AT_A_TIME):
            page = names[start : start + BLOBS_AT_A_TIME]
            for name, body in zip(page, pool.map(blobs.get, page), strict=True):
                bundle.add_bytes(f"{BLOB_FOLDER}/{name}", body)


def _add_rest(bundle: BundleWriter, folder: RunFolder) -> None:
    recipe = folder.recipe
    here = recipe.hub.model_copy(update={"database": "", "storage": "", "storage_endpoint": ""})
    bundle.add_bytes("recipe.toml", dump_config(recipe.model_copy(update={"hub": here})).encode(), PRIVATE)
    for pattern in REST:
        for path in sorted(folder.path.glob(pattern)):
            if path.is_file() and not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # delivered meanwhile
                    bundle.add_file(path.relative_to(folder.path).as_posix(), path)


# ── what a backup's database says ────────────────────────────────────────────────────────────────────────────────


def _submissions(database: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(database)) as file:
        return [row[0] for row in file.execute("SELECT submission FROM submissions ORDER BY unit")]


def _checked(path: Path, contents: Contents, database: Path) -> Summary:
    if not database.exists():
        raise ProtocolError(f"the backup {path} has no database: it is not one of a run")
    try:
        with contextlib.closing(sqlite3.connect(database)) as file:
            [said] = file.execute("PRAGMA integrity_check").fetchone()
            if said != "ok":
                raise ProtocolError(f"the database in {path} is damaged: {said}")
            ledger = _verify_ledger(file, path)
            names = [row[0] for row in file.execute("SELECT submission FROM submissions")]
            [version] = file.execute("SELECT max(version) FROM policies").fetchone()
    except sqlite3.Error as error:
        raise ProtocolError(f"the database in {path} cannot be read: {error}") from error
    lost = [name for name in names if f"{BLOB_FOLDER}/{name}" not in contents.members]
    if lost:
        raise ProtocolError(f"the backup {path} lacks {len(lost)} submissions that its database names, e.g. {lost[0]}")
    return Summary(contents, len(names), ledger, version)


def _verify_ledger(file: sqlite3.Connection, path: Path) -> int:
    """How many rows the chain has, read one by one."""
    columns = ("index", "kind", "body", "at_ms", "previous", "hash")
    found = file.execute('SELECT "index", kind, body, at_ms, previous, hash FROM ledger ORDER BY "index"')
    chain = Chain()
    try:
        for row in (dict(zip(columns, values, strict=True)) for values in found):
            chain.add(LedgerEntry(**{**row, "body": json.loads(row["body"])}))
    except LedgerError as error:
        raise ProtocolError(f"the ledger in {path} does not hold: {error}") from error
    return 0 if chain.last is None else chain.last.index + 1


def file_lines(summary: Summary, path: Path, command: str) -> list[str]:
    """What a person is told once a backup is there."""
    return [
        f"wrote {path}: {summary.line}",
        "it holds this run's private keys and secret: keep it as safe as the run's folder, and never let the restored "
        "run and this one go on at the same time",
        f"to restore: {command} restore {path} FOLDER",
    ]
