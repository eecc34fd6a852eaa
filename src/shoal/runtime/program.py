"""How the person at the terminal calls programs of this installation: advice that is printed must work when copied."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def shoal_command() -> str:
    """`shoal` if that is found and is this one, else its path: `.venv/bin/shoal`."""
    return command("shoal")


def python_command() -> str:
    """The interpreter that shoal runs in."""
    return command("python")


def install_command(package: str) -> str:
    """What installs a package where shoal is: `.venv/bin/python -m pip install tensorboard`."""
    return f"{python_command()} -m pip install {package}"


def command(name: str) -> str:
    ours = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not ours.exists() or (found is not None and Path(found).parent.absolute() == ours.parent.absolute()):
        return name
    relative = os.path.relpath(ours)
    return str(ours) if relative.startswith("..") else relative
