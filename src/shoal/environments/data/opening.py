"""Open a data set: find its files and its format, look at its rows, and name its content.

path ─► files ─► table ─► format ─► scan ─┐
             └─► digest (beside it) ──────┴─► Opened
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.environments.data.digest import data_digest
from shoal.environments.data.locating import locate
from shoal.environments.data.options import DatasetOptions
from shoal.environments.data.scanning import Band, Scan, scan
from shoal.environments.data.table import Table
from shoal.environments.formats.protocol import Format
from shoal.environments.formats.registry import fit
from shoal.errors import EnvironmentSetupError

SOLVE_RATE = "solve_rate"


@dataclass(frozen=True, eq=False)
class Opened:
    """A data set that can be read: its table, how rows become tasks, what every row is, and which data it is."""

    path: Path
    table: Table
    layout: Format
    found: Scan
    digest: str


def open_data(path: Path, options: DatasetOptions) -> Opened:
    """Open the data set at `path`. What is wrong with its columns is said first: reading all of it may take long.

    The digest is computed in a thread beside the scan.
    """
    table = Table(locate(path, options.split))
    layout = fit(options.format, table.columns, options.wanted)
    band = band_of(options, table.columns)
    table.agree([*layout.columns, *([band.column] if band else [])])
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(data_digest, table.paths)
        return Opened(path, table, layout, scan(table, layout, band), digest.result())


def band_of(options: DatasetOptions, columns: tuple[str, ...]) -> Band | None:
    """The solve rates to keep, with their column."""
    if options.keep_solve_rate is None:
        return None
    named = [options.solve_rate] if options.solve_rate else [name for name in columns if name.startswith(SOLVE_RATE)]
    if len(named) != 1 or named[0] not in columns:
        raise EnvironmentSetupError(
            f"keep_solve_rate needs one column of solve rates, not {', '.join(named) or 'none'};"
            f" there are {', '.join(columns)}: set environment.options.solve_rate"
        )
    return Band(named[0], *options.keep_solve_rate)
