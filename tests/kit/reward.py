"""A reward function that misbehaves on request, and pools to contain it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit import eventually
from shoal.environments import EnvironmentSettings, Score, build
from shoal.environments.settings import ScoringSettings
from shoal.errors import ScoringFailure
from shoal.rewards import Job, ScoringPatience, ScoringPool
from shoal.runtime.stop import StopToken

REWARD = """
import ctypes, os, re, signal, subprocess, sys, threading, time
from pathlib import Path

tasks = [{"id": name, "prompt": name, "split": "train"} for name in ("plain", "once", "leaves", "always")]

def spin():
    while True:
        pass

def score(prompt, completion, answer):
    if prompt == "always" and completion != "fine":
        spin()
    if prompt == "once":  # the word of the completion, the first time only
        mark = Path(completion.partition(":")[2])
        if not completion or mark.exists():
            return 1.0
        mark.touch()
    if prompt == "leaves":  # a process that outlives its job says its number
        if completion:
            started = subprocess.Popen(["sleep", "1000"])
            Path(completion).write_text(str(started.pid))
            time.sleep(1000)
        return 1.0
    word = completion.partition(":")[0]
    if word == "sleep": time.sleep(1000)
    if word == "spin": spin()
    if word == "spin in C": re.match(r"(a+)+$", "a" * 64 + "b")
    if word == "gigabytes": return float(len(bytearray(10**10)))
    if word == "bit by bit": return float(len([bytes(10_000) for _ in range(10**7)]))
    if word == "print":
        for _ in range(20000): print("x" * 50)
        os.write(1, b"\\xff" * 100000)
        sys.stdin.read()
    if word == "exit": sys.exit(3)
    if word == "really exit": os._exit(3)
    if word == "threads": threading.Thread(target=spin, daemon=True).start()
    if word == "fork": os.fork()
    if word == "fork and open" and os.fork() == 0:  # the copy has files where the pipes were
        place = Path(completion.partition(":")[2])
        files = [os.open(place / str(n), os.O_WRONLY | os.O_CREAT) for n in range(8)]
        (place / "new").write_text(str(os.getpid()))
        (place / "new").rename(place / "pid")
    if word == "raise": raise ValueError("no such thing")
    if word == "crash": ctypes.string_at(0)
    if word == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if word == "text": return "good"
    return 1.0 if completion else 0.5
"""

LIMITS = ScoringSettings(seconds=0.25, memory_mb=100, processes=1)
PATIENCE = ScoringPatience(start_s=60.0, job_s=60.0, all_s=120.0)
IMPATIENT = ScoringPatience(start_s=60.0, job_s=0.8, all_s=120.0)  # a job that waits; a busy machine is no such one


@contextmanager
def naughty(
    folder: Path, limits: ScoringSettings = LIMITS, patience: ScoringPatience = PATIENCE, stop: StopToken | None = None
) -> Iterator[ScoringPool]:
    file = folder / "reward.py"
    if not file.exists():
        file.write_text(REWARD)
    settings = EnvironmentSettings(file=file, scoring=limits)
    pool = ScoringPool(settings, build(settings), stop, patience)
    try:
        yield pool
    finally:
        pool.close()


def one(pool: ScoringPool, completion: str, task: str = "plain") -> Score | ScoringFailure:
    [result] = pool.scores([Job(task, completion)])
    return result


until = eventually


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
