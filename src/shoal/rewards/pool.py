"""Scores completions in child processes with limits.

    jobs ─► processes, a few at a time ─┬─ a result for each job
                                        └─ the process ended during a job; the jobs after it are open again
                                             └─ this job alone, in a new process ─┬─ a result
                                                                                  └─ ended again ─► whose fault?

A job that ended two processes is the completion's fault if the cause was processor time, memory or a crash, and a new
process can score the *empty* completion of the same task. Then it is worth 0, with the part `limit`. In all other cases
(killed from outside, too long by the clock, an environment that does not build, a function that raises) it is unscored.
Jobs for which no time was left are `NotStarted` and may be asked again. If a process never becomes ready, it is
replaced once, or the other processes take its jobs.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from shoal.environments import Environment, EnvironmentSettings, Score, scoring_of
from shoal.environments.protocol import score_of
from shoal.environments.settings import ScoringSettings, inner_of
from shoal.errors import CodecError, DeadlineExceeded, EnvironmentSetupError, ScoringFailure
from shoal.rewards import frames
from shoal.rewards.frames import Channel, ChannelClosed, JobAnswer
from shoal.runtime import Clock, StopToken, SystemClock, visible
from shoal.runtime.supervise import describe_exit

log = logging.getLogger(__name__)

LIMIT_PART = "limit"
MOST_PROCESSES = 8  # unless the settings ask for more: each process builds the environment, which takes memory
STARTS, SLOW_STARTS = 3, 2  # attempts to start a process for the same jobs: any, and those that are not ready in time
MOST_AT_ONCE, MOST_BYTES, SHORT_S = 32, 2**23, 0.02
"""Jobs in a message: the number doubles while a message takes less than `SHORT_S`, so slow graders get one job."""
RESTART_PAUSE_S, REAP_S, SEND_S = 0.2, 5.0, 30.0
LINES_LOGGED, LINE_LIMIT = 20, 300
SECRETS = ("SHOAL_JUDGE_KEY",)  # not passed to reward functions
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
    "PYTHONHASHSEED": "0",  # the same order of sets in every process
}  # fmt: skip
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
Result = JobAnswer | ScoringFailure


class NotStarted(ScoringFailure):
    """There was no time to start the job. It may be asked again."""


@dataclass(frozen=True)
class Job:
    """`token_ids`: the tokens of the text, if the environment reads them and they are known."""

    task: str
    completion: str
    token_ids: tuple[int, ...] | None = None


Scores = list[Score | ScoringFailure]


@runtime_checkable
class Scorer(Protocol):
    """Scores completions of one environment. Failures of the machinery, and `NotStarted`, are returned, not raised."""

    def scores(self, jobs: Sequence[Job]) -> Scores:
        """One result per job, in order. Equal jobs have equal results."""
        ...

    def close(self) -> None: ...


def score_all(ask: Callable[[Sequence[Job]], Scores], jobs: Sequence[Job]) -> Scores:
    """All scores, in order. Jobs that were not started are asked again; each round finishes at least one."""
    found = ask(jobs)
    while left := [place for place, result in enumerate(found) if isinstance(result, NotStarted)]:
        for place, result in zip(left, ask([jobs[place] for place in left]), strict=True):
            found[place] = result
    return found


@dataclass(frozen=True)
class DirectScorer:
    environment: Environment

    def scores(self, jobs: Sequence[Job]) -> Scores:
        results: dict[Job, Score | ScoringFailure] = {}
        for job in dict.fromkeys(jobs):
            try:
                results[job] = score_of(
                    self.environment, self.environment.task(job.task), job.completion, job.token_ids
                )
            except EnvironmentSetupError as error:
                results[job] = ScoringFailure(f"the environment does not know the task: {error}")
            except ScoringFailure as failure:
                results[job] = failure
        return [results[job] for job in jobs]

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class ScoringPatience:
    """How long the parent waits for a process to be ready, for one job, and for all jobs of a call. `job_s` is clock
    time, for jobs that wait instead of computing; None: three times the limit of processor time, and a minute. The time
    that a grader allows (a sandbox) is added."""

    start_s: float = 120.0
    job_s: float | None = None
    all_s: float = 600.0


def process_count(settings: ScoringSettings) -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return settings.processes or min(MOST_PROCESSES, usable)


class Cause(StrEnum):
    TIME = "time"
    CLOCK = "clock"
    MEMORY = "memory"
    CRASH = "crash"
    OTHER = "other"


# Ends that a completion can cause. Not among them: signals from outside, an exit of the process, and clock time, since
# a job that waits looks like a job on a busy machine.
COMPLETION_CAUSES = frozenset({Cause.TIME, Cause.MEMORY, Cause.CRASH})


class Ended(Exception):
    def __init__(self, cause: Cause, what: str) -> None:
        super().__init__(what)
        self.cause, self.what = cause, what


class StartFailed(ScoringFailure):
    """The process ended, or there was no time left, before it was ready; another attempt may succeed."""

    def __init__(self, what: str, attempts: int = STARTS) -> None:
        super().__init__(what)
        self.attempts = attempts


@dataclass(frozen=True)
class PoolContext:
    """Shared by all processes. Each must build an environment with this `digest`."""

    settings: EnvironmentSettings
    limits: ScoringSettings
    digest: str
    patience: ScoringPatience
    stop: StopToken
    clock: Clock = field(default_factory=SystemClock)


class ScoringProcess:
    """The parent's view of a child process, which is replaced when it ends. For one thread at a time."""

    def __init__(self, ground: PoolContext) -> None:
        self._ground = ground
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._said: deque[str] = deque(maxlen=1)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._process is not None:
            return
        env = {name: value for name, value in os.environ.items() if name not in SECRETS} | CHILD_ENVIRONMENT
        command, pipe = [sys.executable, "-P", "-m", "shoal.rewards.child"], subprocess.PIPE
        try:  # in a session of its own: Ctrl-C is for the parent; what it starts can be ended with it
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
        except OSError as error:
            raise StartFailed(f"a scoring process could not be started: {error}") from error
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
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
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
        """Yield the result of each job. `Ended`: this job ended the process; `ScoringFailure`: it was never ready."""
        for starts in range(1, STARTS + 1):
            try:
                self.start()
                self._ready()
                break
            except ScoringFailure as failure:
                self.end()
                if not isinstance(failure, StartFailed) or starts >= failure.attempts:
                    raise
                log.info("%s; another one is started", failure)
                self._ground.stop.wait(RESTART_PAUSE_S)
        try:
            yield from self._answers(jobs)
        except Ended:
            self.end()
            raise

    def ask_alone(self, job: Job) -> Result | Ended:
        self.end()
        try:
            return next(self.ask([job]))
        except (ScoringFailure, Ended) as outcome:
            return outcome

    def _ready(self) -> None:
        """Wait until it is ready. The time counts from this call, not from the start of the process."""
        if self._is_ready:
            return
        within_s, digest = self._ground.patience.start_s, self._ground.digest
        try:
            message = self._channel.receive(within_s)
        except TimeoutError:
            why = "the environment or one of its first tasks hangs, or this machine is very busy"
            raise StartFailed(f"a scoring process was not ready within {within_s:g} s: {why}", SLOW_STARTS) from None
        except ChannelClosed:
            raise StartFailed(f"a scoring process did not start: it {self._how_it_ended().what}") from None
        if not isinstance(message, frames.Ready) or message.problem:
            problem = message.problem if isinstance(message, frames.Ready) else "it says what it should not"
            raise ScoringFailure(f"a scoring process could not build the environment: {problem}")
        if message.digest != digest:
            detail = f"({digest[:16]}… then, {message.digest[:16]}… now): undo the change, or start a new run"
            seed = "; a reward file that draws tasks at random must seed the generator"
            raise ScoringFailure(f"the environment has changed since this process started {detail}{seed}")
        if message.unlimited:
            log.warning("scoring has no limit on %s", message.unlimited)
        self._is_ready = True

    def _answers(self, jobs: Sequence[Job]) -> Iterator[Result]:
        within_s, limits, patience = SEND_S, self._ground.limits, self._ground.patience
        try:
            self._channel.send(
                frames.Jobs([(job.task, frames.as_bytes(job.completion), job.token_ids) for job in jobs]), within_s
            )
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
        last_line = f": {self._said[0]}" if self._said and code > 0 else ""
        return Ended(Cause.OTHER, describe_exit(code) + last_line)

    @property
    def _too_much(self) -> str:
        return f"needed more than {self._ground.limits.memory_mb} MB"

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as output:
            for number, line in enumerate(iter(lambda: output.readline(LINE_LIMIT), b"")):
                if text := visible(line.decode(errors="replace").rstrip()):
                    self._said.append(text)
                    if number <= LINES_LOGGED:
                        more = "more; it is not shown" if number == LINES_LOGGED else f": {text}"
                        log.info("scoring process %d says%s", process.pid, more)


class ScoringPool:
    """Implements `Scorer`, for one caller at a time. `settings` are those that `environment` was built from."""

    def __init__(
        self, settings: EnvironmentSettings, environment: Environment, stop: StopToken | None = None,
        patience: ScoringPatience = ScoringPatience(),
    ) -> None:  # fmt: skip
        limits, digest = scoring_of(environment), inner_of(environment).digest
        # the parent adds judges and length budgets
        settings = settings.model_copy(update={"judges": (), "length": None, "retire_after": None})
        self._ground = PoolContext(settings, limits, digest, patience, stop or StopToken())
        self._processes = [ScoringProcess(self._ground) for _ in range(process_count(limits))]
        self._busy = threading.Lock()

    def start(self) -> None:
        try:
            for process in self._processes:
                process.start()
        except StartFailed as failure:
            log.warning("%s; it is tried again when something is to be scored", failure)

    def close(self) -> None:
        for process in self._processes:
            process.end()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def scores(self, jobs: Sequence[Job]) -> Scores:
        with self._busy:
            try:
                results = ScoringRound(self._ground, jobs).run(self._processes)
            except DeadlineExceeded:
                self.close()  # nobody waits for their jobs any more
                raise
        found = (results[job] for job in jobs)
        return [
            one if isinstance(one, ScoringFailure) else Score(one.value, one.parts, frames.as_text(one.notes))
            for one in found
        ]


class ScoringRound:
    """All jobs of one call, over the processes, with a thread for each, until none is open or the time is over."""

    def __init__(self, ground: PoolContext, jobs: Sequence[Job]) -> None:
        self._ground, self._open = ground, deque(dict.fromkeys(jobs))  # equal ones are scored once
        self._results: dict[Job, Result] = {}
        self._unready: dict[ScoringProcess, ScoringFailure] = {}
        self._until_s = ground.clock.monotonic_s() + ground.patience.all_s
        self._late = f"scoring took longer than {ground.patience.all_s:g} s in all"

    def run(self, processes: Sequence[ScoringProcess]) -> dict[Job, Result]:
        usable = processes[: len(self._open)]
        while self._open and usable:  # jobs of a process that never becomes ready go to the others
            with ThreadPoolExecutor(len(usable), thread_name_prefix="scoring") as threads:
                list(threads.map(self._serve, usable))
            usable = [process for process in usable if process not in self._unready]
        return self._results | {job: next(iter(self._unready.values())) for job in self._open}

    def _serve(self, process: ScoringProcess) -> None:
        most = 1
        while jobs := self._next(most):
            if self._is_late():
                self._results |= dict.fromkeys(jobs, NotStarted(f"{self._late}: this was not begun"))
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
        """At most so many jobs, and a sixteenth of the open ones; a large job goes alone."""
        jobs, size = list[Job](), 0
        with suppress(IndexError):
            while len(jobs) < max(1, min(most, len(self._open) // 16)) and size < MOST_BYTES:
                jobs.append(self._open.popleft())
                size += len(jobs[-1].completion) + 5 * len(jobs[-1].token_ids or ())
        return jobs

    def _retried(self, process: ScoringProcess, job: Job, cause: Cause) -> Result:
        """Score the job alone; if it ends the process again, decide whether the completion is to blame."""
        if cause is Cause.CLOCK and self._is_late():  # no second attempt, or `score_all` might never end
            return ScoringFailure(f"{self._late}, and task {job.task} ended its scoring process once")
        again = process.ask_alone(job)
        if not isinstance(again, Ended):
            return again
        about = f"task {job.task}: the scoring process {again.what}"
        if again.cause not in COMPLETION_CAUSES:
            return ScoringFailure(f"{about}, twice")
        empty = process.ask_alone(Job(job.task, "", None if job.token_ids is None else ()))
        if isinstance(empty, JobAnswer):
            log.info("%s, twice; the completion is worth 0 for it", about)
            return JobAnswer(0.0, {LIMIT_PART: 1.0}, f"scoring it {again.what}".encode())
        detail = empty.what if isinstance(empty, Ended) else str(empty)
        return ScoringFailure(f"{about}, and so does an empty completion ({detail}): the reward function is at fault")

    def _is_late(self) -> bool:
        return self._ground.clock.monotonic_s() >= self._until_s
