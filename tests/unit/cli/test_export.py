"""`shoal export` refuses what it can before torch is loaded: a forked command fails if it has loaded it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import fork
from shoal.errors import ConfigError
from shoal.run.export import export_run
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe


def export(run: Path, out: Path) -> tuple[int, str]:
    ran = fork.run(run.parent, "export", str(run), str(out))
    return ran.returncode, ran.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"hub": {"port": 0}}))
    (folder.path / "trainer" / "checkpoints" / "0.0").mkdir(parents=True)
    return folder.path


def test_a_folder_that_is_no_runs(tmp_path: Path) -> None:
    code, said = export(tmp_path, tmp_path / "out")
    assert code == 2
    assert said == f"shoal: {tmp_path} is not a run folder (it has no recipe.toml); make one with: shoal run RECIPE\n"


def test_a_run_that_has_no_checkpoint_yet(run: Path, tmp_path: Path) -> None:
    (run / "trainer" / "checkpoints" / "0.0").rmdir()
    code, said = export(run, tmp_path / "out")
    assert code == 5
    assert "there is no checkpoint in" in said


def test_a_target_that_is_somebody_elses(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    code, said = export(run, tmp_path / "out")
    assert code == 2
    assert "exists and is not an export of shoal; choose another folder" in said
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_file_called_shoal_json_makes_no_export(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shoal.json").write_text("hi")
    (tmp_path / "out" / "precious.txt").write_text("mine")
    code, said = export(run, tmp_path / "out")
    assert code == 2
    assert "exists and is not an export of shoal; choose another folder" in said
    assert (tmp_path / "out" / "precious.txt").read_text() == "mine"


def test_a_target_below_a_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = export(run, tmp_path / "file" / "out")
    assert code == 3
    assert "a part of the path is a file, not a folder" in said


def test_two_checkpoints_at_once(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--best and --version name two checkpoints"):
        export_run(run, tmp_path / "out", best=True, version=3)
