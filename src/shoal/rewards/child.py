"""A scoring process: builds the environment, then scores what it is sent until its parent is gone.

    stdin, stdout ─► descriptors of its own; what the environment's code prints goes to stderr and corrupts nothing
    processor time of a job ─► a timer of the kernel: the process dies of SIGPROF, whatever it is doing
    memory of a job ─────────► a limit of the kernel on what is written to: MemoryError
    the parent is gone ──────► a thread sees the pipe close and ends the process and all that it started

Run by `ScoringPool` as `python -m shoal.rewards.child`; not for people.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
from functools import cache
from pathlib import Path

from shoal.environments import Environment, EnvironmentSettings, build
from shoal.environments.composed import inner_of
from shoal.environments.graders.registry import GRADERS, TASK_TYPES, PatientGrader, grader
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.rewards import frames
from shoal.rewards.frames import JobAnswer, read_message, write_message

TASKS_TRIED = 32
grader_of = cache(grader)


def main() -> None:
    source, sink = _own_pipes()
    threading.Thread(target=_follow_parent, args=(source,), name="follow-parent", daemon=True).start()
    try:
        _serve(source, sink)
    except MemoryError:
        os._exit(frames.EXIT_MEMORY)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # nobody listens any more


def _follow_parent(source: int) -> None:
    waiter = select.poll()
    waiter.register(source, 0)  # only the end of it
    waiter.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def _serve(source: int, sink: int) -> None:
    setup = read_message(source)
    if not isinstance(setup, frames.Setup):
        return
    try:
        environment = build(EnvironmentSettings.model_validate_json(setup.settings))
    except Exception as error:  # noqa: BLE001 - data and files of the owner's: whatever it is, the parent must hear it
        write_message(sink, frames.Ready(problem=f"{type(error).__name__}: {error}"[:1000]))
        return
    _warm_up(environment)
    write_message(sink, frames.Ready(inner_of(environment).digest, _limit_memory(setup.memory_bytes)))
    pid = os.getpid()
    while isinstance(work := read_message(source), frames.Work):
        for task, completion in work.jobs:
            answer = _answer(environment, task, frames.as_text(completion), setup.seconds, sink)
            if os.getpid() != pid:
                os._exit(0)  # the reward function has forked, and this is the copy
            write_message(sink, answer)


def _answer(environment: Environment, task_id: str, completion: str, seconds: float, sink: int) -> JobAnswer:
    try:
        task = environment.task(task_id)
        # What the task allows its grader by the clock: a program in a sandbox has limits of its own, which count
        known = TASK_TYPES.get(task.kind, task.kind) in GRADERS
        chosen = grader_of(task.kind) if known else None
        allowed_s = chosen.clock_s(task.answer) if isinstance(chosen, PatientGrader) else 0.0
        if allowed_s > 0:
            write_message(sink, frames.Allows(allowed_s))
        # Processor time of all threads; the signal's default action ends the process, C code or not
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a profiler of the owner's may have taken it
        signal.setitimer(signal.ITIMER_PROF, seconds)
        score = environment.score(task, completion)
        parts = {str(name): float(value) for name, value in score.parts.items()}
        return JobAnswer(float(score.value), parts, frames.as_bytes(score.notes[:1000]))
    except EnvironmentSetupError as error:
        return JobAnswer(failure=f"the environment does not know the task: {error}")
    except Exception as error:  # noqa: BLE001 - whatever an environment raises, it is no score
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, MemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            return JobAnswer(needs_memory=True)
        told = str(error) if isinstance(error, ScoringFailure) else f"scoring raised {type(error).__name__}: {error}"
        return JobAnswer(failure=told[:1000].encode(errors="replace").decode())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _warm_up(environment: Environment) -> None:
    """Score a few tasks, one of each kind, before anything is limited: what is imported then counts against no job."""
    tasks, kinds = environment.tasks("train"), set()
    for index in range(min(TASKS_TRIED, len(tasks))):
        try:
            task = tasks[index]
            if task.kind not in kinds:
                kinds.add(task.kind)
                for completion in ("", task.answer):
                    environment.score(task, completion)
        except Exception as error:  # noqa: BLE001 - if it matters, it will happen again when it counts
            print(f"while warming up: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


def _limit_memory(size_bytes: int) -> str:
    """Bound what this process writes to beyond what it has now; what cannot be bounded is said. Not the address space:
    data sets are mapped, and mappings of files are no use of memory. Only the soft limit: what a sandbox starts has
    limits of its own."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
        _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + size_bytes, hard))
    except (OSError, StopIteration, ValueError) as error:
        return f"memory ({error or 'this system does not say what it uses'})"
    return ""


def _own_pipes() -> tuple[int, int]:
    """Standard input and output under other numbers; what is printed goes to stderr, and nothing can be read."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)

    def forget() -> None:
        os.close(source)
        os.close(sink)

    os.register_at_fork(after_in_child=forget)
    return source, sink


if __name__ == "__main__":
    main()
