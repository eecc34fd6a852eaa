"""The picture of a run: when which number is drawn, and that a PNG comes out of anything that was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ResourceError, ShoalError
from shoal.run.demo import plot
from shoal.run.demo.plot import Point, curves_of, draw_plot, step_ticks

START_MS = 1_700_000_000_000
ROWS: list[dict[str, float]] = [
    {"step": 0, "held_out": 0.25, "step_s": 10.0, "sampled_reward": 0.5, "reward_mean": 0.9, "at_ms": START_MS + 14e3},
    {"step": 1, "step_s": 4.0, "reward_mean": 0.6, "at_ms": START_MS + 18e3},
    {"step": 2, "held_out": 0.5, "step_s": 6.0, "sampled_reward": 0.7, "at_ms": START_MS + 24e3},
    {"step": 3, "held_out": 0.75, "at_ms": START_MS + 25e3},
]


def metrics(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestCurves:
    def test_seconds_count_from_the_start_that_is_given(self) -> None:
        curves = curves_of(ROWS, START_MS)
        # A version is measured when its row begins; the reward of a step is there when its row ends.
        assert curves.held_out == (Point(4.0, 0.25), Point(18.0, 0.5), Point(25.0, 0.75))
        assert curves.reward == (Point(14.0, 0.5), Point(18.0, 0.6), Point(24.0, 0.7))
        assert curves.steps == (Point(14.0, 1), Point(18.0, 2), Point(24.0, 3))
        assert curves.end_s == 25.0

    def test_or_from_when_the_trainer_began(self) -> None:
        curves = curves_of(ROWS)
        assert [point.at_s for point in curves.held_out] == [0.0, 14.0, 21.0]
        assert [point.at_s for point in curves.reward] == [10.0, 14.0, 20.0]

    def test_the_pause_of_a_trainer_that_was_restarted_counts(self) -> None:
        later = [*ROWS[:2], {**ROWS[2], "at_ms": START_MS + 90e3}]
        assert curves_of(later, START_MS).reward[-1].at_s == 90.0

    def test_without_wall_time_or_with_a_clock_put_back_durations_count(self) -> None:
        without = [{name: value for name, value in row.items() if name != "at_ms"} for row in ROWS]
        put_back = [ROWS[0], *({**row, "at_ms": row["at_ms"] - 3600e3} for row in ROWS[1:])]
        expected = [10.0, 14.0, 20.0]
        assert [point.at_s for point in curves_of(without).reward] == expected
        assert [point.at_s for point in curves_of(put_back).reward] == expected
        assert [point.at_s for point in curves_of(without, START_MS).reward] == expected

    def test_what_is_no_number_is_left_out(self) -> None:
        odd: list[dict[str, object]] = [
            {"step": 0, "held_out": "high", "reward_mean": float("nan"), "step_s": 1.0},
            {"step": 1, "sampled_reward": None, "reward_mean": 0.5, "step_s": 1.0},
        ]
        curves = curves_of(odd)
        assert (curves.held_out, curves.reward) == ((), (Point(2.0, 0.5),))

    @pytest.mark.parametrize(("steps", "shown"), [(3, [1, 2, 3]), (30, [5, 10, 15, 20, 25, 30]), (0, [])])
    def test_steps_are_shown_at_round_numbers(self, steps: int, shown: list[int]) -> None:
        points = [Point(float(step), step + 1) for step in range(steps)]
        assert [point.value for point in step_ticks(points)] == shown
        assert len(step_ticks([Point(float(step), step + 1) for step in range(9999)])) <= plot.MOST_STEP_TICKS


class TestPicture:
    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        "rows",
        [
            ROWS,
            ROWS[:1],
            [{"step": 0, "held_out": 0.0}],
            [{"step": step, "step_s": 60.0, "reward_mean": -2.0 + step / 100} for step in range(400)],
            [{"step": 0, "step_s": 0.0, "reward_mean": 1e6}],
        ],
        ids=["a run", "one step", "one evaluation", "long, no evaluation", "no time at all"],
    )
    def test_anything_measured_gives_a_picture(self, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
        out = tmp_path / "plot.png"
        for marks in ([], [(6.0, "cheater banned")]):
            draw_plot(metrics(tmp_path, rows), out, "a title", marks)
            assert size_of(out) == (1500, 930)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "plot.png"]

    def test_every_part_of_it_shows(self, tmp_path: Path) -> None:
        """Each argument and each curve changes the picture; the same again is the same to the byte."""
        file, seen, other = metrics(tmp_path, ROWS), [], tmp_path / "other"
        other.mkdir()
        without = [{name: value for name, value in row.items() if name != "held_out"} for row in ROWS]
        for arguments in (
            {}, {"title": "other"}, {"marks": [(6.0, "here")]}, {"marks": [(6.0, "there")]}, {"marks": [(7.0, "here")]},
            {"started_ms": START_MS}, {"metrics_file": metrics(other, without)},
        ):  # fmt: skip
            given: dict[str, Any] = {"metrics_file": file, "title": "title", **arguments}
            draw_plot(out=tmp_path / "plot.png", **given)
            seen.append((tmp_path / "plot.png").read_bytes())
        assert len(set(seen)) == len(seen)
        draw_plot(file, tmp_path / "plot.png", "title")
        assert (tmp_path / "plot.png").read_bytes() == seen[0]

    @pytest.mark.parametrize("rows", [None, [], [{"step": 0, "loss": 1.0}]])
    def test_nothing_measured_is_one_clear_error(self, tmp_path: Path, rows: list[dict[str, Any]] | None) -> None:
        file = tmp_path / "metrics.jsonl" if rows is None else metrics(tmp_path, rows)
        with pytest.raises(ShoalError, match=r"nothing to draw in .*metrics\.jsonl: no step and no evaluation"):
            draw_plot(file, tmp_path / "plot.png", "title")
        assert not (tmp_path / "plot.png").exists()

    def test_a_place_that_cannot_be_written_is_one_clear_error(self, tmp_path: Path) -> None:
        file = metrics(tmp_path, ROWS)
        with pytest.raises(ResourceError, match=r"cannot write .*plot\.png"):
            draw_plot(file, file / "plot.png", "title")


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_matplotlib_is_imported_by_who_draws_only() -> None:
    check = "import sys, shoal.run.demo.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
