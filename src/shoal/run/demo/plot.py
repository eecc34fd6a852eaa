"""How a run went, as a picture: held-out score and reward over time, and when something notable happened.

    metrics.jsonl ─► curves (when, what) ─► two panels over one time axis ─► PNG, whole or not at all

The reward shown is that of everything sampled, where the trainer knew it, else that of what it trained on. Row *n*
tells of version *n* (`held_out`, measured when the row begins) and of step *n* (its reward, there when the row ends).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import ShoalError
from shoal.runtime.files import write_atomically
from shoal.runtime.metrics import MetricsLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect

BLUE, ORANGE, RED, INK, GREY = "#1f6fb2", "#d9742b", "#b3261e", "#222222", "#6b6b6b"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 11, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": "#b8b8b8", "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "xtick.color": GREY,
    "ytick.color": GREY,
}  # fmt: skip
SIZE_INCHES, DPI = (10.0, 6.2), 150
MOST_DOTS = 60  # beyond this, dots hide the line
MOST_STEP_TICKS = 12
UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))  # from, seconds in it, name
ROOM = 0.075  # at either end, of the time shown: the first and the last value stand beside their points


@dataclass(frozen=True)
class Point:
    at_s: float
    value: float


@dataclass(frozen=True)
class Curves:
    """What is drawn. A point of `steps` is when that many steps were done."""

    held_out: tuple[Point, ...]
    reward: tuple[Point, ...]
    steps: tuple[Point, ...]

    @property
    def end_s(self) -> float:
        return max(point.at_s for point in (*self.held_out, *self.reward, *self.steps))


def draw_plot(
    metrics_file: Path,
    out: Path,
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    started_ms: int | None = None,
) -> None:
    """Draw a run's metrics to the PNG `out`. One row is enough; if nothing was measured yet, that is the error.

    `marks` are (seconds since the start, label). The start is `started_ms`, or else when the trainer began.
    """
    curves = curves_of(MetricsLog(metrics_file).rows(), started_ms)
    if not curves.held_out and not curves.reward:
        raise ShoalError(f"there is nothing to draw in {metrics_file}: no step and no evaluation was finished yet")
    write_atomically(out, _png(_Picture(curves, title, tuple(sorted(marks)))))


# ── from rows to curves ──────────────────────────────────────────────────────────────────────────────────────────


def curves_of(rows: Sequence[Mapping[str, object]], started_ms: int | None = None) -> Curves:
    """When which number was measured, in seconds since the start."""
    ends_s = _row_ends(rows, started_ms)
    held_out, reward, steps = [], [], []
    for row, end_s in zip(rows, ends_s, strict=True):
        took_s = _number(row, "step_s")
        if (score := _number(row, "held_out")) is not None:
            held_out.append(Point(max(0.0, end_s - (took_s or 0.0)), score))
        if (mean := _first_number(row, "sampled_reward", "reward_mean")) is not None:
            reward.append(Point(end_s, mean))
        if took_s is not None:
            steps.append(Point(end_s, (_number(row, "step") or 0.0) + 1))
    return Curves(tuple(held_out), tuple(reward), tuple(steps))


def _row_ends(rows: Sequence[Mapping[str, object]], started_ms: int | None) -> list[float]:
    """When each row was written. Where the wall clock is missing or was put back, the row's own duration counts."""
    start_ms = started_ms if started_ms is not None else _trainer_began_ms(rows)
    ends_s: list[float] = []
    for row in rows:
        at_ms = _number(row, "at_ms")
        wall_s = 0.0 if at_ms is None else (at_ms - start_ms) / 1000
        counted_s = (ends_s[-1] if ends_s else 0.0) + (_number(row, "step_s") or 0.0)
        ends_s.append(max(counted_s, wall_s))
    return ends_s


def _trainer_began_ms(rows: Sequence[Mapping[str, object]]) -> float:
    for row in rows[:1]:
        if (at_ms := _number(row, "at_ms")) is not None:
            return at_ms - 1000 * (_number(row, "step_s") or 0.0)
    return math.inf  # no wall clock in the first row: durations alone count


def _first_number(row: Mapping[str, object], *names: str) -> float | None:
    return next((value for name in names if (value := _number(row, name)) is not None), None)


def _number(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ── from curves to a picture ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Picture:
    """What is to be drawn, and how the time axis runs: up to `end_s`, in units of `unit_s` seconds."""

    curves: Curves
    title: str
    marks: tuple[tuple[float, str], ...]

    @property
    def end_s(self) -> float:
        return max([1.0, self.curves.end_s, *(at_s for at_s, _ in self.marks)])

    @property
    def unit(self) -> tuple[float, str]:
        return next((unit_s, name) for least_s, unit_s, name in UNITS if self.end_s >= least_s)

    def x(self, at_s: float) -> float:
        return at_s / self.unit[0]


def _png(picture: _Picture) -> bytes:
    """The same picture gives the same bytes. No display and no state of matplotlib's own is involved."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):  # whatever the user prefers elsewhere
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI)
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, hspace=0.05)
        figure.suptitle(picture.title, x=0.015, ha="left", fontsize=15, fontweight="bold")
        _draw_panels(figure, picture)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _draw_panels(figure: Figure, picture: _Picture) -> None:
    """A panel for each curve that there is."""
    curves = picture.curves
    looks = ((curves.held_out, "held-out score", BLUE), (curves.reward, "mean reward", ORANGE))
    shown = [look for look in looks if look[0]]
    panels = list(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0])
    for axes, (curve, label, colour) in zip(panels, shown, strict=True):
        _draw_curve(axes, picture, curve, colour)
        axes.set_ylabel(label, color=colour, fontweight="bold")
    _draw_time(panels[0], panels[-1], picture)
    _draw_marks(panels, picture)


def _draw_curve(axes: Axes, picture: _Picture, curve: Sequence[Point], colour: str) -> None:
    """The line, its first and its last value. A number between 0 and 1 gets the whole of that range."""
    times, values = [picture.x(point.at_s) for point in curve], [point.value for point in curve]
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.08)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.fill_between(times, values, 0, color=colour, alpha=0.07, linewidth=0)
    axes.margins(y=0.15)
    many = len(curve) > MOST_DOTS
    axes.plot(times, values, color=colour, linewidth=1.2 if many else 2.2, marker="" if many else "o", markersize=5.5)
    places: list[tuple[int, int, Literal["left", "right"]]] = [(-1, 10, "left"), (0, -10, "right")]
    for index, aside, alignment in places[: len(curve)]:
        axes.annotate(
            _shown(values[index]), (times[index], values[index]), xytext=(aside, 0), textcoords="offset points",
            ha=alignment, va="center", color=colour, fontweight="bold", fontsize=12, path_effects=_halo(),
        )  # fmt: skip


def _draw_time(top: Axes, bottom: Axes, picture: _Picture) -> None:
    """Time below, steps done above."""
    from matplotlib.ticker import MaxNLocator

    end = picture.x(picture.end_s)
    top.set_xlim(-ROOM * end, (1 + ROOM) * end)
    bottom.set_xlabel(f"{picture.unit[1]} since the start")
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=10))
    if ticks := step_ticks(picture.curves.steps):
        _draw_steps(top.twiny(), top.get_xlim(), [(picture.x(tick.at_s), tick.value) for tick in ticks])


def _draw_steps(above: Axes, limits: tuple[float, float], ticks: Sequence[tuple[float, float]]) -> None:
    above.set_xlim(*limits)
    above.grid(visible=False)
    above.spines["top"].set_visible(True)
    above.set_xticks([x for x, _ in ticks], [f"{steps:.0f}" for _, steps in ticks])
    above.set_xlabel("training steps done", labelpad=7)


def step_ticks(steps: Sequence[Point], most: int = MOST_STEP_TICKS) -> list[Point]:
    """Those steps that are multiples of a round number, so that there are at most `most`."""
    last = max((step.value for step in steps), default=0.0)
    every = next(size * 10**power for power in range(12) for size in (1, 2, 5) if last / (size * 10**power) <= most)
    return [step for step in steps if step.value % every == 0]


def _draw_marks(panels: Sequence[Axes], picture: _Picture) -> None:
    """A dashed line through all panels; labels on the side where there is room, neighbours one above the other."""
    for index, (at_s, label) in enumerate(picture.marks):
        late = at_s > 0.6 * picture.end_s
        for axes in panels:
            axes.axvline(picture.x(at_s), color=RED, linestyle=(0, (4, 3)), linewidth=1.4)
        panels[-1].annotate(
            label, (picture.x(at_s), 0.05 + 0.1 * (index % 4)), xycoords=("data", "axes fraction"),
            xytext=(-6 if late else 6, 0), textcoords="offset points", color=RED, va="bottom",
            ha="right" if late else "left", path_effects=_halo(),
        )  # fmt: skip


def _shown(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"


def _halo() -> list[AbstractPathEffect]:
    """Text stays readable on a line."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3.5, foreground="white")]
