"""`shoal migrate`: a run moves from SQLite and a folder to PostgreSQL and S3, and back, and goes on in each place.

Both servers are real. Whatever goes wrong in between, one of the places is in force, and it has everything.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from folderkit import Play, body_of
from s3kit import KEYS, Shop, s3_server
from shoal.cli import migrate
from shoal.cli.backup import backup_run, restore_run
from shoal.cli.folder import RunFolder
from shoal.cli.main import main
from shoal.cli.migrate import Move, migrate_run
from shoal.errors import ConfigError, ResourceError, ShoalError
from shoal.hub import create_app
from shoal.hub.storage import SqliteStorage, Storage, open_storage
from shoal.hub.storage.copying import LEAVING, MOVED_TO, Extent, copy_rows, extents, run_in
from shoal.protocol import LeaseRequest
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with s3_server() as found:
        yield found


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    play = Play(tmp_path_factory.mktemp("begun") / "run")
    play.step()
    play.close()
    return play.path


@pytest.fixture
def path(begun: Path, tmp_path: Path) -> Path:
    """A run that stands at version 1, stopped."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


def quiet(_line: str) -> None:
    pass


def goes_on(path: Path, receipts_of: Play | None = None) -> Play:
    """One more step where the run is now; everything promised before is there."""
    play = Play(path, receipts=[] if receipts_of is None else list(receipts_of.receipts))
    try:
        play.step()
        play.check()
    finally:
        play.close()
    return play


def test_there_with_a_backup_from_there_and_back(path: Path, database_url: str, shop: Shop, tmp_path: Path) -> None:
    said: list[str] = []
    migrate_run(path, Move.of(database_url, shop.url, shop.endpoint), said.append)
    assert any("the ledger verifies" in line for line in said)
    recipe = RunFolder.open(path).recipe.hub
    assert (recipe.database, recipe.storage, recipe.storage_endpoint) == (database_url, shop.url, shop.endpoint)
    there = goes_on(path)
    assert there.version_at_end == 2
    assert any(key.startswith("runs/one/blobs/") for key in shop.keys())  # noqa: SIM118 not a dict
    summary = backup_run(path, tmp_path / "run.tar", quiet)
    assert (summary.version, summary.submissions) == (2, 4)
    restore_run(tmp_path / "run.tar", tmp_path / "restored")
    restored = goes_on(tmp_path / "restored", there)  # in SQLite and a folder
    assert RunFolder.open(tmp_path / "restored").recipe.hub.database == ""
    assert restored.version_at_end == 3
    migrate_run(path, Move.of("sqlite", "folder", None), quiet)
    back = RunFolder.open(path).recipe.hub
    assert (back.database, back.storage, back.storage_endpoint) == ("", "", "")
    assert goes_on(path, there).version_at_end == 3


def test_a_database_that_the_run_has_left_is_not_gone_on_with(path: Path, database_url: str) -> None:
    before = (path / "recipe.toml").read_text()
    migrate_run(path, Move.of(database_url, None, None), quiet)
    after = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(before)
    with pytest.raises(ConfigError, match="was moved away"):
        Play(path)
    (path / "recipe.toml").write_text(after)
    migrate_run(path, Move.of(database_url, None, None), quiet)  # the same again
    goes_on(path)


def test_cut_short_before_the_recipe_the_old_place_is_in_force_and_the_next_try_has_all(
    path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(migrate, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            migrate_run(path, Move.of(database_url, None, None), quiet)
    first = goes_on(path)  # on SQLite: nothing has happened
    assert RunFolder.open(path).recipe.hub.database == ""
    migrate_run(path, Move.of(database_url, None, None), quiet)
    assert goes_on(path, first).version_at_end == 3


def test_cut_short_after_the_recipe_the_new_place_is_in_force(
    path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(migrate, "_mark", killed)
        with pytest.raises(KeyboardInterrupt):
            migrate_run(path, Move.of(database_url, None, None), quiet)
    goes_on(path)
    migrate_run(path, Move.of(database_url, None, None), quiet)  # says what was left to say
    with contextlib.closing(SqliteStorage(path / "hub" / "hub.db")) as left, left.read() as reader:
        assert reader.setting(MOVED_TO)


def test_not_while_a_hub_is_at_work(path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FolderLock(path / "hub").acquire(StopToken()), pytest.raises(ResourceError, match="in use by process"):
        migrate_run(path, Move.of(database_url, None, None), quiet)
    migrate_run(path, Move.of(database_url, None, None), quiet)
    monkeypatch.setattr(migrate, "LEADER_WAIT_S", 0.5)
    play = Play(path)
    with pytest.raises(ResourceError, match="a hub is at work"):
        migrate_run(path, Move.of("sqlite", None, None), quiet)
    play.close()
    migrate_run(path, Move.of("sqlite", None, None), quiet)


def test_nobody_elses_database_is_overwritten(path: Path, database_url: str, tmp_path: Path) -> None:
    other = Play(tmp_path / "other", {"database": database_url})
    other.close()
    with pytest.raises(ConfigError, match=r"holds the run .* already"):
        migrate_run(path, Move.of(database_url, None, None), quiet)
    with contextlib.closing(open_storage(database_url, tmp_path)) as storage, storage.read() as reader:
        assert run_in(reader) == other.folder.run_id
    assert RunFolder.open(path).recipe.hub.database == ""


def test_a_database_is_not_changed_by_a_setting_alone(path: Path, database_url: str) -> None:
    text = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(text.replace('database = ""', f'database = "{database_url}"'))
    with pytest.raises(ConfigError, match="shoal migrate RUN --database"):
        Play(path)


def test_a_store_is_not_changed_by_a_setting_alone(path: Path, shop: Shop) -> None:
    text = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(
        text.replace('storage = ""', f'storage = "{shop.url}/empty"').replace(
            'storage_endpoint = ""', f'storage_endpoint = "{shop.endpoint}"'
        )
    )
    with pytest.raises(ConfigError, match="shoal migrate RUN --storage"):
        Play(path)


def test_a_copy_that_differs_is_not_made(path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.hub.storage import copying

    honest = copying._rows
    lost = iter([True])  # the first row of the first look at the nodes

    def lossy(connection: object, table: object) -> Iterator[dict[str, object]]:
        rows = honest(connection, table)  # type: ignore[arg-type]
        if getattr(table, "name", "") == "nonces" and next(lost, False):
            next(rows, None)
        return rows

    monkeypatch.setattr(copying, "_rows", lossy)
    with (
        contextlib.closing(SqliteStorage(path / "hub" / "hub.db")) as source,
        contextlib.closing(open_storage(database_url, path)) as target,
    ):
        with pytest.raises(ShoalError, match="the copy differs from what was copied, in nonces"):
            copy_rows(source, target)
        with target.read() as reader:
            assert sum(extent.rows for extent in extents(reader).values()) == 0


def test_the_command_asks_where_to(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(path)]) == 2
    assert "where to?" in capsys.readouterr().err
    assert main(["migrate", str(path), "--database", "mysql://x/y"]) == 2
    assert "not for PostgreSQL" in capsys.readouterr().err
    assert main(["migrate", str(path), "--database", "sqlite"]) == 0
    assert "there already" in capsys.readouterr().out


# ── away from a database that hubs share ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shared(tmp_path: Path, database_url: str) -> Play:
    """A run on PostgreSQL, stopped, with two submissions that are promised and not judged."""
    play = Play(tmp_path / "shared", {"database": database_url})
    request = LeaseRequest(request="before-the-move", max_units=4)
    for lease, _ in play.worker.open_leases(play.worker.lease(request)):
        play.receipts.append(play.worker.submit(lease.lease, body_of(lease)))
    assert len(play.receipts) == 2
    play.close()
    return play


def test_a_hub_that_was_overlooked_writes_nothing_and_ends(shared: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was frozen, say, when the lead was asked for, and wakes up in the middle of the copy."""
    frozen = create_app(shared._config()).state.hub
    frozen.context.resign()
    tried: list[str] = []

    def meddled_with(source: Storage, target: Storage, settings: dict[str, str]) -> dict[str, Extent]:
        for attempt in (lambda: frozen.context.decision().__enter__(), frozen.context.lead):
            with pytest.raises(ConfigError, match="is being moved by `shoal migrate`"):
                attempt()
            tried.append("refused")
        return copy_rows(source, target, settings)

    monkeypatch.setattr(migrate, "copy_rows", meddled_with)
    migrate_run(shared.path, Move.of("sqlite", None, None), quiet)
    assert len(tried) == 2
    assert isinstance(frozen.context.failure, ConfigError), "the process ends with it"
    frozen.close()
    goes_on(shared.path, shared)


def test_what_changes_under_the_copy_is_noticed_and_the_old_place_stays_in_force(
    shared: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(source: Storage, target: Storage, settings: dict[str, str]) -> dict[str, Extent]:
        copied = copy_rows(source, target, settings)
        with source.write() as transaction:  # by a program that does not look at the mark
            transaction.put_setting("a", "b")
        return copied

    with monkeypatch.context() as patch:
        patch.setattr(migrate, "copy_rows", overtaken)
        with pytest.raises(ResourceError, match="changed while it was copied"):
            migrate_run(shared.path, Move.of("sqlite", None, None), quiet)
    assert RunFolder.open(shared.path).recipe.hub.database
    goes_on(shared.path, shared)


def test_the_lead_is_held_while_the_run_moves(shared: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(source: Storage, target: Storage, settings: dict[str, str]) -> dict[str, Extent]:
        assert not source.lead(migrate.LEADER, "a hub that starts", 1.0)
        assert not source.lead(migrate.LEADER, "another migration", 1.0)
        return copy_rows(source, target, settings)

    monkeypatch.setattr(migrate, "copy_rows", asked)
    migrate_run(shared.path, Move.of("sqlite", None, None), quiet)


@pytest.mark.parametrize("stays", [True, False])
def test_killed_in_the_middle_hubs_say_how_to_go_on(shared: Play, stays: bool) -> None:
    database = RunFolder.open(shared.path).recipe.hub.database
    with contextlib.closing(open_storage(database, shared.path)) as storage:
        migrate._put_mark(storage, LEAVING)  # all that is left there of a process that was killed
    with pytest.raises(
        ConfigError, match=r"cut short: give the same command again there, or `shoal migrate RUN --database`"
    ):
        Play(shared.path)
    migrate_run(shared.path, Move.of(database if stays else "sqlite", None, None), quiet)
    assert bool(RunFolder.open(shared.path).recipe.hub.database) == stays
    goes_on(shared.path, shared)


def test_a_place_that_the_run_has_left_is_not_moved_on_from(shared: Play) -> None:
    before = (shared.path / "recipe.toml").read_text()
    database = RunFolder.open(shared.path).recipe.hub.database
    migrate_run(shared.path, Move.of("sqlite", None, None), quiet)
    (shared.path / "recipe.toml").write_text(before)  # as on another machine, which was not told
    for place in ("sqlite", database):
        with pytest.raises(ConfigError, match="was moved away"):
            migrate_run(shared.path, Move.of(place, None, None), quiet)


def test_hubs_know_the_new_place_of_blobs_and_not_the_old_one(shared: Play, shop: Shop) -> None:
    before = (shared.path / "recipe.toml").read_text()
    database = RunFolder.open(shared.path).recipe.hub.database
    migrate_run(shared.path, Move.of(None, f"{shop.url}/known", shop.endpoint), quiet)
    after = (shared.path / "recipe.toml").read_text()
    (shared.path / "recipe.toml").write_text(before)  # as on another machine, which was not told
    with pytest.raises(ConfigError, match="other hubs of this run keep submissions elsewhere"):
        Play(shared.path)
    (shared.path / "recipe.toml").write_text(after)
    migrate_run(shared.path, Move.of("sqlite", "folder", None), quiet)
    migrate_run(shared.path, Move.of(database, f"{shop.url}/again", shop.endpoint), quiet)  # which remembers the first
    goes_on(shared.path, shared)


def test_the_same_database_under_another_address_is_no_other_place(shared: Play) -> None:
    database = RunFolder.open(shared.path).recipe.hub.database
    with pytest.raises(ConfigError, match="is the one that the run is in already"):
        migrate_run(shared.path, Move.of(f"{database}?application_name=other", None, None), quiet)
    assert RunFolder.open(shared.path).recipe.hub.database == database
    goes_on(shared.path, shared)
