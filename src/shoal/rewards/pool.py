"""Scoring in processes of their own, with limits; beside the validator, not inside it.

    jobs ─► chunks ─► processes ─┬─ answers
                                 └─ one ended in the middle of a job
                                      ├─ the rest of its chunk ─► back to the others, without blame
                                      └─ that job ─► alone, in a fresh process ─┬─ an answer: that is it
                                                                                └─ ended again ─► whose fault is it?

A job that ends its process twice is the completion's doing only if it was processor time, memory or a crash, and a
fresh process answers the *empty* completion of the same task within the limits: then it is worth 0, with the part
`limit`. In every other case (killed by somebody, too long by the clock, an environment that does not build, a function
that raises) it is unscored. What there was no time to begin is neither: it is `NotBegun`, and may be asked again.
A process that never took work says nothing of any job: another one is started, and its jobs go to the other seats.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from shoal.environments import Environment, EnvironmentSettings, Score, scoring_of
from shoal.environments.settings import ScoringSettings
from shoal.errors import CodecError, DeadlineExceeded, ScoringFailure
from shoal.rewards import frames
from shoal.rewards.frames import ChannelClosed, FromChild, JobAnswer, SetupDone
from shoal.rewards.protocol import Job, NotBegun, ScoringPatience, child_settings, core_digest, process_count
from shoal.runtime.clock import Backoff, Clock, SystemClock
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import describe_exit
from shoal.runtime.text import visible

log = logging.getLogger(__name__)

MAX_CHUNK, CHUNK_BYTES = 32, 8 * 1024 * 1024
LIMIT_PART = "limit"
STARTS = 3  # of processes that die before they are ready, until a seat is given up for the round
REAP_S, SEND_S = 5.0, 30.0
LINES_LOGGED, LINE_LIMIT = 20, 300
SECRETS = ("SHOAL_JUDGE_KEY",)  # what a reward function has no use for
CALM = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"}
"""One thread each, for there are as many processes as are wanted; sets in the same order in every one of them."""
Result = JobAnswer | ScoringFailure
Item = TypeVar("Item")


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
        self.cause, self.what = cause, what


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
    """One life of a scoring process, seen from its parent: a child with its pipes. Not for several threads at once."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._ready: SetupDone | None = None
        self._said: deque[str] = deque(maxlen=5)
        self.answered = 0
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        command, pipe = [sys.executable, "-P", "-m", "shoal.rewards.child"], subprocess.PIPE
        try:  # in a session of its own: Ctrl-C is for the parent; what it starts can be ended with it
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env={**environment, **CALM}, start_new_session=True
            )
        except OSError as error:
            raise NeverReady(f"a scoring process could not be started: {error}") from error
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        source, sink = self._process.stdout.fileno(), self._process.stdin.fileno()
        self._channel = frames.Channel(source, sink, ground.stop, ground.clock)
        threading.Thread(target=self._drain, name="scoring-output", daemon=True).start()
        limits, settings = ground.limits, ground.settings.model_dump_json().encode()
        try:
            self._channel.send(frames.Setup(settings, limits.seconds, limits.memory_mb * 10**6), SEND_S)
        except (ChannelClosed, TimeoutError):
            log.debug("the scoring process %d takes no settings", self.pid)  # `ready` finds out why
        except BaseException:  # nobody would hold what has been started
            self.end()
            raise

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
        if isinstance(message, frames.SetupFailed):
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
            work = frames.JobBatch([(job.task, frames.as_bytes(job.completion)) for job in jobs])
            self._channel.send(work, SEND_S)
            for _job in jobs:
                answer = self._received(within_s)
                if isinstance(answer, frames.Allows):  # what the task allows beside that
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
        code, until_s = None, self._ground.clock.monotonic_s() + REAP_S
        while code is None and self._ground.clock.monotonic_s() < until_s:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # without reaping it
            if found is None:
                time.sleep(0.002)
            else:
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.end()
        if code is None:
            return Ended(Cause.LEFT, "closed its pipe and did not end")
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return Ended(Cause.TIME, f"took longer than {self._ground.limits.seconds:g} s of processor time")
        if code == frames.EXIT_MEMORY:
            return Ended(Cause.MEMORY, self._too_much)
        if -code in CRASHES:
            return Ended(Cause.CRASH, f"crashed ({signal.Signals(-code).name})")
        said = f": {self._said[-1]}" if self._said and code > 0 else ""
        return Ended(Cause.KILLED if code < 0 else Cause.LEFT, describe_exit(code) + said)

    @property
    def _too_much(self) -> str:
        return f"needed more than {self._ground.limits.memory_mb} MB"

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


class Seat:
    """A place for one process after another. A life that answered nothing is followed by a pause."""

    def __init__(self, ground: Ground, backoff: Backoff = Backoff(first_s=0.2, most_s=5.0)) -> None:
        self._ground, self._backoff = ground, backoff
        self.process: ScoringProcess | None = None
        self._fruitless = 0

    def start(self) -> ScoringProcess:
        """Without waiting for it."""
        if self.process is None:
            self.process = ScoringProcess(self._ground)
        return self.process

    def take(self) -> ScoringProcess:
        """A process that is ready, or `ScoringFailure`. One that dies before it is ready is followed by another."""
        starts = 0
        while True:
            if self.process is None and self._fruitless:
                self._ground.stop.wait(self._backoff.wait_s(self._fruitless - 1))
            try:
                self.start().ready()
                return self.start()
            except ScoringFailure as failure:
                if self.process is None:
                    self._fruitless += 1
                self.clear()
                starts += 1
                if not isinstance(failure, NeverReady) or failure.was_late or starts == STARTS:
                    raise
                log.info("%s; another one is started", failure)

    def clear(self) -> None:
        """End the process, if there is one: the next `take` starts another."""
        if self.process is not None:
            self._fruitless = 0 if self.process.answered else self._fruitless + 1
            self.process.end()
            self.process = None


class ScoringPool:
    """Implements `Scorer`. `settings` are those that `environment` was built from. One caller at a time."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        environment: Environment,
        stop: StopToken | None = None,
        patience: ScoringPatience = ScoringPatience(),
    ) -> None:
        limits = scoring_of(environment)
        self._ground = Ground(child_settings(settings), limits, core_digest(environment), patience, stop or StopToken())
        self._seats = [Seat(self._ground) for _ in range(process_count(limits))]
        self._busy = threading.Lock()

    def start(self) -> None:
        """Start the processes without waiting for them: they are ready sooner. Whoever asks starts what is missing."""
        try:
            for seat in self._seats:
                seat.start()
        except NeverReady as failure:
            log.warning("%s; it is tried again when something is to be scored", failure)

    def close(self) -> None:
        for seat in self._seats:
            seat.clear()

    @property
    def pids(self) -> list[int]:
        return [seat.process.pid for seat in self._seats if seat.process is not None]

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        """What each is worth. `DeadlineExceeded` if the process is told to stop meanwhile."""
        with self._busy:
            try:
                results = _Round(self._ground, list(dict.fromkeys(jobs))).run(self._seats)  # equal ones are scored once
            except DeadlineExceeded:
                self.close()  # they are in the middle of something that nobody waits for
                raise
        found = (results[job] for job in jobs)
        return [
            said if isinstance(said, ScoringFailure) else Score(said.value, said.parts, frames.as_text(said.notes))
            for said in found
        ]


class _Round:
    """All that is asked at once: over the seats, each in a thread, until nothing is open or the time is up."""

    def __init__(self, ground: Ground, jobs: Sequence[Job]) -> None:
        self._ground, self._jobs = ground, jobs
        self._results: dict[Job, Result] = {}
        self._suspects: deque[tuple[Job, Cause]] = deque()
        self._unready: dict[Seat, NeverReady] = {}
        self._until_s = ground.clock.monotonic_s() + ground.patience.all_s
        self._late = f"scoring took longer than {ground.patience.all_s:g} s in all"

    def run(self, seats: Sequence[Seat]) -> dict[Job, Result]:
        chunks, usable = deque(_chunks(self._jobs, len(seats))), list(seats)
        for _ in range(2):  # what a seat without a process gives back, the others may have ended too early to take
            _on_all(usable, chunks, lambda seat, chunk: self._chunk(seat, chunk, chunks))
            usable = [seat for seat in seats if seat not in self._unready]
        for chunk in chunks:
            self._settle(chunk, next(iter(self._unready.values())))
        _on_all(usable or seats, self._suspects, self._suspect)
        return self._results

    def _chunk(self, seat: Seat, jobs: Sequence[Job], chunks: deque[Sequence[Job]]) -> bool:
        """Whether the seat can take another one."""
        if self._is_late():
            self._settle(jobs, NotBegun(f"{self._late}: this was not begun"))
            return True
        done = 0
        try:
            for answer in seat.take().ask(jobs):
                self._results[jobs[done]] = _result(answer)
                done += 1
        except NeverReady as failure:
            self._unready[seat] = failure
            chunks.appendleft(jobs)
            return False
        except ScoringFailure as failure:
            self._settle(jobs[done:], failure)
        except Ended as ended:
            log.debug("task %s is tried again, alone: its scoring process %s", jobs[done].task, ended.what)
            seat.clear()
            self._suspects.append((jobs[done], ended.cause))
            if jobs[done + 1 :]:
                chunks.appendleft(jobs[done + 1 :])
        return True

    def _suspect(self, seat: Seat, suspect: tuple[Job, Cause]) -> bool:
        """The job alone; if that ends the process again, whether the completion is to blame."""
        job, cause = suspect
        if cause is Cause.CLOCK and self._is_late():  # it has had its time: whoever asks again must come to an end
            result: Result = ScoringFailure(f"{self._late}, and task {job.task} ended its scoring process once")
        else:
            again = self._alone(seat, job)
            result = self._judged(seat, job, again) if isinstance(again, Ended) else again
        self._results[job] = result
        return True

    def _judged(self, seat: Seat, job: Job, again: Ended) -> Result:
        about = f"task {job.task}: the scoring process {again.what}"
        if again.cause not in BLAMABLE:
            return ScoringFailure(f"{about}, twice")
        empty = self._alone(seat, Job(job.task, ""))
        if isinstance(empty, JobAnswer):
            log.info("%s, twice; the completion is worth 0 for it", about)
            return JobAnswer(0.0, {LIMIT_PART: 1.0}, f"scoring it {again.what}".encode())
        told = str(empty) if isinstance(empty, ScoringFailure) else empty.what
        return ScoringFailure(f"{about}, and so does an empty completion ({told}): the reward function is at fault")

    def _alone(self, seat: Seat, job: Job) -> Result | Ended:
        """In a process that has scored nothing before."""
        seat.clear()
        try:
            return _result(next(seat.take().ask([job])))
        except ScoringFailure as failure:
            return failure
        except Ended as ended:
            seat.clear()
            return ended

    def _settle(self, jobs: Sequence[Job], failure: ScoringFailure) -> None:
        self._results |= dict.fromkeys(jobs, failure)

    def _is_late(self) -> bool:
        return self._ground.clock.monotonic_s() >= self._until_s


def _on_all(seats: Sequence[Seat], items: deque[Item], work: Callable[[Seat, Item], bool]) -> None:
    """Let every seat take one item after another until there are none, or `work` says that it can take no more. An item
    may bring further ones."""

    def serve(seat: Seat) -> None:
        while items:
            try:
                item = items.popleft()
            except IndexError:
                return  # another seat was faster
            if not work(seat, item):
                return

    if len(seats) <= 1 or len(items) <= 1:
        for seat in seats[:1]:
            serve(seat)
        return
    with ThreadPoolExecutor(len(seats), thread_name_prefix="scoring") as threads:
        for future in [threads.submit(serve, seat) for seat in seats]:
            future.result()


def _chunks(jobs: Sequence[Job], seats: int) -> Iterator[Sequence[Job]]:
    """A few for each seat, so that all end at about the same time; bounded in number and size."""
    most = max(1, min(MAX_CHUNK, len(jobs) // (4 * seats)))
    chunk, size = list[Job](), 0
    for job in jobs:
        if chunk and (len(chunk) == most or size + len(job.completion) > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(job)
        size += len(job.completion)
    if chunk:
        yield chunk


def _result(answer: JobAnswer) -> Result:
    return answer if answer.failure is None else ScoringFailure(answer.failure)
