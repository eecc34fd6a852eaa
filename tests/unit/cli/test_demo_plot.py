"""The picture of a run: when which number is drawn, and that a PNG comes out of anything that was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.run.demo.plot import curves_of, draw_plot

START_MS = 1_700_000_000_000
ROWS: list[dict[str, float]] = [
    {"step": 0, "held_out": 0.25, "step_s": 10.0, "sampled_reward": 0.5, "reward_mean": 0.9, "at_ms": START_MS + 14e3},
    {"step": 1, "step_s": 4.0, "reward_mean": 0.6, "at_ms": START_MS + 18e3},
    {"step": 2, "held_out": 0.5, "step_s": 6.0, "sampled_reward": 0.7, "at_ms": START_MS + 24e3},
    {"step": 3, "held_out": 0.75, "at_ms": START_MS + 25e3},
]


def metrics(folder: Path, rows: list[dict[str, float]]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_version_is_measured_when_its_row_begins_and_a_reward_is_there_when_it_ends() -> None:
    curves = curves_of(ROWS, START_MS)
    assert curves["held-out score"] == [(4.0, 0.25), (18.0, 0.5), (25.0, 0.75)]
    assert curves["mean reward"] == [(14.0, 0.5), (18.0, 0.6), (24.0, 0.7)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[1:2], ROWS[3:]])
def test_anything_measured_gives_a_picture_and_a_mark_shows_in_it(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    file, pictures = metrics(tmp_path, rows), []
    for marks in ([], [(6.0, "cheater banned")]):
        draw_plot(file, tmp_path / "plot.png", "a title", START_MS, marks)
        pictures.append((tmp_path / "plot.png").read_bytes())
    assert pictures[0] != pictures[1]
    for data in pictures:
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [1500, 930]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "loss": 1.0, "at_ms": START_MS}]])
def test_nothing_measured_is_one_clear_error(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    with pytest.raises(ShoalError, match=r"nothing to draw in .*metrics\.jsonl: no step and no evaluation"):
        draw_plot(metrics(tmp_path, rows), tmp_path / "plot.png", "title", START_MS)
    assert not (tmp_path / "plot.png").exists()


def test_matplotlib_is_imported_by_who_draws_only() -> None:
    check = "import sys, shoal.run.demo.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
