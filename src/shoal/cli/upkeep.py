"""`shoal status`, `export`, `backup`, `restore` and `doctor`: what is asked of a run or of a machine, and answered."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

from shoal.cli import options
from shoal.errors import HubUnreachable, UserError
from shoal.runtime import home, shoal_command, stop_on_signals, visible, visible_json
from shoal.runtime.extras import require

PIPED_WIDTH = 200
OUT = "The folder to write."
VERSION = "Write the checkpoint of this version. (default: the newest)"
ADAPTER = "Of a run with [trainer.lora]: write the adapters alone, in PEFT's format."
PUSH = "Push it to the Hugging Face hub, with metrics and ledger; log in before (hf auth login), or set HF_TOKEN."
ROLLOUTS = "With --push: what was trained on as well, as the data set ORG/NAME-rollouts."
VERIFY = "Check this backup instead of making one."
MADE = "The run's folder to make, or a name for it under runs/."
PLACES = "Where rows and submissions go instead of the folder: database, storage or storage_endpoint. Repeatable."
URLS = "The join URLs of a run, to check the connection to its hubs, too."
FOLDER = "A folder that must be writable. (default: with a URL ~/.shoal, like join; else this folder)"
CALIBRATE = "Measure honest work of this machine, and write the limits that it needs as a profile."
MODEL = "Without a URL: the model folder to try."
AGAINST = "What validators compute with, for example cuda/bfloat16. Repeatable. (default: cpu/float32)"
PROFILE = "With --selftest: a profile file to judge by. Repeatable."
LONGEST = "With --calibrate or --bench: the longest completion in tokens."
HEAT = "With --calibrate: the sampling temperature."
WRITTEN = "With --calibrate: the profile to write. (default: KIND.toml, such as torch-cpu-float32.toml)"
BENCH = "Measure tokens per second beside transformers.generate, and what a run would get of it; about a minute."


def status(where: options.OptionalPlace = None, as_json: options.Json = False, wait_s: options.Wait = 3) -> None:
    """Show how a run stands: steps, scores, nodes, verdicts, and who waits for what."""
    from rich.console import Console

    from shoal.cli.view import frame
    from shoal.run.folder import find_run
    from shoal.run.launch import asking_hub, when_stopped
    from shoal.run.progress import History, RunView

    place = find_run(where)
    try:
        with asking_hub(place, wait_s) as client:
            found = client.status()
    except HubUnreachable:
        if "://" in place or as_json or not (stopped := when_stopped(Path(place)))[0]:
            raise
        return echo(stopped[1])
    if as_json:
        return echo(visible_json(found.model_dump_json(indent=2)))
    history, out = History(), Console()
    history.add(found, 0.0)
    width = out.width if out.is_terminal else PIPED_WIDTH
    return Console(width=width).print(frame(RunView(found, (), history, 0.0), width))


def dashboard(where: options.OptionalPlace = None, wait_s: options.Wait = 3) -> None:
    """Say where the pages about a run are; if its hub is off, start it for them until you press Ctrl-C."""
    from shoal.cli.run import role
    from shoal.run.folder import RunFolder, find_run
    from shoal.run.launch import asking_hub

    place = find_run(where)
    try:
        with asking_hub(place, wait_s) as client:
            client.status()
            return echo(f"{client.url}/")
    except HubUnreachable:
        if "://" in place:
            raise
    echo(f"{RunFolder.open(Path(place)).endpoints.hub}/ (the hub was off; Ctrl-C ends it again)")
    return role("hub", Path(place))


def export(
    directory: options.Run,
    out: Annotated[Path, Argument(metavar="OUT", help=OUT)],
    best: Annotated[bool, Option("--best", help="Write the checkpoint with the best held-out score.")] = False,
    version: Annotated[int | None, options.whole("--version", VERSION)] = None,
    adapter: Annotated[bool, Option("--adapter", help=ADAPTER)] = False,
    push: Annotated[str | None, options.value("--push", "ORG/NAME", PUSH)] = None,
    private: Annotated[bool, Option("--private", help="With --push: into private repositories.")] = False,
    rollouts: Annotated[bool, Option("--rollouts", help=ROLLOUTS)] = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, and push it to the hub if asked to."""
    require("trainer", "shoal export")
    from shoal.run.sources import export_run, push_export
    from shoal.runtime import hf

    if push is None and (private or rollouts):
        raise UserError(f"{'--private' if private else '--rollouts'} goes with --push ORG/NAME")
    name = None if push is None else hf.check_push(push)
    echo(f"wrote {export_run(directory, out, best, version, adapter)}")
    for line in () if name is None else push_export(directory, out, name, private, rollouts):
        echo(line)


def backup(
    directory: Annotated[
        Path | None, Argument(metavar="RUN", parser=options.run_folder, help=options.FOLDER_HELP)
    ] = None,
    out: Annotated[Path | None, Argument(metavar="OUT.tar", help="The file to write.")] = None,
    verify: Annotated[Path | None, options.value("--verify", "FILE", VERIFY)] = None,
) -> None:
    """Write a whole run, running or not, to one file. The file holds the run's private keys."""
    from shoal.run.backup import backup_run, verify_backup

    if verify is not None:
        return echo(f"{verify} is whole: {verify_backup(verify).line}")
    if directory is None or out is None:
        raise UserError("give the run's folder and the file to write, for example: shoal backup runs/mine mine.tar")
    summary = backup_run(directory.absolute(), out, lambda line: echo(line, err=True))
    return echo(
        f"wrote {out}: {summary.line}\n"
        "it holds this run's private keys and secret: keep it as safe as the run's folder, and never let the restored "
        f"run and this one continue at the same time\nto restore: {shoal_command()} restore {out} RUN"
    )


def restore(
    file: Annotated[Path, Argument(metavar="FILE", help="The backup.")],
    folder: Annotated[Path, Argument(metavar="RUN", parser=options.run_folder, help=MADE)],
    overrides: Annotated[list[str] | None, options.value("--set", "hub.KEY=VALUE", PLACES)] = None,
) -> None:
    """Make a run's folder from a backup, on another database or store if you name one. The run resumes from there."""
    from shoal.run.backup import restore_run
    from shoal.run.folder import RunFolder
    from shoal.run.recipe import missing_inputs

    summary = restore_run(file, folder.absolute(), overrides or ())
    echo(f"{folder} is ready: {summary.line}")
    for path in missing_inputs(RunFolder.open(folder).recipe):
        echo(f"shoal: the recipe names {path}, which is not here: put it back first", err=True)
    echo(f"to resume: {shoal_command()} run {folder} (only here: the run must not continue in two places)")


def doctor(
    urls: Annotated[list[str] | None, Argument(metavar="URL", help=URLS)] = None,
    folder: Annotated[Path | None, options.value("--folder", "FOLDER", FOLDER)] = None,
    selftest: Annotated[bool, Option("--selftest", help="Run the validator's checks on work of this machine.")] = False,
    calibrate: Annotated[bool, Option("--calibrate", help=CALIBRATE)] = False,
    bench: Annotated[bool, Option("--bench", help=BENCH)] = False,
    model: Annotated[str, options.value("--model", "MODEL", MODEL)] = "tiny",
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    against: Annotated[list[str] | None, options.value("--against", "DEVICE/FORMAT", AGAINST)] = None,
    profile: Annotated[list[Path] | None, options.value("--profile", "FILE", PROFILE)] = None,
    samples: Annotated[int, options.whole("--samples", "With --calibrate: completions to measure.", 32)] = 256,
    tokens: Annotated[int, options.whole("--max-new-tokens", LONGEST, 1)] = 128,
    temperature: Annotated[float, options.number("--temperature", "T", HEAT, 0.01, 10)] = 1.0,
    out: Annotated[Path | None, options.value("--out", "FILE", WRITTEN)] = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine, and say what to do about each problem. The exit code is 1 if there is one."""
    from shoal.engines import check_engine
    from shoal.run.doctor import examine

    if selftest + calibrate + bench > 1:
        raise UserError("--selftest, --calibrate and --bench are three things: ask for one of them")
    if as_json and (selftest or calibrate):
        raise UserError("--json shows what was found and measured by --bench; leave it out here")
    check_engine(engine, device, dtype)
    findings = examine(urls or (), folder or (home() if urls else Path()), device=device, dtype=dtype, engine=engine)
    found: dict[str, object] = {"findings": [asdict(finding) for finding in findings]}
    ok = all(finding.ok for finding in findings)
    if not as_json:
        echo("\n".join(visible(finding.line) for finding in findings))
    elif not bench:
        echo(visible_json(json.dumps(found, indent=2)))
    if not (selftest or calibrate or bench):
        raise Exit(0 if ok else 1)
    require("trainer", "the measurement")
    from rich.console import Console

    from shoal.cli.printing import counted
    from shoal.run.trials import TrialOptions, calibration_report, run_calibration, run_selftest

    asked = TrialOptions(
        urls[0] if urls else None, model, device, dtype, tuple(against or ()), tuple(profile or ()), samples, tokens,
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
