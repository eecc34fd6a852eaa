"""Where an export may go. Apart from `export` because the answer is wanted before torch is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

MARK = "shoal.json"
"""Marks an export, by what is in it. A folder without it is somebody's and is never overwritten."""

HIDDEN = ".exporting"
"""Where an export into a folder that is there is written first."""


def refuse_foreign(destination: Path) -> None:
    """Whatever is at the destination must be an export, an empty folder, or nothing."""
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_dir():
        names = {entry.name for entry in destination.iterdir()}
        if names <= {HIDDEN} or _facts(destination) is not None:
            return
    raise ConfigError(f"{destination} exists and is not an export of shoal; choose another folder, or move it away")


def written_files(folder: Path) -> tuple[str, ...]:
    """The files that the export in a folder consists of, as it says itself; none if it does not say so."""
    listed = (_facts(folder) or {}).get("files")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return tuple(name for name in names if name not in ("", ".", "..") and Path(name).name == name)


def _facts(folder: Path) -> dict[str, Any] | None:
    """What the mark of an export says; None if there is none, or a file of that name that no export wrote."""
    try:
        facts = json.loads((folder / MARK).read_bytes())
        progress = facts["progress"]
        named = isinstance(progress["run"], str)
        counted = all(type(progress[name]) is int for name in ("version", "incarnation"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if named and counted else None
