"""What a node's owner is told: credit, refusals with their reason, suspensions."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from kit import Logs
from shoal.errors import HubUnreachable, ShutOut
from shoal.protocol import HeartbeatReply, NodeState, NodeView, RecentVerdict
from shoal.worker.earnings import Earnings

VIEW = NodeView(node="n" * 32, name="n", role="worker", state=NodeState.ACTIVE, accepted=10, credit=1000)


def status_hub(*verdicts: RecentVerdict, away: bool = False) -> Mock:
    """Stands where the client stands, and answers `status` only."""
    hub = Mock(patient=lambda _patience_s: hub)
    hub.status = Mock(side_effect=HubUnreachable("gone")) if away else lambda: Mock(verdicts=verdicts)
    return hub


def verdict(unit: int, node: str = "n" * 32, at_ms: int = 1) -> RecentVerdict:
    words = {"outcome": "rejected", "reason": "prompt.mismatch", "message": "another prompt"}
    return RecentVerdict(unit=unit, node=node, decided_at_ms=at_ms, **words)


def heard(hub: Mock, *changes: dict[str, Any]) -> Earnings:
    earnings = Earnings(hub)
    for change in ({}, *changes):
        earnings.hear(HeartbeatReply(node=VIEW.model_copy(update=change)))
    return earnings


def test_credit_is_told_with_the_sum_of_this_start(caplog: Logs) -> None:
    caplog.set_level("INFO")
    earnings = heard(status_hub(), {"accepted": 11, "credit": 1010}, {"accepted": 15, "credit": 1050, "pending": 3})
    assert [record.message for record in caplog.records] == [
        "1 group accepted, credit +10; in all 11 groups, credit 1010",
        "4 groups accepted, credit +40; in all 15 groups, credit 1050 and 3 pending",
    ]
    assert earnings.summary() == "5 groups accepted, credit +50; in all 15 groups, credit 1050 and 3 pending"


def test_a_rejection_is_told_at_once_with_its_own_reason(caplog: Logs) -> None:
    hub = status_hub(verdict(3, at_ms=1), verdict(5, at_ms=9), verdict(7, node="m" * 32, at_ms=20))
    heard(hub, {"rejected": 2})
    assert caplog.records[-1].message == "2 groups rejected: unit 5, prompt.mismatch: another prompt"


def test_a_reason_that_is_not_there_is_said_to_be_so(caplog: Logs) -> None:
    heard(status_hub(), {"rejected": 1, "reason": "sampling.seed: x"})
    assert "sampling.seed: x" in caplog.text
    heard(status_hub(away=True), {"rejected": 1})
    assert "could not be asked for (gone)" in caplog.text


def test_being_shut_out_carries_the_reason() -> None:
    earnings = heard(status_hub(), {"state": NodeState.BANNED, "reason": "sampling.seed: tokens"})
    assert isinstance(earnings.shut_out, ShutOut)
    assert earnings.shut_out.code == "node.banned"
    assert "banned this node: sampling.seed: tokens" in str(earnings.shut_out)


def test_a_suspension_is_told_once_and_its_end_and_shuts_nobody_out(caplog: Logs) -> None:
    caplog.set_level("INFO")
    suspended = {"state": NodeState.SUSPENDED, "reason": "leases.lapsed: 8", "until_ms": 70_000, "last_seen_ms": 27_000}
    longer = {**suspended, "until_ms": 90_000}
    earnings = heard(status_hub(), suspended, {**suspended, "last_seen_ms": 32_000}, longer, {})
    assert earnings.shut_out is None
    assert [record.message for record in caplog.records] == [
        "this node is suspended for 43 s more: leases.lapsed: 8; it waits, and resumes by itself",
        "this node is suspended for 63 s more: leases.lapsed: 8; it waits, and resumes by itself",
        "the suspension is over: this node gets work again",
    ]


def test_a_suspension_from_before_this_start_is_told_too(caplog: Logs) -> None:
    view = VIEW.model_copy(update={"state": NodeState.SUSPENDED, "reason": "x"})
    Earnings(status_hub()).hear(HeartbeatReply(node=view))
    assert "suspended until the run's owner pardons it: x; it waits, and resumes by itself" in caplog.text


def test_groups_that_are_not_judged_yet_are_in_the_last_line() -> None:
    earnings = heard(status_hub(), {"accepted": 12, "unsure": 1, "credit": 1020})
    gained = "2 groups accepted, credit +20; in all 12 groups, credit 1020"
    assert earnings.summary(submitted=5) == f"{gained}; 2 groups not judged yet, which may still earn"
    assert earnings.summary(submitted=3) == gained
