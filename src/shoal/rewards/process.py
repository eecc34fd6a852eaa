"""One life of a scoring process, seen from its parent: started, asked, and ended with all that it started."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.environments.settings import EnvironmentSettings, ScoringSettings
from shoal.errors import CodecError, ScoringFailure
from shoal.rewards.frames import (
    EXIT_MEMORY,
    Allows,
    Channel,
    ChannelClosed,
    FromChild,
    JobAnswer,
    JobBatch,
    Setup,
    SetupDone,
    SetupFailed,
    as_bytes,
)
from shoal.rewards.protocol import Job, ScoringPatience
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import describe_exit
from shoal.runtime.text import visible

log = logging.getLogger(__name__)

REAP_S = 5.0
LINES_LOGGED = 20
LINE_LIMIT = 300
SEND_S = 30.0
SECRETS = ("SHOAL_JUDGE_KEY",)  # what a reward function has no use for
CALM = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"}
"""One thread each, for there are as many processes as are wanted; sets in the same order in every one of them."""


class Cause(StrEnum):
    TIME = "time"
    CLOCK = "clock"
    MEMORY = "memory"
    CRASH = "crash"
    KILLED = "killed"
    LEFT = "left"


# What a completion can bring about. A signal from elsewhere and an exit of its own are never its doing; nor is time by
# the clock, for nobody can tell a job that waits for something from one that a busy machine does not get on with.
BLAMABLE = frozenset({Cause.TIME, Cause.MEMORY, Cause.CRASH})
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


class Ended(Exception):
    """The process ended, or has to be, in the middle of a job. `what` goes on from "it"."""

    def __init__(self, cause: Cause, what: str) -> None:
        super().__init__(what)
        self.cause = cause
        self.what = what


class NeverReady(ScoringFailure):
    """The process never took any work: nothing is known of a job. `was_late`: it had all its time to become ready."""

    def __init__(self, message: str, was_late: bool = False) -> None:
        super().__init__(message)
        self.was_late = was_late


@dataclass(frozen=True)
class Ground:
    """What every life of a pool's processes has in common. `digest` is that of the environment they must build."""

    settings: EnvironmentSettings
    limits: ScoringSettings
    digest: str
    patience: ScoringPatience
    stop: StopToken
    clock: Clock = field(default_factory=SystemClock)


class ScoringProcess:
    """A child with its pipes. Not for several threads at once."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._ready: SetupDone | None = None
        self._said: deque[str] = deque(maxlen=5)
        self.answered = 0
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shoal.rewards.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, **CALM},
                start_new_session=True,  # Ctrl-C is for the parent; what it starts can be ended with it
            )
        except OSError as error:
            raise NeverReady(f"a scoring process could not be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._channel = Channel(self._process.stdout.fileno(), self._process.stdin.fileno(), ground.stop, ground.clock)
        threading.Thread(target=self._drain, name="scoring-output", daemon=True).start()
        try:
            self._set_up()
        except BaseException:  # nobody would hold what has been started
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _set_up(self) -> None:
        limits, settings = self._ground.limits, self._ground.settings.model_dump_json().encode()
        try:
            self._channel.send(Setup(settings, limits.seconds, limits.memory_mb * 10**6), SEND_S)
        except (ChannelClosed, TimeoutError):
            log.debug("the scoring process %d takes no settings", self.pid)  # `ready` finds out why

    def ready(self) -> SetupDone:
        """Wait until the environment is built; what goes wrong with it is a `ScoringFailure`.

        The limit counts from here, not from the start: a process that nobody has asked yet cannot be late.
        """
        if self._ready is not None:
            return self._ready
        within_s = self._ground.patience.start_s
        try:
            message = self._channel.receive(within_s)
        except TimeoutError:
            raise NeverReady(
                f"a scoring process was not ready within {within_s:g} s: it builds the environment and scores the "
                "first tasks, so one of these hangs, or this machine is very busy",
                was_late=True,
            ) from None
        except ChannelClosed:
            raise NeverReady(f"a scoring process did not start: it {self._how_it_ended().what}") from None
        if isinstance(message, SetupFailed):
            raise ScoringFailure(f"a scoring process could not build the environment: {message.problem}")
        if not isinstance(message, SetupDone):
            raise ScoringFailure("a scoring process says what it should not")
        if message.digest != self._ground.digest:
            raise ScoringFailure(
                f"the environment has changed since this process started ({self._ground.digest[:16]}… then, "
                f"{message.digest[:16]}… now): undo the change to its file or data, or start a new run"
            )
        if message.unlimited:
            log.warning("scoring has no limit on %s", message.unlimited)
        self._ready = message
        return message

    def ask(self, jobs: Sequence[Job]) -> Iterator[JobAnswer]:
        """An answer for each job, in order. `Ended` is raised at the job that the process did not survive."""
        within_s = self._ground.patience.job_within_s(self._ground.limits)
        try:
            work = JobBatch([(job.task, as_bytes(job.completion)) for job in jobs])
            self._channel.send(work, SEND_S)
            for _job in jobs:
                answer = self._received(within_s)
                if isinstance(answer, Allows):  # what the task allows beside that
                    answer = self._received(within_s + answer.seconds)
                if not isinstance(answer, JobAnswer):
                    raise Ended(Cause.LEFT, "said what it should not")
                if answer.needs_memory:
                    raise Ended(Cause.MEMORY, self._too_much)
                self.answered += 1
                yield answer
        except TimeoutError:
            raise Ended(Cause.CLOCK, f"takes no work within {SEND_S:g} s") from None
        except ChannelClosed:
            raise self._how_it_ended() from None
        except CodecError as error:
            raise ScoringFailure(str(error)) from error

    def _received(self, within_s: float) -> FromChild:
        try:
            return self._channel.receive(within_s)
        except TimeoutError:
            raise Ended(
                Cause.CLOCK,
                f"did not end within {within_s:g} s by the clock (this machine is very busy, or the reward function "
                "waits for something: it must give up by itself)",
            ) from None

    def end(self) -> None:
        """Kill it and all that it started. May be called again."""
        if self._process.returncode is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            log.debug("the group of process %d is gone", self.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    log.debug("the pipe of %d was broken", self.pid)

    def _how_it_ended(self) -> Ended:
        """After its pipe has closed. Its number is not free yet: what it started can still be ended by it."""
        code = self._status(REAP_S)
        self.end()
        if code is None:
            return Ended(Cause.LEFT, "closed its pipe and did not end")
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return Ended(Cause.TIME, f"took longer than {self._ground.limits.seconds:g} s of processor time")
        if code == EXIT_MEMORY:
            return Ended(Cause.MEMORY, self._too_much)
        if -code in CRASHES:
            return Ended(Cause.CRASH, f"crashed ({signal.Signals(-code).name})")
        said = f": {self._said[-1]}" if self._said and code > 0 else ""
        return Ended(Cause.KILLED if code < 0 else Cause.LEFT, describe_exit(code) + said)

    @property
    def _too_much(self) -> str:
        return f"needed more than {self._ground.limits.memory_mb} MB"

    def _status(self, within_s: float) -> int | None:
        """Its exit status, without reaping it; None if it has none yet."""
        until_s = self._ground.clock.monotonic_s() + within_s
        while True:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if self._ground.clock.monotonic_s() >= until_s:
                return None
            time.sleep(0.002)

    def _drain(self) -> None:
        """What its code prints: the first lines are logged, the last ones kept, and it never waits for a reader."""
        assert self._process.stderr is not None
        with self._process.stderr as output:
            for number, line in enumerate(iter(lambda: output.readline(LINE_LIMIT), b"")):
                text = visible(line.decode(errors="replace").rstrip())
                if text:
                    self._said.append(text)
                if text and number < LINES_LOGGED:
                    log.info("scoring process %d says: %s", self.pid, text)
                if number == LINES_LOGGED:
                    log.info("scoring process %d says more; it is not shown", self.pid)
