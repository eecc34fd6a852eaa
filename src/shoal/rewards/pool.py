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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from shoal.environments import Environment, EnvironmentSettings, Score, scoring_of
from shoal.errors import DeadlineExceeded, ScoringFailure
from shoal.rewards.frames import JobAnswer, as_text
from shoal.rewards.process import BLAMABLE, Cause, Ended, Ground, NeverReady, ScoringProcess
from shoal.rewards.protocol import Job, NotBegun, ScoringPatience, child_settings, core_digest, process_count
from shoal.runtime.clock import Backoff
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

MAX_CHUNK = 32
CHUNK_BYTES = 8 * 1024 * 1024
LIMIT_PART = "limit"
STARTS = 3  # of processes that die before they are ready, until a seat is given up for the round

Result = JobAnswer | ScoringFailure
Item = TypeVar("Item")


class Seat:
    """A place for one process after another. A life that answered nothing is followed by a pause."""

    def __init__(self, ground: Ground, backoff: Backoff = Backoff(first_s=0.2, most_s=5.0)) -> None:
        self._ground = ground
        self._backoff = backoff
        self._process: ScoringProcess | None = None
        self._fruitless = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Without waiting for it."""
        if self._process is None:
            self._process = ScoringProcess(self._ground)

    def take(self) -> ScoringProcess:
        """A process that is ready, or `ScoringFailure`. One that dies before it is ready is followed by another."""
        starts = 0
        while True:
            try:
                return self._ready()
            except NeverReady as failure:
                starts += 1
                if failure.was_late or starts == STARTS:
                    raise
                log.info("%s; another one is started", failure)

    def _ready(self) -> ScoringProcess:
        if self._process is None and self._fruitless:
            self._ground.stop.wait(self._backoff.wait_s(self._fruitless - 1))
        try:
            self.start()
            assert self._process is not None
            self._process.ready()
        except ScoringFailure:
            if self._process is None:
                self._fruitless += 1
            self.clear()
            raise
        return self._process

    def clear(self) -> None:
        """End the process, if there is one: the next `take` starts another."""
        if self._process is not None:
            self._fruitless = 0 if self._process.answered else self._fruitless + 1
            self._process.end()
            self._process = None


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
        self._busy = Lock()

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
        return [seat.pid for seat in self._seats if seat.pid is not None]

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        """What each is worth. `DeadlineExceeded` if the process is told to stop meanwhile."""
        with self._busy:
            try:
                results = _Round(self._ground, list(dict.fromkeys(jobs))).run(self._seats)  # equal ones are scored once
            except DeadlineExceeded:
                self.close()  # they are in the middle of something that nobody waits for
                raise
        return [_score(results[job]) for job in jobs]


class _Round:
    """All that is asked at once: over the seats, each in a thread, until nothing is open or the time is up."""

    def __init__(self, ground: Ground, jobs: Sequence[Job]) -> None:
        self._ground = ground
        self._jobs = jobs
        self._results: dict[Job, Result] = {}
        self._suspects: deque[tuple[Job, Cause]] = deque()
        self._unready: dict[Seat, NeverReady] = {}
        self._until_s = ground.clock.monotonic_s() + ground.patience.all_s

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
        self._results[suspect[0]] = self._judge(seat, *suspect)
        return True

    def _judge(self, seat: Seat, job: Job, cause: Cause) -> Result:
        """The job alone; if that ends the process again, whether the completion is to blame."""
        if cause is Cause.CLOCK and self._is_late():  # it has had its time: whoever asks again must come to an end
            return ScoringFailure(f"{self._late}, and task {job.task} ended its scoring process once")
        again = self._alone(seat, job)
        if not isinstance(again, Ended):
            return again
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
        for job in jobs:
            self._results[job] = failure

    def _is_late(self) -> bool:
        return self._ground.clock.monotonic_s() >= self._until_s

    @property
    def _late(self) -> str:
        return f"scoring took longer than {self._ground.patience.all_s:g} s in all"


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
    chunk: list[Job] = []
    size = 0
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


def _score(result: Result) -> Score | ScoringFailure:
    return result if isinstance(result, ScoringFailure) else Score(result.value, result.parts, as_text(result.notes))
