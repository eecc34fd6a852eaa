"""`shoal`: the commands. Each is a few lines here; what it does is in the module that it imports when it runs.

Errors: a `ShoalError` is one line on stderr and its exit code; anything else is a bug and is called one. Tracebacks
are shown with --debug or SHOAL_DEBUG=1; that of a bug is also in the log of a role that `shoal run` started.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import __version__
from shoal.cli.admin import admin
from shoal.cli.cast import cast
from shoal.cli.compare import compare
from shoal.cli.data import data
from shoal.cli.evaluate import evaluate
from shoal.cli.filter import filter_tasks
from shoal.cli.key import key
from shoal.cli.ledger import ledger
from shoal.cli.plan import plan
from shoal.cli.sft import sft
from shoal.cli.why import why
from shoal.errors import ShoalError, UserError
from shoal.runtime import crash
from shoal.runtime.files import home
from shoal.runtime.limits import MachineLimits
from shoal.runtime.stop import SUPERVISED, TOLD_TO_STOP_CODE, end_at_start
from shoal.runtime.text import printable, visible

app = typer.Typer(
    name="shoal",
    help="Reinforcement learning of language models on machines nobody has to trust.",
    epilog="Start with: shoal demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and lets no exception out."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and not end_at_start(given):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)  # what a command has begun to write is removed
    return guarded(
        lambda: app(args=given, prog_name="shoal", standalone_mode=False), "--debug" in given or is_verbose()
    )


def guarded(command: Callable[[], object], debug: bool) -> int:
    """The exit code of what is run; an exception becomes a line and a code."""
    _say_what_can_be_said()
    supervised = SUPERVISED in os.environ
    try:
        crash.arm()
        code = command()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the top: whatever it is becomes a line and an exit code
        line, code = explain(error)
        from shoal.trainer.settings import report_to_agent

        report_to_agent(line)
        with contextlib.suppress(OSError):  # the disk that its log is on may be what is full
            if debug or (supervised and not _is_known(error)):  # a supervised role's stderr is its log
                for text in traceback.format_exc().splitlines():
                    typer.echo(visible(text), err=True)
            if line:
                typer.echo(f"shoal: {line}", err=True)
        return code
    finally:
        _let_go_of_streams()


def _let_go_of_streams() -> None:
    """What can no longer be written is let go of: the interpreter would try it again and end with a code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say_what_can_be_said() -> None:
    """A terminal or file that is not UTF-8 gets question marks, not the end of a run that went well."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_known(error: Exception) -> bool:
    """Whether its line says all there is to say: somebody's input, machine or network, and no bug."""
    return isinstance(error, ShoalError) or hasattr(error, "format_message")


def explain(error: Exception) -> tuple[str, int]:
    """An error as one line and an exit code."""
    if isinstance(error, ShoalError):
        return printable(str(error)), error.exit_code
    format_message = getattr(error, "format_message", None)  # a mistake on the command line, as typer reports it
    if format_message is not None:
        text = printable(format_message())  # empty if the help itself was the answer
        return f"{text} (see: shoal --help)" if text else "", UserError.exit_code
    text = printable(str(error))
    return f"this is a bug: {type(error).__name__}: {text} (--debug shows where)", 1


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and more log.")] = False,
    _wants_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models on machines nobody has to trust."""
    if debug:
        os.environ["SHOAL_DEBUG"] = "1"


def is_verbose() -> bool:
    return os.environ.get("SHOAL_DEBUG", "") not in ("", "0")


class ProcessesChoice(StrEnum):
    many = "many"
    one = "one"


Device = Annotated[str, typer.Option("--device", help="Where a worker computes: cpu, cuda or auto.")]
Dtype = Annotated[str, typer.Option("--dtype", help="What it computes in: float32, bfloat16 or auto.")]
RecipeArgument = Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="A recipe (TOML).")]
RunDir = Annotated[Path, typer.Option("--dir", metavar="RUN", help="The run's folder.")]
OptionalRunDir = Annotated[Path | None, typer.Option("--dir", metavar="RUN", help="The run's folder.")]
Index = Annotated[int, typer.Option("--index", min=0, help="Which of several.")]
PatienceMin = Annotated[
    float, typer.Option("--patience-min", min=0.1, max=100_000, help="End a run without progress for so long.")
]
Wait = Annotated[float, typer.Option("--wait", min=0, max=86_400, help="Seconds to try to reach the hub.")]


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="Where to run.")] = Path("runs/demo"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Move an earlier demo in FOLDER aside instead of replacing it.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Other tasks, other dice.")] = 0,
    staleness: Annotated[int, typer.Option("--staleness", min=0, max=16, help="0: synchronous.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100_000, help="Training steps.")] = 20,
    cheat: Annotated[
        str, typer.Option("--cheat", help="What the third worker does; docs/guides/attack-your-run.md lists them.")
    ] = "best-of",
    patience_min: PatienceMin = 3,
) -> None:
    """Watch a model learn on eight processes, one of which cheats and is caught; minutes, no GPU."""
    from rich.console import Console

    from shoal.cli.demo.run import DemoRequest, run_demo

    request = DemoRequest(directory, keep, seed, staleness, steps, cheat, patience_min)
    raise typer.Exit(run_demo(request, Console()))


@app.command(
    epilog="A reward of your own is one Python file: shoal run recipes/tiny.toml --set environment.file=my_reward.py "
    "(examples/custom_reward.py shows one). What is trained, in one readable file: examples/one_file_rl.py."
)
def run(
    recipe: RecipeArgument = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="RUN", help="The run's folder.  [default: runs/NAME]")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="Workers to start here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and do nothing.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Make the folder, then start each role yourself: shoal hub --dir RUN, …")
    ] = False,
    processes: Annotated[
        ProcessesChoice, typer.Option("--processes", help="one: all roles as threads, for a debugger.")
    ] = ProcessesChoice.many,
    patience_min: PatienceMin = 10,
) -> None:
    """Start and supervise a whole run on this machine. An existing folder is resumed."""
    from shoal.cli.start import RunRequest, start

    request = RunRequest(recipe, directory, tuple(overrides or ()), workers)
    raise typer.Exit(start(request, "dry-run" if dry_run else "prepare" if prepare else processes.value, patience_min))


@app.command()
def hub(directory: RunDir) -> None:
    """Hand out work, take it in, write the ledger."""
    _role("hub", directory)


@app.command()
def trainer(directory: RunDir) -> None:
    """Train on accepted groups and publish policies. Also by torchrun: torchrun … -m shoal.cli trainer --dir RUN."""
    from shoal.trainer.settings import own_rank

    if rank := own_rank():
        return _follower(rank, directory)
    return _role("trainer", directory)


@app.command()
def validator(directory: RunDir, index: Index = 0) -> None:
    """Check submissions and compute their rewards."""
    _role(f"validator-{index}", directory)


@app.command()
def relay(
    directory: OptionalRunDir = None,
    origin: Annotated[bool, typer.Option("--origin", help="Serve what the trainer of RUN publishes.")] = False,
    index: Index = 0,
    hub_url: Annotated[str | None, typer.Option("--run-info", metavar="URL", help="The hub of the run.")] = None,
    upstreams: Annotated[
        list[str] | None, typer.Option("--upstream", metavar="URL", help="Where to mirror from; may be repeated.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="URL", help="A relay beside this one, to trade chunks with; may be repeated."),
    ] = None,
    witnesses: Annotated[
        list[str] | None,
        typer.Option("--witness", metavar="KEY", help="A ledger witness whose heads to mirror; may be repeated."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to keep the mirror.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8472,
    keep: Annotated[int, typer.Option("--keep", min=1, max=1000, help="Newest versions to keep.")] = 3,
    disk_budget_gb: Annotated[
        float | None,
        typer.Option(
            "--disk-budget-gb",
            min=1e-6,
            help="Disk for chunks; the oldest versions go first.  [default: all; with --run-info 80 % of the free]",
        ),
    ] = None,
    connections_per_client: Annotated[
        int | None, typer.Option("--connections-per-client", min=1, help="Connections that one address may have.")
    ] = 256,
    rate_per_client_mbit: Annotated[
        float | None, typer.Option("--rate-per-client-mbit", min=0.001, help="Mbit/s that one address is sent.")
    ] = None,
    wait_s: Wait = 10,
) -> None:
    """Mirror weights: of a run's folder (--dir), a run anywhere (--run-info), or any source (--upstream URL#KEY)."""
    if directory is not None:
        return _role("origin" if origin else f"relay-{index}", directory)
    if hub_url is None and not upstreams:
        raise UserError(
            "give --dir RUN for a run on this machine, --run-info URL for one elsewhere, "
            "or --upstream URL#KEY for any source"
        )
    settings = {
        "kept_versions": keep,
        "disk_budget_gb": disk_budget_gb,
        "connections_per_client": connections_per_client,
        "rate_per_client_mbit": rate_per_client_mbit,
    }
    if hub_url is None:
        from shoal.cli.casting.relay import RelayRequest, run_cast_relay

        request = RelayRequest(
            tuple(upstreams or ()), tuple(peers or ()), folder or Path("mirror"), host, port, settings
        )
        return run_cast_relay(request, is_verbose())
    from shoal.cli.join import StandaloneRelay, run_standalone_relay

    further, mirrored = tuple(peers or ()), tuple(witnesses or ())
    standalone = StandaloneRelay(
        hub_url, tuple(upstreams or ()), folder, host, port, wait_s, further, mirrored, settings
    )
    return run_standalone_relay(standalone, is_verbose())


def worker(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="The join URL http://host:port/#…, or several.")
    ] = None,
    directory: OptionalRunDir = None,
    index: Index = 0,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Keys, weights and unsent work.  [default: ~/.shoal/RUN]")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="What to generate with.")] = "torch",
    device: Device = "auto",
    dtype: Dtype = "auto",
    name: Annotated[
        str | None, typer.Option("--name", help="How to be called, in public.  [default: node- and its id's start]")
    ] = None,
    wait_s: Wait = 10,
    cheat: Annotated[
        str | None, typer.Option("--cheat", metavar="NAME", help="Cheat in this way, to attack a run of your own.")
    ] = None,
    owner: Annotated[
        Path | None, typer.Option("--owner", metavar="FILE", help="Your key: what this machine earns is yours.")
    ] = None,
    vouch: Annotated[
        Path | None, typer.Option("--vouch", metavar="FILE", help="The same, by what `shoal key vouch` wrote.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Look at this machine first.")] = True,
    sandbox: Annotated[
        bool,
        typer.Option("--sandbox", help="Work without network, home and other processes in sight (needs bubblewrap)."),
    ] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory", metavar="SIZE", help="Most memory for the model, e.g. 8GB.  [default: 80 % of the free]"
        ),
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(
            "--max-disk", metavar="SIZE", help="Most disk for weights, e.g. 40GB.  [default: 80 % of the free]"
        ),
    ] = None,
    max_bandwidth: Annotated[
        str | None,
        typer.Option("--max-bandwidth", metavar="RATE", help="Fastest download, e.g. 20Mbit/s.  [default: no limit]"),
    ] = None,
) -> int:
    """Contribute this machine to a run: all you need is its join URL."""
    if cheat is not None:
        from shoal.adversary import find_cheat

        find_cheat(cheat)
    limits = MachineLimits.of_options(max_memory, max_disk, max_bandwidth)
    if directory is not None:
        _refuse_both(urls, directory, sandbox or limits != MachineLimits())
        _role(f"worker-{index}", directory, cheat)
        return 0
    from shoal.cli.join import JoinRequest, run_joined_worker

    if not urls:
        raise UserError("give the run's join URL, for example: shoal join http://host:8470/#0123…")
    request = JoinRequest(
        tuple(urls),
        folder,
        engine,
        device,
        dtype,
        name,
        wait_s,
        cheat,
        owner=owner,
        vouch=vouch,
        check=check,
        limits=limits,
        sandbox=sandbox,
    )
    return run_joined_worker(request, is_verbose())


def _refuse_both(urls: list[str] | None, directory: Path, is_limited: bool) -> None:
    """A worker belongs to a run's folder here, or to the run at a URL."""
    if urls:
        raise UserError(
            f"{urls[0]} and --dir name two ways to work: leave --dir out to join that run (--folder {directory} would "
            "keep keys and weights there), or the URL to be a worker of the run in that folder"
        )
    if is_limited:
        raise UserError("--sandbox, --max-memory, --max-disk and --max-bandwidth go with a join URL, not with --dir")


app.command(name="worker")(worker)
app.command(name="join", help="Contribute this machine to a run: shoal join http://host:8470/#0123… (as `worker`).")(
    worker
)
app.add_typer(cast)
app.add_typer(data)
app.add_typer(ledger)
app.command(name="why")(why)
app.add_typer(admin)
app.add_typer(key)
app.command(name="eval")(evaluate)
app.command(name="compare")(compare)
app.command(name="plan")(plan)
app.command(name="filter")(filter_tasks)
app.command(name="sft")(sft)


@app.command()
def status(
    where: Annotated[str, typer.Argument(metavar="URL|RUN", help="A hub's address or a run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    wait_s: Wait = 3,
) -> None:
    """Show how a run stands: steps, nodes, verdicts, who waits for whom."""
    from shoal.cli.status import show_status

    show_status(where, as_json, wait_s)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    best: Annotated[bool, typer.Option("--best", help="The one with the best held-out score.")] = False,
    version: Annotated[int | None, typer.Option("--version", min=0, help="The one of this version.")] = None,
) -> None:
    """Write a checkpoint, the newest by default, as a Hugging Face folder."""
    from shoal.cli.export import export_run

    typer.echo(f"wrote {export_run(directory, out, best, version)}")


@app.command()
def backup(
    directory: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The run's folder.")] = None,
    out: Annotated[Path | None, typer.Argument(metavar="[OUT.tar]", help="The file to write.")] = None,
    verify: Annotated[
        Path | None, typer.Option("--verify", metavar="FILE", help="Check a backup instead of making one.")
    ] = None,
) -> None:
    """Write a whole run, going on or not, to one file; it holds the run's private keys."""
    from shoal.cli.backup import backup_run, verify_backup
    from shoal.cli.program import shoal_command

    if verify is not None:
        return typer.echo(f"{verify} is whole: {verify_backup(verify).line}")
    if directory is None or out is None:
        raise UserError("give the run's folder and the file to write, for example: shoal backup runs/mine mine.tar")
    summary = backup_run(directory.absolute(), out, lambda line: typer.echo(line, err=True))
    return typer.echo(
        f"wrote {out}: {summary.line}\n"
        "it holds this run's private keys and secret: keep it as safe as the run's folder, and never let the restored "
        f"run and this one continue at the same time\nto restore: {shoal_command()} restore {out} FOLDER"
    )


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A backup.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run folder to make.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="hub.KEY=VALUE",
            help="Where rows and submissions go, instead of the folder: hub.database, hub.storage, "
            "hub.storage_endpoint; may be repeated.",
        ),
    ] = None,
) -> None:
    """Make a run's folder of a backup, on another database or store if you name one; the run continues from there."""
    from shoal.cli.backup import restore_run
    from shoal.cli.folder import RunFolder
    from shoal.cli.program import shoal_command
    from shoal.cli.recipe import missing_inputs

    summary = restore_run(file, folder.absolute(), overrides or ())
    typer.echo(f"{folder} is ready: {summary.line}")
    for path in missing_inputs(RunFolder.open(folder).recipe):
        typer.echo(f"shoal: the recipe names {path}, which is not here: put it back first", err=True)
    typer.echo(f"to go on: {shoal_command()} run --dir {folder} (only here: the run must not go on in two places)")


@app.command()
def doctor(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Also check the road to this run's hubs.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="The folder to be written to.  [default: with a URL ~/.shoal, as join; or this]"),
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Run the validator's checks on this machine's own work.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure honest work of this machine, and write a profile.")
    ] = False,
    model: Annotated[str, typer.Option("--model", help="Model folder to try, if there is no URL.")] = "tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="What a validator computes with, e.g. cuda/bfloat16 [cpu/float32]; repeatable."),
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option("--profile", help="A profile file to be judged by; repeatable.")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", min=32, help="Completions to measure.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest completion to measure.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.01, help="Sampling temperature.")] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", help="Where the measured profile goes.")] = None,
) -> None:
    """Check this machine, and say what to do about each problem."""
    from shoal.cli.doctor import examine

    if selftest and calibrate:
        raise UserError("--selftest and --calibrate are two things: ask for one of them")
    findings = examine(urls or (), folder or (home() if urls else Path()), device=device, dtype=dtype)
    for finding in findings:
        typer.echo(visible(finding.line))
    ok = all(finding.ok for finding in findings)
    if not (selftest or calibrate):
        raise typer.Exit(0 if ok else 1)
    from shoal.cli.trials import CalibrationOptions, TrialOptions, calibration_report, run_calibration, run_selftest
    from shoal.runtime.stop import stop_on_signals

    options = TrialOptions(urls[0] if urls else None, model, device, dtype, tuple(against or ()), tuple(profile or ()))
    if selftest:
        for finding in run_selftest(options, stop_on_signals()):
            typer.echo(visible(finding.line))
            ok = ok and finding.ok
    else:
        how = CalibrationOptions(sequences, tokens, temperature, out)
        calibration, written = run_calibration(options, how, lambda line: typer.echo(line, err=True))
        for line in calibration_report(calibration, written):
            typer.echo(line)
        ok = ok and not calibration.problems
    raise typer.Exit(0 if ok else 1)


def _role(name: str, directory: Path, cheat: str | None = None) -> None:
    """One role of a run folder, in this process."""
    from shoal.cli.roles import begin

    supervised = SUPERVISED in os.environ
    stop = begin(name, directory if (directory / "recipe.toml").is_file() else None, is_verbose())
    from shoal.cli.folder import RunFolder
    from shoal.cli.roles import run_role

    run_role(RunFolder.open(directory.absolute()), name, stop, cheat)
    if supervised and stop.is_set():  # so that the supervisor does not take it for done
        raise typer.Exit(TOLD_TO_STOP_CODE)


def _follower(rank: int, directory: Path) -> None:
    """A process of the trainer beside its first one. It needs no run folder: on another machine there may be none."""
    from shoal.cli.roles import begin, follow_trainer

    supervised = SUPERVISED in os.environ
    stop = begin(f"trainer-rank-{rank}", directory if (directory / "recipe.toml").is_file() else None, is_verbose())
    follow_trainer(stop)
    if supervised and stop.is_set():
        raise typer.Exit(TOLD_TO_STOP_CODE)


def command_names() -> list[str]:
    """The commands there are, for tests and documentation."""
    group: Any = typer.main.get_command(app)
    return sorted(group.commands)
