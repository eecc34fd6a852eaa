"""Where an export may go. Apart from `export` because the answer is wanted before torch is loaded."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError

MARK = "shoal.json"
"""Marks an export. A folder without it is somebody's and is never overwritten."""


def refuse_foreign(destination: Path) -> None:
    """Whatever is at the destination must be an export, an empty folder, or nothing."""
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_dir() and ((destination / MARK).is_file() or not any(destination.iterdir())):
        return
    raise ConfigError(f"{destination} exists and is not an export of shoal; choose another folder, or move it away")
