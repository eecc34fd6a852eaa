"""The demo's recipe, its cast and its folder. What an earlier demo left is replaced, or moved aside with --keep.

Only a folder that says it is a demo's (`demo.json`, written before anything else) is ever removed, and only while
nobody runs in it.
"""

from __future__ import annotations

import itertools
import json
import shutil
from importlib.resources import files
from pathlib import Path

from shoal.adversary import Cheat
from shoal.errors import ConfigError
from shoal.protocol import load_key
from shoal.run.demo.claims import Cast
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe
from shoal.run.roles import role_names
from shoal.runtime.config import parse_config
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken

MARK = "demo.json"
LOCK_WAIT_S = 15.0  # for a demo that is just ending


def make_room(path: Path, keep: bool, facts: dict[str, object]) -> Path | None:
    """An empty, marked folder at `path`; returns where an earlier demo was moved to, if one was kept."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{path} is not a folder; choose another with --dir")
    moved = _clear(path, keep) if path.exists() and any(ensure_folder(path).iterdir()) else None
    ensure_folder(path)
    write_atomically(path / MARK, json.dumps(facts, indent=2).encode() + b"\n")
    return moved


def _clear(path: Path, keep: bool) -> Path | None:
    if not (path / MARK).is_file():
        raise ConfigError(f"the folder {path} is not empty and not an earlier demo's; choose another with --dir")
    if Path.cwd().is_relative_to(path.resolve()):
        raise ConfigError(f"this is called from within {path}, which it replaces: go to another folder, or use --dir")
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    aside = next(name for name in numbered if not name.exists()) if keep else None
    with FolderLock(path).acquire(StopToken(), LOCK_WAIT_S):
        for lock in path.glob("*/.lock"):  # a supervisor that was killed leaves processes that need a moment to end
            FolderLock(lock.parent).acquire(StopToken(), LOCK_WAIT_S).release()
        try:
            if aside is not None:
                path.rename(aside)
            else:
                shutil.rmtree(path)
        except OSError as error:
            raise resource_error("replace the earlier demo in", path, error) from error
    return aside


def demo_recipe(seed: int, staleness: int, steps: int) -> Recipe:
    text = (files("shoal.run.demo") / "recipe.toml").read_text()
    overrides = [f"run.seed={seed}", f"run.max_staleness={staleness}", f"run.steps={steps}"]
    return parse_config(text, Recipe, "the demo's recipe", overrides)


def cheater_name(folder: RunFolder) -> str:
    """The cheater is the worker after the recipe's own."""
    return f"worker-{folder.recipe.worker.count}"


def cast_of(folder: RunFolder, cheat: Cheat) -> Cast:
    """Node ids from the workers' own key files: names are for people, keys are who they are."""
    ids = {path.parent.name: load_key(path).node for path in sorted(folder.path.glob("worker-*/node.key"))}
    cheater = cheater_name(folder)
    honest = {name: ids.get(name, "") for name in role_names(folder) if name.startswith("worker-")}
    return Cast(honest=honest, cheater=ids.get(cheater, ""), cheater_name=cheater, cheat=cheat)
