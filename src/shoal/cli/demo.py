"""`shoal demo`: the whole system on one machine in minutes, with a worker that cheats; what it claims is checked.

make room ─► run folder ─► launch: hub, origin, relay, trainer, validator, two workers, and one that cheats
                              │ until the trainer is done (or Ctrl-C, a crash loop, no progress)
                              ▼
   conclude: ledger.jsonl ─► recount of the exported model ─► claims ─► summary.json, exit code
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.run import PatienceMin

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.adversary import Cheat
    from shoal.run.demo.claims import Cast, Claim
    from shoal.run.folder import RunFolder
    from shoal.run.launch import Launched
    from shoal.runtime.stop import StopToken

STOPPED_CODE = 130


def demo(
    directory: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="Where to run; an earlier demo there is replaced.")
    ] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Other tasks, other samples.")] = 0,
    staleness: Annotated[int, typer.Option(min=0, max=16, help="0: synchronous.")] = 2,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Training steps.")] = 20,
    cheat: Annotated[
        str, typer.Option(help="What the third worker does; docs/guides/attack-your-run.md lists them.")
    ] = "best-of",
    patience_min: PatienceMin = 3,
) -> None:
    """Watch a model learn on eight processes, one of which cheats and is caught; minutes, no GPU."""
    from rich.console import Console

    from shoal.adversary import find_cheat
    from shoal.run.demo.claims import cast_of, demo_recipe, make_room
    from shoal.run.folder import RunFolder
    from shoal.run.preflight import check_ingredients
    from shoal.runtime.stop import stop_on_signals

    recipe, chosen = demo_recipe(seed, staleness, steps), find_cheat(cheat)
    check_ingredients(recipe)
    path = directory.absolute()
    make_room(path, {"seed": seed, "staleness": staleness, "cheat": chosen.name})
    folder = RunFolder.prepare(path, recipe)
    stop, console = stop_on_signals(supervising=True), Console()  # until here, Ctrl-C simply ends this process
    launched = _launch(folder, chosen, patience_min * 60, stop, console)
    if launched.ending.exit_code != 0:
        raise typer.Exit(_say_why(launched, folder))
    raise typer.Exit(conclude(folder, cast_of(folder, chosen), launched.elapsed_s, stop, console))


def _launch(folder: RunFolder, cheat: Cheat, patience_s: float, stop: StopToken, console: Console) -> Launched:
    from shoal.cli.view import choose_display
    from shoal.run.demo.claims import cheater_name
    from shoal.run.launch import launch, process_spec

    cheater = cheater_name(folder)
    spec = process_spec(folder.path, cheater, cheat.name)
    notes = {cheater: f"cheats: {cheat.what}"}
    with choose_display(console) as display:
        return launch(folder, patience_s, stop, display, (spec,), notes)


def _say_why(launched: Launched, folder: RunFolder) -> int:
    import shlex

    from shoal.runtime.text import shoal_command

    ending = launched.ending
    if ending.exit_code == STOPPED_CODE:
        place = shlex.quote(str(folder.path))
        typer.echo(f"stopped. To start again: {shoal_command()} demo --dir {place}")
        typer.echo(f"to go on without the cheater: {shoal_command()} run --dir {place}")
    else:
        typer.echo(f"shoal: {ending.message} (logs: {folder.path / 'logs'})", err=True)
    return ending.exit_code


def conclude(folder: RunFolder, cast: Cast, elapsed_s: float, stop: StopToken, console: Console) -> int:
    """Write the records, check every claim, say what is so; returns the exit code: 0 only if all hold."""
    import json
    from dataclasses import asdict

    from shoal.run.demo.claims import check
    from shoal.runtime.files import write_atomically

    console.print("checking what came out: the ledger, the rollouts, the exported model …")
    found = []
    for claim in check(folder, cast, stop):
        found.append(claim)
        _say(claim, console)
    if stop.is_set():
        console.print("stopped before everything was checked")
        return STOPPED_CODE
    results = {"elapsed_s": round(elapsed_s, 1), "claims": [asdict(claim) for claim in found]}
    write_atomically(folder.path / "summary.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    _say_where(folder.path, console)
    return 0 if all(claim.holds for claim in found) else 1


def _say(claim: Claim, console: Console) -> None:
    """In a terminal, wrapped beside its name; elsewhere one line, for whoever searches it."""
    from rich.markup import escape
    from rich.table import Table

    sign = "[green]✓[/]" if claim.holds else "[bold red]✗[/]"
    if not console.is_terminal:
        console.print(f"{sign} {claim.name:<11} {escape(claim.sentence)}", highlight=False, soft_wrap=True)
        return
    line = Table.grid(padding=(0, 1))
    line.add_row(sign, f"[bold]{claim.name:<11}[/]", escape(claim.sentence))
    console.print(line)


def _say_where(path: Path, console: Console) -> None:
    from shoal.runtime.text import shoal_command

    shoal, python = shoal_command(), shoal_command("python")
    lines = (
        f"{path}",
        "  summary.json  ledger.jsonl                 what you just saw, as files",
        "  trainer/export/                            the model, for transformers",
        "  trainer/rollouts/  trainer/metrics.jsonl   what it was trained on (Parquet), and how it went",
        "next: your own reward is one Python function:",
        f"  {shoal} run recipes/tiny.toml --dir runs/mine --set environment.file=examples/custom_reward.py",
        f"the algorithm in one file: {python} examples/one_file_rl.py",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
