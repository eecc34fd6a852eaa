"""`shoal status`: what others say is shown as they said it, and a stopped run still says where it stands."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kit import Capture, Patch
from shoal import protocol
from shoal.cli.main import main
from shoal.cli.printing import console, sheet
from shoal.cli.status import render, show_status
from shoal.cli.why import check_line, entry_lines, node_lines, unit_lines
from shoal.errors import HubUnreachable
from shoal.ledger import append
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe


def status(**changes: object) -> protocol.RunStatus:
    head = protocol.LedgerHead(run="r", index=-1, hash="0" * 64)
    fields: dict[str, object] = {
        "run": "r", "name": "r", "now_ms": 1000, "finished": False, "steps": 2, "step": 1, "policy": None,
        "max_staleness": 0, "units": {}, "submissions": {}, "nodes": (), "waits": (), "verdicts": (), "reports": (),
        "alarms": (), "ledger": head,
    }  # fmt: skip
    return protocol.RunStatus.model_validate({**fields, **changes})


def test_markup_in_what_others_say_is_text() -> None:
    node = protocol.NodeView(
        node="n" * 32, name="[/bold]", role="worker", state=protocol.NodeState.ACTIVE, doing="[red]x"
    )
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    for part in render(
        status(nodes=(node,), waits=(protocol.Wait(who="[/zz]", what="[bold]y", since_ms=0),), alarms=("[/a]",))
    ):
        console.print(part)
    for text in ("[/bold]", "[red]x", "[/zz]", "[bold]y", "[/a]"):
        assert text in shown.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_in_a_narrow_terminal_what_a_node_does_is_cut_and_no_number(width: int) -> None:
    node = protocol.NodeView(
        node="n" * 32, name="a-machine-with-a-long-name", role="validator", state=protocol.NodeState.SUSPENDED,
        accepted=12345, rejected=678, credit=123456, pending=789,
        doing="generating unit 17 for the third time, token 300 of 2048",
    )  # fmt: skip
    shown = io.StringIO()
    for part in render(status(nodes=(node,))):
        Console(file=shown, width=width).print(part)
    text = " ".join(shown.getvalue().split())
    for whole in ("nnnnnnnn", "suspended", "12345/678", "123456 + 789 pending", "1 s"):
        assert whole in text
    assert (width == 200) == ("token 300 of 2048" in text)
    assert len(shown.getvalue().splitlines()) == 4  # headline, counts, heads, the node


def test_what_is_piped_is_not_cut(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "x" * 300
    console().print(sheet(("name", "doing"), [("a", long)], ("doing",)))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["name  doing", f"a     {long}"]


def test_newcomers_and_pending_credit_are_named() -> None:
    new = protocol.NodeView(
        node="n" * 32, name="a", role="worker", state=protocol.NodeState.ACTIVE, on_probation=True, credit=5, pending=7
    )
    gone = protocol.NodeView(node="m" * 32, name="b", role="worker", state=protocol.NodeState.BANNED, on_probation=True)
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
    node = protocol.NodeView(node="n" * 32, name="alice", role="worker", state=protocol.NodeState.ACTIVE)
    values = {"node": node.node, "outcome": "rejected", "reason": "sampling.seed", "message": "no"}
    verdicts = tuple(protocol.RecentVerdict(unit=unit, decided_at_ms=unit, **values) for unit in range(9, 0, -1))
    reports = (protocol.StepReport(step=3, metrics={"reward_mean": 0.5, "sampled_reward": 0.25}),)
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


def test_a_finished_run_is_no_error(tmp_path: Path, capsys: Capture) -> None:
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"run": {"steps": 2}, "hub": {"port": 0}}))
    folder.assign_endpoints()
    (folder.path / "trainer").mkdir()
    (folder.path / "trainer" / "metrics.jsonl").write_text('{"step": 2, "held_out": 0.5}\n')
    show_status(str(folder.path), as_json=False, wait_s=0)
    said = capsys.readouterr().out
    assert said.startswith(f"the run in {folder.path} is finished: 2 steps")
    assert "no usable answer" not in said


def test_what_the_owner_ordered_and_how_many_nodes_there_are() -> None:
    node = protocol.NodeView(node="n" * 32, name="a", role="worker", state=protocol.NodeState.ACTIVE, liveness="silent")
    standing = protocol.OwnerOrders(conduct="paused", since_ms=0, reason="[/power] cut")
    counts = {"worker.active": 998, "worker.banned": 2}
    shown = io.StringIO()
    for part in render(status(nodes=(node,), standing=standing, node_counts=counts)):
        Console(file=shown, width=200).print(part)
    assert "owner paused by its owner, 1 s ago: [/power] cut; to go on: shoal admin resume" in shown.getvalue()
    assert "1 of 1000 nodes are shown: 998 worker.active, 2 worker.banned" in shown.getvalue()
    assert "silent" in shown.getvalue()


def test_groups_that_could_not_be_scored_are_shown() -> None:
    told = [part for part in render(status(no_sample=3, submissions={"unsure": 4})) if isinstance(part, str)]
    assert any("4 unsure (3 could not be scored: no reward)" in part for part in told)
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


NODE = "ab" * 16
LEASE = protocol.LeaseStory(
    lease="u7a0", unit=7, node=NODE, attempt=0, policy=protocol.PolicyRef(incarnation=0, version=3, digest="0" * 64),
    issued_at_ms=0, deadline_ms=60_000, hard_deadline_ms=600_000, progress=12, state="submitted", ended_at_ms=5_000,
    sentence="answered with a submission",
)  # fmt: skip
CHECKS = [
    {"check": "prompt", "passed": True, "evidence": {}, "message": ""},
    {"check": "sampling", "passed": False, "evidence": {"outside": 812, "p_value": 1.23456e-9}, "message": "no seed"},
]
VERDICT = protocol.SignedDocument(kind="verdict", document={"checks": CHECKS}, signed_by="ab" * 32, signature="0" * 128)
REFUSED = protocol.SubmissionStory(
    submission="cd" * 32, lease="u7a0", unit=7, node=NODE, state="rejected", size_bytes=9, received_at_ms=5_000,
    decided_at_ms=6_000, validator="v", depth="full", reason="sampling.seed", message="no seed", rule="it is banned",
    generated_tokens=0, rewards=(), credit=0, credit_state="none", matures_at_ms=None, verdict=VERDICT,
)  # fmt: skip
REJECTED = {"node": NODE, "unit": 7, "submission": "cd" * 32, "reason": "sampling.seed", "severity": "certain"}


def entries() -> tuple[protocol.LedgerEntry, ...]:
    node = append(None, "node", {"node": NODE, "role": "worker", "name": "alice"}, 0)
    rejected = append(node, "rejected", {**REJECTED, "validator": "v" * 32}, 6_000)
    sanction = append(rejected, "sanction", {"node": NODE, "state": "banned", "reason": "sampling.seed"}, 6_000)
    return node, rejected, sanction


def unit(**changes: Any) -> protocol.UnitStory:
    values: dict[str, Any] = {
        "run": "r", "unit": 7, "task": "t/1", "state": "open", "sentence": "waits for a worker again", "failures": 0,
        "version": None, "step": None, "lost_step": None, "leases": (LEASE,), "submissions": (REFUSED,),
        "ledger": entries()[1:2],
    }  # fmt: skip
    return protocol.UnitStory(**{**values, **changes})


@pytest.mark.parametrize(
    ("step", "said", "remedy"),
    [
        (2, "is finished: 2 steps", "to measure it: shoal eval {} --env SPEC"),
        (1, "is not running: 1 of 2 steps", "go on with: shoal run --dir {}"),
    ],
)
def test_hub_is_gone(tmp_path: Path, step: int, said: str, remedy: str, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr("shoal.runtime.text.shoal_command", lambda: "shoal")
    monkeypatch.setattr("shoal.cli.status.shoal_command", lambda: "shoal")
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"run": {"steps": 2}, "hub": {"port": 0}}))
    folder.assign_endpoints()
    (folder.path / "trainer").mkdir()
    (folder.path / "trainer" / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    assert main(["why", "0", str(folder.path), "--wait", "0"]) == 4
    told = " ".join(capsys.readouterr().err.split())
    assert f"the run in {folder.path} {said}" in told
    assert remedy.format(folder.path) in told
    assert f"start it alone with shoal hub --dir {folder.path}, then ask again" in told


def test_a_unit_in_words() -> None:
    assert list(unit_lines(unit())) == [
        "unit 7 (task t/1): open: waits for a worker again",
        "lease u7a0 of unit 7 to abababababab under policy 0.3, 1970-01-01 00:00:00 to 1970-01-01 00:00:05: submitted: "
        "answered with a submission, 12 tokens claimed",
        "  submission cdcdcdcdcdcdcdcd…, received 1970-01-01 00:00:05, decided 1970-01-01 00:00:06",
        "    check prompt held",
        "    check sampling failed: outside=812 p_value=1.235e-09: no seed",
        "    rejected (sampling.seed: no seed); rule: it is banned",
        "1970-01-01 00:00:06 ledger row 1: rejected: reason sampling.seed, severity certain",
        "its seeds, and its leases as they were signed, are told once it is decided",
    ]
    paid = REFUSED.model_copy(update={"credit": 1200, "generated_tokens": 1200, "credit_state": "pending"})
    lines = list(unit_lines(unit(submissions=(paid,), seeds=("00",))))
    assert "    1,200 credit for 1,200 tokens: pending" in lines
    assert not lines[-1].startswith("its seeds")


def test_a_node_in_words_with_what_its_sanction_followed_from() -> None:
    story = protocol.NodeStory(
        run="r",
        node=protocol.NodeView(node=NODE, name="alice", role="worker", state=protocol.NodeState.BANNED, window=3),
        public_key="0" * 64, registered_at_ms=0, sentence="banned: sampling.seed", streak=0, passed=0, certain=1,
        statistical=0, lapsed=2, pace_ms=1500, record=protocol.Tally(), leases=(), recent=(), refused=(REFUSED,),
        ledger=entries(),
    )  # fmt: skip
    lines = list(node_lines(story))
    assert lines[0] == f"node {NODE} (alice), worker: banned: sampling.seed"
    assert "1 certain and 0 statistical strikes" in lines[1]
    assert "work: may hold 3 leases, let 2 lapse, a group takes it 1.5 s" in lines
    at = lines.index("1970-01-01 00:00:06 ledger row 2: banned: sampling.seed")
    assert lines[at + 1] == (
        "  because of unit 7, submission cdcdcdcdcdcdcdcd…: sampling.seed (certain), by validator vvvvvvvvvvvv"
    )
    assert "refused: unit 7, lease u7a0" in lines


def test_what_happened_to_a_node_is_told_in_order_and_each_sanction_once() -> None:
    """The clock of the ledger: came, lost a lease (5 s), was refused and banned (6 s), then pardoned by order (9 s)."""
    node, rejected, banned = entries()
    pardoned = append(banned, "sanction", {"node": NODE, "state": "active", "reason": "a mistake"}, 9_000)
    order = append(pardoned, "admin", {"node": NODE, "verb": "pardon", "by": "root", "reason": "a mistake"}, 9_000)
    story = protocol.NodeStory(
        run="r", node=protocol.NodeView(node=NODE, name="alice", role="worker", state=protocol.NodeState.ACTIVE),
        public_key="0" * 64, registered_at_ms=0, sentence="on probation", streak=0, passed=0, certain=0, statistical=0,
        lapsed=1, pace_ms=0, record=protocol.Tally(), leases=(LEASE.model_copy(update={"state": "expired"}),),
        recent=(), refused=(REFUSED,), ledger=(node, rejected, banned, pardoned, order),
    )  # fmt: skip
    told = [line for line in node_lines(story) if line.startswith(("1970", "refused", "lease ", "  by order"))]
    assert [line.split(" under ")[0] for line in told] == [
        "1970-01-01 00:00:00 ledger row 0: node: role worker, name alice",
        "lease u7a0 of unit 7 to abababababab",
        "refused: unit 7, lease u7a0",
        "1970-01-01 00:00:06 ledger row 2: banned: sampling.seed",
        "1970-01-01 00:00:09 ledger row 3: active: a mistake",
        "  by order of the run's owner (pardon, ledger row 4, signed by root)",
    ]


def test_what_others_wrote_cannot_move_the_cursor() -> None:
    check = {"check": "x", "passed": False, "evidence": {f"n{i}": i for i in range(9)}, "message": "a\x1b[2Jb"}
    assert check_line(check) == "x failed: n0=0 n1=1 n2=2 n3=3 n4=4 n5=5 n6=6 n7=7 and 1 more numbers: a�[2Jb"
    entry = append(None, "node", {"node": NODE, "name": "x\x1b[2J"}, 0)
    assert "\x1b" not in next(entry_lines([entry]))


def test_rewards_are_shown_with_their_parts_and_who_else_could_compute_them() -> None:
    from shoal.cli.why import reward_lines

    rewards = [{"value": 1.25, "parts": {"task": 1.0, "judge.taste": 0.5}}, {"value": 0.0, "parts": {"task": 0.0}}]
    assert list(reward_lines({"rewards": rewards, "unreproducible": ["judge.taste"]})) == [
        "rewards: 1.25 0",
        "parts, in the mean: task 0.5, judge.taste 0.25",
        "nobody else can compute again: judge.taste",
    ]
    many = list(reward_lines({"rewards": [{"value": 1.0, "parts": {}}] * 20}))
    assert many == ["rewards: " + "1 " * 15 + "1 and 4 more"]
    assert list(reward_lines({})) == []
