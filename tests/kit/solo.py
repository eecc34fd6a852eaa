"""Solo runs for tests: with another run's keys and secret, so that both draw the same; and what they leave."""

import json
import shutil
from pathlib import Path
from typing import Any

from shoal.client.hub import TRAINING_BATCH_LIMITS
from shoal.protocol import unpack
from shoal.run.folder import SOLO, RunFolder
from shoal.run.recipe import Recipe
from shoal.run.solo import WrittenBatch, run_solo, solo_recipe
from shoal.runtime import write_atomically
from shoal.runtime.config import dump_config
from shoal.runtime.stop import StopToken


def solo_folder(path: Path, recipe: dict[str, dict[str, Any]]) -> RunFolder:
    return RunFolder.prepare(path, solo_recipe(Recipe.model_validate(recipe), path))


def solo_twin(run: RunFolder, path: Path) -> RunFolder:
    """The same run, solo: its keys, its secret."""
    shutil.copytree(run.path / "keys", path / "keys")
    (path / "hub").mkdir()
    shutil.copy(run.path / "hub" / "secret", path / "hub" / "secret")
    folder = RunFolder(path, solo_recipe(run.recipe, path))
    write_atomically(path / "recipe.toml", dump_config(folder.recipe).encode())
    return folder


def solo_digests(folder: RunFolder) -> list[str]:
    """By version."""
    lines = (folder.path / "hub" / "policies.jsonl").read_text().splitlines()
    return [json.loads(line)["digest"] for line in lines]


def solo_batches(folder: RunFolder) -> list[WrittenBatch]:
    files = sorted((folder.path / SOLO).iterdir())
    return [unpack(each.read_bytes(), WrittenBatch, TRAINING_BATCH_LIMITS) for each in files]


def live(path: str) -> None:
    """One life of a solo run."""
    run_solo(RunFolder.open(Path(path)), StopToken(), print)
