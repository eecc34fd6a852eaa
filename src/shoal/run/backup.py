"""`shoal backup RUN OUT.tar`, `shoal restore OUT.tar RUN`: a whole run as one file, taken while it continues.

    backup   hard links to checkpoints and published files, because the trainer may remove them meanwhile
             ─► one snapshot of the database, of whichever kind, as an SQLite file
             ─► the submissions that this snapshot names (they are stored before their rows)
             ─► recipe, keys, the run's secret, addresses, metrics, the outboxes of workers that run here
    restore  hidden folder, checked ─► submissions to hub.storage ─► rows to hub.database, marked ─► rename

In this order the hub of a backup is never behind its trainer, as after any crash: the trainer replays the batches since
its checkpoint. The rename completes a restore: the hub of the new folder removes the mark; any other hub is refused. A
restore that was killed can be repeated with the same command.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from pydantic import ValidationError

from shoal import __version__
from shoal.errors import CheckpointError, ConfigError, LedgerError, ProtocolError, UserError
from shoal.hub.settings import HubSettings
from shoal.hub.storage import SqliteStorage, open_blobs, open_storage
from shoal.hub.storage.copying import RESTORED, copy_rows, side_by_side, snapshot
from shoal.ledger import verify
from shoal.protocol import LedgerEntry, Message, canonical_json, first_problem
from shoal.run.folder import RECIPE_MODE, RunFolder
from shoal.run.recipe import Recipe
from shoal.runtime import SystemClock, ensure_folder, files, point, resource_error, write_atomically
from shoal.runtime.config import dump_config, parse_config
from shoal.runtime.metrics import MetricsLog
from shoal.shardcast.tree import parse_label
from shoal.trainer.folder import Retention, scores_of

MANIFEST, MAX_MANIFEST_BYTES = "manifest.json", 2**30
SECRET = ("hub/", "keys/", "worker-")
DATABASE, BLOB_FOLDER = "hub/hub.db", "hub/blobs"
PLACES = ("database", "storage", "storage_endpoint")
CHECKPOINTS_KEPT, TRIES = 2, 5  # the newest, and one before it, should the disk have damaged that
REST = (
    "endpoints.json", "keys/*", "hub/secret", "trainer/metrics.jsonl", "trainer/rollouts/*",
    "worker-*/node.key", "worker-*/outbox/*",
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    manifest: Manifest
    submissions: list[str]
    ledger: int
    version: int | None
    size_bytes: int

    @property
    def line(self) -> str:
        policy = "no policy yet" if self.version is None else f"policy version {self.version}"
        rows = f"{len(self.submissions)} submissions, {self.ledger} ledger rows, {len(self.manifest.members)} files"
        return f"run {self.manifest.run}: {policy}, {rows}, {self.size_bytes / 1e6:.1f} MB"


def backup_run(directory: Path, out: Path, say: Callable[[str], None]) -> Summary:
    folder = RunFolder.open(directory)
    folder.require_hub()
    run, recipe, hub = folder.path, folder.recipe, folder.recipe.hub
    for left_over in run.glob(".backup-*"):  # of a backup that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with (
        new_bundle(out, folder.run_id, SystemClock().now_ms()) as bundle,
        tempfile.TemporaryDirectory(prefix=".backup-", dir=run) as name,  # on this disk, for hard links
    ):
        scratch = Path(name)
        _hold_checkpoints(run, scratch, recipe.trainer.keep_best)
        _hold_origin(run, scratch)
        ensure_folder(scratch / "hub")
        snapshot(hub.database, run / "hub", scratch / DATABASE)
        _add_files(bundle, scratch, ["**/*"])
        with contextlib.closing(sqlite3.connect(scratch / DATABASE)) as file:
            names = [name for (name,) in file.execute("SELECT submission FROM submissions ORDER BY unit")]
        say(f"copying {len(names)} submissions")
        blobs = open_blobs(hub.storage, hub.storage_endpoint, run / BLOB_FOLDER)
        for name, body in zip(names, side_by_side(blobs.get, names), strict=True):
            bundle.add(f"{BLOB_FOLDER}/{name}", body)
        here = hub.model_copy(update=dict.fromkeys(PLACES, ""))
        bundle.add("recipe.toml", dump_config(recipe.model_copy(update={"hub": here})).encode(), RECIPE_MODE)
        _add_files(bundle, run, REST)
    return verify_backup(out)


def verify_backup(path: Path) -> Summary:
    """As a restore reads it: every hash, the database, the chain of the ledger, a blob for every row."""
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as scratch:
        return _summary(path, read_bundle(path, Path(scratch), only=DATABASE), Path(scratch) / DATABASE)


def restore_run(path: Path, folder: Path, overrides: Sequence[str] = ()) -> Summary:
    """Make a run's folder from a backup; rows and submissions go where `overrides` (`hub.database=…`) say."""
    for override in overrides:
        if override.partition("=")[0].strip() not in {f"hub.{place}" for place in PLACES}:
            raise ConfigError(f"--set {override}: a restore sets hub.{', hub.'.join(PLACES)} only")
    hub = parse_config("", Recipe, "--set", overrides).hub
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: a restore replaces nothing; choose another folder")
    if hub.storage:
        open_blobs(hub.storage, hub.storage_endpoint, folder)
    if hub.database:
        open_storage(hub.database, folder).close()  # fails early
    hidden = folder.with_name(f".{folder.name}.restoring")
    shutil.rmtree(hidden, ignore_errors=True)  # of a restore that was killed
    try:
        summary = _summary(path, read_bundle(path, ensure_folder(hidden)), hidden / DATABASE)
        _place(hidden, hub, summary)
        os.sync()  # once for thousands of small files
        point("restore.before_rename")
        hidden.rename(folder)
        files.sync_folder(folder.absolute().parent)
    except OSError as error:
        raise resource_error("restore to", folder, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return summary


def _hold(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:  # a disk without hard links
        shutil.copy2(path, target)


def _hold_checkpoints(run: Path, scratch: Path, keep_best: int) -> None:
    """The trainer removes some as it saves others, so this is repeated if one disappears."""
    source, target = run / "trainer" / "checkpoints", scratch / "trainer" / "checkpoints"
    rule = Retention(CHECKPOINTS_KEPT, keep_best)
    for _ in range(TRIES):
        found = [place for entry in source.glob("*") if (place := parse_label(entry.name)) is not None]
        scores = scores_of(MetricsLog(run / "trainer" / "metrics.jsonl"))
        try:
            for place in sorted(rule.kept(found, scores), reverse=True):
                name = "{}.{}".format(*place)
                for path in sorted((source / name).iterdir()):
                    _hold(path, target / name / path.name)
            return
        except FileNotFoundError:
            shutil.rmtree(target, ignore_errors=True)
    raise CheckpointError(f"the checkpoints in {source} change too fast to be copied: try again")


def _hold_origin(run: Path, scratch: Path) -> None:
    """Manifests are removed before their chunks: a manifest that is still there afterwards has all its chunks."""
    source, target = run / "origin", scratch / "origin"
    for pattern in ("head.json", "manifests/*.json", "chunks/??/*"):
        for path in source.glob(pattern):
            if not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    _hold(path, target / path.relative_to(source))
    for path in target.glob("manifests/*.json"):
        if not (source / "manifests" / path.name).exists():
            path.unlink()


def _add_files(bundle: BundleWriter, folder: Path, patterns: Sequence[str]) -> None:
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_file() and not path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # delivered meanwhile
                bundle.add(path.relative_to(folder).as_posix(), path)


def _summary(path: Path, manifest: Manifest, database: Path) -> Summary:
    if not database.exists():
        raise ProtocolError(f"the backup {path} has no database: it is not one of a run")
    try:
        with contextlib.closing(sqlite3.connect(database)) as file:
            [message] = file.execute("PRAGMA integrity_check(1)").fetchone()
            if message != "ok":
                raise ProtocolError(f"the database in {path} is damaged: {message}")
            file.row_factory = sqlite3.Row
            rows = file.execute('SELECT "index", kind, body, at_ms, previous, hash FROM ledger ORDER BY "index"')
            verify(LedgerEntry(**{**dict(row), "body": json.loads(row["body"])}) for row in rows)
            [ledger] = file.execute("SELECT count(*) FROM ledger").fetchone()
            [version] = file.execute("SELECT max(version) FROM policies").fetchone()
            names = [name for (name,) in file.execute("SELECT submission FROM submissions")]
    except sqlite3.Error as error:
        raise ProtocolError(f"the database in {path} cannot be read: {error}") from error
    except LedgerError as error:
        raise ProtocolError(f"the ledger in {path} does not hold: {error}") from error
    if lost := [name for name in names if f"{BLOB_FOLDER}/{name}" not in manifest.members]:
        raise ProtocolError(f"the backup {path} lacks {len(lost)} submissions that its database names, e.g. {lost[0]}")
    return Summary(manifest, names, ledger, version, path.stat().st_size)


def _place(hidden: Path, hub: HubSettings, summary: Summary) -> None:
    if hub.storage:
        here, store = (open_blobs(to, hub.storage_endpoint, hidden / BLOB_FOLDER) for to in ("", hub.storage))
        for _ in side_by_side(lambda name: store.get(store.put(here.get(name))), summary.submissions):
            pass  # each was read back
        shutil.rmtree(hidden / BLOB_FOLDER)
        point("restore.after_blobs")
    if hub.database:
        with (
            contextlib.closing(SqliteStorage(hidden / DATABASE)) as source,
            contextlib.closing(open_storage(hub.database, hidden)) as target,
        ):
            copy_rows(source, target, summary.manifest.hash)
        for path in hidden.glob(f"{DATABASE}*"):
            path.unlink()
        write_atomically(hidden / "hub" / RESTORED, summary.manifest.hash.encode())
        point("restore.after_rows")
    recipe = RunFolder.open(hidden).recipe
    placed = recipe.hub.model_copy(update={place: getattr(hub, place) for place in PLACES})
    text = dump_config(recipe.model_copy(update={"hub": placed}))
    write_atomically(hidden / "recipe.toml", text.encode(), RECIPE_MODE)


class Manifest(Message):
    """The last member of the tar: the SHA-256 of each member by name, and a hash over all of that."""

    format: Literal[2] = 2
    run: str
    made_at_ms: int
    software: str
    members: dict[str, str]
    hash: str = ""

    def hashed(self) -> Manifest:
        digest = hashlib.sha256(canonical_json(self.model_dump(exclude={"hash"}))).hexdigest()
        return self.model_copy(update={"hash": digest})


class Hashing:
    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.digest = source, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


class BundleWriter:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar, self.members = tar, dict[str, str]()

    def add(self, name: str, source: Path | bytes, mode: int = 0o644) -> None:
        """A file with its mode and its present length; later growth is cut off."""
        info = tarfile.TarInfo(_proper(name))
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            info.mode = source.stat().st_mode & 0o777 if isinstance(source, Path) else mode
            info.size = file.seek(0, os.SEEK_END)
            file.seek(0)
            hashing = Hashing(file)
            self._tar.addfile(info, hashing)
        self.members[name] = hashing.digest.hexdigest()


@contextlib.contextmanager
def new_bundle(path: Path, run: str, made_at_ms: int) -> Iterator[BundleWriter]:
    """Creates the file with its manifest, or nothing if there is an exception."""
    if path.exists():
        raise ConfigError(f"{path} exists already: a backup replaces nothing; choose another name")
    folder = ensure_folder(path.absolute().parent)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        files.make_private(hidden)
        with hidden.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                yield (bundle := BundleWriter(tar))
                software = f"shoal {__version__}"
                manifest = Manifest(run=run, made_at_ms=made_at_ms, software=software, members=bundle.members)
                bundle.add(MANIFEST, manifest.hashed().model_dump_json(indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        point("backup.before_rename")
        hidden.rename(path)
        files.sync_folder(folder)
    except OSError as error:
        raise resource_error("copy to the backup", Path(error.filename or path), error) from error
    finally:
        hidden.unlink(missing_ok=True)


def read_bundle(path: Path, folder: Path, only: str = "") -> Manifest:
    """Unpack all members into `folder`, or only one, and compare all with the manifest."""
    seen, data = dict[str, str](), b""
    try:
        with tarfile.open(path, mode="r|") as tar:
            for info in tar:
                file = tar.extractfile(info) if info.isreg() and not info.issparse() else None  # a hole is a bomb
                if file is None or _proper(info.name) in seen or data:
                    raise _damaged(path, f"it has a member that no backup has: {info.name!r}")
                if info.name == MANIFEST:
                    data = file.read(MAX_MANIFEST_BYTES)
                    continue
                hashing = Hashing(file)
                with _created(folder, info) if only in ("", info.name) else Path(os.devnull).open("wb") as out:
                    shutil.copyfileobj(hashing, out)
                seen[info.name] = hashing.digest.hexdigest()
        manifest = Manifest.model_validate_json(data)
    except (tarfile.TarError, EOFError) as error:
        raise _damaged(path, f"it ends early, or is no tar file ({error})") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no backup at {path}") from error
    except OSError as error:
        raise resource_error("unpack the backup", path, error) from error
    except ValidationError as error:
        raise _damaged(path, f"its manifest is missing or cannot be read ({first_problem(error)})") from error
    if manifest != manifest.hashed():
        raise _damaged(path, "its manifest does not match its own hash")
    if differing := [name for name in {**manifest.members, **seen} if manifest.members.get(name) != seen.get(name)]:
        raise _damaged(path, f"{len(differing)} of its files do not match its manifest, first of all {differing[0]}")
    return manifest


def _created(folder: Path, info: tarfile.TarInfo) -> IO[bytes]:
    target = folder / info.name
    target.parent.mkdir(files.PRIVATE_FOLDER if info.name.startswith(SECRET) else 0o777, parents=True, exist_ok=True)
    return os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode & 0o777), "wb")


def _proper(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise ProtocolError(f"{name!r} is no name of a file in a run's folder: shoal has not written this backup")
    return name


def _damaged(path: Path, what: str) -> ProtocolError:
    return ProtocolError(f"the backup {path} is damaged: {what}; take another one")
