"""`shoal data`: look at a data set before training on it. What each command does is in `shoal.cli.datasets`."""

from __future__ import annotations

from typing import Annotated

import typer

data = typer.Typer(
    name="data",
    help="Check a data set, and see in which order its tasks are drawn.",
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
    """Read every row and every answer; lists those that cannot be used, and exits with 2 if there are any."""
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
