"""A program in its sandbox, test by test, seen from outside.

    Sandbox(code, limits)          bubblewrap starts `runner` in namespaces of its own; it says that it is ready
      .run(given, called=False)    pipes are made here and handed in; the runner forks; what comes out is read here,
                                   with a bound and a deadline; the runner says how the process ended
      .close()                     everything in there is killed, and gone when this returns

The program's output is read from pipes that only it writes to, and compared by whoever called: nothing inside knows
what is expected. The runner is asked only how the program ended and how long it took.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from shoal.environments.sandbox import seccomp, view
from shoal.environments.sandbox.exchange import CHUNK, ERRORS_KEPT, REPORT_BYTES, Cut, Exchange, Pipes
from shoal.environments.sandbox.limits import Limits
from shoal.errors import EnvironmentSetupError, ScoringFailure

Ended = Literal["well", "error", "signal", "time", "output"]

START_S = 30.0
"""How long a sandbox may take to start. One that is slower is a machine in trouble, not a bad program."""
STOP_S = 10.0
STARVED = 0.5
"""A program that had to wait for a processor for this share of its time was not slow: the machine was busy."""
NOTHING = b'{"function": "nothing", "arguments": []}'
ASKED = b"\xff" * 8
"""What the runner's answer to a question begins with, where a report has the status."""
COST_TESTS = 3
"""How many empty tests are run to know what one costs; the dearest counts."""
CLOCKS_AGREE = 0.75
"""How much of the time that the limit saw the account may see: the kernel keeps two clocks, and one only by ticks."""


@dataclass(frozen=True)
class Ran:
    """How one test ended, and what came out of it.

    >>> Ran(ended="well", output=b"5").output
    b'5'
    """

    ended: Ended
    output: bytes = b""
    returned: bytes = b""
    errors: bytes = b""
    status: int = 0
    cpu_s: float = 0.0


class Sandbox:
    """One program, confined. To be closed: use it in a `with` statement, and in one thread."""

    def __init__(self, code: bytes, limits: Limits, modules: tuple[str, ...] = ()) -> None:
        """`modules` of the standard library are imported before the first test, once for all of them."""
        self._limits = limits
        self._left_s = float(limits.cpu_s)
        self._tests = 0
        self._cost_s: float | None = None
        self._clock_s = 0.0
        self._uid = view.spare_uid()
        self._control, theirs = socket.socketpair()
        try:
            self._process = self._started(theirs, modules)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        try:
            self._greet(code)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, given: bytes, *, called: bool = False) -> Ran:
        """One test. After one that did not end well the sandbox is of no more use.

        `called`: `given` is {"function": …, "arguments": […]}, and what it returned comes back as JSON. Otherwise it is
        the program's standard input.
        """
        if self._cost_s is None and self._left_s < min(self._limits.test_cpu_s, self._limits.cpu_s / 2):
            self._give_back(called=called)
        self._tests += 1
        seconds = max(1, min(self._limits.test_cpu_s, math.ceil(self._left_s)))
        exchange = self._exchanged(b"C" if called else b"S", seconds, given)
        return Ran(ended=exchange) if isinstance(exchange, str) else self._judged(exchange, seconds)

    def close(self) -> None:
        """Kills whatever is in there, and waits until it is gone."""
        # The runner ends when it hears no more, and all in there with it. Killing bubblewrap is not enough: it may not
        # kill a process that has become another user.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._control.settimeout(STOP_S)
        with contextlib.closing(self._control):
            try:
                # All that was started holds the socket's other end: when it has ended, so have they.
                while self._control.recv(CHUNK):
                    pass
            except TimeoutError:
                raise ScoringFailure(f"a sandbox was still there {STOP_S:.0f} s after it was ended") from None
            except ConnectionResetError:
                pass  # ended with something unread

    def _started(self, theirs: socket.socket, modules: tuple[str, ...]) -> subprocess.Popen[bytes]:
        limits = self._limits
        settings = [str(self._uid), str(limits.memory_mb << 20), str(limits.threads), ",".join(modules)]
        try:
            return subprocess.Popen(
                view.command(["-c", _runner(), str(theirs.fileno()), _filter(), *settings], uid=self._uid),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=view.ENVIRON,
                pass_fds=[theirs.fileno()],
            )
        except (OSError, EnvironmentSetupError) as error:
            raise ScoringFailure(f"the sandbox does not start: {error}") from error

    def _greet(self, code: bytes) -> None:
        """Hands the program in; the runner says that it is ready."""
        self._control.settimeout(START_S)
        try:
            self._control.sendall(len(code).to_bytes(8, "little") + code)
            answer = self._control.recv(1)
        except OSError:
            answer = b""
        if answer != b"R":
            raise ScoringFailure(f"the sandbox does not start: {self._complaint()}")

    def _complaint(self) -> str:
        """The last line of what bubblewrap or the interpreter said."""
        self._process.kill()
        assert self._process.stderr is not None
        said = self._process.stderr.read(ERRORS_KEPT).decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"no answer within {START_S:.0f} s"

    def _waited_s(self) -> float:
        """How long the program that is running has been waiting for a processor; 0 if it has just ended."""
        self._control.settimeout(STOP_S)
        answer = b""
        try:
            self._control.sendall(b"?")
            while len(answer) < REPORT_BYTES and (part := self._control.recv(REPORT_BYTES - len(answer))):
                answer += part
        except OSError:
            return 0.0
        return int.from_bytes(answer[8:], "little") / 1e6 if answer.startswith(ASKED) else 0.0

    def _exchanged(self, kind: bytes, seconds: int, given: bytes) -> Exchange | Cut:
        """One test, of a kind that the runner knows; or why it was not waited for."""
        with Pipes(owner=self._uid, called=kind in b"Cc") as pipes:
            try:
                socket.send_fds(self._control, [kind + bytes([seconds])], pipes.theirs)
            except OSError as error:
                raise ScoringFailure(f"the sandbox is gone: {error}") from error
            pipes.hand_over()
            within_s = min(self._limits.wall_s(self._tests) - self._clock_s, self._limits.test_wall_s)
            exchange = Exchange(self._control, pipes, given, self._limits.output_bytes, within_s)
            cut = exchange.until_over()
            self._clock_s += exchange.waited_s
            if cut == "time" and self._waited_s() > STARVED * exchange.waited_s:
                raise ScoringFailure("this machine is too busy to run programs: one got hardly any processor time")
        return cut or exchange

    def _give_back(self, *, called: bool) -> None:
        """Measures what a test costs that does nothing, and takes that off the program's account, for every test.

        Only once time is getting short: most programs never come to that.
        """
        costs = []
        for _ in range(COST_TESTS):
            exchange = self._exchanged(b"c" if called else b"s", self._limits.test_cpu_s, NOTHING)
            if isinstance(exchange, str) or exchange.report()[0] != 0:
                raise ScoringFailure("a program that does nothing did not end well in the sandbox")
            costs.append(exchange.report()[1])
        self._cost_s = max(costs)
        self._left_s = min(self._left_s + self._tests * self._cost_s, self._limits.cpu_s)

    def _judged(self, exchange: Exchange, seconds: int) -> Ran:
        """What the runner reported, in words. Killed, and not for the time it took: a program cannot do that itself."""
        status, cpu_s = exchange.report()
        self._left_s -= max(0.0, cpu_s - (self._cost_s or 0.0))
        code = os.waitstatus_to_exitcode(status)
        ended: Ended = "well" if code == 0 else "error" if code > 0 else "signal"
        deaf = code == -signal.SIGKILL and cpu_s >= seconds * CLOCKS_AGREE
        if self._left_s < 0 or code == -signal.SIGXCPU or deaf:
            ended = "time"
        elif code == -signal.SIGKILL:
            raise ScoringFailure("the program was killed, and not by itself; is this machine out of memory?")
        return Ran(ended, bytes(exchange.output), bytes(exchange.returned), bytes(exchange.errors), code, cpu_s)


@cache
def _runner() -> str:
    """The text of what runs inside: it is handed over on the command line, so the package need not be seen there."""
    return Path(__file__).with_name("runner.py").read_text(encoding="utf-8")


@cache
def _filter() -> str:
    return seccomp.assemble(os.uname().machine).hex()
