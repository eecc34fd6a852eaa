"""Scoring in processes of their own, with limits; beside the validator, not inside it.

    jobs ─► processes, a few at a time ─┬─ an answer of each
                                        └─ the process ended in the middle of one; those after it are open again
                                             └─ it alone, in a fresh process ─┬─ an answer
                                                                              └─ ended again ─► whose fault is it?

A job that ends its process twice is the completion's doing only if it was processor time, memory or a crash, and a
fresh process answers the *empty* completion of the same task within the limits: then it is worth 0, with the part
`limit`. In every other case (killed by somebody, too long by the clock, an environment that does not build, a function
that raises) it is unscored. What there was no time to begin is neither: it is `NotBegun`, and may be asked again.
A process that never took work says nothing of any job: another one is started, or the other processes take its jobs.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.environments import Environment, EnvironmentSettings, Score, scoring_of
from shoal.environments.composed import inner_of
from shoal.environments.settings import ScoringSettings
from shoal.errors import CodecError, DeadlineExceeded, ScoringFailure
from shoal.rewards import frames
from shoal.rewards.frames import Channel, ChannelClosed, JobAnswer
from shoal.rewards.protocol import Job, NotBegun, Scores, ScoringPatience, process_count
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import describe_exit
from shoal.runtime.text import visible

log = logging.getLogger(__name__)

LIMIT_PART = "limit"
STARTS = 3  # of processes that die before they are ready, until no more are started for these jobs
MOST_AT_ONCE, MOST_BYTES, SHORT_S = 32, 2**23, 0.02
"""Jobs in a message: twice as many as before while that took a short time, so slow graders get one at a time."""
RESTART_PAUSE_S, REAP_S, SEND_S = 0.2, 5.0, 30.0
LINES_LOGGED, LINE_LIMIT = 20, 300
SECRETS = ("SHOAL_JUDGE_KEY",)  # what a reward function has no use for
CALM = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"}
"""One thread each, for there are as many processes as are wanted; sets in the same order in every one of them."""
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
Result = JobAnswer | ScoringFailure


class Cause(StrEnum):
    TIME = "time"
    CLOCK = "clock"
    MEMORY = "memory"
    CRASH = "crash"
    OTHER = "other"


# What a completion can bring about. A signal from elsewhere and an exit of its own are never its doing; nor is time by
# the clock, for nobody can tell a job that waits for something from one that a busy machine does not get on with.
BLAMABLE = frozenset({Cause.TIME, Cause.MEMORY, Cause.CRASH})


class Ended(Exception):
    """The process ended, or has to be, in the middle of a job. `what` continues "the scoring process"."""

    def __init__(self, cause: Cause, what: str) -> None:
        super().__init__(what)
        self.cause, self.what = cause, what


class DiedEarly(ScoringFailure):
    """The process was never ready, and not for lack of time: another one may be."""


@dataclass(frozen=True)
class Ground:
    """What all processes of a pool have in common. `digest` is that of the environment they must build: a file that was
    edited since must not score for this run."""

    settings: EnvironmentSettings
    limits: ScoringSettings
    digest: str
    patience: ScoringPatience
    stop: StopToken
    clock: Clock = field(default_factory=SystemClock)


class ScoringProcess:
    """One process after another, seen from their parent: a child with its pipes. Not for several threads at once."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._said: deque[str] = deque(maxlen=1)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Without waiting for it."""
        if self._process is not None:
            return
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        command, pipe = [sys.executable, "-P", "-m", "shoal.rewards.child"], subprocess.PIPE
        try:  # in a session of its own: Ctrl-C is for the parent; what it starts can be ended with it
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env={**environment, **CALM}, start_new_session=True
            )
        except OSError as error:
            raise DiedEarly(f"a scoring process could not be started: {error}") from error
        self._process, self._is_ready = process, False
        assert process.stdin is not None
        assert process.stdout is not None
        ground = self._ground
        self._channel = Channel(process.stdout.fileno(), process.stdin.fileno(), ground.stop, ground.clock)
        threading.Thread(target=self._drain, args=(process,), name="scoring-output", daemon=True).start()
        limits, settings = ground.limits, ground.settings.model_dump_json().encode()
        try:
            self._channel.send(frames.Setup(settings, limits.seconds, limits.memory_mb * 10**6), SEND_S)
        except (ChannelClosed, TimeoutError):
            log.debug("the scoring process %d takes no settings", process.pid)  # `_ready` finds out why
        except BaseException:  # nobody would hold what has been started
            self.end()
            raise

    def end(self) -> None:
        """Kill it and all that it started; whoever asks next starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def ask(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """What each job is worth, in order; raises `Ended` at one that it did not survive, or that it is not ready."""
        for starts in range(1, STARTS + 1):
            try:
                self.start()
                self._ready()
                break
            except ScoringFailure as failure:
                self.end()
                if not isinstance(failure, DiedEarly) or starts == STARTS:
                    raise
                log.info("%s; another one is started", failure)
                self._ground.stop.wait(RESTART_PAUSE_S)
        try:
            yield from self._answers(jobs)
        except Ended:
            self.end()
            raise

    def ask_alone(self, job: Job) -> Result | Ended:
        """In a process that has scored nothing before."""
        self.end()
        try:
            return next(self.ask([job]))
        except (ScoringFailure, Ended) as outcome:
            return outcome

    def _ready(self) -> None:
        """Wait until the environment is built; what goes wrong with it is a `ScoringFailure`. The limit counts from
        here, not from the start: a process that nobody has asked yet cannot be late."""
        if self._is_ready:
            return
        within_s, digest = self._ground.patience.start_s, self._ground.digest
        try:
            message = self._channel.receive(within_s)
        except TimeoutError:
            why = "the environment or one of its first tasks hangs, or this machine is very busy"
            raise ScoringFailure(f"a scoring process was not ready within {within_s:g} s: {why}") from None
        except ChannelClosed:
            raise DiedEarly(f"a scoring process did not start: it {self._how_it_ended().what}") from None
        if not isinstance(message, frames.Ready) or message.problem:
            problem = message.problem if isinstance(message, frames.Ready) else "it says what it should not"
            raise ScoringFailure(f"a scoring process could not build the environment: {problem}")
        if message.digest != digest:
            told = f"({digest[:16]}… then, {message.digest[:16]}… now): undo the change, or start a new run"
            raise ScoringFailure(f"the environment has changed since this process started {told}")
        if message.unlimited:
            log.warning("scoring has no limit on %s", message.unlimited)
        self._is_ready = True

    def _answers(self, jobs: Sequence[Job]) -> Iterator[Result]:
        within_s, limits, patience = SEND_S, self._ground.limits, self._ground.patience
        try:
            self._channel.send(frames.Work([(job.task, frames.as_bytes(job.completion)) for job in jobs]), within_s)
            for _job in jobs:
                within_s = 60.0 + 3 * limits.seconds if patience.job_s is None else patience.job_s
                answer = self._channel.receive(within_s)
                if isinstance(answer, frames.Allows):  # what the task allows beside that
                    within_s += answer.seconds
                    answer = self._channel.receive(within_s)
                if not isinstance(answer, JobAnswer):
                    raise Ended(Cause.OTHER, "said what it should not")
                if answer.needs_memory:
                    raise Ended(Cause.MEMORY, self._too_much)
                yield answer if answer.failure is None else ScoringFailure(answer.failure)
        except TimeoutError:
            why = "this machine is very busy, or the reward function waits for something: it must give up by itself"
            raise Ended(Cause.CLOCK, f"did not end within {within_s:g} s by the clock ({why})") from None
        except ChannelClosed:
            raise self._how_it_ended() from None
        except CodecError as error:
            yield from [ScoringFailure(str(error))] * len(jobs)

    def _how_it_ended(self) -> Ended:
        """After its pipe has closed."""
        assert self._process is not None
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return Ended(Cause.OTHER, "closed its pipe and did not end")
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return Ended(Cause.TIME, f"took longer than {self._ground.limits.seconds:g} s of processor time")
        if code == frames.EXIT_MEMORY:
            return Ended(Cause.MEMORY, self._too_much)
        if -code in CRASHES:
            return Ended(Cause.CRASH, f"crashed ({signal.Signals(-code).name})")
        said = f": {self._said[0]}" if self._said and code > 0 else ""
        return Ended(Cause.OTHER, describe_exit(code) + said)

    @property
    def _too_much(self) -> str:
        return f"needed more than {self._ground.limits.memory_mb} MB"

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        """What its code prints: the first lines are logged, the last one kept, and it never waits for a reader."""
        assert process.stderr is not None
        with process.stderr as output:
            for number, line in enumerate(iter(lambda: output.readline(LINE_LIMIT), b"")):
                if text := visible(line.decode(errors="replace").rstrip()):
                    self._said.append(text)
                    if number <= LINES_LOGGED:
                        more = "more; it is not shown" if number == LINES_LOGGED else f": {text}"
                        log.info("scoring process %d says%s", process.pid, more)


class ScoringPool:
    """Implements `Scorer`. `settings` are those that `environment` was built from. One caller at a time."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        environment: Environment,
        stop: StopToken | None = None,
        patience: ScoringPatience = ScoringPatience(),
    ) -> None:
        limits, digest = scoring_of(environment), inner_of(environment).digest
        # judges and length budgets are added here, and judges may take long to load
        settings = settings.model_copy(update={"judges": (), "length": None, "pools": None})
        self._ground = Ground(settings, limits, digest, patience, stop or StopToken())
        self._processes = [ScoringProcess(self._ground) for _ in range(process_count(limits))]
        self._busy = threading.Lock()

    def start(self) -> None:
        """Start the processes without waiting for them: they are ready sooner. Whoever asks starts what is missing."""
        try:
            for process in self._processes:
                process.start()
        except DiedEarly as failure:
            log.warning("%s; it is tried again when something is to be scored", failure)

    def close(self) -> None:
        for process in self._processes:
            process.end()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def scores(self, jobs: Sequence[Job]) -> Scores:
        """What each is worth. `DeadlineExceeded` if the process is told to stop meanwhile."""
        with self._busy:
            try:
                results = _Round(self._ground, jobs).run(self._processes)
            except DeadlineExceeded:
                self.close()  # they are in the middle of something that nobody waits for
                raise
        found = (results[job] for job in jobs)
        return [
            said if isinstance(said, ScoringFailure) else Score(said.value, said.parts, frames.as_text(said.notes))
            for said in found
        ]


class _Round:
    """All that is asked at once: over the processes, a thread each, until nothing is open or the time is up."""

    def __init__(self, ground: Ground, jobs: Sequence[Job]) -> None:
        self._ground, self._open = ground, deque(dict.fromkeys(jobs))  # equal ones are scored once
        self._results: dict[Job, Result] = {}
        self._unready: dict[ScoringProcess, ScoringFailure] = {}
        self._until_s = ground.clock.monotonic_s() + ground.patience.all_s
        self._late = f"scoring took longer than {ground.patience.all_s:g} s in all"

    def run(self, processes: Sequence[ScoringProcess]) -> dict[Job, Result]:
        usable = processes[: len(self._open)]
        while self._open and usable:  # what one that is never ready gives back, the others take
            with ThreadPoolExecutor(len(usable), thread_name_prefix="scoring") as threads:
                list(threads.map(self._serve, usable))
            usable = [process for process in usable if process not in self._unready]
        return self._results | {job: next(iter(self._unready.values())) for job in self._open}

    def _serve(self, process: ScoringProcess) -> None:
        """Give it jobs until there are none, or it does not get ready."""
        most = 1
        while jobs := self._next(most):
            if self._is_late():
                self._results |= dict.fromkeys(jobs, NotBegun(f"{self._late}: this was not begun"))
                continue
            begun_s, done = self._ground.clock.monotonic_s(), 0
            try:
                for result in process.ask(jobs):
                    self._results[jobs[done]] = result
                    done += 1
                    if done < len(jobs) and self._is_late():
                        process.end()
                        self._open.extendleft(jobs[done:])
                        break
            except Ended as ended:
                self._open.extendleft(reversed(jobs[done + 1 :]))
                log.debug("task %s is tried again, alone: its scoring process %s", jobs[done].task, ended.what)
                self._results[jobs[done]] = self._retried(process, jobs[done], ended.cause)
            except ScoringFailure as failure:
                self._unready[process] = failure
                self._open.extendleft(reversed(jobs))
                return
            is_short = self._ground.clock.monotonic_s() - begun_s < SHORT_S
            most = min(MOST_AT_ONCE, 2 * most) if is_short else 1

    def _next(self, most: int) -> list[Job]:
        """At most so many jobs, and a sixteenth of those that are open; large ones in a message of their own."""
        jobs, size = list[Job](), 0
        with suppress(IndexError):
            while len(jobs) < max(1, min(most, len(self._open) // 16)) and size < MOST_BYTES:
                jobs.append(self._open.popleft())
                size += len(jobs[-1].completion)
        return jobs

    def _retried(self, process: ScoringProcess, job: Job, cause: Cause) -> Result:
        """The job alone; if that ends the process again, whether the completion is to blame."""
        if cause is Cause.CLOCK and self._is_late():  # it has had its time: whoever asks again must come to an end
            return ScoringFailure(f"{self._late}, and task {job.task} ended its scoring process once")
        again = process.ask_alone(job)
        if not isinstance(again, Ended):
            return again
        about = f"task {job.task}: the scoring process {again.what}"
        if again.cause not in BLAMABLE:
            return ScoringFailure(f"{about}, twice")
        empty = process.ask_alone(Job(job.task, ""))
        if isinstance(empty, JobAnswer):
            log.info("%s, twice; the completion is worth 0 for it", about)
            return JobAnswer(0.0, {LIMIT_PART: 1.0}, f"scoring it {again.what}".encode())
        told = empty.what if isinstance(empty, Ended) else str(empty)
        return ScoringFailure(f"{about}, and so does an empty completion ({told}): the reward function is at fault")

    def _is_late(self) -> bool:
        return self._ground.clock.monotonic_s() >= self._until_s
