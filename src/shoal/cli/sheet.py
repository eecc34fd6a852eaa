"""A table that fits where it is shown: what may give way is cut, in order; numbers and states never are.

    wide enough, a pipe, a file   node  name                 state   credit  doing
                                  ab12  a-very-long-hostname  active  1,200   generating unit 17, token 300
    narrow                        ab12  a-very-long-hostname  active  1,200   generating un…
    narrower                      ab12  a-very-lo…            active  1,200   gener…

Where even that is too wide, lines are folded: nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shoal.runtime.text import printable

GAP = 2
UNBOUND = 100_000


@dataclass(frozen=True)
class Sheet:
    """`gives` names the columns that may be cut, the first to be cut first, and how much of each stays; one of which
    nothing has to stay is left out before a sliver of it is shown."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    gives: Mapping[str, int] = field(default_factory=dict)
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [[printable(cell) for cell in row] for row in self.rows]
        widths = self._widths(rows, options.max_width)
        if self.title:
            yield Text(self.title, style="italic")
        yield Text(_line(self.heads, widths), style="bold", overflow="fold")
        for row in rows:
            yield Text(_line(row, widths), overflow="fold")

    def _widths(self, rows: Sequence[Sequence[str]], room: int) -> list[int]:
        widths = [max(cell_len(cell) for cell in column) for column in zip(self.heads, *rows, strict=True)]
        excess = sum(widths) + GAP * (len(widths) - 1) - room
        for name, least in self.gives.items():
            index = self.heads.index(name)
            cut = max(0, min(excess, widths[index] - (max(least, cell_len(name)) if least else 0)))
            if cut and widths[index] - cut < cell_len(name):  # not even its head would fit
                cut = widths[index] + GAP
            widths[index] -= cut
            excess -= cut
        return widths


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [_cell(cell, width) for cell, width in zip(cells, widths, strict=True) if width >= 0]
    return (" " * GAP).join(shown).rstrip()


def _cell(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return f"{set_cell_size(text, width - 1)}…"


def console() -> Console:
    """Where commands print: as wide as the terminal; what is no terminal has no edge, so that programs read it all."""
    found = Console()
    return found if found.is_terminal else Console(width=UNBOUND)
