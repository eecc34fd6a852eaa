"""Asking the hub and passing on what it says: mock answers, a manual clock, and one hub that never answers."""

from __future__ import annotations

import queue
import socket
import threading
import time

import httpx
import pytest

from kit.cli import status, wait
from kit.scene import Memory, at_step, process
from shoal.protocol import RunStatus
from shoal.run.reporter import Reporter, StatusPoller, fetch_status
from shoal.run.watchdog import Watchdog
from shoal.runtime.clock import ManualClock

DEADLINE_S = 20.0


def transport(answers: list[httpx.Response | Exception]) -> httpx.Client:
    """Gives the answers in turn, the last one again and again."""

    def answer(_request: httpx.Request) -> httpx.Response:
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(given, Exception):
            raise given
        return given

    return httpx.Client(transport=httpx.MockTransport(answer))


def answer(seen: RunStatus) -> httpx.Response:
    return httpx.Response(200, text=seen.model_dump_json())


def test_whatever_is_not_a_status_is_none() -> None:
    answers = [httpx.ConnectError("no"), httpx.Response(500), httpx.Response(200, text="<html>"), answer(status())]
    http = transport(list(answers))
    assert [fetch_status("http://hub", http) for _ in answers] == [None, None, None, status()]


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


def test_the_poller_can_be_asked_directly() -> None:
    poller = StatusPoller("http://hub", transport([httpx.ConnectError("away"), answer(at_step(3))]))
    assert [poller.ask(), poller.ask()] == [None, at_step(3)]


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


def test_the_last_look_asks_again_and_is_shown() -> None:
    clock, display, source = ManualClock(), Memory(), Answers()
    reporter = Reporter(source, display, Watchdog(1000), clock=clock)
    reporter.tick()
    source.next = at_step(9, finished=True)
    clock.advance(0.1)
    reporter.last_look()
    assert reporter.status == at_step(9, finished=True)
    assert display.scenes[-1].status == reporter.status
    assert reporter.history.answered_s == pytest.approx(0.1, abs=1e-3)


def test_the_watchdog_is_told_everything() -> None:
    clock, source = ManualClock(), Answers()
    reporter = Reporter(source, Memory(), Watchdog(60), clock=clock)
    reporter.processes = lambda: [process("hub"), process("relay-0", state="given up", why="ended with exit code 1")]
    source.next = status(waits=(wait("trainer", "a batch", 5),))
    for _ in range(60):
        assert reporter.tick() is None
        clock.advance(1)
    ending = reporter.tick()
    assert ending is not None
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
