"""`shoal run`, and one command for each role: what starts something that lasts.

A role is of a run's folder (--dir), or takes part in a run that is elsewhere (`shoal join URL`, `relay --run-info`).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import options
from shoal.errors import UserError
from shoal.runtime.limits import MachineLimits
from shoal.runtime.logs import is_verbose
from shoal.runtime.stop import SUPERVISED, TOLD_TO_STOP_CODE

if TYPE_CHECKING:
    from shoal.run.folder import RunFolder


def run(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A recipe (TOML).")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="RUN", help="The run's folder. (default: runs/NAME)")
    ] = None,
    overrides: options.Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and do nothing.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Make the folder, then start each role yourself: shoal hub --dir RUN, …")
    ] = False,
    patience_min: options.PatienceMin = 10,
) -> None:
    """Start and supervise a whole run on this machine. An existing folder is resumed."""
    from shoal.run.estimate import settled
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
        shown, derived = settled(resolved)
        return typer.echo(f"{derived}{dump_config(without_passwords(shown))}", nl=False)
    if not prepare:
        check_machine(resolved)
    directory = directory or Path("runs") / resolved.run.name
    made = RunFolder.prepare(directory.absolute(), resolved)
    if not prepare:
        raise typer.Exit(_launch(made, patience_min * 60))
    from shoal.run.roles import command_of, role_names
    from shoal.runtime.text import shoal_command

    typer.echo(f"{directory} is ready; everything that has to run, in this order:")
    for name in role_names(made):
        typer.echo(f"  {shoal_command()} {shlex.join(command_of(directory, name))}")
    return typer.echo(f"to contribute: {shoal_command()} join {made.assign_endpoints().join}")


def _warn(line: str) -> None:
    typer.echo(f"shoal: {line}", err=True)


def _launch(folder: RunFolder, patience_s: float) -> int:
    """Run it all to its end, show it, and say what it came to."""
    from rich.console import Console

    from shoal.cli.view import choose_display
    from shoal.run.launch import METRICS, NOTHING_TRAINED, conclusion, kept_line, launch, ledger_line, steps_in
    from shoal.runtime.stop import stop_on_signals

    display, before = choose_display(Console()), steps_in(folder.path / METRICS)
    with display:
        launched = launch(folder, patience_s, stop_on_signals(supervising=True), display)
    lines, code = conclusion(folder.path, launched, before), launched.ending.exit_code
    if code == 0:
        lines += [ledger_line(folder.path), kept_line(folder.path)]
    for line in [*([""] if display.live else []), *lines]:
        typer.echo(line)
    if launched.ending.message:
        _warn(launched.ending.message)
    return code or int(any(line.startswith(NOTHING_TRAINED) for line in lines))


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
    origin: Annotated[bool, typer.Option("--origin", help="Serve what the trainer of RUN publishes.")] = False,
    index: options.Index = 0,
    hub_url: Annotated[str | None, typer.Option("--run-info", metavar="URL", help="The hub of the run.")] = None,
    upstreams: Annotated[
        list[str] | None, typer.Option("--upstream", metavar="URL", help="Where to mirror from; may be repeated.")
    ] = None,
    peers: options.Peers = None,
    folder: Annotated[Path | None, typer.Option(help="Where to keep the mirror.")] = None,
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
        raise UserError(
            "give --dir RUN for a run on this machine, or --run-info URL for one elsewhere; any other broadcast is "
            "mirrored by: shoal cast relay --upstream URL#KEY"
        )
    from shoal.run.join import run_standalone_relay

    settings = {"kept_versions": keep, "disk_budget_gb": disk_budget_gb}
    return run_standalone_relay(
        hub_url, tuple(upstreams or ()), tuple(peers or ()), folder, (host, port), wait_s, settings, is_verbose()
    )


def join(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="The join URL http://host:port/#…, or several.")
    ] = None,
    directory: options.OptionalRunDir = None,
    index: options.Index = 0,
    folder: Annotated[Path | None, typer.Option(help="Keys, weights and unsent work. (default: ~/.shoal/RUN)")] = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    name: Annotated[
        str | None, typer.Option(help="How to be called, in public. (default: node- and its id's start)")
    ] = None,
    wait_s: options.Wait = 10,
    cheat: Annotated[
        str | None, typer.Option(metavar="NAME", help="Cheat in this way, to attack a run of your own.")
    ] = None,
    owner: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your key: what this machine earns is yours.")
    ] = None,
    vouch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same, by what `shoal key vouch` wrote.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Look at this machine first.")] = True,
    sandbox: Annotated[
        bool,
        typer.Option("--sandbox", help="Work without network, home and other processes in sight (needs bubblewrap)."),
    ] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory for the model, e.g. 8GB. (default: 80 % of the free)"),
    ] = None,
    max_disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most disk for weights, e.g. 40GB. (default: 80 % of the free)")
    ] = None,
    max_bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Fastest download, e.g. 20Mbit/s. (default: no limit)")
    ] = None,
) -> int:
    """Contribute this machine to a run: shoal join http://host:8470/#0123… (with --dir: of a run's folder)."""
    if cheat is not None:
        from shoal.adversary import find_cheat

        find_cheat(cheat)
    limits = MachineLimits.of_options(max_memory, max_disk, max_bandwidth)
    if directory is not None:
        if urls:  # a worker belongs to a run's folder here, or to the run at a URL
            raise UserError(
                f"{urls[0]} and --dir name two ways to work: leave --dir out to join that run (--folder {directory} "
                "would keep keys and weights there), or the URL to be a worker of the run in that folder"
            )
        if sandbox or limits != MachineLimits():
            raise UserError(
                "--sandbox, --max-memory, --max-disk and --max-bandwidth go with a join URL, not with --dir"
            )
        _role(f"worker-{index}", directory, cheat)
        return 0
    from shoal.run.join import JoinRequest, run_joined_worker

    if not urls:
        raise UserError("give the run's join URL, for example: shoal join http://host:8470/#0123…")
    given = (tuple(urls), folder, engine, device, dtype, name, wait_s, cheat, owner, vouch, check, limits, sandbox)
    return run_joined_worker(JoinRequest(*given), is_verbose())


def _role(name: str, directory: Path, cheat: str | None = None) -> None:
    """One role of a run folder, in this process; or a process of the trainer beside its first one, which needs no run
    folder: on another machine there may be none."""
    from shoal.run.roles import begin

    supervised = SUPERVISED in os.environ
    stop = begin(name, directory if (directory / "recipe.toml").is_file() else None, is_verbose())
    if name.startswith("trainer-rank-"):
        from shoal.trainer.shards import run_rank

        run_rank(stop)
    else:
        from shoal.run.folder import RunFolder
        from shoal.run.roles import run_role

        run_role(RunFolder.open(directory.absolute()), name, stop, cheat)
    if supervised and stop.is_set():  # so that the supervisor does not take it for done
        raise typer.Exit(TOLD_TO_STOP_CODE)
