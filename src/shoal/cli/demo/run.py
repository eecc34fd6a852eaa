"""The demo from beginning to end.

make room ─► run folder ─► launch: hub, origin, relay, trainer, validator, two workers, and one that cheats
                              │ until the trainer is done (or Ctrl-C, a crash loop, no progress)
                              ▼
   conclude: ledger.jsonl ─► plot.png ─► recount of the exported model ─► claims ─► summary.json, exit code
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import typer
from rich.console import Console

from shoal.adversary import Cheat, find_cheat
from shoal.cli.demo.claims import Cast
from shoal.cli.demo.conclude import conclude
from shoal.cli.demo.place import make_room
from shoal.cli.folder import RunFolder
from shoal.cli.ingredients import check_ingredients
from shoal.cli.launch import Launched, LaunchOptions, launch, process_spec
from shoal.cli.program import shoal_command
from shoal.cli.recipe import Recipe
from shoal.cli.roles import role_names
from shoal.cli.view import choose_display
from shoal.protocol import load_key
from shoal.runtime.config import parse_config
from shoal.runtime.stop import StopToken, stop_on_signals


@dataclass(frozen=True)
class DemoRequest:
    """What was asked for on the command line."""

    directory: Path
    keep: bool
    seed: int
    staleness: int
    steps: int
    cheat: str
    patience_min: float


def run_demo(request: DemoRequest, console: Console) -> int:
    """Run the demo; returns the exit code: 0 only if every claim holds."""
    recipe, cheat = demo_recipe(request), find_cheat(request.cheat)
    check_ingredients(recipe)
    path = request.directory.absolute()
    moved = make_room(path, request.keep, {"seed": request.seed, "staleness": request.staleness, "cheat": cheat.name})
    if moved is not None:
        typer.echo(f"the earlier demo is kept in {moved}")
    folder = RunFolder.prepare(path, recipe)
    stop = stop_on_signals(supervising=True)  # until here, Ctrl-C simply ends this process
    launched = _launch(folder, cheat, request, stop, console)
    if launched.ending.exit_code != 0:
        return _say_why(launched, folder)
    return conclude(folder, cast_of(folder, cheat), launched.elapsed_s, stop, console)


def demo_recipe(request: DemoRequest) -> Recipe:
    text = (files("shoal.cli.demo") / "recipe.toml").read_text()
    overrides = [
        f"run.seed={request.seed}", f"run.max_staleness={request.staleness}", f"run.steps={request.steps}"
    ]  # fmt: skip
    return parse_config(text, Recipe, "the demo's recipe", overrides)


def _launch(folder: RunFolder, cheat: Cheat, request: DemoRequest, stop: StopToken, console: Console) -> Launched:
    cheater = cheater_name(folder)
    spec = process_spec(folder.path, cheater, cheat.name)
    notes = {cheater: f"cheats: {cheat.what}"}
    with choose_display(console) as display:
        return launch(folder, LaunchOptions(patience_s=request.patience_min * 60), stop, display, (spec,), notes)


def cheater_name(folder: RunFolder) -> str:
    """The cheater is the worker after the recipe's own."""
    return f"worker-{folder.recipe.worker.count}"


def cast_of(folder: RunFolder, cheat: Cheat) -> Cast:
    """Node ids from the workers' own key files: names are for people, keys are who they are."""
    ids = {path.parent.name: load_key(path).node for path in sorted(folder.path.glob("worker-*/node.key"))}
    cheater = cheater_name(folder)
    honest = {name: ids.get(name, "") for name in role_names(folder) if name.startswith("worker-")}
    return Cast(honest=honest, cheater=ids.get(cheater, ""), cheater_name=cheater, cheat=cheat)


def _say_why(launched: Launched, folder: RunFolder) -> int:
    ending = launched.ending
    if ending.exit_code == 130:
        place = shlex.quote(str(folder.path))
        typer.echo(f"stopped. To start again: {shoal_command()} demo --dir {place}")
        typer.echo(f"to go on without the cheater: {shoal_command()} run --dir {place}")
    else:
        typer.echo(f"shoal: {ending.message} (logs: {folder.path / 'logs'})", err=True)
    return ending.exit_code
