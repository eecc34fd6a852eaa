"""How a run went, as a picture: held-out score and reward over time, and when something notable happened.

The reward shown is that of everything sampled, where the trainer knew it, else that of what it trained on. Row *n*
tells of version *n* (`held_out`, measured when the row begins) and of step *n* (its reward, there when the row ends).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import ShoalError
from shoal.run.progress import reward_of
from shoal.runtime.files import write_atomically
from shoal.runtime.metrics import MetricsLog

Curve = list[tuple[float, float]]
"""Points (seconds since the start, value)."""

COLOURS = {"held-out score": "#1f6fb2", "mean reward": "#d9742b"}
RED, GREY = "#b3261e", "#e6e6e6"
MOST_DOTS = 60  # beyond this, dots hide the line


def curves_of(rows: Sequence[Mapping[str, float]], started_ms: float) -> dict[str, Curve]:
    """When which number was measured; only curves that have a point."""
    curves: dict[str, Curve] = {name: [] for name in COLOURS}
    for row in rows:
        end_s = (row["at_ms"] - started_ms) / 1000
        if "held_out" in row:
            curves["held-out score"].append((max(0.0, end_s - row.get("step_s", 0.0)), row["held_out"]))
        if (reward := reward_of(row)) is not None:
            curves["mean reward"].append((end_s, reward))
    return {name: curve for name, curve in curves.items() if curve}


def draw_plot(
    metrics_file: Path, out: Path, title: str, started_ms: float, marks: Sequence[tuple[float, str]] = ()
) -> None:
    """Draw a run's metrics to the PNG `out`, whole or not at all. `marks` are (seconds since the start, label)."""
    curves = curves_of(MetricsLog(metrics_file).rows(), started_ms)
    if not curves:
        raise ShoalError(f"there is nothing to draw in {metrics_file}: no step and no evaluation was finished yet")
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("default"):  # whatever the user prefers elsewhere
        figure = Figure(figsize=(10.0, 6.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.015, ha="left", fontsize=15, fontweight="bold")
        panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, curve) in zip(panels, curves.items(), strict=True):
            times, values, colour = [at for at, _ in curve], [value for _, value in curve], COLOURS[name]
            axes.plot(times, values, color=colour, linewidth=2, marker="" if len(curve) > MOST_DOTS else "o")
            axes.set_ylabel(name, color=colour, fontweight="bold")
            axes.set_title(f"{values[0]:.2f} → {values[-1]:.2f}", color=colour, loc="right")
            axes.grid(color=GREY)
            if min(values) >= 0 and max(values) <= 1:
                axes.set_ylim(-0.02, 1.05)
            for at_s, _ in marks:
                axes.axvline(at_s, color=RED, linestyle="--", linewidth=1.4)
        for at_s, label in marks:
            panels[-1].annotate(f" {label}", (at_s, 0.05), xycoords=("data", "axes fraction"), color=RED)
        panels[-1].set_xlabel("seconds since the start")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomically(out, buffer.getvalue())
