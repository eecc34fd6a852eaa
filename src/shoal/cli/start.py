"""What `shoal run` was asked for, turned into a run folder and started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from shoal.cli.folder import RunFolder
from shoal.cli.ingredients import check_ingredients
from shoal.cli.launch import LaunchOptions, launch
from shoal.cli.recipe import Recipe, load_recipe
from shoal.errors import ConfigError
from shoal.runtime.config import dump_config
from shoal.runtime.stop import stop_on_signals


@dataclass(frozen=True)
class RunRequest:
    recipe: Path | None
    directory: Path | None
    overrides: tuple[str, ...]
    workers: int | None


def start(request: RunRequest, mode: str, patience_min: float) -> int:
    """Do what was asked; returns the exit code. `mode` is dry-run, prepare, many or one (processes)."""
    recipe = resolve(request)
    check_ingredients(recipe)
    if mode == "dry-run":
        typer.echo(dump_config(recipe), nl=False)
        return 0
    directory = request.directory or Path("runs") / recipe.run.name
    folder = RunFolder.prepare(directory.absolute(), recipe)
    if mode == "prepare":
        typer.echo(
            f"{directory} is ready; start: shoal hub --dir {directory}, shoal relay --origin --dir {directory}, …"
        )
        typer.echo(f"to contribute: shoal join {folder.assign_endpoints().join}")
        return 0
    options = LaunchOptions("one" if mode == "one" else "many", patience_min * 60)
    ending = launch(folder, options, stop_on_signals(), lambda line: typer.echo(line))
    if ending.message:
        typer.echo(f"shoal: {ending.message}", err=True)
    return ending.exit_code


def resolve(request: RunRequest) -> Recipe:
    """The recipe that was named, or that of the folder to resume, with everything that was changed on the way."""
    source = request.recipe
    if source is None:
        source = request.directory / "recipe.toml" if request.directory is not None else None
        if request.directory is not None and not request.directory.is_dir():
            raise ConfigError(f"there is no run folder {request.directory}; to make one: shoal run RECIPE --dir FOLDER")
        if source is None or not source.is_file():
            raise ConfigError("which recipe? for example: shoal run recipes/tiny.toml (or --dir RUN to resume a run)")
    workers = () if request.workers is None else (f"worker.count={request.workers}",)
    return load_recipe(source, (*request.overrides, *workers))
