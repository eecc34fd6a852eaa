"""`shoal status`: what others say is shown as they said it, and a stopped run still says where it stands."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.printing import Sheet, console
from shoal.cli.status import render, show_status
from shoal.errors import HubUnreachable
from shoal.protocol import LedgerHead, NodeState, NodeView, OwnerOrders, RecentVerdict, RunStatus, StepReport, Wait
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe


def status(**changes: object) -> RunStatus:
    head = LedgerHead(run="r", index=-1, hash="0" * 64)
    fields: dict[str, object] = {
        "run": "r", "name": "r", "now_ms": 1000, "finished": False, "steps": 2, "step": 1, "policy": None,
        "max_staleness": 0, "units": {}, "submissions": {}, "nodes": (), "waits": (), "verdicts": (), "reports": (),
        "alarms": (), "ledger": head,
    }  # fmt: skip
    return RunStatus.model_validate({**fields, **changes})


def test_markup_in_what_others_say_is_text() -> None:
    node = NodeView(node="n" * 32, name="[/bold]", role="worker", state=NodeState.ACTIVE, doing="[red]x")
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    for part in render(status(nodes=(node,), waits=(Wait(who="[/zz]", what="[bold]y", since_ms=0),), alarms=("[/a]",))):
        console.print(part)
    for text in ("[/bold]", "[red]x", "[/zz]", "[bold]y", "[/a]"):
        assert text in shown.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_in_a_narrow_terminal_what_a_node_does_is_cut_and_no_number(width: int) -> None:
    node = NodeView(
        node="n" * 32, name="a-machine-with-a-long-name", role="validator", state=NodeState.SUSPENDED, accepted=12345,
        rejected=678, credit=123456, pending=789, doing="generating unit 17 for the third time, token 300 of 2048",
    )  # fmt: skip
    shown = io.StringIO()
    for part in render(status(nodes=(node,))):
        Console(file=shown, width=width).print(part)
    text = " ".join(shown.getvalue().split())
    for whole in ("nnnnnnnn", "suspended", "12345/678", "123456 + 789 pending", "1 s"):
        assert whole in text
    assert (width == 200) == ("token 300 of 2048" in text)
    if width >= 80:
        assert len(shown.getvalue().splitlines()) == 4  # headline, counts, heads, the node


def test_what_is_piped_is_not_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "x" * 300
    console().print(Sheet(("name", "doing"), [("a", long)], {"doing": 0}))
    assert capsys.readouterr().out.splitlines() == ["name  doing", f"a     {long}"]


def test_newcomers_and_pending_credit_are_named() -> None:
    new = NodeView(
        node="n" * 32, name="a", role="worker", state=NodeState.ACTIVE, on_probation=True, credit=5, pending=7
    )
    gone = NodeView(node="m" * 32, name="b", role="worker", state=NodeState.BANNED, on_probation=True)
    shown = io.StringIO()
    for part in render(status(nodes=(new, gone))):
        Console(file=shown, width=200).print(part)
    [first] = [line for line in shown.getvalue().splitlines() if "nnnnnnnn" in line]
    [second] = [line for line in shown.getvalue().splitlines() if "mmmmmmmm" in line]
    assert "probation" in first
    assert "5 + 7 pending" in first
    assert "banned" in second
    assert "pending" not in second


def test_the_newest_refusals_are_shown_with_the_name_of_the_node() -> None:
    node = NodeView(node="n" * 32, name="alice", role="worker", state=NodeState.ACTIVE)
    values = {"node": node.node, "outcome": "rejected", "reason": "sampling.seed", "message": "no"}
    verdicts = tuple(RecentVerdict(unit=unit, decided_at_ms=unit, **values) for unit in range(9, 0, -1))
    reports = (StepReport(step=3, metrics={"reward_mean": 0.5, "sampled_reward": 0.25}),)
    shown = [
        part for part in render(status(nodes=(node,), verdicts=verdicts, reports=reports)) if isinstance(part, str)
    ]
    assert shown[-5:] == [f"alice, unit {unit}: rejected, sampling.seed: no" for unit in range(5, 10)]
    assert ", reward 0.250" in shown[0]


def test_a_stopped_run_says_where_it_stands_and_how_to_go_on(tmp_path: Path) -> None:
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"run": {"steps": 9}, "hub": {"port": 0}}))
    folder.assign_endpoints()
    (folder.path / "trainer").mkdir()
    rows = [{"step": 0, "held_out": 0.25}, {"step": 4, "held_out": 0.5}]
    (folder.path / "trainer" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(HubUnreachable, match=r"not running: 4 of 9 steps, held-out score 0.250 → 0.500; go on with"):
        show_status(str(folder.path), as_json=False, wait_s=0)


def test_a_finished_run_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"run": {"steps": 2}, "hub": {"port": 0}}))
    folder.assign_endpoints()
    (folder.path / "trainer").mkdir()
    (folder.path / "trainer" / "metrics.jsonl").write_text('{"step": 2, "held_out": 0.5}\n')
    show_status(str(folder.path), as_json=False, wait_s=0)
    said = capsys.readouterr().out
    assert said.startswith(f"the run in {folder.path} is finished: 2 steps")
    assert "no usable answer" not in said


def test_what_the_owner_ordered_and_how_many_nodes_there_are() -> None:
    node = NodeView(node="n" * 32, name="a", role="worker", state=NodeState.ACTIVE, liveness="silent")
    standing = OwnerOrders(conduct="paused", since_ms=0, reason="[/power] cut")
    counts = {"worker.active": 998, "worker.banned": 2}
    shown = io.StringIO()
    for part in render(status(nodes=(node,), standing=standing, node_counts=counts)):
        Console(file=shown, width=200).print(part)
    assert "owner paused by its owner, 1 s ago: [/power] cut; to go on: shoal admin resume" in shown.getvalue()
    assert "1 of 1000 nodes are shown: 998 worker.active, 2 worker.banned" in shown.getvalue()
    assert "silent" in shown.getvalue()


def test_groups_that_could_not_be_scored_are_shown() -> None:
    told = [part for part in render(status(no_sample=3, submissions={"unsure": 4})) if isinstance(part, str)]
    assert any("4 unsure (3 could not be scored: no sample, no reward)" in part for part in told)
    assert not any("no sample" in part for part in render(status()) if isinstance(part, str))


def test_difficulty_and_what_is_being_measured_are_shown() -> None:
    ref = {"incarnation": 0, "version": 4, "digest": "a" * 64}
    measuring = [
        {"policy": ref, "tasks": 128, "scored": 32},
        {"policy": ref, "tasks": 128, "scored": 128, "complete": True},
    ]
    told = [
        part for part in render(status(pools={"easy": 3, "retired": 2}, evaluations=measuring)) if isinstance(part, str)
    ]
    assert told[-1] == "tasks seen: 3 easy, 2 retired; measuring version 4: 32 of 128 held-out tasks"
    assert not any("tasks" in part for part in render(status()) if isinstance(part, str))
