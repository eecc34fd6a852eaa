"""Who is to blame when nothing happens: every sentence, from made-up statuses and processes."""

from __future__ import annotations

from typing import Any

import pytest

from kit.cli import report, status, wait
from kit.scene import at_step, process, worker
from shoal.protocol import LedgerHead, NodeView, OwnerOrders, RunStatus
from shoal.run.progress import Watchdog, blame, troubles
from shoal.runtime.supervise import Ending, ProcessView

HUB = process("hub", pid=None)


def sentence(of: ProcessView, seen: RunStatus | None = None, silent_s: float = 0.0) -> str:
    return troubles(seen, [HUB, of], silent_s).get(of.name, "")


# ── the end of a run without progress ────────────────────────────────────────────────────────────────────────────


def test_the_watchdog_ends_a_run_that_stands_still_and_names_who_waits() -> None:
    dog = Watchdog(patience_s=60)
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
    dog = Watchdog(patience_s=60)
    assert dog.look(status(), 0.0) is None
    assert dog.look(status(**change), 59.0) is None
    assert dog.look(status(**change), 118.0) is None
    assert dog.look(status(**change), 119.0) is not None


def test_before_the_first_policy_patience_counts_too() -> None:
    dog = Watchdog(patience_s=60)
    assert dog.look(None, 0.0) is None
    assert dog.look(status(step=0), 30.0) is None
    assert dog.look(status(step=0), 89.0) is None
    assert dog.look(status(step=0), 90.0) is not None
    hub = Watchdog(patience_s=60)
    assert hub.look(None, 0.0) is None
    assert hub.look(None, 61.0, silent_s=61.0) == Ending(
        1, "no progress for 61 s: the hub does not answer (see logs/hub.log)"
    )


WAITS = (wait("trainer", "a batch", 55),)
DEAD = process("validator-0", state="restarting", restarts=2, why="was killed by SIGKILL", since_s=12.0)


@pytest.mark.parametrize(
    ("seen", "processes", "silent_s", "words"),
    [
        (status(waits=WAITS), [process("hub", pid=12)], 63.0,  # what it said last is held against nobody
         "hub (pid 12) has not answered for 63 s: is it stuck? (see logs/hub.log)"),
        (status(waits=WAITS), [HUB, DEAD], 0.0, "trainer waits for a batch (55 s); validator-0 was killed by SIGKILL, "
         "12 s ago, and is being restarted (#3)"),
        (status(), [HUB], 0.0, "and nobody says that they wait for anything"),
        (status(outbox=7, outbox_since_ms=40_000), [], 0.0,
         "7 ledger entries wait to be appended, for 60 s: no hub leads (see logs/hub.log)"),
        (status(outbox=7, outbox_since_ms=99_000), [], 0.0, "and nobody says that they wait for anything"),
    ],
)  # fmt: skip
def test_symptom_and_cause_are_both_named(
    seen: RunStatus, processes: list[ProcessView], silent_s: float, words: str
) -> None:
    assert blame(seen, processes, silent_s) == words


# ── what is wrong with a process ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "words"),
    [
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
    ],
)  # fmt: skip
def test_what_the_supervisor_knows(changes: dict[str, Any], words: str) -> None:
    assert sentence(process("w", **changes)) == words


def node(name: str, seen_s_ago: float, role: Any = "validator") -> NodeView:
    changes = {"name": name, "role": role, "last_seen_ms": int(100_000 - seen_s_ago * 1000)}
    return worker(0).model_copy(update=changes)


QUIET = "validator-0 (pid 4711) has said nothing for 63 s: is it stuck?"
ABSENT = "trainer (pid 4711) has not reached the hub in the 91 s since it started"
HEARD_63 = node("validator-0", 63)


@pytest.mark.parametrize(
    ("of", "since_s", "seen", "words"),
    [
        ("validator-0", 300.0, status(nodes=(HEARD_63,)), QUIET),
        ("validator-0", 300.0, status(nodes=(HEARD_63, node("validator-0", 5))), ""),
        ("validator-0", 300.0, status(nodes=(HEARD_63,), finished=True), ""),
        ("validator-0", 300.0, status(nodes=(node("validator-0", 5, "worker"), HEARD_63)), QUIET),
        ("validator-0", 89.0, status(nodes=(HEARD_63,)), ""),  # it has just started
        ("validator-0", 91.0, status(nodes=(HEARD_63,)), QUIET),
        ("trainer", 91.0, status(nodes=()), ABSENT),
        ("trainer", 89.0, status(nodes=()), ""),
        ("origin", 91.0, status(nodes=()), ""),
    ],
)
def test_a_process_of_which_the_hub_has_not_heard_for_long(
    of: str, since_s: float, seen: RunStatus, words: str
) -> None:
    assert sentence(process(of, since_s=since_s), seen) == words
    assert troubles(seen, [process("hub", since_s=5.0), process(of)], 0.0) == {}, "the hub itself has just started"


@pytest.mark.parametrize(
    ("since_s", "silent_s", "said"),
    [(300, 9, None), (300, 11, "11 s"), (29, 29, None), (31, 31, "31 s"), (20, 90, None), (40, 90, "40 s")],
)
def test_a_hub_that_does_not_answer(since_s: float, silent_s: float, said: str | None) -> None:
    """One that has answered in this life is silent sooner than one that has just been started."""
    found = troubles(status(), [process("hub", since_s=since_s)], silent_s).get("hub")
    expected = said and f"hub (pid 4711) has not answered for {said}: is it stuck? (see logs/hub.log)"
    assert found == expected


# ── what the run's owner ordered ─────────────────────────────────────────────────────────────────────────────────


def test_a_paused_or_drained_run_is_left_alone_for_as_long_as_it_takes() -> None:
    watchdog = Watchdog(patience_s=10.0)
    paused = status(standing=OwnerOrders(conduct="paused", since_ms=40_000, reason="power cut"))
    drained = status(standing=OwnerOrders(conduct="draining", drained=True))
    for now_s, seen in ((0.0, paused), (1000.0, paused), (2000.0, drained), (3000.0, drained)):
        assert watchdog.look(seen, now_s) is None
    draining = status(standing=OwnerOrders(conduct="draining", since_ms=40_000, reason="moving"))
    assert watchdog.look(draining, 3001.0) is None
    ending = watchdog.look(draining, 3011.0)
    assert "draining by its owner, 60 s ago: moving; to go on: shoal admin resume" in ending.message
