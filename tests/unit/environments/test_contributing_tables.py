"""CONTRIBUTING.md names every optional interface and every list that an extension goes into."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
INTERFACES = ("shoal.environments.protocol", "shoal.environments.graders")
LISTS = {
    "GRADERS": "shoal.environments.graders", "FORMATS": "shoal.environments.formats",
    "BY_COLUMNS": "shoal.environments.formats", "TOOLS": "shoal.environments.tools", "PartJudge": "shoal.rewards.panel",
    "panel_of": "shoal.rewards.panel",
}  # fmt: skip


@pytest.mark.parametrize("module", INTERFACES)
def test_every_interface_is_named(module: str) -> None:
    classes = vars(importlib.import_module(module)).values()
    names = [c.__name__ for c in classes if getattr(c, "_is_protocol", False) and c.__module__ == module]
    assert names
    assert [name for name in names if f"`{name}`" not in TEXT] == []


@pytest.mark.parametrize("name", LISTS)
def test_every_list_is_named_and_there(name: str) -> None:
    assert f"`{name}`" in TEXT
    assert hasattr(importlib.import_module(LISTS[name]), name)
