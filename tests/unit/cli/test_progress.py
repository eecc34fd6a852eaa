"""Progress lines, the watchdog and the summary, from made-up statuses under a manual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from clikit import NODE, report, status, wait

from shoal.cli.progress import Progress, Reporter, Watchdog, fetch_status, latest, summary, waits_line
from shoal.protocol import LedgerHead
from shoal.runtime.clock import ManualClock


def test_a_line_says_where_the_run_stands() -> None:
    reports = (report(1, reward_mean=0.5, staleness_mean=0.25), report(0, reward_mean=0.1, held_out=0.4))
    progress = Progress(started_s=0.0)
    first = progress.line(status(reports=reports), 65.0)
    assert first == (
        "  1:05  step 2/9  reward 0.50  held out 0.40  staleness 0.25  groups 5 accepted, 1 rejected  0 tokens/s"
    )


def test_a_line_is_not_repeated_and_the_rate_is_since_the_last_look() -> None:
    progress = Progress(started_s=0.0)
    progress.line(status(), 10.0)
    assert progress.line(status(), 11.0) is None
    more = status(step=3, nodes=(NODE.model_copy(update={"credit": 1100}),))
    assert "500 tokens/s" in str(progress.line(more, 13.0))


def test_long_waits_are_part_of_the_line_and_short_ones_are_not() -> None:
    waits = (wait("trainer", "a batch", 30), wait("worker", "work", 1))
    line = str(Progress(0.0).line(status(waits=waits), 1.0))
    assert line.endswith("(trainer waits for a batch (30 s))")


def test_waits_are_told_longest_first_and_not_without_end() -> None:
    waits = tuple(wait(f"w{i}", "x", i) for i in range(6))
    assert waits_line(status(waits=waits), most=2) == "w5 waits for x (5 s); w4 waits for x (4 s); and 4 more"
    assert waits_line(status()) == ""


def test_the_newest_value_counts_and_missing_ones_are_none() -> None:
    reports = [report(0, held_out=0.1), report(1, held_out=0.2), report(2)]
    assert latest(reports, "held_out") == 0.2
    assert latest(reports, "loss") is None


def test_the_watchdog_ends_a_run_that_stands_still_and_names_who_waits() -> None:
    dog = Watchdog(patience_s=60)
    stuck = status(waits=(wait("trainer", "3 more groups", 55),), alarms=("the cap is reached",))
    assert dog.look(stuck, 0.0) is None
    assert dog.look(stuck, 59.0) is None
    ending = dog.look(stuck, 60.0)
    assert ending is not None
    assert ending.exit_code == 1
    assert ending.message == (
        "no progress for 1 min: trainer waits for 3 more groups (55 s); alarms: the cap is reached"
    )


@pytest.mark.parametrize(
    "change",
    [{"step": 3}, {"submissions": {"accepted": 6, "rejected": 1}}, {"reports": (report(0),)},
     {"ledger": LedgerHead(run="demo-1", index=5, hash="ab" * 32)}],
)  # fmt: skip
def test_anything_new_calms_the_watchdog(change: dict[str, Any]) -> None:
    dog = Watchdog(patience_s=60)
    assert dog.look(status(), 0.0) is None
    assert dog.look(status(**change), 59.0) is None
    assert dog.look(status(**change), 118.0) is None
    assert dog.look(status(**change), 119.0) is not None


def test_a_hub_that_comes_and_goes_is_no_progress() -> None:
    dog = Watchdog(patience_s=60)
    for now_s in range(0, 60, 10):
        assert dog.look(None if now_s % 20 else status(), float(now_s)) is None
    ending = dog.look(None, 61.0)
    assert ending is not None
    assert "the hub does not answer" in ending.message


def transport(answers: list[httpx.Response | Exception]) -> httpx.Client:
    def answer(_request: httpx.Request) -> httpx.Response:
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    return httpx.Client(transport=httpx.MockTransport(answer))


def test_whatever_is_not_a_status_is_none() -> None:
    answers = [httpx.ConnectError("no"), httpx.Response(500), httpx.Response(200, text="<html>"),
               httpx.Response(200, text=status().model_dump_json())]  # fmt: skip
    http = transport(list(answers))
    assert [fetch_status("http://hub", http) for _ in answers] == [None, None, None, status()]


def test_the_reporter_asks_now_and_then_and_says_each_alarm_once() -> None:
    alarmed = status(alarms=("the disk is nearly full",)).model_dump_json()
    http = transport([httpx.Response(200, text=alarmed) for _ in range(3)])
    clock, said = ManualClock(), list[str]()
    reporter = Reporter("http://hub", said.append, Watchdog(1000), every_s=3, clock=clock, http=http)
    for _ in range(60):  # ten looks a second for six seconds
        assert reporter.tick() is None
        clock.advance(0.1)
    assert said[1:] == ["alarm: the disk is nearly full"]
    reporter.last_look()
    assert reporter.status is not None


def test_the_summary_is_read_from_the_trainers_own_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 0, "held_out": 0.25, "reward_mean": 0.5},
        {"step": 1, "reward_mean": 0.75},
        {"step": 2, "held_out": 0.5},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    lines = summary(path, status(), 12.3)
    assert lines == [
        "2 of 9 steps in 12 s",
        "held-out score 0.250 → 0.500",
        "reward 0.500 → 0.750",
        "submissions: 5 accepted, 1 rejected; 100 verified tokens",
    ]
    assert summary(tmp_path / "none", None, 1.0) == ["0 steps in 1 s"]
