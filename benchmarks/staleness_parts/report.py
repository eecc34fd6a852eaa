"""Tables and plots of exact-age runs: means over seeds, 95 % intervals, and differences to staleness 0 paired by seed.

A run that ended early keeps its last score for the steps that it did not reach: its owner
would be left with that.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.evaluation.statistics import t_interval

PLAIN = "plain"
AGES = (0, 1, 2, 4, 8)
LAST = 10**9
COLOURS = dict(zip(AGES, ("#1b3a5b", "#2f7f9f", "#58a65c", "#e0a030", "#c0392b"), strict=True))
VARIANT_WORDS = {"recipe": "as the recipe", "half": "learning rate 5e-5", "fast": "learning rate 3e-4"}
NAMES = {"tiny": "sort", "gym": "spell_backward"}


@dataclass(frozen=True, order=True)
class Setting:
    """What is averaged over seeds."""

    task: str
    variant: str
    method: str
    staleness: int


@dataclass(frozen=True)
class Run:
    """The scores of one run by step, and its rows."""

    scores: Mapping[int, float]
    rows: Sequence[Mapping[str, Any]]
    ended: str

    def at(self, step: int) -> float:
        return self.scores[max(known for known in self.scores if known <= step)]

    def mean(self, name: str) -> float:
        return float(np.mean([row[name] for row in self.rows if name in row]))


Runs = Mapping[Setting, Mapping[int, Run]]


def read_runs(folder: Path) -> Runs:
    """Every complete run of the folder, by setting and seed."""
    found: dict[Setting, dict[int, Run]] = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        first = rows[0]
        setting = Setting(first["task"], first["variant"], first["method"], first["staleness"])
        _refuse_other_ages(path, rows)
        scores = {row["step"]: row["held_out"] for row in rows if "held_out" in row}
        found[setting][first["seed"]] = Run(scores, rows, rows[-1]["ended"])
    return found


def _refuse_other_ages(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The claim is about groups that are exactly s steps old, so that is checked on the trainer's own numbers."""
    for row in rows:
        wanted = min(row["step"], row["staleness"])
        if "staleness_mean" in row and not row["staleness_mean"] == row["staleness_max"] == wanted:
            raise SystemExit(f"{path}: step {row['step']} was trained on groups of another age than {wanted}")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t).

    >>> [round(number, 3) for number in interval([0.7, 0.8, 0.9])]
    [0.8, 0.248]
    """
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    estimate = t_interval(np.array(values))
    return estimate.value, (estimate.high - estimate.low) / 2


def against_fresh(runs: Runs, setting: Setting, step: int) -> list[float]:
    """The score less that of staleness 0, for each seed that has both."""
    fresh = runs.get(Setting(setting.task, setting.variant, setting.method, 0), {})
    return [run.at(step) - fresh[seed].at(step) for seed, run in runs[setting].items() if seed in fresh]


def table(runs: Runs, settings: Iterable[Setting]) -> list[str]:
    chosen = sorted(settings)
    last = max(max(run.scores) for setting in chosen for run in runs[setting].values())
    half = last // 2
    lines = [
        f"| loss | staleness | seeds | after {half} steps | after {last} steps | difference to staleness 0 | "
        "ended early | log-probability moved | effective samples |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for setting in chosen:
        own = list(runs[setting].values())
        difference = "" if setting.staleness == 0 else _shown(against_fresh(runs, setting, last), sign=True)
        early = sum(run.ended != "complete" for run in own)
        moved = np.mean([run.mean("mismatch") for run in own])
        effective = np.mean([run.mean("effective_samples") for run in own])
        lines.append(
            f"| {setting.method} | {setting.staleness} | {len(own)} | {_shown([run.at(half) for run in own])} "
            f"| {_shown([run.at(last) for run in own])} | {difference} | {early or ''} "
            f"| {moved:.3f} | {effective:.2f} |"
        )
    return lines


def _shown(values: Sequence[float], sign: bool = False) -> str:
    if not values:
        return ""
    mean, half = interval(values)
    shown = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return shown if math.isnan(half) else f"{shown} ± {half:.3f}"


def write_report(folder: Path, out: Path, plots: Path, command: str) -> None:
    """Everything into one Markdown file and two plots."""
    runs = read_runs(folder)
    if not runs:
        raise SystemExit(f"there is no complete run in {folder}; run a sweep first")
    parts = ["# Learning from rollouts that are s steps old", "", command, ""]
    for task, variant in sorted({(setting.task, setting.variant) for setting in runs}, reverse=True):
        here = [setting for setting in runs if (setting.task, setting.variant) == (task, variant)]
        parts += [f"## {NAMES.get(task, task)}: {VARIANT_WORDS.get(variant, variant)}", "", *table(runs, here), ""]
    out.write_text("\n".join(parts).rstrip() + "\n")
    print(out.read_text())
    plot_curves(runs, plots / "staleness-curves.svg")
    plot_losses(runs, plots / "staleness-losses.svg")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "shoal", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def plot_curves(runs: Runs, path: Path) -> None:
    """Score over steps: a panel for each task, variant and loss that was run at several ages; a line for each age."""
    pyplot = _pyplot()
    panels = sorted({(s.task, s.variant, s.method) for s in runs}, key=lambda panel: (panel[0] != "tiny", *panel[1:]))
    panels = [panel for panel in panels if len(_ages(runs, panel)) > 3]
    rows = math.ceil(len(panels) / 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(8.4, 2.9 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for setting in _ages(runs, panel):
            _line(axis, list(runs[setting].values()), COLOURS[setting.staleness], f"staleness {setting.staleness}")
        task, variant, method = panel
        axis.set_title(f"{NAMES.get(task, task)}, {VARIANT_WORDS.get(variant, variant)}: {method}", fontsize=9)
        axis.set(ylim=(0, 1), xlabel="training step", ylabel="greedy held-out score")
        axis.grid(alpha=0.25)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _ages(runs: Runs, panel: tuple[str, str, str]) -> list[Setting]:
    return sorted(setting for setting in runs if (setting.task, setting.variant, setting.method) == panel)


def _line(axis: Any, runs: Sequence[Run], colour: str, label: str) -> None:
    """The mean over seeds, and the span from the worst to the best of them."""
    steps = sorted({step for run in runs for step in run.scores if step % 5 == 0})
    scores = np.array([[run.at(step) for step in steps] for run in runs])
    axis.plot(steps, scores.mean(0), color=colour, label=label)
    axis.fill_between(steps, scores.min(0), scores.max(0), color=colour, alpha=0.12, linewidth=0)


def plot_losses(runs: Runs, path: Path) -> None:
    """The last score over staleness: a panel for each task and variant, a line for each loss."""
    pyplot = _pyplot()
    panels = sorted({(setting.task, setting.variant) for setting in runs}, reverse=True)
    colours = {method: f"C{number}" for number, method in enumerate(sorted({setting.method for setting in runs}))}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.2), squeeze=False, sharey=True)
    for axis, (task, variant) in zip(axes[0], panels, strict=True):
        for method in sorted({s.method for s in runs if (s.task, s.variant) == (task, variant)}):
            chosen = _ages(runs, (task, variant, method))
            ends = [interval([run.at(LAST) for run in runs[setting].values()]) for setting in chosen]
            style = {"color": "black", "linestyle": "--"} if method == PLAIN else {"color": colours[method]}
            places = [AGES.index(setting.staleness) for setting in chosen]
            means, halves = [mean for mean, _ in ends], [0.0 if math.isnan(half) else half for _, half in ends]
            axis.errorbar(places, means, yerr=halves, marker="o", markersize=3, capsize=2, label=method, **style)
        axis.set_xticks(range(len(AGES)), [str(age) for age in AGES])
        axis.set(xlabel="staleness", ylim=(0, 1))
        axis.set_title(f"{NAMES.get(task, task)}, {VARIANT_WORDS.get(variant, variant)}", fontsize=9)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("last greedy held-out score")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
