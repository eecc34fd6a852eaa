"""The demo's folder: its own earlier ones are replaced or kept, nobody else's is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import ConfigError, ResourceError
from shoal.run.demo import place
from shoal.run.demo.place import MARK, make_room
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken

FACTS: dict[str, object] = {"seed": 3}


def earlier_demo(path: Path) -> Path:
    make_room(path, keep=False, facts=FACTS)
    (path / "hub").mkdir()
    (path / "hub" / "hub.db").write_text("old")
    return path


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    assert make_room(tmp_path / "runs" / "demo", keep=False, facts=FACTS) is None
    assert json.loads((tmp_path / "runs" / "demo" / MARK).read_text()) == FACTS


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    path = earlier_demo(tmp_path / "demo")
    assert make_room(path, keep=False, facts=FACTS) is None
    assert [entry.name for entry in path.iterdir()] == [MARK]
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo"]


def test_an_earlier_demo_is_kept_beside_the_new_one_when_asked(tmp_path: Path) -> None:
    for number in (1, 2):
        path = earlier_demo(tmp_path / "demo")
        moved = make_room(path, keep=True, facts=FACTS)
        assert moved == tmp_path / f"demo-{number}"
        assert (moved / "hub" / "hub.db").read_text() == "old"
        assert [entry.name for entry in path.iterdir()] == [MARK]


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_that_is_not_a_demos_is_refused_and_untouched(tmp_path: Path, keep: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not an earlier demo's; choose another with --dir"):
        make_room(tmp_path, keep, FACTS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_link_or_a_file_in_its_place_is_refused_and_what_it_points_to_untouched(tmp_path: Path) -> None:
    real = earlier_demo(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "file").write_text("x")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="is not a folder"):
            make_room(tmp_path / name, False, FACTS)
    assert (real / "hub" / "hub.db").exists()


@pytest.mark.parametrize("busy", [".", "hub"])
def test_a_demo_that_is_running_or_still_ending_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    monkeypatch.setattr(place, "LOCK_WAIT_S", 0.0)
    path = earlier_demo(tmp_path / "demo")
    with FolderLock(path / busy).acquire(StopToken()), pytest.raises(ResourceError, match="in use by process"):
        make_room(path, False, FACTS)
    assert (path / "hub" / "hub.db").exists()
    make_room(path, False, FACTS)


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = earlier_demo(tmp_path / "demo")
    monkeypatch.chdir(path / "hub")
    with pytest.raises(ConfigError, match="from within"):
        make_room(path, False, FACTS)
    assert (path / "hub" / "hub.db").exists()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    make_room(tmp_path / "empty", False, FACTS)  # nothing is replaced there
