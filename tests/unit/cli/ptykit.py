"""A real terminal for a process under test (a pty), and what a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 30.0
SIZE_AND_STYLE = ("COLUMNS", "LINES", "NO_COLOR", "PYTHONUNBUFFERED")  # the last: writes that a signal cuts short
CODES = re.compile(r"\x1b\[\?25([lh])|\x1b\[(\d*)([AK])|\x1b\[[\d;]*m|(\r)|(\n)|([^\x1b])")


class Screen:
    """As much of a terminal as a frame needs: lines that scroll, cursor up, erase line, hide and show the cursor."""

    def __init__(self, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self._lines = [""] * rows
        self._row = self._column = 0
        self.scrolled: list[str] = []
        self.cursor_hidden = False

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines]

    @property
    def text(self) -> str:
        return "\n".join([*self.scrolled, *self.lines])

    def feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            match = CODES.match(text, position)
            assert match is not None, f"a code that this terminal does not know: {text[position : position + 20]!r}"
            self._obey(match)
            position = match.end()

    def _obey(self, match: re.Match[str]) -> None:
        hidden, amount, code, carriage_return, line_feed, letter = match.groups()
        if hidden:
            self.cursor_hidden = hidden == "l"
        elif code == "A":
            self._row = max(0, self._row - int(amount or 1))
        elif code == "K":
            self._lines[self._row] = ""
        elif carriage_return:
            self._column = 0
        elif line_feed:
            self._feed_line()
        elif letter:
            self._write(letter)

    def _feed_line(self) -> None:
        if self._row < self._rows - 1:
            self._row += 1
        else:
            self.scrolled.append(self._lines.pop(0).rstrip())
            self._lines.append("")

    def _write(self, letter: str) -> None:
        if self._column == self._columns:
            self._column = 0
            self._feed_line()
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
        self._column += 1


class Terminal:
    """A Python script that runs in a pty of its own."""

    def __init__(self, script: str, rows: int = 24, columns: int = 80, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen = Screen(rows, columns)
        self.before = self.settings()
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        kept = {name: value for name, value in os.environ.items() if name not in SIZE_AND_STYLE}
        variables = {**kept, "PYTHONPATH": path, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=slave, stdout=slave, stderr=slave, env=variables,
            preexec_fn=_own_terminal,  # so that Ctrl-C reaches it
        )  # fmt: skip
        os.close(slave)
        self._rest = b""

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._master)

    def read_until(self, words: str) -> None:
        """Until the words stand on the screen."""
        end_s = time.monotonic() + DEADLINE_S
        while words not in self.screen.text:
            assert time.monotonic() < end_s, f"never saw {words!r} on\n{self.screen.text}"
            assert self._read(), f"the process ended without {words!r} on\n{self.screen.text}"

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        end_s = time.monotonic() + DEADLINE_S
        while self._read():
            assert time.monotonic() < end_s, f"it does not end:\n{self.screen.text}"
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        os.close(self._master)

    def _read(self) -> bool:
        """What there is by now; false at the end."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return True
        try:
            received = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        text, self._rest = _whole(self._rest + received)
        self.screen.feed(text)
        return bool(received)


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _whole(received: bytes) -> tuple[str, bytes]:
    """As much as can be read, and what is left: a letter or a code of which a part is still to come."""
    cut = len(received)
    if (start := received.rfind(b"\x1b")) >= 0 and not re.match(rb"\x1b\[\??[\d;]*[A-Za-z]", received[start:]):
        cut = start
    while True:
        try:
            return received[:cut].decode(), received[cut:]
        except UnicodeDecodeError as error:
            cut = error.start
