"""Nothing that others wrote reaches a terminal or a log with a character that does more than stand there."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime import logs
from shoal.runtime.text import printable, visible, visible_json

NASTY = {
    "clear the screen": "\x1b[2J",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "CSI of one byte": "\x9b31m",
    "back": "password\x08\x08\x08",
    "return": "real\rfake",
    "lines": "one\ntwo\r\nthree\x0bfour\x85five\u2028six",
    "bidi": "a\u202eb\u2066c",
    "zero width": "a\u200bb\ufeffc",
    "surrogate": "\udcff",
    "delete": "\x7f",
}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_nothing_invisible_is_left(text: str) -> None:
    assert visible(text).isprintable()
    assert printable(text).isprintable()


@given(st.text())
def test_what_is_visible_stays_and_json_keeps_its_meaning(text: str) -> None:
    assert visible(text).isprintable()
    kept = [letter for letter in text if letter.isprintable()]
    assert [letter for letter in visible(text) if letter in kept] == kept or "⏎" in visible(text)
    shown = visible_json(json.dumps({"text": text}, ensure_ascii=False, indent=2))
    assert all(line.isprintable() for line in shown.split("\n"))
    assert json.loads(shown) == {"text": text}


def test_spaces_stay_where_a_line_is_shown_as_it_is() -> None:
    assert visible("    indented  twice") == "    indented  twice"
    assert printable("  a\t b\n") == "a b"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_no_log_holds_what_others_wrote_uncleaned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, as_json: bool
) -> None:
    monkeypatch.setenv("SHOAL_LOG_FORMAT", "json" if as_json else "text")
    logs.setup("worker", tmp_path / "worker.log", verbose=True)
    log = logging.getLogger("shoal.worker")
    log.warning("the hub says: %s", text, extra={"fields": {"said": text}})
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
