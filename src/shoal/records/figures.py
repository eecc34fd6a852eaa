"""The figures of a report, from `metrics.jsonl` and the records; several runs share the axes of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import UserError
from shoal.records.records import Records
from shoal.runtime.files import write_atomically
from shoal.runtime.metrics import MetricsLog

PART = "part_"
COLUMNS, WIDTH, HEIGHT = 3, 4.2, 2.8  # inches of one figure
CHARTS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("reward", {"sampled_reward": "all sampled", "reward_mean": "trained on"}),
    ("held-out score", {"held_out": ""}),
    ("tokens of a completion", {"completion_tokens": ""}),
    ("entropy", {"entropy": ""}),
    ("gradient norm", {"grad_norm": ""}),
    ("staleness", {"staleness_mean": "mean", "staleness_max": "most"}),
    ("trained tokens/s", {"tokens_per_s": ""}),
    ("share of the time idle", {"idle_fraction": ""}),
)


@dataclass
class Chart:
    """A figure: lines by label, each with (step, value)."""

    title: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def charts_of(run: Path) -> list[Chart]:
    rows = MetricsLog(run / "trainer" / "metrics.jsonl").rows()
    if not rows:
        raise UserError(f"{run} has no metrics yet (trainer/metrics.jsonl): nothing can be drawn")
    parts = sorted({name for row in rows for name in row if name.startswith(PART)})
    wanted = [*CHARTS[:1], ("parts of the reward", {name: name.removeprefix(PART) for name in parts}), *CHARTS[1:]]
    found = [Chart(title, {label: _line(rows, name) for name, label in names.items()}) for title, names in wanted]
    return [chart for chart in (*found, _outcomes(run)) if any(chart.lines.values())]


def _line(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _outcomes(run: Path) -> Chart:
    """Groups by outcome and step."""
    table = Records(run / "hub" / "records").table()
    pairs = zip(*(table[name].to_pylist() for name in ("sample", "outcome", "step")), strict=True)
    counts = Counter((outcome, step) for sample, outcome, step in pairs if sample == 0)
    steps = sorted({step for _, step in counts})
    outcomes = sorted({outcome for outcome, _ in counts})
    return Chart(
        "groups judged while a step was next",
        {name: [(step, counts[name, step]) for step in steps] for name in outcomes},
    )


def draw(runs: Mapping[str, Sequence[Chart]], out: Path) -> None:
    """A PNG or SVG, by the name's end; a chart for each title that any run has."""
    import io

    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    titles = list(dict.fromkeys(chart.title for charts in runs.values() for chart in charts))
    height = -(-len(titles) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * WIDTH, height * HEIGHT), layout="constrained")
    for place, title in enumerate(titles):
        axes = figure.add_subplot(height, COLUMNS, place + 1)
        for run, charts in runs.items():
            for chart in (chart for chart in charts if chart.title == title):
                for label, line in chart.lines.items():
                    named = " ".join(filter(None, [label, run if len(runs) > 1 else ""]))
                    axes.plot([x for x, _ in line], [y for _, y in line], label=named, linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if any(not label.startswith("_") for label in axes.get_legend_handles_labels()[1]):
            axes.legend(fontsize=7)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=out.suffix[1:], dpi=110, metadata={"Date": None} if out.suffix == ".svg" else None)
    write_atomically(out, drawn.getvalue())
