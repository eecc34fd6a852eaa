"""Scoring in processes of their own: what is contained, who is to blame, and what the two ends say."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kit.reward import IMPATIENT, LIMITS, is_running, naughty, one, until
from kit.sandbox import needs_bubblewrap
from shoal.environments import EnvironmentSettings, Score, Task, build
from shoal.environments.settings import ScoringSettings
from shoal.errors import CodecError, DeadlineExceeded, EnvironmentSetupError, ScoringFailure
from shoal.rewards import DirectScorer, Job, NotStarted, Scorer, ScoringPatience, ScoringPool
from shoal.rewards.child import _answer
from shoal.rewards.frames import HEAD, Allows, Channel, ChannelClosed, JobAnswer, Jobs, frame_of, read_message
from shoal.rewards.pool import PoolContext, ScoringProcess, ScoringRound, process_count, score_all
from shoal.runtime import ManualClock, StopToken

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScoringPool]:
    """Shared: whatever one test does to it must not trouble the next."""
    with naughty(tmp_path_factory.mktemp("reward")) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ScoringPool]:
    with naughty(tmp_path) as made:
        yield made


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def limited(said: str) -> Score:
    return Score(0.0, {"limit": 1.0}, f"scoring it {said}")


def test_pool_scores_like_the_environment_in_order() -> None:
    settings = EnvironmentSettings(name="sort")
    environment = build(settings)
    said = [(task, text) for task in environment.tasks("train")[:40] for text in (task.answer, "nonsense", task.answer)]
    jobs = [*(Job(task.id, text) for task, text in said), Job("?", "")]
    pool = ScoringPool(settings, environment)
    assert isinstance(pool, Scorer)
    with closing(pool):
        found, direct = pool.scores(jobs), DirectScorer(environment).scores(jobs)
    assert found[:-1] == direct[:-1]
    assert isinstance(found[-1], ScoringFailure)
    assert str(found[-1]) == str(direct[-1])
    assert pool.pids == []


TOO_LONG, TOO_MUCH = "took longer than 0.25 s of processor time", "needed more than 100 MB"


@pytest.mark.parametrize(("completion", "said", "blamed"), [
    slow("spin", TOO_LONG, True), ("spin in C", TOO_LONG, True), ("gigabytes", TOO_MUCH, True),
    slow("bit by bit", TOO_MUCH, True), slow("crash", "crashed (SIGSEGV)", True),
    ("raise", "raised ValueError: no such thing", False), ("exit", "raised SystemExit: 3", False),
    ("text", "returned 'good'", False), slow("really exit", "ended with exit code 3, twice", False),
    ("killed", "was killed by SIGKILL, twice", False),
])  # fmt: skip
def test_exceeded_limit_scores_0_and_a_failure_of_the_machinery_is_unscored(pool, completion, said, blamed):
    first, second = pool.scores([Job("plain", completion), Job("plain", "fine")])
    assert second == Score(1.0, {})
    assert first == limited(said) if blamed else isinstance(first, ScoringFailure) and said in str(first)


def test_job_that_never_ends_without_computing_is_unscored(tmp_path: Path) -> None:
    with naughty(tmp_path, patience=IMPATIENT) as pool:
        failure = one(pool, "sleep")
        assert type(failure) is ScoringFailure, "and not one that was not begun"
        assert "did not end within 0.8 s by the clock" in str(failure)


@pytest.mark.slow
@needs_bubblewrap
def test_program_gets_the_time_of_its_task_even_beyond_the_pools(tmp_path: Path) -> None:
    tests = json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "2", "output": "5"}]})
    rows = [{"prompt": f"p{n}", "verification_info": tests, "task_type": "prime_rl_code"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EnvironmentSettings(name="dataset", data=tmp_path / "rows.jsonl", scoring=LIMITS)
    environment = build(settings)
    with closing(ScoringPool(settings, environment, patience=ScoringPatience(job_s=2.0))) as pool:
        program = "```python\nimport time\ntime.sleep(3)\nprint(5)\n```"
        [score] = pool.scores([Job(environment.tasks("train")[0].id, program)])
    assert isinstance(score, Score)
    assert score.value == 1.0


@pytest.mark.slow
def test_a_task_that_exceeds_the_limits_whatever_the_completion_is_unscored(tmp_path: Path) -> None:
    with naughty(tmp_path) as pool:
        failure, fine = pool.scores([Job("always", "anything"), Job("always", "fine")])
    assert isinstance(failure, ScoringFailure)
    assert "so does an empty completion" in str(failure)
    assert fine == Score(1.0, {})


@pytest.mark.parametrize("trouble", ["killed", slow("really exit"), slow("spin"), slow("crash")])
def test_trouble_that_passes_costs_no_score(pool: ScoringPool, tmp_path: Path, trouble: str) -> None:
    jobs = [Job("once", f"{trouble}:{tmp_path / 'mark'}"), *(Job("plain", f"fine {n}") for n in range(8))]
    assert pool.scores(jobs) == [Score(1.0, {})] * 9
    assert (tmp_path / "mark").exists()


def test_failing_jobs_do_not_affect_other_jobs(pool: ScoringPool) -> None:
    jobs = [Job("plain", f"fine {n}") for n in range(800)]
    for place, trouble in ((100, "spin in C"), (101, "raise"), (250, "killed"), (251, "gigabytes")):
        jobs[place] = Job("plain", trouble)
    found = pool.scores(jobs)
    others = [score for place, score in enumerate(found) if place not in (100, 101, 250, 251)]
    assert (found[100], found[251]) == (limited(TOO_LONG), limited(TOO_MUCH))
    assert "raised ValueError" in str(found[101])
    assert "was killed by SIGKILL, twice" in str(found[250])
    assert others == [Score(1.0, {})] * 796


class Timed(ScoringProcess):
    """Takes so many milliseconds for each job."""

    def __init__(self, ground: PoolContext, clock: ManualClock, takes_ms: int) -> None:
        super().__init__(ground)
        self._clock, self._takes_ms, self.sizes = clock, takes_ms, list[int]()

    def ask(self, jobs: Sequence[Job]) -> Iterator[JobAnswer]:
        self.sizes.append(len(jobs))
        for _job in jobs:
            self._clock.advance(self._takes_ms / 1000)
            yield JobAnswer(1.0)


@pytest.mark.parametrize(("takes_ms", "all_s", "sizes", "scored"), [
    (0, 1, [1, 2, 4, 8, 16, 32, 32], 800),
    (15, 600, [1, 2, 1, 2, 1, 2, 1], 800),  # more at once only as long as that is short
    (100, 1, [1, 1, 1, 1, 1, 1, 1], 10),
    (3, 0.1, [1, 2, 4, 8, 1, 2, 4], 34),  # no further one when the time is up
])  # fmt: skip
def test_jobs_in_a_message_grow_with_the_speed_and_end_with_the_time(takes_ms, all_s, sizes, scored):
    clock = ManualClock()
    ground = PoolContext(EnvironmentSettings(), LIMITS, "", ScoringPatience(all_s=all_s), StopToken(), clock)
    process, jobs = Timed(ground, clock, takes_ms), [Job("plain", str(n)) for n in range(800)]
    found = list(ScoringRound(ground, jobs).run([process]).values())
    assert process.sizes[:7] == sizes
    assert (found.count(JobAnswer(1.0)), sum(isinstance(each, NotStarted) for each in found)) == (scored, 800 - scored)


@pytest.mark.parametrize("trouble", ["print", "threads", "fork", "\ud800 half a pair"])
def test_noise_threads_forks_and_broken_text_corrupt_nothing(pool: ScoringPool, trouble: str) -> None:
    jobs = [Job("plain", f"{word}:{n}") for n in range(3) for word in (trouble, "fine")]
    assert pool.scores(jobs) == [Score(1.0, {})] * 6


def test_a_forked_copy_answers_nothing_wherever_it_could(pool: ScoringPool, tmp_path: Path) -> None:
    assert one(pool, f"fork and open:{tmp_path}") == Score(1.0, {})
    until((tmp_path / "pid").exists)
    until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    assert [(tmp_path / str(number)).read_bytes() for number in range(8)] == [b""] * 8


@pytest.mark.slow
def test_processes_started_by_a_job_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with naughty(tmp_path, patience=IMPATIENT) as pool:
        assert isinstance(one(pool, str(note), "leaves"), ScoringFailure)
    assert not is_running(int(note.read_text()))


@pytest.mark.parametrize(
    ("change", "said"), [("{}\n", "has changed"), slow("tasks = oops\n", "could not build the environment")]
)
def test_an_environment_that_changed_meanwhile_does_not_score(own, tmp_path, change, said):
    assert one(own, "fine") == Score(1.0, {})
    (tmp_path / "reward.py").write_text(change.format((tmp_path / "reward.py").read_text()))
    os.kill(own.pids[0], signal.SIGKILL)
    failure = one(own, "fine")
    assert isinstance(failure, ScoringFailure)
    assert said in str(failure)


def test_start_and_all_jobs_together_have_a_deadline(tmp_path: Path) -> None:
    with naughty(tmp_path, patience=ScoringPatience(start_s=0.01)) as pool:
        assert "not ready within 0.01 s" in str(one(pool, "fine"))
    with naughty(tmp_path, patience=ScoringPatience(start_s=60, job_s=2, all_s=1)) as pool:
        one(pool, "fine")
        begun, left = pool.scores([Job("plain", "sleep"), Job("plain", "sleep:2")])
    assert (type(begun), type(left)) == (ScoringFailure, NotStarted)
    assert "longer than 1 s in all: this was not begun" in str(left)


def test_jobs_not_started_are_asked_again_until_all_are_scored() -> None:
    asked = []

    def one_at_a_time(given: Sequence[Job]) -> list[Score | ScoringFailure]:
        asked.append(len(given))
        return [Score(float(given[0].completion)), *([NotStarted("no time")] * (len(given) - 1))]

    assert score_all(one_at_a_time, [Job("plain", str(n)) for n in range(3)]) == [Score(0.0), Score(1.0), Score(2.0)]
    assert asked == [3, 2, 1]


def test_there_are_as_many_processes_as_cores_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, processes in ((1, 1), (5, 5), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: set(range(cores)))
        assert process_count(ScoringSettings()) == processes
    assert process_count(ScoringSettings(processes=20)) == 20


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Processes that are started from now on; in their place an error, if there is one at the end of the list."""
    made: list[Any] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **named: Any) -> Any:
        if made and isinstance(made[-1], Exception):
            raise made.pop()
        made.append(popen(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return made


def test_stop_while_it_starts_or_waits_leaves_no_process(tmp_path: Path, started: list[Any]) -> None:
    stop = StopToken()
    with naughty(tmp_path, stop=stop) as pool:
        stop.set("SIGTERM")
        with pytest.raises(DeadlineExceeded, match="SIGTERM"):
            pool.start()
    assert [child.returncode for child in started] == [-signal.SIGKILL]
    stop = StopToken()
    with naughty(tmp_path, patience=ScoringPatience(job_s=100), stop=stop) as pool:
        one(pool, "fine")
        [child] = pool.pids
        timer = threading.Timer(0.1, stop.set, ["SIGTERM"])
        timer.start()
        with pytest.raises(DeadlineExceeded, match="SIGTERM"):
            one(pool, "sleep")
        assert not is_running(child)


PARENT = """
import sys
from pathlib import Path
from kit.reward import naughty
from shoal.rewards import Job, ScoringPatience

with naughty(Path(sys.argv[1]), patience=ScoringPatience(start_s=float(sys.argv[2]), job_s=100)) as pool:
    pool.start()
    print(pool.pids[0], flush=True)
    sys.stdin.readline()
    print("asking", flush=True)
    print(pool.scores([Job("plain", sys.argv[3])]), flush=True)
"""


@contextmanager
def parent_of(folder: Path, start_s: float, completion: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that starts a pool and asks it when it is sent a line; and the pool's process."""
    tests = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PARENT, str(folder), str(start_s), completion]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": tests}}
    with subprocess.Popen(command, text=True, **pipes) as parent:  # type: ignore[call-overload]
        yield parent, int(parent.stdout.readline())


def begin(parent: subprocess.Popen[str]) -> None:
    print("go", file=parent.stdin, flush=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "asking\n"


@pytest.mark.parametrize("busy", [slow(False), True])
def test_children_end_with_their_parent_even_by_kill_9(tmp_path: Path, busy: bool) -> None:
    with parent_of(tmp_path, 60, "sleep") as (parent, child):
        assert is_running(child)
        if busy:
            begin(parent)
        parent.kill()
    until(lambda: not is_running(child))


SLOW_TO_START = """
import time
from pathlib import Path
tasks = [{"prompt": "p", "id": "plain", "split": "train"}]
folder = Path(__file__).parent

def score(prompt, completion, answer):
    (folder / "started").touch()
    while not (folder / "gate").exists():
        time.sleep(0.01)
    return 1.0
"""


@pytest.mark.parametrize("stopped", [slow("before it asks"), slow("while it waits"), "with its child"])
def test_stopped_parent_does_not_count_against_its_child(tmp_path: Path, stopped: str) -> None:
    (tmp_path / "reward.py").write_text(SLOW_TO_START)
    with parent_of(tmp_path, 1.0, "fine") as (parent, child):
        until((tmp_path / "started").exists)
        if stopped != "before it asks":
            begin(parent)
        for pid in [parent.pid, *([child] if stopped == "with its child" else [])]:
            os.kill(pid, signal.SIGSTOP)
        resumes_s = time.monotonic() + 1.3
        until(lambda: time.monotonic() > resumes_s)
        (tmp_path / "gate").touch()
        for pid in (child, parent.pid):
            os.kill(pid, signal.SIGCONT)
        said, _ = parent.communicate("go\n", timeout=60)
        assert said.splitlines()[-1] == str([Score(1.0, {})])


def first_life(folder: Path, what: str, completion: str = "") -> None:
    """A reward file whose first process does `what` at this completion; if it is empty, before it is ready."""
    (folder / "reward.py").write_text(f"""
import os, time
from pathlib import Path
tasks = [{{"prompt": "p", "id": "plain", "split": "train"}}]

def score(prompt, completion, answer):
    if completion != {completion!r}:
        return 1.0
    try:
        Path(__file__).with_name("mark").touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    {what}
""")


@pytest.mark.parametrize(("what", "at", "patience"), [
    ("os._exit(9)", "", ScoringPatience(start_s=60)),
    ("time.sleep(0.5); os.kill(os.getpid(), 9)", "go", ScoringPatience(start_s=60, all_s=0.3)),
    ("time.sleep(1000)", "", ScoringPatience(start_s=8)),
], ids=["it dies before it is ready", "somebody killed it, however late it is", "it stands still"])  # fmt: skip
def test_a_process_that_dies_is_followed_by_another(tmp_path, what, at, patience):
    first_life(tmp_path, what, at)
    with naughty(tmp_path, patience=patience) as pool:
        assert [one(pool, said) for said in ("fine", at or "too")] == [Score(1.0, {})] * 2
    assert (tmp_path / "mark").exists()


def test_the_jobs_of_a_process_that_is_never_ready_go_to_the_others(tmp_path: Path) -> None:
    first_life(tmp_path, "time.sleep(1000)")
    two, jobs = LIMITS.model_copy(update={"processes": 2}), [Job("plain", f"fine {n}") for n in range(20)]
    with naughty(tmp_path, two, ScoringPatience(start_s=2.5)) as pool:
        pool.start()
        assert pool.scores(jobs) == [Score(1.0, {})] * 20


def test_process_that_fails_to_start_is_started_later(tmp_path: Path, started: list[Any]) -> None:
    with naughty(tmp_path) as pool:
        started += [OSError("no more processes")] * 2
        pool.start()
        assert pool.pids == []
        assert one(pool, "fine") == Score(1.0, {})
        assert len(started) == 1


def test_keys_are_not_for_reward_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_JUDGE_KEY", "secret")
    (tmp_path / "reward.py").write_text(
        "import os\ntasks = [{'prompt': 'p', 'id': 'plain', 'split': 'train'}]\n"
        "def score(prompt, completion, answer):\n    return float('SHOAL_JUDGE_KEY' in os.environ)\n"
    )
    with naughty(tmp_path) as pool:
        assert one(pool, "") == Score(0.0, {})


class Strict:
    """Needs too much memory for those that speak of elephants. The task "long" may take a minute of its own."""

    name = "strict"
    digest = "5" * 64

    def tasks(self, split: str) -> list[Task]:
        return []

    def task(self, task_id: str) -> Task:
        if task_id == "unknown":
            raise EnvironmentSetupError("no such task")
        tests = {"test_cases": [{"type": "stdin_stdout", "input": "", "output": "5"}], "limits": {"cpu_s": 60}}
        return Task("t", "p", "a") if task_id == "t" else Task("t", "p", json.dumps(tests), kind="code")

    def score(self, task: Task, completion: str) -> Score:
        if "elephant" in completion:
            raise ScoringFailure("it raised") from MemoryError()
        return Score(1 / 0) if "zero" in completion else Score(1, {"whole": 1}, "fine")


def test_job_answers_are_score_failure_or_memory_after_the_allowed_time() -> None:
    source, sink = os.pipe()
    answers = [_answer(Strict(), ("t", said, None), 10.0, sink) for said in (b"x", b"elephant", b"zero")]
    assert answers[:2] == [JobAnswer(1.0, {"whole": 1.0}, b"fine"), JobAnswer(needs_memory=True)]
    assert answers[2].failure == "scoring raised ZeroDivisionError: division by zero"
    assert "does not know the task" in (_answer(Strict(), ("unknown", b"x", None), 10.0, sink).failure or "")
    assert _answer(Strict(), ("long", b"x", None), 10.0, sink).value == 1.0
    channel = Channel(source, sink, StopToken())
    said = channel.receive(5)
    assert isinstance(said, Allows)
    assert said.seconds >= 4 * 60
    with pytest.raises(TimeoutError):  # other tasks say nothing
        channel.receive(0.01)
    os.close(source)
    os.close(sink)


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    """Two pipes: (source, theirs), (nothing, sink)."""
    both = (*os.pipe(), *os.pipe())
    yield both
    for each in both:
        with suppress(OSError):
            os.close(each)


@pytest.mark.parametrize("sent", [b"", b"\0\0", HEAD.pack(3) + b"abc", HEAD.pack(2**32 - 1) + b"x"])
def test_a_channel_gives_up_on_what_is_no_message(pipes: tuple[int, int, int, int], sent: bytes) -> None:
    source, theirs, _, sink = pipes
    os.write(theirs, sent)
    os.close(theirs)
    with pytest.raises(ChannelClosed):
        Channel(source, sink, StopToken()).receive(5)


def test_channel_waits_are_bounded_and_large_messages_are_refused(pipes, monkeypatch):
    channel = Channel(pipes[0], pipes[3], StopToken())
    with pytest.raises(TimeoutError):
        channel.send(Jobs([("t", b"x" * 10**6)]), 0.05)
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    monkeypatch.setattr("shoal.rewards.frames.MAX_FRAME_BYTES", 10)
    with pytest.raises(CodecError):
        channel.send(Jobs([("t", b"x" * 20)]), 1)


class Stopped(ManualClock):
    """The clock of a process that is stopped for an hour at every look; at the fifth the answer is there."""

    def __init__(self, sink: int) -> None:
        super().__init__()
        self._sink, self.looks = sink, 0

    def monotonic_s(self) -> float:
        self.advance(3600)
        self.looks += 1
        if self.looks == 5:
            os.write(self._sink, frame_of(JobAnswer(1.0)))
        return super().monotonic_s()


def test_time_in_which_the_process_was_stopped_is_not_waited(pipes: tuple[int, int, int, int]) -> None:
    source, theirs, _, sink = pipes
    assert Channel(source, sink, StopToken(), Stopped(theirs)).receive(2.0) == JobAnswer(1.0)
    with pytest.raises(TimeoutError):  # every look counts something: it comes to an end
        Channel(source, sink, StopToken(), Stopped(sink)).receive(0.5)
    os.write(theirs, frame_of(Jobs([("t", b"x", None)])) + b"\0\0")  # the child's end reads whole messages or none
    os.close(theirs)
    assert read_message(source) == Jobs([("t", b"x", None)])
    assert read_message(source) is None
