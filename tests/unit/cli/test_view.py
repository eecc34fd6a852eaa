"""What a person sees: lines, frames of every size, and the live display in a real terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from kit.cli import at_step, process, report, scene, status, verdict, wait, worker
from shoal.cli.view import LiveDisplay, PlainDisplay, choose_display, frame, live_rows
from shoal.protocol import NodeState, NodeView, OwnerOrders
from shoal.run.progress import History, RunView

BANNED = worker(2, state=NodeState.BANNED, reason="sampling.seed: token 3 has another seed", rejected=7)
REPORTS = (report(0, reward_mean=0.1, held_out=0.4), report(1, reward_mean=0.5, staleness_mean=0.25))


def lines(*scenes: RunView) -> list[list[str]]:
    """What a plain display says to one scene after another."""
    said: list[str] = []
    display = PlainDisplay(said.append)
    heard = []
    for moment in scenes:
        display.show(moment)
        heard.append(list(said))
        said.clear()
    return heard


def test_line_says_where_the_run_stands_its_rate_and_time_left() -> None:
    assert lines(scene(status(reports=REPORTS))) == [
        ["  1:05  step 2/9  reward 0.50  held out 0.40  staleness 0.25  groups 5 accepted, 1 rejected  0 tokens/s"]
    ]
    history = History()
    for step in range(3):
        history.add(at_step(step, nodes=(worker(0, credit=1000 * step),)), 4.0 * step)
    ((line,),) = lines(RunView(at_step(2), (), history, 9.0))
    assert line.endswith("250 tokens/s  0:27 left")
    ((line,),) = lines(RunView(at_step(2, finished=True), (), history, 9.0))
    assert line.endswith("250 tokens/s")


def test_line_is_repeated_only_after_a_long_silence_and_not_while_the_hub_is_silent() -> None:
    moments = [scene(status(), elapsed_s=elapsed_s) for elapsed_s in (10.0, 13.0, 19.0, 20.0, 23.0)]
    assert [len(heard) for heard in lines(*moments)] == [1, 0, 0, 1, 0]
    changed = lines(moments[0], scene(status(step=3), elapsed_s=13.0))
    assert [len(heard) for heard in changed] == [1, 1]
    history = History()
    history.add(status(waits=(wait("trainer", "a batch", 30),)), 5.0)
    moments = [RunView(status(), (), history, elapsed_s) for elapsed_s in (5.0, 14.0, 16.0, 22.0, 26.0)]
    first, *silent = lines(*moments)
    assert len(first) == 1
    assert silent == [
        [], ["  0:16  the hub does not answer, for 11 s now"], [], ["  0:26  the hub does not answer, for 21 s now"]
    ]  # fmt: skip


def test_rejections_bans_and_alarms_are_said_once_and_many_are_counted() -> None:
    nodes = (worker(0), BANNED)
    rejected = verdict(17, BANNED, "rejected")
    seen = status(nodes=nodes, verdicts=(rejected,), alarms=("the disk is full", "the disk is nearly full"))
    first, second = lines(scene(seen), scene(seen, elapsed_s=66.0))
    assert [*first[:3], *first[4:]] == [
        "worker-2 was banned: sampling.seed: token 3 has another seed", "alarm: the disk is full",
        "alarm: the disk is nearly full", "worker-2, unit 17: rejected, sampling.seed: token 3 has another seed",
    ]  # fmt: skip
    assert second == []
    refused = tuple(verdict(unit, BANNED, "rejected") for unit in range(12))
    (said,) = lines(scene(status(nodes=(worker(2),), verdicts=refused)))
    assert [line for line in said if "unit" in line][-1].startswith("worker-2, unit 4: rejected")
    assert said[-1] == "and 7 more rejections"


def test_a_process_that_died_and_came_back_is_told_twice() -> None:
    dead = process("trainer", state="restarting", why="was killed by SIGKILL", since_s=1.0, pid=None)
    back = process("trainer", restarts=1, why="was killed by SIGKILL", since_s=1.0, pid=77)
    heard = lines(*(scene(None, view) for view in (process("trainer"), dead, dead, back, back)))
    assert heard == [
        [], ["trainer was killed by SIGKILL, 1 s ago, and is being restarted (#1)"], [],
        ["trainer was killed by SIGKILL; it was started again (pid 77)"], [],
    ]  # fmt: skip
    between_two_looks = lines(scene(None, process("trainer")), scene(None, back), scene(None, back))
    assert between_two_looks == [[], ["trainer was killed by SIGKILL; it was started again (pid 77)"], []]
    again = process("trainer", restarts=2, why="was killed by SIGKILL", since_s=1.0, pid=None)
    assert lines(scene(None, again)) == [["trainer was restarted 2 times, 1 s ago after it was killed by SIGKILL"]]


def test_control_characters_stay_out_of_lines() -> None:
    said: list[str] = []
    evil = worker(2, name="\x1b[2J", state=NodeState.BANNED, reason="\x07\nx")
    display = PlainDisplay(said.append)
    display.show(scene(status(nodes=(evil,), verdicts=(verdict(1, evil, "rejected", message="\r\x1b"),))))
    display.say("hello\x1b[31m")
    assert len(said) == 4
    assert all(line.isprintable() for line in said)


def drawn(moment: RunView, width: int = 80, colours: bool = False) -> str:
    system: Any = "standard" if colours else None
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=24, color_system=system)
    console.print(frame(moment, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def busy(workers: int = 3) -> RunView:
    """A run in which everything happens at once."""
    nodes = [worker(index, accepted=200 - index, credit=1000 - index) for index in range(workers)]
    nodes[2:3] = [BANNED]
    trusted = NodeView(node="ee" * 16, name="trainer", role="trainer", state=NodeState.ACTIVE, doing="training step 7")
    accepted = [verdict(300 + index, nodes[0], at_ms=500 + index) for index in range(20)]
    refused = [verdict(17 + index, BANNED, "rejected") for index in range(4)]
    seen = at_step(
        7, steps=30, nodes=(*nodes, trusted.model_copy(update={"last_seen_ms": 99_000})),
        verdicts=(*accepted, *refused), waits=(wait("trainer", "a batch", 14),),
        alarms=("3 groups were all there was",),
        reports=tuple(report(step, reward_mean=step / 60, held_out=0.31 + step / 100) for step in range(50)),
    )  # fmt: skip
    dead = process("validator-0", state="restarting", why="was killed by SIGKILL", since_s=2.0, restarts=2, pid=None)
    return scene(seen, process("hub", pid=None), process("trainer", pid=None), dead, worker_2="cheats: keeps the best")


def test_a_frame_shows_everything_on_an_ordinary_terminal() -> None:
    shown = drawn(busy())
    for words in (
        "shoal demo-1", "1:05", "step 7/30", "reward      0.82", "0.31 → 0.80  +49 points", "staleness", "tokens/s",
        "5 accepted, 1 rejected", "worker-0", "worker-1", "banned sampling.seed: token 3 has another",
        "worker-2 cheats: keeps the best", "hub · trainer: training step 7 · validator-0: restarting",
        "validator-0 was killed by SIGKILL, 2 s ago, and is being restarted", "(#3)", "3 groups were all there was",
        "trainer waits for a batch (14 s)", "worker-2, unit 20: rejected, sampling.seed: token 3 has another seed",
    ):  # fmt: skip
        assert words in shown, words


@pytest.mark.parametrize("width", [10, 40, 80, 200])
@pytest.mark.parametrize("workers", [3, 50])
def test_every_row_of_a_frame_is_one_line(width: int, workers: int) -> None:
    assert all(len(row) <= width for row in drawn(busy(workers), width).split("\n"))


def test_workers_in_trouble_are_shown_with_the_state_of_their_process_and_others_counted() -> None:
    shown = drawn(busy(50))
    table = shown.split("doing")[1].split("\n")
    assert table[1].startswith("worker-2 ")
    assert table[2].startswith("worker-0 ")
    assert "and 42 more" in shown
    seen = status(nodes=(worker(0), worker(1), BANNED))
    dead = {"state": "restarting", "why": "was killed by SIGKILL", "pid": None}
    shown = drawn(scene(seen, process("worker-0", **dead), process("worker-2", **dead), process("worker-3", pid=None)))
    rows = {row.split()[0]: row for row in shown.split("\n") if row.startswith("worker-")}
    assert "restarting was killed by SIGKILL" in rows["worker-0"]
    assert "active" in rows["worker-1"]
    assert "banned" in rows["worker-2"]
    assert "starting" in rows["worker-3"]


DONE = {"state": "resting", "why": "is done", "pid": None}
FINISHED = scene(at_step(9, nodes=(worker(0),), finished=True), process("worker-0", **DONE), process("trainer", **DONE))
UNHEARD = scene(None, process("hub", pid=None, since_s=2.0), process("worker-0", pid=None), elapsed_s=2.0)


@pytest.mark.parametrize(("moment", "shown", "absent"), [
    (FINISHED, ("1:05, finished", "trainer: done"), "trouble"),
    (UNHEARD, ("the hub does not answer yet", "worker-0"), "trouble"),
    (scene(status(step=0)), ("the trainer is loading the first policy",), "trouble"),
    (busy(), (), "the trainer is loading"),
    (scene(status(alarms=tuple(f"alarm {n}" for n in range(9, 0, -1)))), ("alarm 9", "alarm 6"), "alarm 5"),
], ids=["finished", "unheard", "starting", "busy", "many-alarms"])  # fmt: skip
def test_frame_shows_and_hides(moment: RunView, shown: tuple[str, ...], absent: str) -> None:
    found = drawn(moment)
    assert [words for words in shown if words not in found] == []
    assert absent not in found


def test_a_worker_that_does_nothing_says_what_it_waits_for() -> None:
    idle = worker(0, doing="")
    stranger = worker(1, name="alice", doing="")
    waits = (
        wait(f"worker-0 ({idle.node[:8]})", "a unit: all are leased", 1),
        wait(f"worker alice ({stranger.node[:8]})", "policy 0.7", 1),
        wait("worker-0 (ffffffff)", "something else", 1),
    )
    shown = drawn(scene(at_step(1, nodes=(idle, stranger), waits=waits)))
    rows = {row.split()[0]: row for row in shown.split("\n") if row}
    assert rows["worker-0"].rstrip().endswith("waits for a unit: all are leased")
    assert "waits for policy 0.7" in rows["alice"]


def test_foreign_text_is_neither_markup_nor_control_code() -> None:
    evil = worker(0, name="[/bold]", doing="[red]x\x1b[2J")
    waits = (wait("[/zz]", "[bold]y", 30),)
    seen = status(
        nodes=(evil,), waits=waits, alarms=("[/a]\x07",), verdicts=(verdict(1, evil, "rejected", message="[b"),)
    )
    shown = drawn(scene(seen))
    for words in ("[/bold]", "[red]x�[2J", "[/zz] waits for [bold]y", "[/a]�", "sampling.seed: [b"):
        assert words in shown, words
    assert "\x1b" not in shown


def test_a_status_alone_is_drawn_with_all_nodes_and_what_concerns_their_owners() -> None:
    new = worker(0, name="new", on_probation=True, credit=5, pending=7)
    gone, away = worker(1, name="gone", state=NodeState.BANNED, on_probation=True), worker(2, liveness="silent")
    judge = NodeView(node="ee" * 16, name="judge", role="validator", state=NodeState.ACTIVE, doing="auditing unit 7")
    ref = {"incarnation": 0, "version": 4, "digest": "a" * 64}
    seen = at_step(
        2, nodes=(new, gone, away, judge), node_counts={"worker.active": 998, "worker.banned": 2}, unscored=3,
        submissions={"unsure": 4}, standing=OwnerOrders(conduct="paused", since_ms=99_000, reason="[/power] cut"),
        pools={"easy": 3, "retired": 2}, evaluations=({"policy": ref, "tasks": 128, "scored": 32},),
    )  # fmt: skip
    rows = {row.split()[0]: row for row in drawn(scene(seen), width=120).split("\n") if row.strip()}
    for name, words in {
        "shoal": "policy 0.2", "new": "5 + 7 pending probation", "gone": "banned", "worker-2": "silent",
        "and": "and 997 more", "processes": "judge: auditing unit 7", "staleness": "4 unsure (3 could not be scored)",
        "tasks": "3 easy, 2 retired, measuring version 4: 32 of 128 held-out tasks",
        "owner": "paused by its owner, 1 s ago: [/power] cut; to continue: shoal admin resume",
    }.items():  # fmt: skip
        assert words in " ".join(rows[name].split()), name
    assert "1:05" not in rows["shoal"]


@pytest.mark.parametrize(
    ("terminal", "changes", "live"),
    [(True, {}, True), (True, {"TERM": "dumb"}, False), (False, {}, False), (False, {"FORCE_COLOR": "1"}, False),
     (True, {"encoding": "ascii"}, False)],
)  # fmt: skip
def test_live_only_on_a_capable_terminal(monkeypatch, terminal, changes, live):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=changes.pop("encoding", "utf-8"))
    monkeypatch.setattr(file, "isatty", lambda: terminal, raising=False)
    for name, value in {"TERM": "xterm-256color", **changes}.items():
        monkeypatch.setenv(name, value)
    display = choose_display(Console(file=file))
    assert isinstance(display, LiveDisplay if live else PlainDisplay)
    assert display.live is live
    if not live:
        display.say("a line " + "longer than eighty columns, " * 5)
        file.flush()
        assert raw.getvalue().count(b"\n") == 1
    with live_rows(Console(file=file)) as show:
        assert (show is not None) is live
        if show is not None:
            show([("worker", "generating"), ("so far", "12 tokens")])
            show([("worker", "paused until\x1b[2J 22:00"), ("so far", "12 tokens")])
    file.flush()
    assert (b"paused until\xef\xbf\xbd[2J 22:00" in raw.getvalue()) is live


def in_trouble(*seconds: float) -> list[RunView]:
    """A hub that answered last after 100 s."""
    answered = History()
    answered.add(status(), 100.0)
    return [RunView(None, [process("hub", since_s=300.0)], answered, elapsed_s) for elapsed_s in seconds]


BANNED_ALL = "nobody is left to work: worker-0 was banned for proofs.drift; start another with `shoal join`"
LATER = BANNED_ALL.replace("proofs.drift", "proofs.drift, 9 s ago")
PAUSED = OwnerOrders(conduct="paused", since_ms=98_000, reason="power cut")
DRAINED = OwnerOrders(conduct="draining", drained=True)


@pytest.mark.parametrize(("moments", "of", "said"), [
    ([scene(status(standstill=each)) for each in ((BANNED_ALL,), (LATER,), (), (BANNED_ALL,))], "standstill",
     [f"standstill: {BANNED_ALL}", "", "", f"standstill: {BANNED_ALL}"]),
    (in_trouble(120.0, 120.0, 101.0, 120.0), "hub",
     ["hub (pid 4711) has not answered for 20 s", "", "", "hub (pid 4711) has not answered for 20 s"]),
    ([scene(status(), process("worker-0", state=state, why="ended with exit code 1", pid=None), elapsed_s=9.0 + at)
      for at, state in enumerate(("restarting", "restarting", "given up", "given up"))], "worker-0",
     ["worker-0 ended with exit code 1", "", "worker-0 was given up after it ended with exit code 1", ""]),
    ([scene(at_step(2, standing=each)) for each in (OwnerOrders(), PAUSED, PAUSED, DRAINED)], "owner",
     ["", "owner: paused by its owner, 2 s ago: power cut; to continue: shoal admin resume", "",
      "owner: drained by its owner, 100 s ago; to continue: shoal admin resume"]),
], ids=["nobody-left", "in-trouble-again", "given-up-after-restarts", "ordered"])  # fmt: skip
def test_a_fact_is_said_once_and_again_when_it_is_so_again(moments: list[RunView], of: str, said: list[str]) -> None:
    found = ["".join(line for line in heard if of in line) for heard in lines(*moments)]
    assert [line.startswith(words) for line, words in zip(found, said, strict=True)] == [True] * len(said), found
    assert [bool(line) for line in found] == [bool(words) for words in said]
