"""metrics.jsonl: every step once, whatever happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import ResourceError
from shoal.runtime.metrics import MetricsLog


def test_a_rewind_forgets_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.rewind(0)  # nothing there: nothing to forget
    for step in range(4):
        log.append(step, {"loss": float(step)})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    log.rewind(2)
    log.append(2, {"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in log.rows()] == [(0, 0.0), (1, 1.0), (2, 9.0)]


def test_a_rewind_keeps_what_a_row_says_of_its_version_until_the_row_is_written_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"loss": 0.5})
    log.append(1, {"held_out": 0.9, "loss": 0.4})
    log.append(2, {"held_out": 0.8})
    log.rewind(1, keep=("held_out",))
    assert log.rows() == [{"step": 0, "loss": 0.5}, {"step": 1, "held_out": 0.9}]
    again = MetricsLog(log.path)  # another crash before the row is written
    again.rewind(1, keep=("held_out",))
    assert again.append(1, {"loss": 0.3}) == {"step": 1, "held_out": 0.9, "loss": 0.3}
    assert again.append(2, {"loss": 0.2}) == {"step": 2, "loss": 0.2}
    assert [row["step"] for row in again.rows()] == [0, 1, 2]
    again.rewind(1, keep=("held_out",))
    again.append(1, {"held_out": 0.7})  # what is measured anew counts
    assert again.rows()[1:] == [{"step": 1, "held_out": 0.7}]
    again.rewind(0, keep=("held_out",))
    assert again.rows() == []


def test_what_is_no_number_is_never_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(0, {"loss": float("nan")})
    assert log.rows() == []


def test_what_becomes_known_later_is_added_to_its_row(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.append(step, {"loss": float(step)})
    assert log.amend(1, {"held_out": 0.5}) == {"step": 1, "loss": 1.0, "held_out": 0.5}
    assert log.rows() == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 1.0, "held_out": 0.5}, {"step": 2, "loss": 2.0}]
    assert log.amend(1, {"held_out": 0.5}) is None, "it says so already"
    assert log.amend(7, {"held_out": 0.5}) is None, "there is no such row"


def test_a_row_that_a_rewind_left_in_part_can_be_added_to(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"loss": 1.0, "held_out": 0.25})
    log.rewind(0, keep=("held_out",))
    log.amend(0, {"extra": 2.0})
    assert log.append(0, {"loss": 3.0}) == {"step": 0, "held_out": 0.25, "extra": 2.0, "loss": 3.0}
    assert len(log.rows()) == 1


@pytest.mark.parametrize("value", ["null", '"fast"', "NaN", "-Infinity", "true", "[1]", '{"a": 1}', "1" + "0" * 400])
def test_what_somebody_put_there_that_is_no_number_is_left_out(tmp_path: Path, value: str) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_text(f'{{"step": 0, "loss": 0.5, "rate_factor": {value}}}\n{{"step": {value}, "loss": 0.25}}\n')
    assert log.rows() == [{"step": 0, "loss": 0.5}]
    log.rewind(1)
    assert log.append(1, {"loss": 0.1}) == {"step": 1, "loss": 0.1}


@pytest.mark.parametrize("use", [MetricsLog.rows, lambda log: log.rewind(1), lambda log: log.append(0, {})])
def test_a_folder_in_its_place_is_one_clear_error(tmp_path: Path, use: Callable[[MetricsLog], object]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ResourceError, match=r"cannot (read|write) .*metrics\.jsonl: Is a directory"):
        use(MetricsLog(tmp_path / "metrics.jsonl"))
