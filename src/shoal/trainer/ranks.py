"""Which process of a group this is, told from what `torchrun` puts into the environment. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
TELLER = "shoal"


def own_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of this process in its group; None if `torchrun` did not start it.

    >>> own_rank({"RANK": "1", "WORLD_SIZE": "2"}), own_rank({})
    (1, None)
    """
    values = os.environ if environment is None else environment
    return int(values["RANK"]) if "RANK" in values and "WORLD_SIZE" in values else None


def in_group(environment: Mapping[str, str] | None = None) -> bool:
    """Whether there are other processes beside this one.

    >>> in_group({"RANK": "0", "WORLD_SIZE": "2"}), in_group({"RANK": "0", "WORLD_SIZE": "1"}), in_group({})
    (True, False, False)
    """
    values = os.environ if environment is None else environment
    return own_rank(values) is not None and int(values["WORLD_SIZE"]) > 1


def tell_agent(why: str) -> None:
    """In a rank that ends: why, left where its agent looks for it. Does nothing in a process that has no agent."""
    if path := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError):  # the exit code still tells
            Path(path).write_text(json.dumps({"message": why, "timestamp": 0, "by": TELLER}))
