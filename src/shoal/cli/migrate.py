"""`shoal migrate RUN --database URL --storage URL`: a stopped run moves to other places, or back.

    locks, lead ─► "leaving" ─► blobs, each read back ─► rows, in one transaction, compared ─► ledger ─► recipe ─► marks
                                                                                                     ▲
                           a crash before this leaves the old places in force, one after it the new ─┘

Nothing at the old places is removed. The database that was left is marked, so that no hub goes on with it by mistake;
one that a run has not arrived in yet is marked too, so that the same command can begin again and nobody else's database
is ever overwritten.

A shared database has no folder's lock that keeps hubs away. So it is marked before anything is copied, in a transaction
that waits for all others; from then on every decision of a hub that was overlooked is refused, and the hub ends. What
fails takes the mark away again; after a crash it stands, and hubs say how to go on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.folder import RECIPE_MODE, RunFolder
from shoal.errors import ConfigError, ResourceError, ShoalError
from shoal.hub.settings import HubSettings
from shoal.hub.storage import Reader, Storage, open_blobs, open_storage
from shoal.hub.storage.copying import (
    INCOMING,
    LEAVING,
    LEFT,
    MOVED_TO,
    connection_of,
    copy_blobs,
    copy_rows,
    extents,
    mark_blobs,
    moved_away,
    run_in,
    submissions_of,
)
from shoal.hub.storage.opening import DATABASE_FILE
from shoal.hub.storage.schema import unhurried
from shoal.ledger.chain import Chain
from shoal.runtime.config import dump_config
from shoal.runtime.crash import point
from shoal.runtime.files import write_atomically
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken

Say = Callable[[str], None]

log = logging.getLogger(__name__)

PAGE = 1000
LEADER = "upkeep"
LEADER_WAIT_S = 6.0
"""A hub that is just stopping lets go at once, one that was killed after its lease of the lead ran out."""
LEAD_S, RENEW_S = 5.0, 1.0
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
            if reader.setting(MOVED_TO) not in (None, "", LEAVING) and (error := moved_away(reader)):
                raise error
        lead = held.enter_context(_leading(source, stop))
        with _leaving(source, is_moved=now != wanted):
            _copy(held, folder, wanted, source, say)
            if now != wanted:
                lead.require()
                recipe = folder.recipe.model_copy(update={"hub": wanted})
                write_atomically(folder.path / "recipe.toml", dump_config(recipe).encode(), RECIPE_MODE)
        if now != wanted:
            point("migrate.after_recipe")
            say(f"{folder.path / 'recipe.toml'} names the new place: from now on it is the one in force")
        _mark(held, folder, now, wanted)
        say("done" if now != wanted else "the run is there already")


def _copy(held: contextlib.ExitStack, folder: RunFolder, wanted: HubSettings, source: Storage, say: Say) -> None:
    now = folder.recipe.hub
    if (now.storage, now.storage_endpoint) != (wanted.storage, wanted.storage_endpoint):
        _move_blobs(source, folder, wanted, say)
        point("migrate.after_blobs")
    if now.database != wanted.database:
        target = _open(held, wanted.database, folder)
        _require_another(target)
        _move_rows(source, target, folder.run_id, say)
        point("migrate.after_rows")


def _hub_file(folder: RunFolder) -> Path:
    return folder.path / "hub" / DATABASE_FILE


def _open(held: contextlib.ExitStack, database: str, folder: RunFolder) -> Storage:
    storage = open_storage(database, folder.path / "hub")
    held.callback(storage.close)
    return storage


class _Lead:
    """The lead of a shared database, kept while a run moves: no hub takes it, and who has it runs."""

    def __init__(self, source: Storage) -> None:
        self._source = source
        self._holder = f"migration/{secrets.token_hex(4)}"
        self._ended = threading.Event()
        self._is_lost = False

    def take(self) -> bool:
        return self._source.lead(LEADER, self._holder, LEAD_S)

    def keep(self) -> None:
        """In a thread of its own: a copy can take hours."""
        while not self._ended.wait(RENEW_S):
            try:
                self._is_lost = self._is_lost or not self.take()
            except ShoalError as error:  # the copy meets it, too; a lead that another took meanwhile is seen above
                log.warning("the lead could not be renewed: %s", error)

    def require(self) -> None:
        if self._is_lost or not self.take():
            raise ResourceError("a hub took over while the run was copied: stop all hubs of the run, and try again")

    def end(self) -> None:
        self._ended.set()
        with contextlib.suppress(ShoalError):
            self._source.resign(LEADER, self._holder)


@contextlib.contextmanager
def _leading(source: Storage, stop: StopToken) -> Iterator[_Lead]:
    """No hub may be at work. The folder's lock says so for SQLite; hubs that share a database always have a leader."""
    lead = _Lead(source)
    tries = round(LEADER_WAIT_S / POLL_S)
    while not lead.take():
        tries -= 1
        if tries <= 0:
            raise ResourceError(
                "a hub is at work on this run's database: stop all hubs of the run first, on every machine"
            )
        stop.wait(POLL_S)
    renewing = threading.Thread(target=lead.keep, name="migrate-lead", daemon=True)
    renewing.start()
    try:
        yield lead
    finally:
        lead.end()
        renewing.join(LEAD_S)


def _require_another(target: Storage) -> None:
    """Two addresses can name one database, whose lead we hold already: it would be marked as left by itself."""
    lead = _Lead(target)
    if not lead.take():
        raise ConfigError(
            "the database that you name is the one that the run is in already, or a hub is at work on it: for another "
            "address or password of the same one, change hub.database in recipe.toml; otherwise stop the hub, try again"
        )
    lead.end()


@contextlib.contextmanager
def _leaving(source: Storage, is_moved: bool) -> Iterator[None]:
    """Keep every hub off a shared database from here on; if what follows fails, let them in again."""
    if not source.is_shared or not is_moved:
        yield
        return
    _put_mark(source, LEAVING)
    try:
        yield
    except BaseException:
        try:
            _put_mark(source, "")
        except ShoalError as error:
            log.error("the database stays marked, and no hub works on it: %s; give the command again", error)
        raise


def _put_mark(storage: Storage, mark: str) -> None:
    with storage.write(exclusive=True) as transaction:
        transaction.put_setting(MOVED_TO, mark)


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
        unhurried(connection_of(left))
        rows = _verified(arrived)
        if rows != _verified(left) or extents(left) != copied:
            raise ResourceError("the run changed while it was copied: a hub is at work; stop it and try again")
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
    place = _open(held, now.database, folder)
    with place.write(exclusive=True) as arrived:
        is_begun = before != now or any(arrived.setting(mark) for mark in (INCOMING, MOVED_TO))
        if place.is_shared and is_begun:  # hubs whose recipe names the old store find that it is not this one
            blobs = open_blobs(now.storage, now.storage_endpoint, folder.path / "hub" / "blobs")
            mark_blobs(arrived, blobs, folder.run_id)
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
            leaving.put_setting(MOVED_TO, LEFT)
