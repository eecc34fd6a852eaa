"""One test's pipes: what goes in and what comes out, at once, with a bound and a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from shoal.errors import ScoringFailure

CHUNK = 1 << 16
ERRORS_KEPT = 4096
REPORT_BYTES = 16
LOOK_S = 0.25

Cut = Literal["time", "output"]


class Pipes:
    """Our ends of a test's pipes, which do not block, and theirs. Every descriptor is closed exactly once."""

    def __init__(self, *, owner: int, called: bool) -> None:
        """`owner` is the user that the program runs as, if it is not ours: it may then open /dev/stdin."""
        self._ours: list[int] = []
        self.theirs: list[int] = []
        try:
            for number in range(4 if called else 3):
                reading, writing = os.pipe()
                mine, given_away = (writing, reading) if number == 0 else (reading, writing)
                self._ours.append(mine)
                self.theirs.append(given_away)
                os.set_blocking(mine, False)
                if owner:
                    os.fchown(given_away, owner, owner)
        except OSError as error:
            self.close()
            raise ScoringFailure(f"no pipe for a program: {error}") from error
        self.given, self.output, self.errors = self._ours[:3]
        self.returned = self._ours[3] if called else -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hand_over(self) -> None:
        """Closes their ends here: they have them."""
        while self.theirs:
            os.close(self.theirs.pop())

    def end_of_input(self) -> None:
        self._ours.remove(self.given)
        os.close(self.given)
        self.given = -1

    def close(self) -> None:
        self.hand_over()
        while self._ours:
            os.close(self._ours.pop())


@dataclass
class Exchange:
    """What goes in and comes out during one test, for `within_s` at the latest.

    All at once: a program may print before it has read everything. One look counts `LOOK_S` at most in `waited_s`,
    however long it took: while the machine sleeps, the program does not run either.
    """

    control: socket.socket
    pipes: Pipes
    given: bytes
    most_bytes: int
    within_s: float
    waited_s: float = 0.0
    output: bytearray = field(default_factory=bytearray)
    returned: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    said: bytearray = field(default_factory=bytearray)
    _errors_size: int = 0
    _written: int = 0
    _poll: select.poll = field(default_factory=select.poll)

    def until_over(self) -> Cut | None:
        """None when the program has ended and everything was read; otherwise why it was not waited for."""
        reading = {self.pipes.output, self.pipes.errors, self.pipes.returned} - {-1}
        self._poll.register(self.pipes.given, select.POLLOUT)
        for descriptor in (self.control.fileno(), *reading):
            self._poll.register(descriptor, select.POLLIN)
        while len(self.said) < REPORT_BYTES or reading:
            remaining_s, began_s = self.within_s - self.waited_s, time.monotonic()
            if remaining_s <= 0:
                return "time"
            ready = self._poll.poll(1000 * min(remaining_s, LOOK_S))
            self.waited_s += min(time.monotonic() - began_s, LOOK_S)
            for descriptor, _event in ready:
                if self._served(descriptor):
                    reading.discard(descriptor)
            if max(len(self.output), len(self.returned), self._errors_size) > self.most_bytes:
                return "output"
        return None

    def report(self) -> tuple[int, float]:
        """The kernel's status of the program, and its processor seconds."""
        return int.from_bytes(self.said[:8], "little"), int.from_bytes(self.said[8:], "little") / 1e6

    def _served(self, descriptor: int) -> bool:
        """Whether this was the last of it."""
        if descriptor == self.control.fileno():
            over = self._listened()
        elif descriptor == self.pipes.given:
            over = self._wrote()
        else:
            over = self._read(descriptor)
        if over:
            self._poll.unregister(descriptor)
            if descriptor == self.pipes.given:
                self.pipes.end_of_input()
        return over

    def _listened(self) -> bool:
        part = self.control.recv(REPORT_BYTES - len(self.said))
        if not part:
            raise ScoringFailure("the sandbox ended in the middle of a test; something on this machine killed it")
        self.said += part
        return len(self.said) == REPORT_BYTES

    def _wrote(self) -> bool:
        try:
            self._written += os.write(self.pipes.given, self.given[self._written : self._written + CHUNK])
        except BrokenPipeError:
            # The program does not read what it is given; that is its own business.
            return True
        except BlockingIOError:
            return False
        return self._written >= len(self.given)

    def _read(self, descriptor: int) -> bool:
        part = b""
        with contextlib.suppress(BlockingIOError):
            part = os.read(descriptor, CHUNK)
            if not part:
                return True
        if descriptor == self.pipes.output:
            self.output += part
        elif descriptor == self.pipes.returned:
            self.returned += part
        else:
            self._errors_size += len(part)
            self.errors[:] = (self.errors + part)[-ERRORS_KEPT:]
        return False
