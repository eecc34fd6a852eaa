"""A program in its sandbox, test by test, seen from outside.

    Sandbox(code, limits)          bubblewrap starts `runner` in its own namespaces; it reports that it is ready
      .run(given, called=False)    pipes are passed in; the runner forks; the output is read here, with a limit and a
                                   deadline; the runner reports how the process ended
      .close()                     kills everything inside, and returns when it is gone

The expected output never enters the sandbox. The runner reports only how the program ended and how long it took.
"""

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from shoal.environments.sandbox import seccomp, view
from shoal.errors import EnvironmentSetupError, ScoringFailure

WALL_FACTOR, WALL_GRACE_S = 4, 5.0
TEST_COST_S = 0.01  # processor time to start a test, at most; it is added to the limit for every test
CHUNK, ERRORS_KEPT, REPORT_BYTES = 1 << 16, 4096, 16
LOOK_S = 0.25
START_S = 30.0
STOP_S = 10.0
STARVED = 0.5  # a program that waited for a processor for this share of its time was not slow: the machine was busy
ASKED = b"\xff" * 8  # prefix of the runner's answer to a question, in place of a status
CLOCKS_AGREE = 0.75  # share of the limit: the kernel measures processor time in two ways, one of them in ticks
Cut = Literal["time", "output"]
Ended = Literal["well", "error", "signal", "time", "output"]


class Limits(BaseModel, frozen=True, extra="forbid"):
    """Limits of one program, for all of its tests together unless noted. A program beyond them is worth 0. Time is
    processor time, so a busy machine fails no good program; starting a test does not count. A program that only waits
    is ended by the clock, after four times its processor time and five seconds."""

    cpu_s: int = Field(default=10, ge=1, le=600, description="processor seconds of all tests together")
    test_cpu_s: int = Field(default=4, ge=1, le=120, description="processor seconds of one test")
    memory_mb: int = Field(default=512, ge=64, le=16_384, description="address space of the program")
    threads: int = Field(default=64, ge=1, le=1024, description="threads; other processes cannot be started at all")
    output_bytes: int = Field(default=10_000_000, ge=1, le=1_000_000_000, description="what one test may print")

    def wall_s(self, tests: int) -> float:
        return WALL_FACTOR * (self.cpu_s + TEST_COST_S * tests) + WALL_GRACE_S


@dataclass(frozen=True)
class Ran:
    ended: Ended
    output: bytes = b""
    returned: bytes = b""
    errors: bytes = b""
    status: int = 0
    cpu_s: float = 0.0


@dataclass
class Exchange:
    """Input and output of one test, at the same time: a program may print before it has read everything. One look adds
    at most `LOOK_S` to `waited_s`: time in which the machine sleeps does not count."""

    control: socket.socket
    given: bytes
    most_bytes: int
    within_s: float
    waited_s: float = 0.0
    output: bytearray = field(default_factory=bytearray)
    returned: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    reported: bytearray = field(default_factory=bytearray)
    _errors_size: int = 0
    _written: int = 0

    def until_over(self, pipes: Sequence[FileIO]) -> Cut | None:
        """None if the program has ended and everything was read; else why it was cut off."""
        into = (self.reported, self.output, self.errors, self.returned)
        sinks: dict[Any, bytearray] = dict(zip((self.control, *pipes[1:]), into, strict=False))
        with selectors.PollSelector() as waiting:
            waiting.register(pipes[0], selectors.EVENT_WRITE)
            for source, sink in sinks.items():
                waiting.register(source, selectors.EVENT_READ, sink)
            while any(source in waiting.get_map() for source in sinks):
                remaining_s, began_s = self.within_s - self.waited_s, time.monotonic()
                if remaining_s <= 0:
                    return "time"
                ready = waiting.select(min(remaining_s, LOOK_S))
                self.waited_s += min(time.monotonic() - began_s, LOOK_S)
                for key, _event in ready:
                    if self._served(key.fileobj, key.data):
                        waiting.unregister(key.fileobj)
                        if key.fileobj is pipes[0]:
                            pipes[0].close()
                if max(len(self.output), len(self.returned), self._errors_size) > self.most_bytes:
                    return "output"
        return None

    def report(self) -> tuple[int, float]:
        return int.from_bytes(self.reported[:8], "little"), int.from_bytes(self.reported[8:], "little") / 1e6

    def _served(self, file: Any, sink: bytearray | None) -> bool:
        if file is self.control:
            part = self.control.recv(REPORT_BYTES - len(self.reported))
            if not part:
                raise ScoringFailure("the sandbox ended in the middle of a test; something on this machine killed it")
            self.reported += part
            return len(self.reported) == REPORT_BYTES
        if sink is None:
            try:
                self._written += file.write(self.given[self._written : self._written + CHUNK]) or 0
            except BrokenPipeError:
                return True  # the program does not read its input
            return self._written >= len(self.given)
        part = file.read(CHUNK)  # None if there is nothing yet, empty at the end
        sink += part or b""
        if sink is self.errors:
            self._errors_size += len(part or b"")
            del sink[:-ERRORS_KEPT]
        return bool(part == b"")


class Sandbox:
    """One program in its sandbox. Use it in a `with` statement, in one thread."""

    def __init__(self, code: bytes, limits: Limits, modules: tuple[str, ...] = ()) -> None:
        """`modules` of the standard library are imported once, before the first test."""
        self._limits, self._left_s, self._clock_s = limits, float(limits.cpu_s), 0.0
        self._tests, self._uid = 0, view.spare_uid()
        self._control, theirs = socket.socketpair()
        try:
            self._process = self._started(theirs, modules)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        try:
            self._control.settimeout(START_S)
            try:
                self._control.sendall(len(code).to_bytes(8, "little") + code)
                answer = self._control.recv(1)
            except OSError:
                answer = b""
            if answer != b"R":  # report the last line that bubblewrap or the interpreter printed
                self._process.kill()
                assert self._process.stderr is not None
                lines = self._process.stderr.read(ERRORS_KEPT).decode(errors="replace").strip().splitlines()
                complaint = lines[-1] if lines else f"no answer within {START_S:.0f} s"
                raise ScoringFailure(f"the sandbox does not start: {complaint}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def run(self, given: bytes, *, called: bool = False) -> Ran:
        """Run one test. After a test that did not end well the sandbox must be closed. If `called`, `given` is
        {"function": …, "arguments": […]}, and the return value comes back as JSON."""
        self._tests += 1
        self._left_s += TEST_COST_S
        limits = self._limits
        seconds = max(1, min(limits.test_cpu_s, math.ceil(self._left_s)))
        alone_s, left_s = WALL_FACTOR * limits.test_cpu_s + WALL_GRACE_S, limits.wall_s(self._tests) - self._clock_s
        exchange = Exchange(self._control, given, limits.output_bytes, min(alone_s, left_s))
        with contextlib.ExitStack() as opened:
            ours, theirs = list[FileIO](), list[FileIO]()
            try:
                for number in range(4 if called else 3):
                    reading, writing = map(opened.enter_context, map(FileIO, os.pipe(), ("rb", "wb")))
                    ours.append(reading if number else writing)
                    theirs.append(writing if number else reading)
                    os.set_blocking(ours[-1].fileno(), False)
                    if self._uid:  # the user that the program runs as may then open /dev/stdin
                        os.fchown(theirs[-1].fileno(), self._uid, self._uid)
            except OSError as error:
                raise ScoringFailure(f"no pipe for a program: {error}") from error
            try:
                message = (b"C" if called else b"S") + bytes([seconds])
                socket.send_fds(self._control, [message], [file.fileno() for file in theirs])
            except OSError as error:
                raise ScoringFailure(f"the sandbox is gone: {error}") from error
            for file in theirs:
                file.close()
            cut = exchange.until_over(ours)
            self._clock_s += exchange.waited_s
            if cut == "time" and self._waited_s() > STARVED * exchange.waited_s:
                raise ScoringFailure("this machine is too busy to run programs: one got hardly any processor time")
        return Ran(ended=cut) if cut else self._judged(exchange, seconds)

    def close(self) -> None:
        """Kill all processes inside, and wait until they are gone."""
        # The runner ends everything when the socket closes. Killing bubblewrap is not enough: it may not kill a process
        # of another user.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._control.settimeout(STOP_S)
        with contextlib.closing(self._control), contextlib.suppress(ConnectionResetError):
            try:
                # Every process inside holds the socket's other end: at its end all of them have ended.
                while self._control.recv(CHUNK):
                    pass
            except TimeoutError:
                raise ScoringFailure(f"a sandbox was still there {STOP_S:.0f} s after it was ended") from None

    def _started(self, theirs: socket.socket, modules: tuple[str, ...]) -> subprocess.Popen[bytes]:
        limits, nothing = self._limits, subprocess.DEVNULL
        settings = [str(self._uid), str(limits.memory_mb << 20), str(limits.threads), ",".join(modules)]
        runner = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")  # the package is not visible inside
        try:
            syscalls = seccomp.assemble(os.uname().machine).hex()
            inside = ["-c", runner, str(theirs.fileno()), syscalls, *settings]
            return subprocess.Popen(
                view.command(inside, uid=self._uid), stdin=nothing, stdout=nothing, stderr=subprocess.PIPE,
                env=view.ENVIRON, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        except (OSError, EnvironmentSetupError) as error:
            raise ScoringFailure(f"the sandbox does not start: {error}") from error

    def _waited_s(self) -> float:
        """How long the running program has waited for a processor; 0 if it has just ended."""
        self._control.settimeout(STOP_S)
        answer = b""
        try:
            self._control.sendall(b"?")
            while len(answer) < REPORT_BYTES and (part := self._control.recv(REPORT_BYTES - len(answer))):
                answer += part
        except OSError:
            return 0.0
        return int.from_bytes(answer[8:], "little") / 1e6 if answer.startswith(ASKED) else 0.0

    def _judged(self, exchange: Exchange, seconds: int) -> Ran:
        """The runner's report in words. A kill that is not about time comes from outside: a program cannot do it."""
        status, cpu_s = exchange.report()
        self._left_s -= cpu_s
        code = os.waitstatus_to_exitcode(status)
        ended: Ended = "well" if code == 0 else "error" if code > 0 else "signal"
        deaf = code == -signal.SIGKILL and cpu_s >= seconds * CLOCKS_AGREE
        if self._left_s < 0 or code == -signal.SIGXCPU or deaf:
            ended = "time"
        elif code == -signal.SIGKILL:
            raise ScoringFailure("the program was killed, and not by itself; is this machine out of memory?")
        return Ran(ended, bytes(exchange.output), bytes(exchange.returned), bytes(exchange.errors), code, cpu_s)


# With two threads: before Linux 5.14 a user's processes are counted across namespaces, so the limit would not work.
HELLO = b"""
import threading
words = []
threads = [threading.Thread(target=words.append, args=(word,)) for word in ("hello", "there")]
for thread in threads:
    thread.start()
    thread.join()
print(*words, input())
"""


def require_sandbox() -> None:
    """Run a trial program. An `EnvironmentSetupError` says what is missing and how to get it."""
    view.bubblewrap()
    try:
        with Sandbox(HELLO, Limits()) as sandbox:
            ran = sandbox.run(b"world\n")
    except ScoringFailure as failure:
        raise EnvironmentSetupError(f"programs cannot be run safely here: {failure}. {advice(str(failure))}") from None
    if ran.output != b"hello there world\n":
        outcome = f"{ran.ended!r}: {ran.errors.decode(errors='replace').strip()[-200:]}"
        raise EnvironmentSetupError(f"programs cannot be run safely here (this needs Linux 5.14 or later): {outcome}")


def advice(failure: str) -> str:
    if "namespace" in failure or "not permitted" in failure or "Permission denied" in failure:
        return (
            "bubblewrap may not make namespaces: allow user namespaces"
            " (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1,"
            " kernel.apparmor_restrict_unprivileged_userns=0), or, in a container, start it with them allowed"
        )
    return "See docs/guides/code-rewards.md"
