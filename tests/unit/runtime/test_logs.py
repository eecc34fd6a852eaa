"""Logs, and others' words made fit for a terminal."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ResourceError
from shoal.runtime import logs, printable, visible, visible_json


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


def test_a_long_record_takes_little_of_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hub's words may be as long as its answers, 64 MiB, and come with every attempt."""
    logs.setup("worker", tmp_path / "log")
    try:
        raise ValueError("a" * 10**6)
    except ValueError:
        logging.getLogger("shoal").exception("the hub says %s", "b" * 10**6)
    written = (tmp_path / "log").read_text()
    assert "(1,000,013 characters)" in written
    assert len(written) < 30_000
    assert len(capsys.readouterr().err) < 30_000


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


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write the log"):
        logs.setup("hub", tmp_path / "file" / "hub.log")


NASTY = {
    "clear the screen": "\x1b[2J", "title": "\x1b]0;title\x07", "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "CSI of one byte": "\x9b31m", "back": "password\x08\x08\x08", "return": "real\rfake",
    "lines": "one\ntwo\r\nthree\x0bfour\x85five\u2028six", "bidi": "a\u202eb\u2066c", "zero width": "a\u200bb\ufeffc",
    "surrogate": "\udcff", "delete": "\x7f",
}  # fmt: skip


@given(st.text())
def test_visible_text_stays_and_json_keeps_its_meaning(text: str) -> None:
    assert visible(text).isprintable()
    kept = [letter for letter in text if letter.isprintable()]
    assert [letter for letter in visible(text) if letter in kept] == kept or "⏎" in visible(text)
    shown = visible_json(json.dumps({"text": text}, ensure_ascii=False, indent=2))
    assert all(line.isprintable() for line in shown.split("\n"))
    assert json.loads(shown) == {"text": text}


def test_spaces_stay_where_a_line_is_shown_as_it_is() -> None:
    assert visible("    indented  twice") == "    indented  twice"
    assert printable("  a\t b\n") == "a b"


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_no_log_holds_what_others_wrote_uncleaned(tmp_path, capsys, text):
    logs.setup("worker", tmp_path / "worker.log", verbose=True)
    log = logging.getLogger("shoal.worker")
    log.warning("the hub says: %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("it failed")
    for written in (capsys.readouterr().err, (tmp_path / "worker.log").read_text(encoding="utf-8")):
        lines = written.split("\n")
        assert len(lines) >= 3, "both records are there"
        assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]


def test_warnings_of_libraries_go_through_the_log() -> None:
    script = "from shoal.runtime import logs; import warnings; logs.setup('w', None); warnings.warn('a\\x1b[2Jb')"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "a�[2Jb" in ran.stderr
    assert "\x1b" not in ran.stderr
