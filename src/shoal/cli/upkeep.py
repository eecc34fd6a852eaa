"""`shoal status`, `export`, `backup`, `restore` and `doctor`: what is asked of a run or of a machine, and answered."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

from shoal.cli import options
from shoal.errors import HubUnreachable, UserError
from shoal.runtime.files import home
from shoal.runtime.stop import stop_on_signals
from shoal.runtime.text import shoal_command, visible, visible_json

PIPED_WIDTH = 200
PLACES = (
    "Where rows and submissions go, instead of the folder: hub.database, hub.storage, hub.storage_endpoint; may be "
    "repeated."
)
URLS = "Also check the connection to this run's hubs."
FOLDER = "The folder to be written to. (default: with a URL ~/.shoal, as join; or this)"
SELFTEST = "Run the validator's checks on this machine's own work."
CALIBRATE = "Measure honest work of this machine, and write a profile."
BENCH = "Measure tokens a second, beside transformers.generate, and what a run would get of it; about a minute."
AGAINST = "What a validator computes with, e.g. cuda/bfloat16; repeatable. (default: cpu/float32)"


def status(
    where: Annotated[str, Argument(metavar="URL|RUN", help=f"{options.HubOrRun}.")],
    as_json: options.Json = False,
    wait_s: options.Wait = 3,
) -> None:
    """Show how a run stands: steps, nodes, verdicts, who waits for whom."""
    from rich.console import Console

    from shoal.cli.view import frame
    from shoal.client import HubClient
    from shoal.run.folder import hub_address
    from shoal.run.launch import when_stopped
    from shoal.run.progress import History, RunView

    with closing(HubClient.of_a_person(*hub_address(where, wait_s))) as client:
        try:
            found = client.status()
        except HubUnreachable as error:
            if "://" in where:
                raise
            finished, sentence = when_stopped(Path(where))
            if not finished or as_json:
                raise HubUnreachable(f"{sentence} ({error})") from error
            return echo(sentence)
    if as_json:
        return echo(visible_json(found.model_dump_json(indent=2)))
    history, out = History(), Console()
    history.add(found, 0.0)
    width = out.width if out.is_terminal else PIPED_WIDTH
    return Console(width=width).print(frame(RunView(found, (), history, 0.0), width))


def export(
    directory: Annotated[Path, Argument(metavar="RUN", help="The run's folder.")],
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to write.")],
    best: Annotated[bool, Option("--best", help="The one with the best held-out score.")] = False,
    version: Annotated[int | None, Option(min=0, help="The one of this version.")] = None,
) -> None:
    """Write a checkpoint, the newest by default, as a Hugging Face folder."""
    from shoal.run.sources import export_run

    echo(f"wrote {export_run(directory, out, best, version)}")


def backup(
    directory: Annotated[Path | None, Argument(metavar="RUN", help="The run's folder.")] = None,
    out: Annotated[Path | None, Argument(metavar="OUT.tar", help="The file to write.")] = None,
    verify: Annotated[Path | None, Option(metavar="FILE", help="Check a backup instead of making one.")] = None,
) -> None:
    """Write a whole run, going on or not, to one file; it holds the run's private keys."""
    from shoal.run.backup import backup_run, verify_backup

    if verify is not None:
        return echo(f"{verify} is whole: {verify_backup(verify).line}")
    if directory is None or out is None:
        raise UserError("give the run's folder and the file to write, for example: shoal backup runs/mine mine.tar")
    summary = backup_run(directory.absolute(), out, lambda line: echo(line, err=True))
    return echo(
        f"wrote {out}: {summary.line}\n"
        "it holds this run's private keys and secret: keep it as safe as the run's folder, and never let the restored "
        f"run and this one continue at the same time\nto restore: {shoal_command()} restore {out} FOLDER"
    )


def restore(
    file: Annotated[Path, Argument(metavar="FILE", help="A backup.")],
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The run folder to make.")],
    overrides: Annotated[list[str] | None, Option("--set", metavar="hub.KEY=VALUE", help=PLACES)] = None,
) -> None:
    """Make a run's folder of a backup, on another database or store if you name one; the run continues from there."""
    from shoal.run.backup import restore_run
    from shoal.run.folder import RunFolder
    from shoal.run.recipe import missing_inputs

    summary = restore_run(file, folder.absolute(), overrides or ())
    echo(f"{folder} is ready: {summary.line}")
    for path in missing_inputs(RunFolder.open(folder).recipe):
        echo(f"shoal: the recipe names {path}, which is not here: put it back first", err=True)
    echo(f"to resume: {shoal_command()} run --dir {folder} (only here: the run must not continue in two places)")


def doctor(
    urls: Annotated[list[str] | None, Argument(metavar="URL", help=URLS)] = None,
    folder: Annotated[Path | None, Option(help=FOLDER)] = None,
    selftest: Annotated[bool, Option("--selftest", help=SELFTEST)] = False,
    calibrate: Annotated[bool, Option("--calibrate", help=CALIBRATE)] = False,
    bench: Annotated[bool, Option("--bench", help=BENCH)] = False,
    model: Annotated[str, Option(help="Model folder to try, if there is no URL.")] = "tiny",
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    against: Annotated[list[str] | None, Option(help=AGAINST)] = None,
    profile: Annotated[list[Path] | None, Option(help="A profile file to be judged by; repeatable.")] = None,
    sequences: Annotated[int, Option(min=32, help="Completions to measure.")] = 256,
    tokens: Annotated[int, Option(min=1, help="Longest completion to measure.")] = 128,
    temperature: Annotated[float, Option(min=0.01, help="Sampling temperature.")] = 1.0,
    out: Annotated[Path | None, Option(help="Where the measured profile goes.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine, and say what to do about each problem."""
    from shoal.run.doctor import examine

    if selftest + calibrate + bench > 1:
        raise UserError("--selftest, --calibrate and --bench are three things: ask for one of them")
    if as_json and (selftest or calibrate):
        raise UserError("--json shows what was found and measured by --bench; leave it out here")
    findings = examine(urls or (), folder or (home() if urls else Path()), device=device, dtype=dtype, engine=engine)
    found: dict[str, object] = {"findings": [asdict(finding) for finding in findings]}
    ok = all(finding.ok for finding in findings)
    if not as_json:
        echo("\n".join(visible(finding.line) for finding in findings))
    elif not bench:
        echo(visible_json(json.dumps(found, indent=2)))
    if not (selftest or calibrate or bench):
        raise Exit(0 if ok else 1)
    from rich.console import Console

    from shoal.cli.printing import counted
    from shoal.run.trials import TrialOptions, calibration_report, run_calibration, run_selftest

    asked = TrialOptions(
        urls[0] if urls else None, model, device, dtype, tuple(against or ()), tuple(profile or ()), sequences, tokens,
        temperature, out, engine,
    )  # fmt: skip
    if bench:
        from shoal.run.bench import run_bench

        with counted("benchmark", Console(stderr=True), unit="s") as report:
            measured = run_bench(asked, stop_on_signals(), report)
        found["bench"] = asdict(measured)
        echo(visible_json(json.dumps(found, indent=2)) if as_json else "\n".join(map(visible, measured.lines())))
    elif selftest:
        for finding in run_selftest(asked, stop_on_signals()):
            echo(visible(finding.line))
            ok = ok and finding.ok
    else:
        calibration, written = run_calibration(asked, lambda line: echo(line, err=True))
        echo("\n".join(calibration_report(calibration, written)))
        ok = ok and not calibration.problems
    raise Exit(0 if ok else 1)
