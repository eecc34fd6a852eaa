"""`shoal migrate RUN --database URL --storage URL`: a stopped run moves to other places, or back.

    locks ─► blobs, each read back ─► rows, in one transaction, compared ─► ledger verified ─► recipe.toml ─► marks
                                                                                              ▲
                    a crash before this leaves the old places in force, one after it the new ─┘

Nothing at the old places is removed. The database that was left is marked, so that no hub goes on with it by mistake;
one that a run has not arrived in yet is marked too, so that the same command can begin again and nobody else's database
is ever overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.folder import RunFolder
from shoal.errors import ConfigError, ResourceError
from shoal.hub.settings import HubSettings
from shoal.hub.storage import Reader, Storage, open_blobs, open_storage
from shoal.hub.storage.copying import INCOMING, MOVED_TO, copy_blobs, copy_rows, run_in, submissions_of
from shoal.hub.storage.opening import DATABASE_FILE
from shoal.ledger.chain import Chain
from shoal.runtime.config import dump_config
from shoal.runtime.crash import point
from shoal.runtime.files import write_atomically
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken

Say = Callable[[str], None]

PAGE = 1000
LEADER = "upkeep"
LEADER_WAIT_S = 6.0
"""A hub that is just stopping lets go at once, one that was killed after its lease of the lead ran out."""
LEAD_S = 600.0
POLL_S = 0.5
PROBE = b"shoal was here"
HERE_DATABASE, HERE_STORAGE = "sqlite", "folder"
"""How the default places are called on the command line."""


@dataclass(frozen=True)
class Move:
    """Where to: None stays as it is, empty is the default (SQLite, a folder)."""

    database: str | None = None
    storage: str | None = None
    endpoint: str | None = None

    @classmethod
    def of(cls, database: str | None, storage: str | None, endpoint: str | None) -> Move:
        """As it was asked for on the command line.

        >>> Move.of("sqlite", "s3://bucket/run", None)
        Move(database='', storage='s3://bucket/run', endpoint=None)
        """
        if database is None and storage is None and endpoint is None:
            raise ConfigError("where to? give --database postgresql://… (or sqlite), --storage s3://… (or folder)")
        database = "" if database == HERE_DATABASE else database
        storage = "" if storage == HERE_STORAGE else storage
        return cls(database, storage, "" if storage == "" and endpoint is None else endpoint)

    def applied(self, hub: HubSettings) -> HubSettings:
        asked = {"database": self.database, "storage": self.storage, "storage_endpoint": self.endpoint}
        return hub.model_copy(update={key: value for key, value in asked.items() if value is not None})


def migrate_run(directory: Path, move: Move, say: Say) -> None:
    """Move a run that nobody is running. The same again is harmless, also after a crash."""
    folder = RunFolder.open(directory)
    stop = StopToken()
    with contextlib.ExitStack() as held:
        held.enter_context(FolderLock(folder.path).acquire(stop))
        held.enter_context(FolderLock(folder.path / "hub").acquire(stop))
        now = folder.recipe.hub
        wanted = move.applied(now)
        if not now.database and not _hub_file(folder).is_file():
            raise ConfigError(
                f"the run in {folder.path} has not begun: name its places when you start it (--set hub.…)"
            )
        source = _open(held, now.database, folder)
        with source.read() as reader:
            if run_in(reader) != folder.run_id:
                raise ConfigError(f"hub.database of {folder.path} does not hold this run: put back the recipe it had")
        _require_idle(source, stop)
        if (now.storage, now.storage_endpoint) != (wanted.storage, wanted.storage_endpoint):
            _move_blobs(source, folder, wanted, say)
            point("migrate.after_blobs")
        if now.database != wanted.database:
            target = _open(held, wanted.database, folder)
            _move_rows(source, target, folder.run_id, say)
            point("migrate.after_rows")
        if now != wanted:
            recipe = folder.recipe.model_copy(update={"hub": wanted})
            write_atomically(folder.path / "recipe.toml", dump_config(recipe).encode())
            point("migrate.after_recipe")
            say(f"{folder.path / 'recipe.toml'} names the new place: from now on it is the one in force")
        _mark(held, folder, now, wanted)
        say("done" if now != wanted else "the run is there already")


def _hub_file(folder: RunFolder) -> Path:
    return folder.path / "hub" / DATABASE_FILE


def _open(held: contextlib.ExitStack, database: str, folder: RunFolder) -> Storage:
    storage = open_storage(database, folder.path / "hub")
    held.callback(storage.close)
    return storage


def _require_idle(source: Storage, stop: StopToken) -> None:
    """No hub may be at work. The folder's lock says so for SQLite; hubs that share a database always have a leader."""
    tries = round(LEADER_WAIT_S / POLL_S)
    for _ in range(tries):
        if source.lead(LEADER, "migration", LEAD_S):
            source.resign(LEADER, "migration")
            return
        stop.wait(POLL_S)
    raise ResourceError("a hub is at work on this run's database: stop all hubs of the run first, on every machine")


def _move_blobs(source: Storage, folder: RunFolder, wanted: HubSettings, say: Say) -> None:
    now, kept = folder.recipe.hub, folder.path / "hub" / "blobs"
    here = open_blobs(now.storage, now.storage_endpoint, kept)
    there = open_blobs(wanted.storage, wanted.storage_endpoint, kept)
    there.get(there.put(PROBE))  # said now if it cannot be, not after the first hour
    with source.read() as reader:
        names = submissions_of(reader)
    tenth = max(1, len(names) // 10)

    def tell(done: int, of: int) -> None:
        if done % tenth == 0:
            say(f"submissions: {done} of {of}")

    new = copy_blobs(here, there, names, tell)
    say(f"{len(names)} submissions are at {wanted.storage or kept}, {new} of them new; all were read back")


def _move_rows(source: Storage, target: Storage, run: str, say: Say) -> None:
    with target.read() as reader:
        there = run_in(reader)
        free = there is None or (there == run and any(reader.setting(mark) for mark in (INCOMING, MOVED_TO)))
    if not free:
        raise ConfigError(
            f"the database that you name holds the run {there} already, and it is in force there: choose an empty one"
        )
    copied = copy_rows(source, target, {INCOMING: run, MOVED_TO: ""})
    with source.read() as left, target.read() as arrived:
        rows = _verified(arrived)
        if rows != _verified(left):
            raise ResourceError("the ledger changed while it was copied: a hub is at work; stop it and try again")
    total = sum(extent.rows for extent in copied.values())
    say(f"{total} rows in {len(copied)} tables are there, and are the same; the ledger verifies, {rows[0]} rows")


def _verified(reader: Reader) -> tuple[int, str]:
    """How long the ledger is, and its last hash, once every row was checked."""
    chain = Chain()
    while page := reader.ledger_after(-1 if chain.last is None else chain.last.index, PAGE):
        for entry in page:
            chain.add(entry)
    return (0, "") if chain.last is None else (chain.last.index + 1, chain.last.hash)


def _mark(held: contextlib.ExitStack, folder: RunFolder, before: HubSettings, now: HubSettings) -> None:
    """Say on each database what it is now; also what a crash kept an earlier call from saying."""
    with _open(held, now.database, folder).write(exclusive=True) as arrived:
        for mark in (INCOMING, MOVED_TO):
            arrived.put_setting(mark, "")
    if before.database != now.database:
        left = before.database
    elif now.database and _hub_file(folder).is_file():
        left = ""  # where it must have come from, if an earlier call was cut short here
    else:
        return
    with _open(held, left, folder).write(exclusive=True) as leaving:
        if run_in(leaving) == folder.run_id:
            leaving.put_setting(MOVED_TO, "another database")
