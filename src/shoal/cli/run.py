"""`shoal run`, `shoal demo`, and one command for each role: of a run's folder (--dir), or of a run elsewhere."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, echo

from shoal.cli import options
from shoal.errors import UserError
from shoal.runtime.limits import MachineLimits
from shoal.runtime.logs import is_verbose
from shoal.runtime.stop import STOPPED_CODE, SUPERVISED, StopToken, stop_on_signals
from shoal.runtime.text import shoal_command

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.adversary import Cheat
    from shoal.run.folder import RunFolder

NEXT = """{path}
  summary.json  ledger.jsonl                 what you just saw, as files
  trainer/export/                            the model, for transformers
  trainer/rollouts/  trainer/metrics.jsonl   what it was trained on (Parquet), and how it went
next: your own reward is one Python function:
  {shoal} run recipes/tiny.toml --dir runs/mine --set environment.file=examples/custom_reward.py
the algorithm in one file: {python} examples/one_file_rl.py"""
RUN = "The run's folder. (default: runs/NAME)"
PREPARE = "Make the folder, then start each role yourself: shoal hub --dir RUN, …"
REPLACED = "Where to run; an earlier demo there is replaced."
THIRD = "What the third worker does; docs/guides/attack-your-run.md lists them."
URLS = "The join URL http://host:port/#…, or several."
SANDBOX = "Work without network, home and other processes in sight (needs bubblewrap)."
MEMORY = "Most memory for the model, e.g. 8GB. (default: 80 % of the free)"
DISK = "Most disk for weights, e.g. 40GB. (default: 80 % of the free)"
GPUS = "One worker on each of these GPUs, e.g. 0,2. (default: all)"
WORKERS = "So many workers on the processor."
BANDWIDTH = "Fastest download, e.g. 20Mbit/s. (default: no limit)"


def run(
    recipe: Annotated[Path | None, Argument(metavar="RECIPE", help="A recipe (TOML).")] = None,
    directory: Annotated[Path | None, Option("--dir", metavar="RUN", help=RUN)] = None,
    overrides: options.Settings = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the resolved recipe and do nothing.")] = False,
    prepare: Annotated[bool, Option("--prepare", help=PREPARE)] = False,
    patience_min: options.PatienceMin = 10,
) -> None:
    """Start and supervise a whole run on this machine. An existing folder is resumed."""
    from shoal.run.estimate import with_derived_settings
    from shoal.run.folder import RunFolder, resolve, without_passwords
    from shoal.run.preflight import advice, check_ingredients, check_machine
    from shoal.runtime.config import dump_config

    resolved = resolve(recipe, directory, overrides or ())
    environment = check_ingredients(resolved, _warn if dry_run else None)
    for line in advice(resolved, environment):
        _warn(line)
    if dry_run:
        if directory is not None:
            RunFolder.refuse_other(directory.absolute(), resolved)
        shown, derived = with_derived_settings(resolved)
        return echo(f"{derived}{dump_config(without_passwords(shown))}", nl=False)
    if not prepare:
        check_machine(resolved)
    directory = directory or Path("runs") / resolved.run.name
    made = RunFolder.prepare(directory.absolute(), resolved)
    if not prepare:
        raise Exit(_launch(made, patience_min * 60))
    from shoal.run.roles import command_of, role_names

    echo(f"{directory} is ready; everything that has to run, in this order:")
    for name in role_names(made):
        echo(f"  {shoal_command()} {shlex.join(command_of(directory, name))}")
    return echo(f"to contribute: {shoal_command()} join {made.assign_endpoints().join}")


def _warn(line: str) -> None:
    echo(f"shoal: {line}", err=True)


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
    directory: Annotated[Path, Option("--dir", metavar="FOLDER", help=REPLACED)] = Path("runs/demo"),
    seed: Annotated[int, Option(min=0, max=2**31, help="Other tasks, other samples.")] = 0,
    staleness: Annotated[int, Option(min=0, max=16, help="0: synchronous.")] = 2,
    steps: Annotated[int, Option(min=1, max=100_000, help="Training steps.")] = 20,
    cheat: Annotated[str, Option(help=THIRD)] = "best-of",
    patience_min: options.PatienceMin = 3,
) -> None:
    """Watch a model learn on eight processes, one of which cheats and is caught; minutes, no GPU."""
    from rich.console import Console

    from shoal.adversary import find_cheat
    from shoal.cli.view import choose_display
    from shoal.run.demo.claims import cheater_name, demo_recipe, replace_earlier_demo
    from shoal.run.folder import RunFolder
    from shoal.run.launch import launch, process_spec
    from shoal.run.preflight import check_ingredients

    recipe, chosen = demo_recipe(seed, staleness, steps), find_cheat(cheat)
    check_ingredients(recipe)
    path = directory.absolute()
    replace_earlier_demo(path, {"seed": seed, "staleness": staleness, "cheat": chosen.name})
    folder = RunFolder.prepare(path, recipe)
    stop, console = stop_on_signals(supervising=True), Console()  # until here, Ctrl-C simply ends this process
    cheater = cheater_name(folder)
    with choose_display(console) as display:
        spec, notes = process_spec(folder.path, cheater, chosen.name), {cheater: f"cheats: {chosen.what}"}
        launched = launch(folder, patience_min * 60, stop, display, (spec,), notes)
    ending, place = launched.ending, shlex.quote(str(path))
    if ending.exit_code == STOPPED_CODE:
        echo(f"stopped. To start again: {shoal_command()} demo --dir {place}")
        echo(f"to resume without the cheater: {shoal_command()} run --dir {place}")
    elif ending.exit_code != 0:
        echo(f"shoal: {ending.message} (logs: {folder.path / 'logs'})", err=True)
    raise Exit(ending.exit_code or conclude(folder, chosen, launched.elapsed_s, stop, console))


def conclude(folder: RunFolder, cheat: Cheat, elapsed_s: float, stop: StopToken, console: Console) -> int:
    """Check every claim and write what was found; the exit code is 0 only if all hold."""
    from rich.markup import escape
    from rich.table import Table

    from shoal.run.demo.claims import check, participants_of
    from shoal.runtime.files import write_atomically

    console.print("checking what came out: the ledger, the rollouts, the exported model …")
    found = []
    for claim in check(folder, participants_of(folder, cheat), stop):
        found.append(asdict(claim))
        sign, line = "[green]✓[/]" if claim.holds else "[bold red]✗[/]", Table.grid(padding=(0, 1))
        line.add_row(sign, f"[bold]{claim.name:<11}[/]", escape(claim.sentence))
        one_line = f"{sign} {claim.name:<11} {escape(claim.sentence)}"  # for whoever searches a log
        console.print(line if console.is_terminal else one_line, highlight=False, soft_wrap=not console.is_terminal)
    if stop.is_set():
        console.print("stopped before everything was checked")
        return STOPPED_CODE
    results = {"elapsed_s": round(elapsed_s, 1), "claims": found}
    write_atomically(folder.path / "summary.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    following = NEXT.format(path=folder.path, shoal=shoal_command(), python=shoal_command("python"))
    console.print(following, markup=False, highlight=False, soft_wrap=True)
    return int(not all(claim["holds"] for claim in found))


def hub(directory: options.RunDir) -> None:
    """Hand out work, take it in, write the ledger."""
    _role("hub", directory)


def trainer(directory: options.RunDir) -> None:
    """Train on accepted groups and publish policies. Also by torchrun: torchrun … -m shoal.cli trainer --dir RUN."""
    from shoal.trainer.settings import own_rank

    rank = own_rank()
    _role(f"trainer-rank-{rank}" if rank else "trainer", directory)


def validator(directory: options.RunDir, index: options.Index = 0) -> None:
    """Check submissions and compute their rewards."""
    _role(f"validator-{index}", directory)


def relay(
    directory: options.OptionalRunDir = None,
    origin: Annotated[bool, Option("--origin", help="Serve what the trainer of RUN publishes.")] = False,
    index: options.Index = 0,
    hub_url: Annotated[str | None, Option("--run-info", metavar="URL", help="The hub of the run.")] = None,
    upstreams: Annotated[list[str] | None, Option("--upstream", metavar="URL", help=options.UPSTREAM)] = None,
    peers: options.Peers = None,
    folder: Annotated[Path | None, Option(help="Where to keep the mirror.")] = None,
    host: options.Host = "0.0.0.0",
    port: options.Port = 8472,
    keep: options.Keep = 3,
    disk_budget_gb: options.DiskBudget = None,
    wait_s: options.Wait = 10,
) -> None:
    """Mirror the weights of a run: of its folder (--dir), or of a run anywhere (--run-info)."""
    if directory is not None:
        return _role("origin" if origin else f"relay-{index}", directory)
    if hub_url is None:
        other = "any other broadcast is mirrored by: shoal cast relay --upstream URL#KEY"
        raise UserError(f"give --dir RUN for a run on this machine, or --run-info URL for one elsewhere; {other}")
    from shoal.run.join import run_standalone_relay

    settings, sources = {"keep_versions": keep, "disk_budget_gb": disk_budget_gb}, tuple(upstreams or ())
    return run_standalone_relay(hub_url, sources, tuple(peers or ()), folder, (host, port), wait_s, settings)


def join(
    urls: Annotated[list[str] | None, Argument(metavar="URL", help=URLS)] = None,
    directory: options.OptionalRunDir = None,
    index: options.Index = 0,
    folder: Annotated[Path | None, Option(help="Keys, weights and unsent work. (default: ~/.shoal/RUN)")] = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    name: Annotated[str | None, Option(help="How to be called, in public. (default: node- and its id's start)")] = None,
    wait_s: options.Wait = 10,
    cheat: Annotated[str | None, Option(metavar="NAME", help="Cheat in this way, to attack a run of your own.")] = None,
    owner: Annotated[Path | None, Option(metavar="FILE", help="Your key: what this machine earns is yours.")] = None,
    vouch: Annotated[Path | None, Option(metavar="FILE", help="The same, by what `shoal key vouch` wrote.")] = None,
    check: Annotated[bool, Option("--check/--no-check", help="Look at this machine first.")] = True,
    sandbox: Annotated[bool, Option("--sandbox", help=SANDBOX)] = False,
    max_memory: Annotated[str | None, Option(metavar="SIZE", help=MEMORY)] = None,
    max_disk: Annotated[str | None, Option(metavar="SIZE", help=DISK)] = None,
    max_bandwidth: Annotated[str | None, Option(metavar="RATE", help=BANDWIDTH)] = None,
    gpu: Annotated[str | None, Option(metavar="LIST", help=GPUS)] = None,
    workers: Annotated[int | None, Option(min=1, max=1024, help=WORKERS)] = None,
) -> int:
    """Contribute this machine, with all its GPUs, to a run: shoal join http://host:8470/#0123…"""
    if cheat is not None:
        from shoal.adversary import find_cheat

        find_cheat(cheat)
    limits = MachineLimits.of_options(max_memory, max_disk, max_bandwidth)
    if directory is not None:
        if urls:  # a worker belongs to a run's folder here, or to the run at a URL
            join_it = f"leave --dir out to join that run (--folder {directory} would keep keys and weights there)"
            remedy = f"{join_it}, or the URL to be a worker of the run in that folder"
            raise UserError(f"{urls[0]} and --dir name two ways to work: {remedy}")
        if sandbox or limits != MachineLimits() or gpu is not None or workers is not None:
            wide = "--sandbox, --gpu, --workers, --max-memory, --max-disk and --max-bandwidth"
            raise UserError(f"{wide} go with a join URL, not with --dir")
        _role(f"worker-{index}", directory, cheat)
        return 0
    from shoal.run.join import JoinRequest, run_joined_worker

    if not urls:
        raise UserError("give the run's join URL, for example: shoal join http://host:8470/#0123…")
    given = (tuple(urls), folder, engine, device, dtype, name, wait_s, cheat, owner, vouch, check, limits, sandbox)
    return run_joined_worker(JoinRequest(*given, gpu, workers))


def _role(name: str, directory: Path, cheat: str | None = None) -> None:
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
