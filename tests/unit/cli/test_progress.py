"""How a run goes, in words: history, remarks, the watchdog, and the reasons when nothing happens."""

import json
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kit import eventually
from kit.asgi import InProcess
from kit.cli import NODE, RecordingDisplay, at_step, process, report, status, verdict, wait, worker
from shoal.client import ClientOptions, HubClient
from shoal.protocol import LedgerHead, NodeState, NodeView, OwnerOrders, Role, RunStatus, SigningKey
from shoal.run import progress as progress
from shoal.run.launch import steps_in, summary
from shoal.runtime import ManualClock, StopToken
from shoal.runtime.supervise import Ending


def test_history_keeps_rewards_and_rejections_and_forgets_the_pace_of_a_run_set_back() -> None:
    history = progress.History()
    history.add(status(reports=(report(0, reward_mean=0.1, held_out=0.3), report(1, reward_mean=0.2))), 1.0)
    sampled = report(2, reward_mean=0.4, sampled_reward=0.3, held_out=0.5)  # the reward of all that was sampled counts
    history.add(status(reports=(report(1, reward_mean=0.25), sampled)), 2.0)
    assert history.rewards == {0: 0.1, 1: 0.25, 2: 0.3}
    assert history.held_out == {0: 0.3, 2: 0.5}
    history, cheater = progress.History(), worker(2)
    first, second = (verdict(unit, cheater, "rejected") for unit in (17, 18))
    history.add(status(verdicts=(verdict(19, worker(0)), first)), 1.0)
    history.add(status(verdicts=(second, first)), 2.0)
    history.add(status(verdicts=tuple(verdict(unit, worker(0)) for unit in range(20, 40))), 3.0)
    assert list(history.rejections.values()) == [first, second]
    history = progress.History()
    for step, at_s, left_s in ((5, 0.0, None), (6, 4.0, None), (3, 8.0, None), (4, 10.0, None), (5, 12.0, 4 * 2.0)):
        history.add(at_step(step), at_s)
        assert history.left_s(at_s) == (left_s and pytest.approx(left_s))


def credited(tokens: int) -> tuple[NodeView, ...]:
    return (NODE.model_copy(update={"credit": tokens}),)


def test_the_rate_is_over_the_last_seconds_and_does_not_jump_with_a_lump() -> None:
    history = progress.History()
    assert history.tokens_per_s() == 0.0
    for second in range(100):  # 100 tokens a second, credited in lumps of a thousand
        history.add(status(nodes=credited(second // 10 * 1000)), float(second))
        if second >= 30:
            assert 90 <= history.tokens_per_s() <= 150
    for second in range(100, 130):
        history.add(status(nodes=credited(9000)), float(second))
    assert history.tokens_per_s() == 0.0


def test_the_time_left_follows_the_pace_of_the_steps_and_runs_down_between_them() -> None:
    history = progress.History()
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


def test_nodes_of_one_name_are_told_apart() -> None:
    alone, one, other = (worker(index) for index in range(3))
    twin = NodeView(node="cd" * 16, name="worker-1", role="worker", state=NodeState.ACTIVE)
    nameless = NodeView(node="ef" * 16, name="", role="worker", state=NodeState.ACTIVE)
    assert progress.labels([alone, one, twin, other, nameless]) == {
        alone.node: "worker-0", one.node: "worker-1 (00000000)", twin.node: "worker-1 (cdcdcdcd)",
        other.node: "worker-2", nameless.node: "worker",
    }  # fmt: skip


def test_waits_are_told_longest_first_and_not_without_end() -> None:
    waits = tuple(wait(f"w{i}", "x", i) for i in range(6))
    assert progress.waits_line(status(waits=waits), most=2) == "w5 waits for x (5 s); w4 waits for x (4 s); and 4 more"
    assert progress.waits_line(status(waits=waits), least_s=5) == "w5 waits for x (5 s)"
    assert progress.waits_line(status()) == ""
    several = (wait("units 3-18 (16)", "worker-0", 2), wait("unit 19", "worker-1", 1))
    told = "units 3-18 (16) wait for worker-0 (2 s); unit 19 waits for worker-1 (1 s)"
    assert progress.waits_line(status(waits=several)) == told


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
        "2 of 9 steps in 12 s", "held-out score 0.250 → 0.500", "reward 0.125 → 0.750",
        "submissions: 5 accepted, 1 rejected; 100 verified tokens",
    ]  # fmt: skip
    assert summary(tmp_path / "none", None, 1.0) == ["0 steps in 1 s"]


def test_a_start_that_failed_does_not_claim_the_steps_before_it(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", *({"step": step, "groups": 4} for step in range(87)))
    assert steps_in(path) == 87
    assert summary(path, None, 12.0, before=87)[0] == "87 steps, 0 of them in 12 s"
    assert summary(path, status(), 12.0, before=1)[0] == "2 of 9 steps, 1 of them in 12 s"


@pytest.mark.parametrize(("groups", "dropped", "unsure", "said"), [
    pytest.param([0, 0, 0], 12, 0, "nothing was trained on: all 36 groups had equal rewards; ", id="equal"),
    pytest.param([0], 0, 0, "nothing was trained on: no group was accepted", id="none"),
    pytest.param([0], 2, 248, "nothing was trained on: 248 submissions could not be judged; logs/val", id="unsure"),
    pytest.param([0, 1], 11, 0, "submissions: ", id="one group is not nothing"),
])  # fmt: skip
def test_training_on_nothing_is_explained(tmp_path, groups, dropped, unsure, said):
    rows = [{"step": step, "groups": count, "dropped_groups": dropped} for step, count in enumerate(groups)]
    seen = status(submissions={"accepted": 2, "unsure": unsure})
    assert summary(written(tmp_path / "metrics.jsonl", *rows), seen, 1.0)[-1].startswith(said)


DEADLINE_S = 20.0


def answer(seen: RunStatus) -> httpx2.Response:
    return httpx2.Response(200, text=seen.model_dump_json())


def taken(poller: progress.StatusPoller) -> RunStatus:
    seen: list[RunStatus | None] = []
    eventually(lambda: seen.append(poller.take()) or seen[-1], DEADLINE_S, "no answer came")
    return seen[-1]


def test_the_poller_gives_each_answer_once_and_no_answer_for_none() -> None:
    answers: queue.SimpleQueue[httpx2.Response | Exception] = queue.SimpleQueue()
    asked = 0

    def answer_when_told(_request: httpx2.Request) -> httpx2.Response:
        nonlocal asked
        asked += 1
        given = answers.get(timeout=DEADLINE_S)
        if isinstance(given, Exception):
            raise given
        return given

    http, impatient = InProcess(answer_when_told), ClientOptions.of_a_person(0.0)
    client = HubClient("http://hub", SigningKey.generate(), StopToken(), http=http, options=impatient)
    with progress.StatusPoller(client, every_s=0.001) as poller:
        answers.put(answer(at_step(1)))
        assert taken(poller).step == 1
        assert poller.take() is None
        answers.put(answer(at_step(2)))
        answers.put(httpx2.ConnectError("away"))
        eventually(lambda: asked >= 4, DEADLINE_S)
        assert taken(poller).step == 2, "an answer is not lost because the next one did not come"
        answers.put(httpx2.ConnectError("for a question that may be on its way"))
    assert not polling()


def polling() -> bool:
    return any(thread.name == "status" for thread in threading.enumerate())


def test_a_hub_that_never_answers_holds_up_nobody() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,  # takes connections and never answers, like a halted hub
        progress.StatusPoller(
            HubClient.of_a_person(f"http://127.0.0.1:{deaf.getsockname()[1]}", 0.0, None), 0.001
        ) as poller,
    ):
        reporter = progress.Reporter(poller, RecordingDisplay(), progress.Watchdog(600.0))
        began_s = time.monotonic()
        for _ in range(100):
            assert reporter.tick() is None
        assert time.monotonic() - began_s < 20.0
        assert polling()
        deaf.close()  # the hub is gone, and so are its connections
    assert not polling()


class Answers:
    """A source that has an answer when the test says so."""

    def __init__(self) -> None:
        self.next: RunStatus | None = None

    def take(self) -> RunStatus | None:
        given, self.next = self.next, None
        return given

    ask = take


def test_the_reporter_shows_scenes_as_often_as_the_display_wants_them() -> None:
    clock, display, source = ManualClock(), RecordingDisplay(), Answers()
    reporter = progress.Reporter(source, display, progress.Watchdog(1000), {"worker-2": "cheats"}, clock)
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
    reporter = progress.Reporter(source, RecordingDisplay(), progress.Watchdog(60), clock=clock)
    reporter.processes = lambda: [process("hub"), process("relay-0", state="given up", why="ended with exit code 1")]
    source.next = status(waits=(wait("trainer", "a batch", 5),))
    for _ in range(60):
        assert reporter.tick() is None
        clock.advance(1)
    ending = reporter.tick()
    assert "relay-0 was given up" in ending.message
    assert "hub (pid 4711) has not answered for 60 s" in ending.message


def test_suspended_process_blames_no_other() -> None:
    """Ctrl-Z and fg, or a laptop that slept: the others may have gone on all the while."""
    clock, source = ManualClock(), Answers()
    reporter = progress.Reporter(source, RecordingDisplay(), progress.Watchdog(60), clock=clock)
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


HUB = process("hub", pid=None)


def test_the_watchdog_ends_a_run_that_stands_still_and_names_who_waits() -> None:
    dog = progress.Watchdog(patience_s=60)
    banned = "nobody is left to work: worker-0 was banned for proofs.drift; start another with `shoal join`"
    stuck = status(waits=(wait("trainer", "3 more groups", 55),), alarms=("the cap is reached",), standstill=(banned,))
    assert dog.look(stuck, 0.0) is None
    assert dog.look(stuck, 59.0) is None
    ending = dog.look(stuck, 60.0)
    assert ending.exit_code == 1
    assert ending.message == (
        f"no progress for 60 s: {banned}; the cap is reached; trainer waits for 3 more groups (55 s)"
    )


@pytest.mark.parametrize(
    "change",
    [{"step": 3}, {"submissions": {"accepted": 6, "rejected": 1}}, {"reports": (report(0),)},
     {"ledger": LedgerHead(run="demo-1", index=5, hash="ab" * 32)}, {"policy": at_step(2).policy}],
)  # fmt: skip
def test_anything_new_calms_the_watchdog(change: dict[str, Any]) -> None:
    dog = progress.Watchdog(patience_s=60)
    assert dog.look(status(), 0.0) is None
    assert [bool(dog.look(status(**change), now_s)) for now_s in (59.0, 118.0, 119.0)] == [False, False, True]


def test_passes_of_a_long_training_step_calm_the_watchdog_and_repeated_ones_do_not() -> None:
    dog = progress.Watchdog(patience_s=60)

    def look(doing: str, now_s: float, role: Role = "trainer") -> bool:
        trainer = NodeView(node="ee" * 16, name="t", role=role, state=NodeState.ACTIVE, doing=doing)
        return bool(dog.look(status(nodes=(trainer,)), now_s))

    assert not look("training step 2, pass 1", 0.0)
    assert [look(f"training step 2, pass {number}", 59.0 * number) for number in (2, 3)] == [False, False]
    # killed, resumed, and killed again: the same passes are no progress, nor is what a worker says
    assert [look("training step 2, pass 1", 178.0), look("training step 2, pass 2", 236.0)] == [False, False]
    assert look("any", 237.0, "worker")


def test_before_the_first_policy_patience_counts_too() -> None:
    dog = progress.Watchdog(patience_s=60)
    assert dog.look(None, 0.0) is None
    assert [bool(dog.look(status(step=0), now_s)) for now_s in (30.0, 89.0, 90.0)] == [False, False, True]
    hub = progress.Watchdog(patience_s=60)
    assert hub.look(None, 0.0) is None
    assert hub.look(None, 61.0, silent_s=61.0) == Ending(
        1, "no progress for 61 s: the hub does not answer (see logs/hub.log)"
    )


WAITS = (wait("trainer", "a batch", 55),)
DEAD = process("validator-0", state="restarting", restarts=2, why="was killed by SIGKILL", since_s=12.0)


@pytest.mark.parametrize(("seen", "processes", "silent_s", "words"), [
    (status(waits=WAITS), [process("hub", pid=12)], 63.0,  # what it said last is held against nobody
     "hub (pid 12) has not answered for 63 s: is it stuck? (see logs/hub.log)"),
    (status(waits=WAITS), [HUB, DEAD], 0.0, "trainer waits for a batch (55 s); validator-0 was killed by SIGKILL, "
     "12 s ago, and is being restarted (#3)"),
    (status(), [HUB], 0.0, "and nobody says that they wait for anything"),
    (status(outbox=7, outbox_since_ms=40_000), [], 0.0,
     "7 ledger entries wait to be appended, for 60 s: no hub leads (see logs/hub.log)"),
    (status(outbox=7, outbox_since_ms=99_000), [], 0.0, "and nobody says that they wait for anything"),
])  # fmt: skip
def test_symptom_and_cause_are_both_named(seen, processes, silent_s, words):
    assert progress.standstill_reasons(seen, processes, silent_s) == words


@pytest.mark.parametrize(("changes", "words"), [
    ({"state": "restarting", "why": "was killed by SIGKILL", "since_s": 12.4},
     "w was killed by SIGKILL, 12 s ago, and is being restarted (#1)"),
    ({"state": "restarting", "why": "ended with exit code 1: no luck", "since_s": 3, "restarts": 11},
     "w ended with exit code 1, 3 s ago, and is being restarted (#12): no luck"),
    ({"state": "given up", "why": "ended with exit code 1: no luck"},
     "w was given up after it ended with exit code 1: no luck"),
    ({"state": "resting", "why": "was shut out by the hub: this node is banned"},
     "w was shut out by the hub and is not started again: this node is banned"),
    ({"state": "given up", "why": "ended with exit code 1: \x1b[2J"},
     "w was given up after it ended with exit code 1: �[2J"),
    ({"state": "resting", "why": "is done"}, ""),
    ({"state": "running", "restarts": 2, "why": "was killed by SIGKILL", "since_s": 5},
     "w was restarted 2 times, 5 s ago after it was killed by SIGKILL"),
    ({"state": "running", "restarts": 2, "why": "was killed by SIGKILL", "since_s": 300}, ""),
    ({"state": "running", "restarts": 1, "why": "was killed by SIGKILL", "since_s": 5}, ""),
    ({}, ""),
])  # fmt: skip
def test_supervisor_states_appear_as_reasons(changes: dict[str, Any], words: str) -> None:
    assert progress.process_problems(None, [HUB, process("w", **changes)], 0.0).get("w", "") == words


def node(name: str, seen_s_ago: float, role: Any = "validator") -> NodeView:
    changes = {"name": name, "role": role, "last_seen_ms": int(100_000 - seen_s_ago * 1000)}
    return worker(0).model_copy(update=changes)


QUIET = "validator-0 (pid 4711) has said nothing for 63 s: is it stuck?"
ABSENT = "trainer (pid 4711) has not reached the hub in the 91 s since it started"
HEARD_63 = node("validator-0", 63)


@pytest.mark.parametrize(("of", "since_s", "seen", "words"), [
    ("validator-0", 300.0, status(nodes=(HEARD_63,)), QUIET),
    ("validator-0", 300.0, status(nodes=(HEARD_63, node("validator-0", 5))), ""),
    ("validator-0", 300.0, status(nodes=(HEARD_63,), finished=True), ""),
    ("validator-0", 300.0, status(nodes=(node("validator-0", 5, "worker"), HEARD_63)), QUIET),
    ("validator-0", 89.0, status(nodes=(HEARD_63,)), ""),  # it has just started
    ("validator-0", 91.0, status(nodes=(HEARD_63,)), QUIET),
    ("trainer", 91.0, status(nodes=()), ABSENT),
    ("trainer", 89.0, status(nodes=()), ""),
    ("origin", 91.0, status(nodes=()), ""),
])  # fmt: skip
def test_a_process_of_which_the_hub_has_not_heard_for_long(of, since_s, seen, words):
    assert progress.process_problems(seen, [HUB, process(of, since_s=since_s)], 0.0).get(of, "") == words
    assert progress.process_problems(seen, [process("hub", since_s=5.0), process(of)], 0.0) == {}, (
        "the hub itself has just started"
    )


@pytest.mark.parametrize(
    ("since_s", "silent_s", "said"),
    [(300, 9, None), (300, 11, "11 s"), (29, 29, None), (31, 31, "31 s"), (20, 90, None), (40, 90, "40 s")],
)
def test_a_hub_that_does_not_answer(since_s: float, silent_s: float, said: str | None) -> None:
    """One that has answered in this life is silent sooner than one that has just been started."""
    found = progress.process_problems(status(), [process("hub", since_s=since_s)], silent_s).get("hub")
    expected = said and f"hub (pid 4711) has not answered for {said}: is it stuck? (see logs/hub.log)"
    assert found == expected


def test_a_paused_or_drained_run_is_left_alone_for_as_long_as_it_takes() -> None:
    watchdog = progress.Watchdog(patience_s=10.0)
    paused = status(standing=OwnerOrders(conduct="paused", since_ms=40_000, reason="power cut"))
    drained = status(standing=OwnerOrders(conduct="draining", drained=True))
    for now_s, seen in ((0.0, paused), (1000.0, paused), (2000.0, drained), (3000.0, drained)):
        assert watchdog.look(seen, now_s) is None
    draining = status(standing=OwnerOrders(conduct="draining", since_ms=40_000, reason="moving"))
    assert watchdog.look(draining, 3001.0) is None
    ending = watchdog.look(draining, 3011.0)
    assert "draining by its owner, 60 s ago: moving; to continue: shoal admin resume" in ending.message
