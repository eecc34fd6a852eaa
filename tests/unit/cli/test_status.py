"""`shoal status` and `shoal why`: what others say is shown as they said it; a stopped run says where it stands."""

import json
from typing import Any

import pytest

from kit.cli import told
from shoal import protocol
from shoal.cli.why import check_line, entry_line, node_lines, reward_lines, unit_lines
from shoal.ledger import append
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe


@pytest.mark.parametrize(("steps", "last", "code", "said", "remedy"), [
    (4, {"step": 4}, 0, "is finished: 4 steps, held-out score 0.250 → 0.500; its model is", "eval {} --env SPEC"),
    (4, {"step": 3, "groups": 8}, 0, "is finished: 4 steps", "eval {} --env SPEC"),  # no version is evaluated
    (9, {"step": 4}, 4, "is not running: 4 of 9 steps, held-out score 0.250 → 0.500", "with: shoal run {}"),
])  # fmt: skip
def test_a_stopped_run_says_where_it_stands(tmp_path, steps, last, code, said, remedy, monkeypatch, capsys):
    monkeypatch.setattr("shoal.runtime.text.shoal_command", lambda: "shoal")
    monkeypatch.setattr("shoal.run.launch.shoal_command", lambda: "shoal")
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"run": {"steps": steps}, "hub": {"port": 0}}))
    folder.assign_endpoints()
    (folder.path / "trainer").mkdir()
    rows = [{"step": 0, "held_out": 0.25}, {"held_out": 0.5, **last}]
    (folder.path / "trainer" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = told(capsys, code, "status", folder.path, "--wait", 0)
    words = " ".join((shown.out if code == 0 else shown.err).split())
    assert f"the run in {folder.path} {said}" in words
    assert remedy.format(folder.path) in words
    assert f"the run in {folder.path} {said}" in told(capsys, 4, "join", folder.path, "--wait", 0).err
    assert "has the run begun?" in told(capsys, 2, "why", 0, folder.path, "--wait", 0).err


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


def story(**changes: Any) -> protocol.NodeStory:
    node = protocol.NodeView(node=NODE, name="alice", role="worker", state=protocol.NodeState.BANNED, window=3)
    values: dict[str, Any] = {
        "run": "r", "node": node, "public_key": "0" * 64, "registered_at_ms": 0, "sentence": "banned: sampling.seed",
        "streak": 0, "passed": 0, "certain": 1, "statistical": 0, "lapsed": 2, "pace_ms": 1500,
        "record": protocol.Tally(), "leases": (), "recent": (), "refused": (REFUSED,), "ledger": entries(),
    }  # fmt: skip
    return protocol.NodeStory(**{**values, **changes})


def test_events_of_a_node_are_shown_in_order_and_once() -> None:
    """The clock of the ledger: came, lost a lease (5 s), was refused and banned (6 s), then pardoned by order (9 s)."""
    node, rejected, banned = entries()
    pardoned = append(banned, "sanction", {"node": NODE, "state": "active", "reason": "a mistake"}, 9_000)
    order = append(pardoned, "admin", {"node": NODE, "verb": "pardon", "by": "root", "reason": "a mistake"}, 9_000)
    lost = LEASE.model_copy(update={"state": "expired"})
    told = list(node_lines(story(leases=(lost,), ledger=(node, rejected, banned, pardoned, order))))
    assert told[0] == f"node {NODE} (alice), worker: banned: sampling.seed"
    assert "1 certain and 0 statistical strikes" in told[1]
    assert "work: may hold 3 leases, let 2 lapse, a group takes it 1.5 s" in told
    events = ("1970", "refused", "lease ", "  because")
    assert [line.split(" under ")[0] for line in told if line.startswith(events)] == [
        "1970-01-01 00:00:00 ledger row 0: node: role worker, name alice", "lease u7a0 of unit 7 to abababababab",
        "refused: unit 7, lease u7a0", "1970-01-01 00:00:06 ledger row 2: sanction: state banned, reason sampling.seed",
        "  because of unit 7, submission cdcdcdcdcdcdcdcd…: sampling.seed (certain), by validator vvvvvvvvvvvv",
        "1970-01-01 00:00:09 ledger row 3: sanction: state active, reason a mistake",
        "1970-01-01 00:00:09 ledger row 4: order of the run's owner: verb pardon, by root, reason a mistake",
    ]  # fmt: skip


def test_foreign_text_cannot_move_the_cursor() -> None:
    check = {"check": "x", "passed": False, "evidence": {f"n{i}": i for i in range(9)}, "message": "a\x1b[2Jb"}
    assert check_line(check) == "x failed: n0=0 n1=1 n2=2 n3=3 n4=4 n5=5 n6=6 n7=7 and 1 more numbers: a�[2Jb"
    entry = append(None, "node", {"node": NODE, "name": "x\x1b[2J"}, 0)
    assert "\x1b" not in entry_line(entry)


def test_rewards_are_shown_with_their_parts_and_who_else_could_compute_them() -> None:
    rewards = [{"value": 1.25, "parts": {"task": 1.0, "judge.taste": 0.5}}, {"value": 0.0, "parts": {"task": 0.0}}]
    assert list(reward_lines({"rewards": rewards, "unreproducible": ["judge.taste"]})) == [
        "rewards: 1.25 0",
        "parts, in the mean: task 0.5, judge.taste 0.25",
        "nobody else can compute again: judge.taste",
    ]
    many = list(reward_lines({"rewards": [{"value": 1.0, "parts": {}}] * 20}))
    assert many == ["rewards: " + "1 " * 15 + "1 and 4 more"]
    assert list(reward_lines({})) == []
