"""Logs are one line per record; metrics survive torn lines and numbers that JSON lacks."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ResourceError
from shoal.runtime import logs
from shoal.runtime.metrics import MetricsWriter, read_metrics


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, shoal_level = root.handlers[:], root.level, logging.getLogger("shoal").level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("shoal").setLevel(shoal_level)


def test_a_record_is_one_line_on_stderr_and_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs" / "hub.log"
    logs.setup("hub", file)
    logging.getLogger("shoal.hub").info("first\nsecond %d", 3)
    logging.getLogger("shoal.hub").debug("hidden")
    (line,) = file.read_text().splitlines()
    assert line in capsys.readouterr().err
    assert line.endswith("INFO  hub        first ⏎ second 3")


def test_a_traceback_goes_to_the_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hub.log"
    logs.setup("hub", file)
    try:
        raise KeyError("lost\nkey")
    except KeyError:
        logging.getLogger("shoal").exception("a step failed")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "a step failed: KeyError" in shown
    assert "Traceback" in file.read_text()
    assert all(line.startswith("    ") for line in file.read_text().splitlines()[1:])


def test_verbose_shows_more_and_setting_up_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("hub", None)
    logs.setup("relay", None, verbose=True)
    logging.getLogger("shoal.x").debug("detail")
    shown = capsys.readouterr().err
    assert shown.count("detail") == 1
    assert "relay" in shown


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write the log"):
        logs.setup("hub", tmp_path / "file" / "hub.log")


def test_metrics_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    assert read_metrics(path) == []
    with MetricsWriter(path) as writer:
        writer.write({"step": 0, "loss": 0.5})
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": math.nan})
        assert read_metrics(path) == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": None}]


@given(cut=st.integers(0, 200))
def test_any_torn_tail_is_ignored_and_then_cut(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    rows = [{"step": step, "text": "é" * step} for step in range(8)]
    with MetricsWriter(path) as writer:
        for row in rows:
            writer.write(row)
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    kept = rows[: whole.count(b"\n")]
    assert read_metrics(path) == kept
    with MetricsWriter(path) as writer:
        writer.write({"step": 99})
    assert read_metrics(path) == [*kept, {"step": 99}]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_metrics_below_a_file_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="a part of the path is a file"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")
