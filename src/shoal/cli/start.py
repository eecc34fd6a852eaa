"""What `shoal run` was asked for, turned into a run folder, started, shown, and summed up at the end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from shoal.cli.folder import RunFolder, without_passwords
from shoal.cli.ingredients import check_ingredients, check_machine
from shoal.cli.launch import Launched, LaunchOptions, launch
from shoal.cli.planning import announced_size, settled
from shoal.cli.program import shoal_command
from shoal.cli.progress import NOTHING_TRAINED, alarm_lines, steps_in, summary
from shoal.cli.recipe import Recipe, load_recipe
from shoal.cli.roles import command_of, role_names
from shoal.cli.view import PlainDisplay, choose_display
from shoal.environments import Environment
from shoal.errors import ConfigError, ShoalError
from shoal.models import BUILTIN
from shoal.runtime.config import dump_config
from shoal.runtime.limits import folder_bytes, show_bytes
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.sizing import RunSize, Speeds, open_settings, validators_needed
from shoal.runtime.stop import stop_on_signals

NO_MODEL = (
    "there is no model folder {path}: what needs it was not checked (weights, tokenizer, chat template, and whether "
    "prompts fit the model's context); all else was"
)
METRICS = Path("trainer") / "metrics.jsonl"
KEPT_NAMED = 3


@dataclass(frozen=True)
class RunRequest:
    recipe: Path | None
    directory: Path | None
    overrides: tuple[str, ...]
    workers: int | None


def start(request: RunRequest, mode: str, patience_min: float) -> int:
    """Do what was asked; returns the exit code. `mode` is dry-run, prepare, many or one (processes)."""
    recipe = resolve(request)
    missing = mode == "dry-run" and recipe.model.path not in BUILTIN and not Path(recipe.model.path).exists()
    environment = check_ingredients(recipe, without_model=missing)
    if missing:
        typer.echo(f"shoal: {NO_MODEL.format(path=recipe.model.path)}", err=True)
    for line in held_out_lines(recipe, len(environment.tasks("held_out"))):
        typer.echo(f"shoal: {line}", err=True)
    for line in validator_lines(recipe):
        typer.echo(f"shoal: {line}", err=True)
    if mode == "dry-run":
        if request.directory is not None:
            RunFolder.refuse_other(request.directory.absolute(), recipe)
        for line in derived_lines(recipe):
            typer.echo(f"shoal: {line}", err=True)
        typer.echo(dump_config(without_passwords(settled(recipe))), nl=False)
        return 0
    if mode != "prepare":
        check_machine(recipe)
    directory = request.directory or Path("runs") / recipe.run.name
    changes = RunFolder.changes(directory.absolute(), recipe)
    folder = RunFolder.prepare(directory.absolute(), recipe)
    for line in changes:
        typer.echo(f"shoal: {line}", err=True)
    refuse_changed(folder, environment)
    if mode == "prepare":
        typer.echo(f"{directory} is ready; everything that has to run, in this order:")
        for name in role_names(folder):
            typer.echo(f"  {shoal_command()} {shlex.join(command_of(directory, name))}")
        typer.echo(f"to contribute: {shoal_command()} join {folder.assign_endpoints().join}")
        return 0
    options = LaunchOptions("one" if mode == "one" else "many", patience_min * 60)
    display = choose_display(Console()) if mode == "many" else PlainDisplay(typer.echo)  # a debugger needs the terminal
    before = steps_in(folder.path / METRICS)
    with display:
        launched = launch(folder, options, stop_on_signals(supervising=True), display)
    if display.live:
        typer.echo()
    lines = conclusion(folder.path, launched, before)
    if launched.ending.exit_code == 0:
        lines += [ledger_line(folder.path), kept_line(folder.path)]
    for line in lines:
        typer.echo(line)
    if launched.ending.message:
        typer.echo(f"shoal: {launched.ending.message}", err=True)
    return launched.ending.exit_code or int(any(line.startswith(NOTHING_TRAINED) for line in lines))


def held_out_lines(recipe: Recipe, tasks: int) -> Iterator[str]:
    """That the held-out score will be of few tasks, or that there will be none: a score alone looks like any other.

    >>> list(held_out_lines(Recipe(), 7))
    ['only 7 tasks are held out, and trainer.evaluate_tasks is 128: held-out scores will be rough']
    """
    wanted = recipe.trainer.evaluate_tasks
    if recipe.trainer.evaluate_every == 0 or tasks >= wanted:
        return
    if tasks:
        few = f"only {tasks} task{' is' if tasks == 1 else 's are'} held out"
        yield f"{few}, and trainer.evaluate_tasks is {wanted}: held-out scores will be rough"
    else:
        yield "no task is held out, so there will be no held-out score: give more tasks, or name the split of some"


def validator_lines(recipe: Recipe) -> Iterator[str]:
    """That the validators of the recipe would hold every step up, and how many would not."""
    run, speeds = recipe.run, Speeds()
    size = RunSize.made_of(announced_size(recipe), run.group_size, run.max_new_tokens, run.max_staleness)
    tokens = run.groups_per_step * run.group_size * run.max_new_tokens * speeds.length_share
    needed = validators_needed(size, tokens, recipe.trainer.processes, speeds)
    if needed > recipe.validator.count:
        yield (
            f"validator.count is {recipe.validator.count}, and about {needed} validators keep up with the trainer "
            f"(trainer.processes is {recipe.trainer.processes}): raise it, start others (shoal validator), or "
            "every step waits for audits (`shoal plan` says how this is computed)"
        )


def derived_lines(recipe: Recipe) -> Iterator[str]:
    """Which of the settings that are shown follow from the size of the model."""
    sections = {"hub": recipe.hub, "validator": recipe.validator, "trainer": recipe.trainer}
    names = [f"{section}.{name}" for section, settings in sections.items() for name in open_settings(settings)]
    if names and announced_size(recipe).parameters:
        yield f"not set, so derived from the size of the model (`shoal plan` says how): {', '.join(names)}"
    elif names:
        yield (
            f"not set, and the model is not here, so that these are a small model's: {', '.join(names)}; "
            "`shoal plan RECIPE --parameters 32e9` says what they are for a model of 32 billion weights"
        )


def refuse_changed(folder: RunFolder, environment: Environment) -> None:
    """Other tasks or rewards than the run began with are refused by its hub; here before anything is started for it."""
    from shoal.hub.storage.opening import DATABASE_FILE, open_storage

    hub = folder.path / "hub"
    if folder.recipe.hub.database or not (hub / DATABASE_FILE).is_file():
        return  # a database elsewhere may be busy: there the hub says it
    with closing(open_storage("", hub)) as storage, storage.read() as reader:
        began = json.loads(reader.setting("run") or "{}").get("environment_digest", environment.digest)
    if began != environment.digest:
        raise ConfigError(
            f"the environment {environment.name} (tasks, options or reward file) has changed since the run in "
            f"{folder.path} began: put it back, or start a new run with another --dir"
        )


def ledger_line(path: Path) -> str:
    """Leaves the ledger as a file; that it could not be written makes no failure of a run that went well."""
    from shoal.cli.accounting.exporting import leave_ledger

    try:
        rows = leave_ledger(path)
    except ShoalError as error:
        return f"the ledger could not be written out: {error}"
    check = f"{shoal_command()} ledger verify {path}"
    return f"the ledger is in {path / 'ledger.jsonl'}: {rows:,} entries; to check it: {check}"


def kept_line(path: Path) -> str:
    """What a finished run keeps on this disk: caches of its own workers, validators and relays are removed by now."""
    sizes = {one.name: folder_bytes(one) for one in sorted(path.iterdir()) if one.is_dir()}
    parts = sorted(sizes.items(), key=lambda item: -item[1])[:KEPT_NAMED]
    named = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts)
    return f"{path} keeps {show_bytes(sum(sizes.values()))}: {named}"


def conclusion(path: Path, launched: Launched, before: int = 0) -> list[str]:
    """What a run came to, and what to do next. `before`: steps that were done when it was started."""
    lines = summary(path / METRICS, launched.status, launched.elapsed_s, before)
    if launched.ending.exit_code == 130:
        lines.append(f"to go on: {shoal_command()} run --dir {path}")
    if launched.ending.exit_code == 0:
        untrained, alarms = any(line.startswith(NOTHING_TRAINED) for line in lines), alarm_lines(path / METRICS)
        where = f"the {'unchanged' if untrained else 'trained'} model is in {path / 'trainer' / 'export'}"
        lines += [*alarms, f"{where}{_instead(path) if alarms else ''}"]
        lines += best_lines(path) if not alarms else []
    return lines


def best_lines(path: Path) -> list[str]:
    """That an earlier version has the better held-out score, and how to take it; of equal ones the newer is better."""
    scores = {int(row["step"]): row["held_out"] for row in MetricsLog(path / METRICS).rows() if "held_out" in row}
    last, best = max(scores, default=0), max(scores.values(), default=0.0)
    if not scores or scores[last] >= best:
        return []
    version = max(version for version, score in scores.items() if score == best)
    take = f"{shoal_command()} export {path} OUT --best"
    return [
        f"version {version} has the best held-out score, {best:.3f} (the last {scores[last]:.3f}); to take it: {take}"
    ]


def _instead(path: Path) -> str:
    """What to do about a model that alarms stand for."""
    export = f"{shoal_command()} export {path} OUT"
    scored = any("held_out" in row for row in MetricsLog(path / METRICS).rows())
    which = f"the best by held-out score: {export} --best" if scored else f"an earlier one: {export} --version N"
    return f", BUT ALARMS STAND: look at it before you use it; {which}"


def resolve(request: RunRequest) -> Recipe:
    """The recipe that was named, or that of the folder to resume, with everything that was changed on the way."""
    source = request.recipe
    if source is None:
        source = request.directory / "recipe.toml" if request.directory is not None else None
        if request.directory is not None and not request.directory.is_dir():
            raise ConfigError(f"there is no run folder {request.directory}; to make one: shoal run RECIPE --dir FOLDER")
        if source is None or not source.is_file():
            raise ConfigError("which recipe? for example: shoal run recipes/tiny.toml (or --dir RUN to resume a run)")
        RunFolder.open(source.parent)  # says what is wrong with a recipe that was damaged
    workers = () if request.workers is None else (f"worker.count={request.workers}",)
    return load_recipe(source, (*request.overrides, *workers))
