"""Processes killed while a run is saved, or restored elsewhere; and a hub whose submissions are in a bucket.
Whatever died when: the same command again does it, and nothing is lost.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kit import TempPaths
from kit.crash import Cast, HubLives, dies_of
from kit.crash import Place as HubPlace
from kit.folder import Play
from kit.s3 import KEYS, Shop
from shoal.errors import ConfigError
from shoal.run.backup import backup_run, restore_run, verify_backup
from shoal.runtime.crash import POINTS

RESTORE = ("restore.after_blobs", "restore.after_rows", "restore.before_rename")
SUBMIT = ("hub.submit.after_blob", "hub.submit.after_commit")
HERE = {*RESTORE, "backup.before_rename"}


def test_every_point_of_these_is_tried_here() -> None:
    assert {name for name in POINTS if name.startswith(("backup.", "restore."))} == HERE


pytestmark = pytest.mark.usefixtures("shop_keys")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: TempPaths) -> Path:
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


def step(path: Path) -> int:
    """One more step, wherever the run is now; which version it came to. Nothing is credited twice, the ledger holds."""
    play = Play(path)
    try:
        play.step()
        play.check()
        return play.version
    finally:
        play.close()


def restore(file: Path, folder: Path, places: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    restore_run(file, folder, places)


@pytest.mark.parametrize(
    "name", [RESTORE[1], *(pytest.param(name, marks=pytest.mark.slow) for name in RESTORE if name != RESTORE[1])]
)
def test_restore_elsewhere_killed(path: Path, tmp_path: Path, database_url: str, shop: Shop, name: str) -> None:
    """There is no run until it is whole; no hub works on what is there of it; the same command then completes it."""
    file, folder = tmp_path / "run.tar", tmp_path / "there"
    places = [f"hub.database={database_url}", f"hub.storage={shop.url}", f"hub.storage_endpoint={shop.endpoint}"]
    backup_run(path, file, quiet)
    before = file.read_bytes()
    assert dies_of(name, restore, file, folder, places, KEYS)
    assert not folder.exists()
    if name != "restore.after_blobs":
        with pytest.raises(ConfigError, match=r"`shoal restore` has copied a run into hub\.database"):
            Play(tmp_path / "other", {"database": database_url})
    assert file.read_bytes() == before
    restore_run(file, folder, places)
    assert not list(tmp_path.glob(".there*"))
    assert step(folder) == 2
    assert step(path) == 2, "nothing of the source was touched"


def test_backup_and_restore_killed(path: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "run.tar", tmp_path / "elsewhere"
    assert dies_of("backup.before_rename", backup_run, path, file, quiet)
    assert not file.exists(), "a backup is there when it is whole"
    backup_run(path, file, quiet)
    assert dies_of("restore.before_rename", restore_run, file, folder)
    assert not folder.exists()
    assert restore_run(file, folder).version == verify_backup(file).version == 1
    assert step(folder) == 2


def test_a_hub_that_keeps_submissions_in_a_bucket_killed(tmp_path: Path, shop: Shop) -> None:
    place = HubPlace(tmp_path / "hub", {"storage": shop.url, "storage_endpoint": shop.endpoint}, KEYS)
    with HubLives(place, SUBMIT) as hub, Cast(hub) as cast:
        entries = cast.play()
    cast.books.check(place, entries)
    assert hub.struck == set(SUBMIT)
