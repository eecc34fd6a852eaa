"""`shoal data`: look at a data set before training on it. What each command does is in `shoal.cli.datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(
    name="data",
    help="Check a data set, see in which order its tasks are drawn, write right answers as demonstrations.",
    epilog="Schemas, options and a first try: docs/guides/data.md.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WhereArgument = Annotated[
    str,
    typer.Argument(metavar="DATA", help="A data file or folder, FORMAT:FILE, a recipe (TOML), or a run's folder."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OPTION=VALUE", help="An option of the data set, e.g. format=aime; may be repeated."),
]


@data.command()
def check(where: WhereArgument, settings: Settings = None) -> None:
    """Read every row and answer; lists those that cannot be used, and exits with 2 unless they are to be skipped."""
    from shoal.cli.datasets import check_data

    raise typer.Exit(check_data(where, settings or ()))


@data.command()
def order(
    where: WhereArgument,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The run's seed.  [default: the recipe's, or 0]")] = None,
    start: Annotated[int, typer.Option("--from", min=0, metavar="UNIT", help="The first unit to show.")] = 0,
    count: Annotated[int, typer.Option("--count", min=1, max=10_000_000, help="How many units to show.")] = 20,
) -> None:
    """Show which task each unit is: unit, row, id. Anyone with the data and the seed can check a run's leases by it."""
    from shoal.cli.datasets import show_order

    show_order(where, settings or (), seed, range(start, start + count))


@data.command()
def demos(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="An environment by name, a recipe, a data file, …")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.jsonl", help="The demonstrations to write.")],
    count: Annotated[int, typer.Option("--count", min=1, max=10_000_000, help="How many.")] = 1000,
    form: Annotated[
        str, typer.Option("--form", help="What is said, with {answer} in it, e.g. <answer>{answer}</answer>.")
    ] = "{answer}",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="environment.KEY=VALUE", help="Change the environment; may be repeated."),
    ] = None,
) -> None:
    """Write right answers of training tasks as demonstrations for `shoal sft`; each is scored before."""
    from shoal.cli.demonstrating import write_demos

    write_demos(spec, settings or (), out, count, form)
