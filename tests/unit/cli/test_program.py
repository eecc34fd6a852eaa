"""Advice that is printed works when it is copied."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.runtime.text import install_command, shoal_command


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "shoal"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return folder


def test_from_outside_the_environment_its_path_is_given(venv: Path) -> None:
    assert (shoal_command(), shoal_command("python")) == (".venv/bin/shoal", ".venv/bin/python")
    assert install_command("wandb") == ".venv/bin/python -m pip install wandb"


def test_in_another_folder_the_whole_path_is_given(
    venv: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert shoal_command() == str(venv / "shoal")


def test_in_the_active_environment_the_name_is_enough(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(venv))
    assert (shoal_command(), shoal_command("python")) == ("shoal", "python")


def test_another_shoal_on_the_path_is_not_meant(
    venv: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "shoal").write_text("#!/bin/sh\n")
    (other / "shoal").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    assert shoal_command() == ".venv/bin/shoal"
