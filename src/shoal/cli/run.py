"""`shoal run`, `shoal demo`, `shoal join`, and one command for each role of a run."""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Exit, Option, echo

from shoal.cli import options
from shoal.errors import UserError
from shoal.runtime import STOPPED_CODE, SUPERVISED, MachineLimits, StopToken, is_verbose, shoal_command, stop_on_signals
from shoal.runtime.extras import require
from shoal.runtime.limits import ALL_DAY, Hours

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.adversary import Cheat
    from shoal.run.folder import RunFolder

NEXT = """{path}
  summary.json  ledger.jsonl                 what you just saw, as files
  trainer/export/                            the model, for transformers
  trainer/rollouts/  trainer/metrics.jsonl   what it was trained on (Parquet), and how it went
next: your own reward is one Python function; this writes one, with a recipe and a README:
  {shoal} init mine
the algorithm in one file: {python} {examples}/one_file_rl.py"""
STALENESS = "How many steps old the policy of trained work may be; 0 is synchronous."
SOURCE = (
    "A recipe to start a run (a TOML file, or a name that `shoal init` lists), or a run to resume: its folder or name."
)
RUN = "With a recipe: the run's folder, or a name for it under runs/. (default: runs/ and run.name of the recipe)"
SOLO = "Everything in this process: nobody else takes part, no proofs, no ledger. For one GPU of one's own."
PREPARE = "Make the run's folder, and print the commands that start each role on its own."
REPLACED = "Where to run: a folder, or a name under runs/. An earlier demo there is replaced. (default: runs/demo)"
CHEAT = "What the third worker does; docs/guides/attack-your-run.md lists the cheats."
WHERE = "The run's join URL, http://HOST:PORT/#KEY, or those of all its hubs; or a run on this machine."
ATTACK = "Cheat in this way, to attack a run of your own."
MIRROR = "Keep the mirror here. (default: ~/.shoal/RUN/relay)"
JOIN_FOLDER = "Keep keys, weights and unsent work here. (default: ~/.shoal/RUN/worker)"
NAME = "The public name of this machine. (default: node- and the start of its id)"
PROJECT = "The folder to make; the run gets its name."
SANDBOX = "Hide network, home folder and other processes from the worker; needs bubblewrap."
MEMORY = "Most memory for the model, for example 8GB. (default: 80 % of the free)"
GPUS = "One worker on each of these GPUs, for example 0,2. (default: all GPUs)"
LEFT = "What was joined: the join URL, the run's name in ~/.shoal, or the worker's folder."
LEAVE_WAIT = "How long to wait for the workers to send what is finished and to end."
HOURS = "Work only at these hours of the local time, for example 22-7 or 12:30-14,20-24. (default: all day)"
IDLE = "Work only while other programs leave the processor idle (Linux); their use of a GPU is not seen."
WORKERS = "This many workers on the processor. (default: 1)"
BANDWIDTH = "Fastest download, for example 20Mbit/s. (default: no limit)"
OWNER = "The file with your owner's key: what this machine earns is yours."
TRUSTED = "The certificate that the run's owner made (shoal admin add-worker): this machine is checked by sample."
JOIN_WAIT = f"{options.WAIT_HELP} (default: 10; for a run on this machine, until its hub answers)"
VOUCH = "The same, by a file that `shoal key vouch` wrote, without your key on this machine."


def run(
    source: Annotated[str | None, Argument(metavar="RECIPE|RUN", help=SOURCE)] = None,
    directory: Annotated[Path | None, Argument(metavar="RUN", parser=options.run_folder, help=RUN)] = None,
    overrides: options.Settings = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything, print the whole recipe, and stop.")] = False,
    prepare: Annotated[bool, Option("--prepare", help=PREPARE)] = False,
    solo: Annotated[bool, Option("--solo", help=SOLO)] = False,
    patience_s: options.DerivedPatience = None,
) -> None:
    """Start and supervise a whole run on this machine, or resume one. Ctrl-C stops it; the same command resumes it."""
    require("data" if dry_run or prepare else "trainer", "shoal run")
    recipe = None if source is None else Path(source)
    from shoal.run.recipe import pinned, shipped_recipe

    if recipe is not None and directory is None and recipe.suffix != ".toml" and not recipe.is_file():
        directory = options.run_folder(str(source))
        recipe = recipe if shipped_recipe(recipe) and not directory.exists() else None
    from shoal.run.estimate import patience_of, with_derived_settings
    from shoal.run.folder import RunFolder, resolve, without_passwords
    from shoal.run.preflight import advice, check_ingredients, check_machine
    from shoal.runtime.config import dump_config

    resolved = resolve(recipe, directory, overrides or ())
    place = directory or Path("runs") / resolved.run.name
    if solo or RunFolder.is_solo(place):
        from shoal.run.solo import solo_recipe

        solo, resolved = True, solo_recipe(resolved, place)
        if prepare:
            raise UserError("--prepare: a solo run is one process, which --solo alone starts")
    resolved = pinned(resolved, RunFolder.stored(place), weights=not dry_run)
    environment = check_ingredients(resolved, _warn if dry_run else None)
    for line in advice(resolved, environment, solo):
        _warn(line)
    if dry_run:
        if directory is not None:
            RunFolder.refuse_other(directory.absolute(), resolved, changed=recipe is None)
        try:
            check_machine(resolved)
        except UserError as error:  # the recipe may be for another machine
            _warn(f"a run is refused here: {error}")
        shown, derived = with_derived_settings(resolved)
        return echo(f"{derived}{dump_config(without_passwords(shown))}", nl=False)
    if not prepare:
        check_machine(resolved)
    directory = place
    made = RunFolder.prepare(directory.absolute(), resolved, changed=recipe is None)
    if solo:
        raise Exit(_solo(made))
    if not prepare:
        raise Exit(_launch(made, patience_s or patience_of(resolved)))
    from shoal.run.roles import command_of, role_names

    endpoints = made.assign_endpoints()  # a port that is taken is said before anything is promised
    echo(f"{directory} is ready; everything that has to run, in this order:")
    for name in role_names(made):
        echo(f"  {shoal_command()} {shlex.join(command_of(directory, name))}")
    return echo(f"to contribute: {shoal_command()} join {endpoints.join}")


def _warn(line: str) -> None:
    echo(f"shoal: {line}", err=True)


def _solo(folder: RunFolder) -> int:
    from shoal.run.launch import METRICS, NOTHING_TRAINED, Launched, conclusion, kept_line, steps_in
    from shoal.run.solo import run_solo
    from shoal.runtime import logs
    from shoal.runtime.supervise import Ending

    before, began_s, stop = steps_in(folder.path / METRICS), time.monotonic(), stop_on_signals()
    echo(f"solo run {folder.run_id} in {folder.path}, log in {folder.path / 'logs' / 'solo.log'}")
    logs.setup("solo", folder.path / "logs" / "solo.log", stderr=False)
    run_solo(folder, stop, echo)
    code = STOPPED_CODE if stop.is_set() else 0
    lines = conclusion(folder.path, Launched(Ending(code, ""), None, time.monotonic() - began_s), before)
    echo("\n".join([*lines, kept_line(folder.path)]))
    return code or int(any(line.startswith(NOTHING_TRAINED) for line in lines))


def _launch(folder: RunFolder, patience_s: float) -> int:
    from rich.console import Console

    from shoal.cli.view import choose_display
    from shoal.run.launch import METRICS, NOTHING_TRAINED, conclusion, kept_line, launch, ledger_line, steps_in

    display, before = choose_display(Console()), steps_in(folder.path / METRICS)
    with display:
        launched = launch(folder, patience_s, stop_on_signals(supervising=True), display)
    lines, code = conclusion(folder.path, launched, before), launched.ending.exit_code
    lines += [ledger_line(folder.path), kept_line(folder.path)] if code == 0 else []
    echo("\n".join([*([""] if display.live else []), *lines]))
    if launched.ending.message:
        _warn(launched.ending.message)
    return code or int(any(line.startswith(NOTHING_TRAINED) for line in lines))


def demo(
    directory: Annotated[Path | None, Argument(metavar="RUN", parser=options.run_folder, help=REPLACED)] = None,
    seed: options.Seed = 0,
    staleness: Annotated[int, options.whole("--staleness", STALENESS, 0, 16)] = 2,
    steps: Annotated[int, options.whole("--steps", "How many training steps to make.", 1, 100_000)] = 20,
    cheat: Annotated[str, options.value("--cheat", "NAME", CHEAT)] = "best-of",
    patience_s: options.Patience = 180,
) -> None:
    """Watch a model learn on eight processes of which one cheats and is caught. It takes minutes and no GPU."""
    require("trainer", "shoal demo")
    from rich.console import Console

    from shoal.adversary import find_cheat
    from shoal.cli.view import choose_display
    from shoal.run.demo.claims import cheater_name, demo_recipe, replace_earlier_demo
    from shoal.run.folder import RunFolder
    from shoal.run.launch import launch, process_spec
    from shoal.run.preflight import check_ingredients

    recipe, chosen = demo_recipe(seed, staleness, steps), find_cheat(cheat)
    check_ingredients(recipe)
    path = (directory or Path("runs", "demo")).absolute()
    replace_earlier_demo(path, {"seed": seed, "staleness": staleness, "cheat": chosen.name})
    folder = RunFolder.prepare(path, recipe)
    stop, console = stop_on_signals(supervising=True), Console()  # until here, Ctrl-C simply ends this process
    cheater = cheater_name(folder)
    with choose_display(console) as display:
        spec, notes = process_spec(folder.path, cheater, chosen.name), {cheater: f"cheats: {chosen.what}"}
        launched = launch(folder, patience_s, stop, display, (spec,), notes)
    ending, place = launched.ending, shlex.quote(str(path))
    if ending.exit_code == STOPPED_CODE:
        given = f"--seed {seed} --staleness {staleness} --steps {steps} --cheat {chosen.name} --patience {patience_s:g}"
        echo(f"stopped. To start again: {shoal_command()} demo {place} {given}")
        echo(f"to resume without the cheater: {shoal_command()} run {place}")
    elif ending.exit_code != 0:
        echo(f"shoal: {ending.message} (logs: {folder.path / 'logs'})", err=True)
    raise Exit(ending.exit_code or conclude(folder, chosen, launched.elapsed_s, stop, console))


def conclude(folder: RunFolder, cheat: Cheat, elapsed_s: float, stop: StopToken, console: Console) -> int:
    """Check every claim and write what was found; the exit code is 0 only if all hold."""
    from rich.markup import escape
    from rich.table import Table

    from shoal.run.demo.claims import check, participants_of
    from shoal.run.recipe import shipped
    from shoal.runtime import write_atomically

    console.print("checking what came out: the ledger, the rollouts, the exported model …")
    found = []
    for claim in check(folder, participants_of(folder, cheat), stop):
        found.append(asdict(claim))
        sign, line = "[green]✓[/]" if claim.holds else "[bold red]✗[/]", Table.grid(padding=(0, 1))
        line.add_row(sign, f"[bold]{claim.name:<11}[/]", escape(claim.sentence))
        one_line = f"{sign} {claim.name:<11} {escape(claim.sentence)}"  # for a search in a log
        console.print(line if console.is_terminal else one_line, highlight=False, soft_wrap=not console.is_terminal)
    if stop.is_set():
        console.print("stopped before everything was checked")
        return STOPPED_CODE
    results = {"elapsed_s": round(elapsed_s, 1), "claims": found}
    write_atomically(folder.path / "summary.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    examples = os.path.relpath(shipped("examples"))
    examples = str(shipped("examples")) if examples.startswith("..") else examples
    following = NEXT.format(path=folder.path, shoal=shoal_command(), python=shoal_command("python"), examples=examples)
    console.print(following, markup=False, highlight=False, soft_wrap=True)
    return int(not all(claim["holds"] for claim in found))


def init(name: Annotated[Path | None, Argument(metavar="NAME", help=PROJECT)] = None) -> None:
    """Write a commented recipe, a reward file and a README into a new folder: the start of a run of your own. Without
    NAME, list the recipes that come with shoal."""
    from shoal.cli.printing import console, sheet
    from shoal.run.recipe import make_project, shipped, shipped_recipes

    if name is None:
        console().print(sheet(["recipe", "what it is"], [*shipped_recipes().items()], ["what it is"]))
        echo(f"to start one: {shoal_command()} run tiny (changed: --set SECTION.KEY=VALUE)")
        return echo(f"to write your own: {shoal_command()} init NAME; the files are in {shipped('recipes')}")
    echo("\n".join(f"wrote {path}" for path in make_project(name)))
    return echo(f"next: cd {shlex.quote(str(name))} && {shoal_command()} run {name.name}.toml")


def hub(directory: options.Run) -> None:
    """Start the hub of a run: it gives out work, receives it, and writes the ledger. It needs no torch."""
    require("data", "shoal hub")
    role("hub", directory)


def trainer(directory: options.Run) -> None:
    """Start the trainer of a run: it trains on accepted groups and publishes policies. Several processes on several
    machines are started by torchrun … -m shoal.cli trainer RUN."""
    require("trainer", "shoal trainer")
    from shoal.trainer.settings import own_rank

    rank = own_rank()
    role(f"trainer-rank-{rank}" if rank else "trainer", directory)


def validator(directory: options.Run, index: options.Index = 0) -> None:
    """Start a validator of a run: it checks submissions and computes their rewards."""
    require("trainer", "shoal validator")
    role(f"validator-{index}", directory)


def relay(
    context: Context,
    where: options.Place,
    origin: Annotated[bool, Option("--origin", help="Serve what the trainer of this run's folder publishes.")] = False,
    index: options.Index = 0,
    upstreams: Annotated[list[str] | None, options.value("--upstream", "URL", options.UPSTREAM_HELP)] = None,
    peers: options.Peers = None,
    folder: Annotated[Path | None, options.value("--folder", "FOLDER", MIRROR)] = None,
    host: options.Host = "0.0.0.0",
    port: options.Port = 8472,
    keep: options.KeepVersions = 3,
    max_disk: options.MaxDisk = None,
    wait_s: options.Wait = 10,
) -> None:
    """Mirror the weights of a run and serve them. For a run's folder everything is in its recipe; options other than
    --origin and --index are for a run elsewhere, given by its URL. It needs no torch."""
    if "://" not in where:
        _refuse_others(context, where, "origin", "index")
        return role("origin" if origin else f"relay-{index}", Path(where))
    if origin:
        raise UserError(f"--origin: only for the run's folder, on the machine of its trainer, not for {where}")
    from shoal.run.join import run_standalone_relay
    from shoal.shardcast import RelayConfig

    config = RelayConfig(Path(), tuple(upstreams or ()), "", "", host, port, tuple(peers or ()), keep, max_disk)
    return run_standalone_relay(where, wait_s, folder, config)


def join(
    context: Context,
    where: Annotated[list[str], Argument(metavar="URL|RUN", help=WHERE)],
    index: Annotated[int, options.whole("--index", "For a run on this machine: the number of this worker.")] = 0,
    folder: Annotated[Path | None, options.value("--folder", "FOLDER", JOIN_FOLDER)] = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    name: Annotated[str | None, options.value("--name", "NAME", NAME)] = None,
    wait_s: Annotated[float | None, options.number("--wait", "SECONDS", JOIN_WAIT, 0, options.DAY_S)] = None,
    cheat: Annotated[str | None, options.value("--cheat", "NAME", ATTACK)] = None,
    owner: Annotated[Path | None, options.value("--owner", "FILE", OWNER)] = None,
    vouch: Annotated[Path | None, options.value("--vouch", "FILE", VOUCH)] = None,
    check: Annotated[bool, Option("--check/--no-check", help="Look at this machine before work begins.")] = True,
    sandbox: Annotated[bool, Option("--sandbox", help=SANDBOX)] = False,
    max_memory: Annotated[str | None, options.value("--max-memory", "SIZE", MEMORY)] = None,
    max_disk: Annotated[str | None, options.value("--max-disk", "SIZE", options.DISK_HELP)] = None,
    max_bandwidth: Annotated[str | None, options.value("--max-bandwidth", "RATE", BANDWIDTH)] = None,
    gpu: Annotated[str | None, options.value("--gpu", "LIST", GPUS)] = None,
    workers: Annotated[int | None, options.whole("--workers", WORKERS, 1, 1024)] = None,
    trusted: Annotated[Path | None, options.value("--trusted", "FILE", TRUSTED)] = None,
    hours: Annotated[str | None, options.value("--hours", "HOURS", HOURS)] = None,
    idle: Annotated[bool, Option("--idle", help=IDLE)] = False,
) -> int:
    """Contribute this machine, with all its GPUs, to a run: generate rollouts until the run ends, or Ctrl-C."""
    require("worker", "shoal join")
    if cheat is not None:
        from shoal.adversary import find_cheat

        find_cheat(cheat)
    limits = MachineLimits.of_options(max_memory, max_disk, max_bandwidth)
    urls = [each for each in where if "://" in each]
    if not urls and len(where) == 1:
        _refuse_others(context, where[0], "index", "cheat", "wait_s")
        directory = options.run_folder(where[0])
        if wait_s is not None:
            from shoal.run.launch import asking_hub

            with asking_hub(str(directory), wait_s) as hub:
                hub.trusted_run()
        role(f"worker-{index}", directory, cheat)
        return 0
    if len(urls) != len(where):
        raise UserError(f"{' '.join(where)}: give one run on this machine, or the join URLs of one run")
    from rich.console import Console

    from shoal.cli.view import live_rows
    from shoal.run.join import JoinRequest, run_joined_worker

    open_hours = ALL_DAY if hours is None else Hours.parse(hours)
    given = (tuple(urls), folder, engine, device, dtype, name, 10 if wait_s is None else wait_s, cheat, owner, vouch)
    request = JoinRequest(*given, check, limits, sandbox, gpu, workers, trusted, open_hours, idle)
    with live_rows(Console(stderr=True)) as show:
        return run_joined_worker(request, show)


def leave(
    where: Annotated[str, Argument(metavar="RUN", help=LEFT)],
    pause: Annotated[bool, Option("--pause", help="Give running work back, and rest until --resume.")] = False,
    resume: Annotated[bool, Option("--resume", help="End the pause.")] = False,
    wait_s: Annotated[float, options.number("--wait", "SECONDS", LEAVE_WAIT, 0, options.DAY_S)] = 120,
) -> None:
    """Stop, pause or resume the workers of this machine that have joined a run; shows what they have earned."""
    require("worker", "shoal leave")
    from shoal.run import join as joined

    if pause and resume:
        raise UserError("--pause and --resume exclude each other")
    folder = joined.joined_folder(where)
    echo(joined.pause(folder, pause) if pause or resume else joined.leave(folder, wait_s))


def _refuse_others(context: Context, where: str, *taken: str) -> None:
    """For a run's folder, options that would be dropped without a word: all that were given and are not `taken`."""
    others = (each for each in context.command.params if each.name not in ("where", *taken))
    given = (each for each in others if "DEFAULT" not in repr(context.get_parameter_source(each.name or "")))
    if wrong := [(each.secondary_opts or each.opts)[0] for each in given]:
        raise UserError(f"{', '.join(wrong)}: only for a run's URL; what is in {where} is set by its recipe")


def role(name: str, directory: Path, cheat: str | None = None) -> None:
    """A rank of the trainer beyond the first needs no run folder: on another machine there may be none."""
    from shoal.run.roles import start_role

    supervised = SUPERVISED in os.environ
    stop = start_role(name, directory if (directory / "recipe.toml").is_file() else None, is_verbose())
    if name.startswith("trainer-rank-"):
        from shoal.trainer.shards import run_rank

        run_rank(stop)
    else:
        from shoal.run.folder import RunFolder
        from shoal.run.roles import run_role

        run_role(RunFolder.open(directory.absolute()), name, stop, cheat)
    if supervised and stop.is_set():  # so that the supervisor does not take it for done
        raise Exit(STOPPED_CODE)
