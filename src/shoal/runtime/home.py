"""The user's own folder: identities, known hubs, kept ledger heads. `SHOAL_HOME` names another place for it."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import ResourceError
from shoal.runtime.files import resource_error

VARIABLE = "SHOAL_HOME"


def home() -> Path:
    """`~/.shoal`, or the folder that SHOAL_HOME names."""
    given = os.environ.get(VARIABLE)
    try:
        return Path(given).absolute() if given else Path.home() / ".shoal"
    except RuntimeError as error:
        raise ResourceError(f"this user has no home folder ({error}): name a folder in {VARIABLE}") from error


def make_home() -> Path:
    """The same, made if need be; nobody else may look inside."""
    path = home()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise resource_error("make the folder", path, error) from error
    return path
