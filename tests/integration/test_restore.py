"""`shoal restore --set hub.database=… --set hub.storage=…`: a run moves from SQLite and a folder to PostgreSQL and S3,
and back, and continues in each place. Both servers are real. Whatever died when: the same command again does it.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit import Patch, TempPaths
from kit.crash import Actors, HubLives, dies_of
from kit.crash import Place as HubLedger
from kit.folder import LocalRun
from kit.hub import submission_body
from kit.s3 import KEYS, Shop
from shoal.cli.main import main
from shoal.errors import ConfigError, ShoalError
from shoal.hub.service.context import Context
from shoal.hub.storage import SqliteStorage, copying, open_storage
from shoal.hub.storage.copying import INCOMING, copy_rows, extents
from shoal.protocol import LeaseRequest
from shoal.run.backup import Summary, backup_run, restore_run, verify_backup
from shoal.run.folder import RunFolder
from shoal.runtime.crash import POINTS

pytestmark = pytest.mark.usefixtures("shop_keys")


@dataclass(frozen=True)
class Taken:
    """A run on SQLite that stands at version 1, with two submissions that are promised and not judged; its backup."""

    run: LocalRun
    tar: Path


@pytest.fixture(scope="module")
def taken(tmp_path_factory: TempPaths) -> Taken:
    folder = tmp_path_factory.mktemp("taken")
    run = LocalRun(folder / "run")
    run.step()
    request = LeaseRequest(request="before-the-move", max_units=4)
    for lease, _ in run.worker.open_leases(run.worker.lease(request)):
        run.receipts.append(run.worker.submit(lease.lease, submission_body(lease)))
    assert len(run.receipts) == 4
    run.close()
    backup(folder / "run", folder / "run.tar")
    return Taken(run, folder / "run.tar")


def backup(run: Path, tar: Path) -> Summary:
    return backup_run(run, tar, lambda _line: None)


def continued(path: Path, before: LocalRun) -> LocalRun:
    """One more step where the run is now; everything promised before is there."""
    run = LocalRun(path, receipts=list(before.receipts))
    try:
        run.step()
        run.check()
    finally:
        run.close()
    return run


def at(database_url: str, shop: Shop | None = None) -> list[str]:
    store = [] if shop is None else [f"hub.storage={shop.url}", f"hub.storage_endpoint={shop.endpoint}"]
    return [*([f"hub.database={database_url}"] if database_url else []), *store]


def test_run_moves_to_postgresql_and_back(taken: Taken, database_url: str, shop: Shop, tmp_path: Path) -> None:
    restore_run(taken.tar, tmp_path / "there", at(database_url, shop))
    hub = RunFolder.open(tmp_path / "there").recipe.hub
    assert (hub.database, hub.storage, hub.storage_endpoint) == (database_url, shop.url, shop.endpoint)
    assert (tmp_path / "there" / "recipe.toml").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in (tmp_path / "there" / "hub").iterdir()) == ["restored", "secret"]
    assert len([key for key in shop.keys() if key.startswith("runs/one/blobs/")]) == 4  # noqa: SIM118 not a dict
    there = continued(tmp_path / "there", taken.run)
    assert there.version_at_end == 2
    summary = backup(tmp_path / "there", tmp_path / "there.tar")
    assert (summary.version, len(summary.submissions)) == (2, len(there.receipts))
    assert not [name for name in summary.manifest.members if name.startswith("hub/hub.db-")]
    restore_run(tmp_path / "there.tar", tmp_path / "back")
    back = RunFolder.open(tmp_path / "back").recipe.hub
    assert (back.database, back.storage, back.storage_endpoint) == ("", "", "")
    assert continued(tmp_path / "back", there).version_at_end == 3


def test_database_with_a_run_is_not_overwritten(taken: Taken, database_url: str, tmp_path: Path) -> None:
    other = LocalRun(tmp_path / "other", {"database": database_url})
    other.close()
    with pytest.raises(ConfigError, match=f"holds the run {other.folder.run_id} already"):
        restore_run(taken.tar, tmp_path / "there", at(database_url))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    LocalRun(tmp_path / "other").close()


@pytest.mark.parametrize("was_started", [False, True])
def test_restored_run_is_not_overwritten(taken: Taken, database_url: str, tmp_path: Path, was_started: bool) -> None:
    restore_run(taken.tar, tmp_path / "one", at(database_url))
    backup(taken.run.path, tmp_path / "later.tar")  # by the same backup, what was not started may be completed
    if was_started:
        LocalRun(tmp_path / "one").close()
    with pytest.raises(ConfigError, match="holds the run"):
        restore_run(taken.tar if was_started else tmp_path / "later.tar", tmp_path / "two", at(database_url))
    continued(tmp_path / "one", taken.run)


def test_other_hubs_are_refused_until_the_restored_one_starts(taken, database_url, tmp_path, monkeypatch):
    restore_run(taken.tar, tmp_path / "one", at(database_url))
    restored = tmp_path / "one" / "hub" / "restored"
    mark = restored.read_text()
    restored.unlink()
    refused = pytest.raises(ConfigError, match=r"`shoal restore` has copied a run into hub\.database")
    with refused:
        LocalRun(tmp_path / "one")
    restored.write_text("of another backup")
    with refused:
        LocalRun(tmp_path / "one")
    with monkeypatch.context() as patch, refused:
        looks, look = iter(range(9)), Context._require_restored  # as if the rows had come after the first look
        patch.setattr(Context, "_require_restored", lambda *given: next(looks) and look(*given))
        LocalRun(tmp_path / "one")
    restored.write_text(mark)
    first = continued(tmp_path / "one", taken.run)
    restored.unlink()  # as on another machine
    continued(tmp_path / "one", first)
    with contextlib.closing(open_storage(database_url, tmp_path)) as storage, storage.read() as reader:
        assert not reader.setting(INCOMING)


@pytest.mark.parametrize("place", ["database", "storage"])
def test_setting_alone_does_not_move_a_run(taken, database_url, shop, tmp_path, place):
    restore_run(taken.tar, tmp_path / "run")
    bucket = {"storage": f"{shop.url}/empty", "storage_endpoint": shop.endpoint}
    change(tmp_path / "run", **({"database": database_url} if place == "database" else bucket))
    with pytest.raises(ConfigError, match=rf"shoal restore --set hub\.{place}"):
        LocalRun(tmp_path / "run")


def change(run: Path, **places: str) -> None:
    text = (run / "recipe.toml").read_text()
    for name, value in places.items():
        assert f'\n{name} = ""' in text
        text = text.replace(f'\n{name} = ""', f'\n{name} = "{value}"')
    (run / "recipe.toml").write_text(text)


def test_copy_that_differs_is_undone(taken: Taken, database_url: str, tmp_path: Path, monkeypatch: Patch) -> None:
    honest = copying._rows
    lost = iter([True])  # the first row of the first look at the nonces

    def lossy(connection: object, table: object) -> Iterator[dict[str, object]]:
        rows = honest(connection, table)  # type: ignore[arg-type]
        if getattr(table, "name", "") == "nonces" and next(lost, False):
            next(rows, None)
        return rows

    restore_run(taken.tar, tmp_path / "run")
    monkeypatch.setattr(copying, "_rows", lossy)
    with (
        contextlib.closing(SqliteStorage(tmp_path / "run" / "hub" / "hub.db")) as source,
        contextlib.closing(open_storage(database_url, tmp_path)) as target,
    ):
        with pytest.raises(ShoalError, match="the copy differs from what was copied, in nonces"):
            copy_rows(source, target)
        with target.read() as reader:
            assert set(extents(reader).values()) == {0}


@pytest.mark.parametrize(("override", "said"), [
    ("hub.database=mysql://x/y", "not for PostgreSQL"),
    ("run.steps=4", "a restore sets hub.database, hub.storage, hub.storage_endpoint only"),
    ("hub.storage", "expected section.key=value"), ("hub.storage=ftp://x", "s3://"),
])  # fmt: skip
def test_wrong_place_is_refused_before_the_backup_is_read(tmp_path, capsys, override, said):
    assert main(["restore", str(tmp_path / "none.tar"), str(tmp_path / "run"), "--set", override]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


RESTORE = ("restore.after_rows", "restore.after_blobs", "restore.before_rename")
SUBMIT = ("hub.submit.after_blob", "hub.submit.after_commit")


def test_every_crash_point_of_backup_and_restore_is_tried() -> None:
    here = {*RESTORE, "backup.before_rename"}
    assert {name for name in POINTS if name.startswith(("backup.", "restore."))} == here


def restore(file: Path, folder: Path, places: list[str]) -> None:
    os.environ.update(KEYS)
    restore_run(file, folder, places)


@pytest.mark.parametrize("name", [RESTORE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in RESTORE[1:])])
def test_killed_restore_is_completed_by_the_same_command(taken, tmp_path, database_url, shop, name):
    """There is no run until it is whole; no hub works on what is there of it; the same command then completes it."""
    folder, before = tmp_path / "there", taken.tar.read_bytes()
    assert dies_of(name, restore, taken.tar, folder, at(database_url, shop))
    assert not folder.exists()
    if name != "restore.after_blobs":
        with pytest.raises(ConfigError, match=r"`shoal restore` has copied a run into hub\.database"):
            LocalRun(tmp_path / "other", {"database": database_url})
    assert taken.tar.read_bytes() == before
    restore_run(taken.tar, folder, at(database_url, shop))
    assert not list(tmp_path.glob(".there*"))
    assert continued(folder, taken.run).version_at_end == 2


def test_killed_backup_and_restore_leave_nothing(taken: Taken, tmp_path: Path) -> None:
    path, file, folder = tmp_path / "run", tmp_path / "run.tar", tmp_path / "elsewhere"
    shutil.copytree(taken.run.path, path)
    assert dies_of("backup.before_rename", backup, path, file)
    assert not file.exists(), "a backup is there when it is whole"
    backup(path, file)
    assert dies_of("restore.before_rename", restore_run, file, folder)
    assert not folder.exists()
    assert restore_run(file, folder).version == verify_backup(file).version == 1
    assert continued(folder, taken.run).version_at_end == 2
    assert continued(path, taken.run).version_at_end == 2, "nothing of the source was touched"


def test_killed_hub_with_a_bucket_loses_nothing(tmp_path: Path, shop: Shop) -> None:
    place = HubLedger(tmp_path / "hub", {"storage": shop.url, "storage_endpoint": shop.endpoint}, KEYS)
    with HubLives(place, SUBMIT) as hub, Actors(hub) as actors:
        entries = actors.play()
    actors.books.check(place, entries)
    assert hub.struck == set(SUBMIT)
