"""The history of a run, the words for what a status says, and the summary, from made-up statuses."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from kit.cli import NODE, report, status, wait
from kit.scene import Memory, at_step, process, verdict, worker
from shoal.protocol import NodeState, NodeView, RunStatus
from shoal.run.launch import steps_in, summary
from shoal.run.progress import History, Reporter, StatusPoller, Watchdog, labels, waits_line
from shoal.runtime.clock import ManualClock

# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rewards_and_scores_are_kept_by_step_even_when_the_hub_shows_them_no_more() -> None:
    history = History()
    history.add(status(reports=(report(0, reward_mean=0.1, held_out=0.3), report(1, reward_mean=0.2))), 1.0)
    sampled = report(2, reward_mean=0.4, sampled_reward=0.3, held_out=0.5)  # the reward of all that was sampled counts
    history.add(status(reports=(report(1, reward_mean=0.25), sampled)), 2.0)
    assert history.rewards == {0: 0.1, 1: 0.25, 2: 0.3}
    assert history.held_out == {0: 0.3, 2: 0.5}


def test_every_rejection_is_kept_once_and_newest_last() -> None:
    history, cheater = History(), worker(2)
    first, second = (verdict(unit, cheater, "rejected") for unit in (17, 18))
    history.add(status(verdicts=(verdict(19, worker(0)), first)), 1.0)
    history.add(status(verdicts=(second, first)), 2.0)
    history.add(status(verdicts=tuple(verdict(unit, worker(0)) for unit in range(20, 40))), 3.0)
    assert list(history.rejections.values()) == [first, second]


def credited(tokens: int) -> tuple[NodeView, ...]:
    return (NODE.model_copy(update={"credit": tokens}),)


def test_the_rate_is_over_the_last_seconds_and_does_not_jump_with_a_lump() -> None:
    history = History()
    assert history.tokens_per_s() == 0.0
    for second in range(100):  # 100 tokens a second, credited in lumps of a thousand
        history.add(status(nodes=credited(second // 10 * 1000)), float(second))
        if second >= 30:
            assert 90 <= history.tokens_per_s() <= 150
    for second in range(100, 130):
        history.add(status(nodes=credited(9000)), float(second))
    assert history.tokens_per_s() == 0.0


def test_the_time_left_follows_the_pace_of_the_steps_and_runs_down_between_them() -> None:
    history = History()
    history.add(status(step=0), 5.0)  # no policy yet: what came before it says nothing about steps
    history.add(at_step(0), 7.0)  # nor does the first step, in which the other processes were starting
    assert history.left_s(11.0) is None
    history.add(at_step(1), 14.0)
    assert history.left_s(14.0) is None
    history.add(at_step(2), 18.0)
    assert history.left_s(18.0) == pytest.approx(7 * 4.0)
    assert history.left_s(20.0) == pytest.approx(7 * 4.0 - 2.0)
    assert history.left_s(60.0) == pytest.approx(6 * 4.0)  # this step takes longer; the others may not
    history.add(at_step(9), 90.0)
    assert history.left_s(95.0) == 0.0


def test_a_run_that_was_set_back_forgets_its_pace() -> None:
    history = History()
    history.add(at_step(5), 0.0)
    history.add(at_step(6), 4.0)
    history.add(at_step(3), 8.0)
    assert history.left_s(9.0) is None
    history.add(at_step(4), 10.0)
    assert history.left_s(10.0) is None
    history.add(at_step(5), 12.0)
    assert history.left_s(12.0) == pytest.approx(4 * 2.0)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nodes_of_one_name_are_told_apart() -> None:
    alone, one, other = worker(0), worker(1), worker(2)
    twin = NodeView(node="cd" * 16, name="worker-1", role="worker", state=NodeState.ACTIVE)
    nameless = NodeView(node="ef" * 16, name="", role="worker", state=NodeState.ACTIVE)
    assert labels([alone, one, twin, other, nameless]) == {
        alone.node: "worker-0", one.node: "worker-1 (00000000)", twin.node: "worker-1 (cdcdcdcd)",
        other.node: "worker-2", nameless.node: "worker",
    }  # fmt: skip


def test_waits_are_told_longest_first_and_not_without_end() -> None:
    waits = tuple(wait(f"w{i}", "x", i) for i in range(6))
    assert waits_line(status(waits=waits), most=2) == "w5 waits for x (5 s); w4 waits for x (4 s); and 4 more"
    assert waits_line(status(waits=waits), least_s=5) == "w5 waits for x (5 s)"
    assert waits_line(status()) == ""
    several = (wait("units 3-18 (16)", "worker-0", 2), wait("unit 19", "worker-1", 1))
    told = "units 3-18 (16) wait for worker-0 (2 s); unit 19 waits for worker-1 (1 s)"
    assert waits_line(status(waits=several)) == told


# ── what it came to ──────────────────────────────────────────────────────────────────────────────────────────────


def written(path: Path, *rows: dict[str, float]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_summary_is_read_from_the_trainers_own_numbers(tmp_path: Path) -> None:
    path = written(
        tmp_path / "metrics.jsonl",
        {"step": 0, "held_out": 0.25, "reward_mean": 0.5, "sampled_reward": 0.125, "groups": 4},
        {"step": 1, "reward_mean": 0.75, "groups": 4},
        {"step": 2, "held_out": 0.5},
    )
    path.write_text(path.read_text() + '{"torn')
    lines = summary(path, status(), 12.3)
    assert lines == [
        "2 of 9 steps in 12 s",
        "held-out score 0.250 → 0.500",
        "reward 0.125 → 0.750",
        "submissions: 5 accepted, 1 rejected; 100 verified tokens",
    ]
    assert summary(tmp_path / "none", None, 1.0) == ["0 steps in 1 s"]


def test_a_start_that_failed_does_not_claim_the_steps_before_it(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", *({"step": step, "groups": 4} for step in range(87)))
    assert steps_in(path) == 87
    assert summary(path, None, 12.0, before=87)[0] == "87 steps, 0 of them in 12 s"
    assert summary(path, status(), 12.0, before=1)[0] == "2 of 9 steps, 1 of them in 12 s"


@pytest.mark.parametrize(
    ("groups", "dropped", "unsure", "said"),
    [
        pytest.param([0, 0, 0], 12, 0, "nothing was trained on: all 36 groups had equal rewards; ", id="equal"),
        pytest.param([0], 0, 0, "nothing was trained on: no group was accepted", id="none"),
        pytest.param([0], 2, 248, "nothing was trained on: 248 submissions could not be judged; logs/val", id="unsure"),
        pytest.param([0, 1], 11, 0, "submissions: ", id="one group is not nothing"),
    ],
)
def test_training_on_nothing_is_explained(
    tmp_path: Path, groups: list[int], dropped: int, unsure: int, said: str
) -> None:
    rows = [{"step": step, "groups": count, "dropped_groups": dropped} for step, count in enumerate(groups)]
    seen = status(submissions={"accepted": 2, "unsure": unsure})
    assert summary(written(tmp_path / "metrics.jsonl", *rows), seen, 1.0)[-1].startswith(said)


DEADLINE_S = 20.0


def answer(seen: RunStatus) -> httpx.Response:
    return httpx.Response(200, text=seen.model_dump_json())


# ── the poller ───────────────────────────────────────────────────────────────────────────────────────────────────


def taken(poller: StatusPoller) -> RunStatus:
    end_s = time.monotonic() + DEADLINE_S
    while (seen := poller.take()) is None:
        assert time.monotonic() < end_s, "no answer came"
        time.sleep(0.001)
    return seen


def test_the_poller_gives_each_answer_once_and_no_answer_for_none() -> None:
    answers: queue.SimpleQueue[httpx.Response | Exception] = queue.SimpleQueue()

    asked = 0

    def answer_when_told(_request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        given = answers.get(timeout=DEADLINE_S)
        if isinstance(given, Exception):
            raise given
        return given

    http = httpx.Client(transport=httpx.MockTransport(answer_when_told))
    with StatusPoller("http://hub", http, every_s=0.001) as poller:
        answers.put(answer(at_step(1)))
        assert taken(poller).step == 1
        assert poller.take() is None
        answers.put(answer(at_step(2)))
        answers.put(httpx.ConnectError("away"))
        end_s = time.monotonic() + DEADLINE_S
        while asked < 4:
            assert time.monotonic() < end_s
        assert taken(poller).step == 2, "an answer is not lost because the next one did not come"
        answers.put(httpx.ConnectError("for a question that may be on its way"))
    assert not polling()


def polling() -> bool:
    return any(thread.name == "status" for thread in threading.enumerate())


def test_a_hub_that_never_answers_holds_up_nobody() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,  # takes connections and never answers, like a halted hub
        StatusPoller(f"http://127.0.0.1:{deaf.getsockname()[1]}", every_s=0.001) as poller,
    ):
        reporter = Reporter(poller, Memory(), Watchdog(600.0))
        began_s = time.monotonic()
        for _ in range(100):
            assert reporter.tick() is None
        assert time.monotonic() - began_s < 1.0
        assert polling()
        deaf.close()  # the hub is gone, and so are its connections
    assert not polling()


# ── the reporter ─────────────────────────────────────────────────────────────────────────────────────────────────


class Answers:
    """A source that has an answer when the test says so."""

    def __init__(self) -> None:
        self.next: RunStatus | None = None

    def take(self) -> RunStatus | None:
        given, self.next = self.next, None
        return given

    ask = take


def test_the_reporter_shows_scenes_as_often_as_the_display_wants_them() -> None:
    clock, display, source = ManualClock(), Memory(), Answers()
    reporter = Reporter(source, display, Watchdog(1000), {"worker-2": "cheats"}, clock)
    reporter.processes = lambda: [process("hub")]
    source.next = at_step(1)
    for _ in range(60):  # ten looks a second for six seconds
        assert reporter.tick() is None
        clock.advance(0.1)
    assert [scene.elapsed_s for scene in display.scenes] == [0, 1, 2, 3, 4, 5]
    last = display.scenes[-1]
    assert last.status == at_step(1)
    assert last.processes == [process("hub")]
    assert last.notes == {"worker-2": "cheats"}
    assert last.silent_s == 5.0


def test_the_watchdog_is_told_everything() -> None:
    clock, source = ManualClock(), Answers()
    reporter = Reporter(source, Memory(), Watchdog(60), clock=clock)
    reporter.processes = lambda: [process("hub"), process("relay-0", state="given up", why="ended with exit code 1")]
    source.next = status(waits=(wait("trainer", "a batch", 5),))
    for _ in range(60):
        assert reporter.tick() is None
        clock.advance(1)
    ending = reporter.tick()
    assert "relay-0 was given up" in ending.message
    assert "hub (pid 4711) has not answered for 60 s" in ending.message


def test_who_was_suspended_blames_nobody() -> None:
    """Ctrl-Z and fg, or a laptop that slept: the others may have gone on all the while."""
    clock, source = ManualClock(), Answers()
    reporter = Reporter(source, Memory(), Watchdog(60), clock=clock)
    source.next = status()
    assert reporter.tick() is None
    clock.advance(3600)
    assert reporter.tick() is None
    assert reporter.elapsed_s - reporter.history.answered_s == 0
    endings = []
    for _ in range(61):
        clock.advance(1)
        endings.append(reporter.tick())
    assert endings[-1] is not None, "patience begins again, it does not end"
    assert endings[:58] == [None] * 58
