"""`shoal demo`: the whole system on one machine in minutes, with a worker that cheats; what it claims is checked.

make room ─► run folder ─► launch: hub, origin, relay, trainer, validator, two workers, and one that cheats
                              │ until the trainer is done (or Ctrl-C, a crash loop, no progress)
                              ▼
   conclude: ledger.jsonl ─► recount of the exported model ─► claims ─► summary.json, exit code
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option, echo

from shoal.cli.options import PatienceMin
from shoal.runtime.text import shoal_command

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.adversary import Cheat
    from shoal.run.folder import RunFolder
    from shoal.runtime.stop import StopToken

STOPPED_CODE = 130
NEXT = """{path}
  summary.json  ledger.jsonl                 what you just saw, as files
  trainer/export/                            the model, for transformers
  trainer/rollouts/  trainer/metrics.jsonl   what it was trained on (Parquet), and how it went
next: your own reward is one Python function:
  {shoal} run recipes/tiny.toml --dir runs/mine --set environment.file=examples/custom_reward.py
the algorithm in one file: {python} examples/one_file_rl.py"""


def demo(
    directory: Annotated[
        Path, Option("--dir", metavar="FOLDER", help="Where to run; an earlier demo there is replaced.")
    ] = Path("runs/demo"),
    seed: Annotated[int, Option(min=0, max=2**31, help="Other tasks, other samples.")] = 0,
    staleness: Annotated[int, Option(min=0, max=16, help="0: synchronous.")] = 2,
    steps: Annotated[int, Option(min=1, max=100_000, help="Training steps.")] = 20,
    cheat: Annotated[
        str, Option(help="What the third worker does; docs/guides/attack-your-run.md lists them.")
    ] = "best-of",
    patience_min: PatienceMin = 3,
) -> None:
    """Watch a model learn on eight processes, one of which cheats and is caught; minutes, no GPU."""
    from rich.console import Console

    from shoal.adversary import find_cheat
    from shoal.cli.view import choose_display
    from shoal.run.demo.claims import cheater_name, demo_recipe, make_room
    from shoal.run.folder import RunFolder
    from shoal.run.launch import launch, process_spec
    from shoal.run.preflight import check_ingredients
    from shoal.runtime.stop import stop_on_signals

    recipe, chosen = demo_recipe(seed, staleness, steps), find_cheat(cheat)
    check_ingredients(recipe)
    path = directory.absolute()
    make_room(path, {"seed": seed, "staleness": staleness, "cheat": chosen.name})
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
    """Write the records, check every claim, say what is so; returns the exit code: 0 only if all hold."""
    from rich.markup import escape
    from rich.table import Table

    from shoal.run.demo.claims import cast_of, check
    from shoal.runtime.files import write_atomically

    console.print("checking what came out: the ledger, the rollouts, the exported model …")
    found = []
    for claim in check(folder, cast_of(folder, cheat), stop):
        found.append(claim)
        sign, line = "[green]✓[/]" if claim.holds else "[bold red]✗[/]", Table.grid(padding=(0, 1))
        line.add_row(sign, f"[bold]{claim.name:<11}[/]", escape(claim.sentence))
        one_line = f"{sign} {claim.name:<11} {escape(claim.sentence)}"  # for whoever searches a log
        console.print(line if console.is_terminal else one_line, highlight=False, soft_wrap=not console.is_terminal)
    if stop.is_set():
        console.print("stopped before everything was checked")
        return STOPPED_CODE
    results = {"elapsed_s": round(elapsed_s, 1), "claims": [asdict(claim) for claim in found]}
    write_atomically(folder.path / "summary.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    shoal, python = shoal_command(), shoal_command("python")
    console.print(
        NEXT.format(path=folder.path, shoal=shoal, python=python), markup=False, highlight=False, soft_wrap=True
    )
    return 0 if all(claim.holds for claim in found) else 1
