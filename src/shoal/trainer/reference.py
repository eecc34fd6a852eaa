"""The reference of a KL term is the policy that training began with: after a resume, too.

A checkpoint holds what has been learnt, so the reference is read from the model folder again. `start.json` in the
trainer's folder says what was in it when the run began; another content is refused, since the objective would change
in the middle of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from shoal.errors import CheckpointError
from shoal.models.folder import model_folder
from shoal.runtime.files import ensure_folder, write_atomically

START = "start.json"


def weights_digest(model: str | Path) -> str:
    """Of all weight files of a model folder, names included: the same folder, or a copy of it, has the same digest."""
    digest = blake3()
    for path in sorted(model_folder(model).glob("*.safetensors")):
        content = blake3().update_mmap(path).hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def hold_start(folder: Path, digest: Callable[[], str], *, begins: bool, needed: bool) -> None:
    """When a run begins, write down from what; when it goes on and the reference is needed, compare.

    For example after `model.path` was pointed at another folder: with a KL term that is an error, without one it
    changes nothing, since the weights come from the checkpoint.
    """
    path = folder / START
    if begins:
        ensure_folder(folder)
        write_atomically(path, json.dumps({"weights": digest()}).encode() + b"\n")
    elif needed and digest() != (recorded := _recorded(path)):
        raise CheckpointError(
            f"the model folder does not hold the weights that this run began with ({path} says {recorded[:16]}…), and "
            "trainer.objective.kl is measured from them; put that model back, or begin a new run from an export of "
            "this one (shoal export)"
        )


def _recorded(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["weights"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"trainer.objective.kl is measured from the policy that the run began with, and {path}, which says which "
            "one that was, cannot be read; put it back from a backup, or begin a new run from an export of this one "
            "(shoal export)"
        ) from error
