"""A scoring process: builds the environment, then scores jobs until its parent ends.

    stdin, stdout ─► moved to other descriptors; prints of the environment's code go to stderr
    processor time of a job ─► a timer of the kernel kills the process by SIGPROF
    memory of a job ─────────► a limit of the kernel on data: MemoryError
    end of the parent ───────► a thread sees the pipe close and kills the process and its children

`ScoringPool` starts it as `python -m shoal.rewards.child`.
"""

import os
import resource
import select
import signal
import sys
import threading
from functools import cache
from pathlib import Path

from shoal.environments import Environment, EnvironmentSettings, build
from shoal.environments.graders import GRADERS, TASK_TYPES, PatientGrader, grader
from shoal.environments.protocol import score_of
from shoal.environments.settings import inner_of
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.rewards import frames
from shoal.rewards.frames import JobAnswer, read_message, write_message

TASKS_TRIED = 32
grader_of = cache(grader)


def main() -> None:
    # standard input and output under other numbers; prints go to stderr, and reads give nothing
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)

    def forget() -> None:
        os.close(source)
        os.close(sink)

    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=_follow_parent, args=(source,), name="follow-parent", daemon=True).start()
    try:
        _serve(source, sink)
    except MemoryError:
        os._exit(frames.EXIT_MEMORY)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # nobody listens any more


def _follow_parent(source: int) -> None:
    waiter = select.poll()
    waiter.register(source, 0)  # only hang-ups
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
    except Exception as error:  # noqa: BLE001 - the owner's data and files may raise anything
        write_message(sink, frames.Ready(problem=f"{type(error).__name__}: {error}"[:1000]))
        return
    # score one task of each kind before the limits begin, so that imports count against no job
    tasks, kinds = environment.tasks("train"), set()
    for index in range(min(TASKS_TRIED, len(tasks))):
        try:
            tried = tasks[index]
            if tried.kind not in kinds:
                kinds.add(tried.kind)
                for text in ("", tried.answer):
                    score_of(environment, tried, text, tuple(text.encode()))  # tokens of some number
        except Exception as error:  # noqa: BLE001 - a real problem will occur again in a job
            print(f"while warming up: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
    write_message(sink, frames.Ready(inner_of(environment).digest, _limit_memory(setup.memory_bytes)))
    pid = os.getpid()
    while isinstance(work := read_message(source), frames.Jobs):
        for job in work.jobs:
            answer = _answer(environment, job, setup.seconds, sink)
            if os.getpid() != pid:
                os._exit(0)  # a child that the reward function has forked
            write_message(sink, answer)


def _answer(environment: Environment, job: frames.SentJob, seconds: float, sink: int) -> JobAnswer:
    task_id, completion, token_ids = job
    try:
        task = environment.task(task_id)
        # A program in a sandbox has its own limits; the parent must wait at least that long.
        known = TASK_TYPES.get(task.kind, task.kind) in GRADERS
        chosen = grader_of(task.kind) if known else None
        allowed_s = chosen.clock_s(task.answer) if isinstance(chosen, PatientGrader) else 0.0
        if allowed_s > 0:
            write_message(sink, frames.Allows(allowed_s))
        # Processor time of all threads. The signal's default action ends the process, in C code, too.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the owner's code may have changed it
        signal.setitimer(signal.ITIMER_PROF, seconds)
        score = score_of(environment, task, frames.as_text(completion), token_ids)
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
        detail = str(error) if isinstance(error, ScoringFailure) else f"scoring raised {type(error).__name__}: {error}"
        return JobAnswer(failure=detail[:1000].encode(errors="replace").decode())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(size_bytes: int) -> str:
    """Limit the data that this process may add from now on; returns why it cannot be limited. The address space is not
    limited: mapped data sets take none. Only the soft limit is set: a sandbox sets its own."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
        _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + size_bytes, hard))
    except (OSError, StopIteration, ValueError) as error:
        return f"memory ({error or 'this system does not say what it uses'})"
    return ""


if __name__ == "__main__":
    main()
