"""How the person at the terminal calls this program again: advice that is printed must work when it is copied."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def shoal_command() -> str:
    """`shoal` if that is found and is this one, else its path: `.venv/bin/shoal`."""
    return _callable("shoal")


def python_command() -> str:
    """The interpreter that shoal runs in."""
    return _callable("python")


def _callable(name: str) -> str:
    ours = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not ours.exists() or (found is not None and Path(found).parent.absolute() == ours.parent.absolute()):
        return name
    relative = os.path.relpath(ours)
    return str(ours) if relative.startswith("..") else relative
