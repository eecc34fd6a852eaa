"""What runs in a scoring process, called here; and the example of the documentation in real ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.environments import EnvironmentSettings, Score, Task, build
from shoal.environments.settings import ScoringSettings
from shoal.errors import CodecError, EnvironmentSetupError, ScoringFailure
from shoal.rewards import DirectScorer, Job, ScoringPool
from shoal.rewards.child import _answer
from shoal.rewards.frames import HEAD, Allows, Channel, ChannelClosed, JobAnswer, JobBatch, frame_of, read_message
from shoal.rewards.protocol import core_digest
from shoal.runtime.clock import ManualClock
from shoal.runtime.stop import StopToken

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_reward.py"


class Strict:
    """Needs too much memory for those that speak of elephants."""

    name = "strict"
    digest = "5" * 64

    def tasks(self, split: str) -> list[Task]:
        return []

    def task(self, task_id: str) -> Task:
        if task_id != "t":
            raise EnvironmentSetupError("no such task")
        return Task("t", "p", "a")

    def score(self, task: Task, completion: str) -> Score:
        if "elephant" in completion:
            raise ScoringFailure("it raised") from MemoryError()
        if "zero" in completion:
            return Score(1 / 0)
        return Score(1, {"whole": 1}, "fine")


def asked(completion: str, task: str = "t") -> JobAnswer:
    return _answer(Strict(), task, completion, 10.0, -1)


def test_a_job_is_a_score_a_failure_or_too_much() -> None:
    assert asked("x") == JobAnswer(1.0, {"whole": 1.0}, b"fine")
    assert asked("elephant") == JobAnswer(needs_memory=True)
    assert asked("zero").failure == "scoring raised ZeroDivisionError: division by zero"
    assert "does not know the task" in (asked("x", "u").failure or "")


class Programs(Strict):
    """One task whose program may take a minute of processor time."""

    def task(self, task_id: str) -> Task:
        tests = {"test_cases": [{"type": "stdin_stdout", "input": "", "output": "5"}], "limits": {"cpu_s": 60}}
        return Task("t", "p", json.dumps(tests), kind="code")


def test_a_task_with_limits_of_its_own_says_so_before_it_is_scored() -> None:
    source, sink = os.pipe()
    answer = _answer(Programs(), "t", "x", 10.0, sink)
    channel = Channel(source, sink, StopToken())
    said = channel.receive(5)
    assert isinstance(said, Allows)
    assert said.seconds >= 4 * 60
    assert answer.value == 1.0
    assert _answer(Strict(), "t", "x", 10.0, sink).value == 1.0
    with pytest.raises(TimeoutError):  # other tasks say nothing
        channel.receive(0.01)
    os.close(source)
    os.close(sink)


def test_the_digest_that_a_child_must_have_is_that_of_the_scoring_alone() -> None:
    settings = EnvironmentSettings(scoring=ScoringSettings(seconds=3))
    assert core_digest(build(settings)) == core_digest(build(EnvironmentSettings())) != build(settings).digest


def test_a_channel_gives_up_on_what_is_no_message() -> None:
    for sent in (b"", b"\0\0", HEAD.pack(3) + b"abc", HEAD.pack(2**32 - 1) + b"x"):
        source, theirs = os.pipe()
        nothing, sink = os.pipe()
        os.write(theirs, sent)
        os.close(theirs)
        channel = Channel(source, sink, StopToken())
        with pytest.raises(ChannelClosed):
            channel.receive(5)
        os.close(source)
        os.close(sink)
        os.close(nothing)


def test_a_channel_does_not_wait_for_ever_for_somebody_who_does_not_read() -> None:
    theirs, sink = os.pipe()
    source, other = os.pipe()
    channel = Channel(source, sink, StopToken())
    with pytest.raises(TimeoutError):
        channel.send(JobBatch([("t", b"x" * 10**6)]), 0.05)
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    for each in (source, sink, theirs, other):
        os.close(each)


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


def test_time_in_which_the_process_was_stopped_is_not_waited() -> None:
    source, theirs = os.pipe()
    nothing, sink = os.pipe()
    assert Channel(source, sink, StopToken(), Stopped(theirs)).receive(2.0) == JobAnswer(1.0)
    with pytest.raises(TimeoutError):  # every look counts something: it comes to an end
        Channel(source, sink, StopToken(), Stopped(nothing)).receive(0.5)
    for each in (source, sink, theirs, nothing):
        os.close(each)


def test_the_childs_end_reads_whole_messages_or_none() -> None:
    source, sink = os.pipe()
    os.write(sink, frame_of(JobBatch([("t", b"x")])) + b"\0\0")
    os.close(sink)
    assert read_message(source) == JobBatch([("t", b"x")])
    assert read_message(source) is None
    os.close(source)


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rewards.frames.MAX_FRAME_BYTES", 10)
    with pytest.raises(CodecError):
        frame_of(JobBatch([("t", b"x" * 20)]))


def test_the_example_scores_the_same_in_processes_of_its_own() -> None:
    settings = EnvironmentSettings(file=EXAMPLE)
    environment = build(settings)
    tasks = [environment.tasks("train")[index] for index in range(5)]
    gold = ["".join(sorted(task.prompt.rstrip("="))) for task in tasks]
    jobs = [Job(task.id, text) for task, right in zip(tasks, gold, strict=True) for text in (right, right[:3], "x")]
    pool = ScoringPool(settings, environment)
    try:
        found = pool.scores(jobs)
    finally:
        pool.close()
    assert found == DirectScorer(environment).scores(jobs)
    values = [score.value for score in found if isinstance(score, Score)]
    assert values[0::3] == [1.0] * 5
    assert all(0 < value < 1 for value in values[1::3])
    assert values[2::3] == [0.0] * 5
