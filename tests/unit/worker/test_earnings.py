"""What a node's owner is told: credit, refusals with their reason, suspensions."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import HubUnreachable, ShutOut
from shoal.protocol import HeartbeatReply, NodeState, NodeView, RecentVerdict
from shoal.worker.earnings import Earnings

VIEW = NodeView(node="n" * 32, name="n", role="worker", state=NodeState.ACTIVE, accepted=10, credit=1000)


class StatusHub:
    """Stands where the client stands, and answers `status` only."""

    def __init__(self, *verdicts: RecentVerdict) -> None:
        self.verdicts = verdicts
        self.away = False

    def patient(self, patience_s: float) -> StatusHub:
        return self

    def status(self) -> StatusHub:
        if self.away:
            raise HubUnreachable("gone")
        return self


def verdict(unit: int, node: str = "n" * 32, at_ms: int = 1) -> RecentVerdict:
    return RecentVerdict(
        unit=unit, node=node, outcome="rejected", reason="prompt.mismatch", message="another prompt",
        decided_at_ms=at_ms,
    )  # fmt: skip


def heard(hub: StatusHub, *changes: dict[str, Any]) -> Earnings:
    client: Any = hub
    earnings = Earnings(client)
    for change in ({}, *changes):
        earnings.hear(HeartbeatReply(node=VIEW.model_copy(update=change)))
    return earnings


def test_credit_is_told_with_the_sum_of_this_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    earnings = heard(StatusHub(), {"accepted": 11, "credit": 1010}, {"accepted": 15, "credit": 1050, "pending": 3})
    assert [record.message for record in caplog.records] == [
        "1 group accepted, credit +10; in all 11 groups, credit 1010",
        "4 groups accepted, credit +40; in all 15 groups, credit 1050 and 3 pending",
    ]
    assert earnings.summary() == "5 groups accepted, credit +50; in all 15 groups, credit 1050 and 3 pending"


def test_a_rejection_is_told_at_once_with_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    hub = StatusHub(verdict(3, at_ms=1), verdict(5, at_ms=9), verdict(7, node="m" * 32, at_ms=20))
    heard(hub, {"rejected": 2})
    assert caplog.records[-1].message == "2 groups rejected: unit 5, prompt.mismatch: another prompt"


def test_a_reason_that_is_not_there_is_said_to_be_so(caplog: pytest.LogCaptureFixture) -> None:
    hub = StatusHub()
    heard(hub, {"rejected": 1, "reason": "sampling.seed: x"})
    assert "sampling.seed: x" in caplog.text
    hub.away = True
    heard(hub, {"rejected": 1})
    assert "could not be asked for (gone)" in caplog.text


def test_being_shut_out_carries_the_reason() -> None:
    earnings = heard(StatusHub(), {"state": NodeState.BANNED, "reason": "sampling.seed: tokens"})
    assert isinstance(earnings.shut_out, ShutOut)
    assert earnings.shut_out.code == "node.banned"
    assert "banned this node: sampling.seed: tokens" in str(earnings.shut_out)


def test_a_suspension_is_told_once_and_its_end_and_shuts_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    suspended = {"state": NodeState.SUSPENDED, "reason": "leases.lapsed: 8", "until_ms": 70_000, "last_seen_ms": 27_000}
    longer = {**suspended, "until_ms": 90_000}
    earnings = heard(StatusHub(), suspended, {**suspended, "last_seen_ms": 32_000}, longer, {})
    assert earnings.shut_out is None
    assert [record.message for record in caplog.records] == [
        "this node is suspended for 43 s more: leases.lapsed: 8; it waits, and resumes by itself",
        "this node is suspended for 63 s more: leases.lapsed: 8; it waits, and resumes by itself",
        "the suspension is over: this node gets work again",
    ]


def test_a_suspension_from_before_this_start_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = StatusHub()
    view = VIEW.model_copy(update={"state": NodeState.SUSPENDED, "reason": "x"})
    Earnings(client).hear(HeartbeatReply(node=view))
    assert (
        caplog.records[-1].message
        == "this node is suspended until the run's owner pardons it: x; it waits, and resumes by itself"
    )


def test_groups_that_are_not_judged_yet_are_in_the_last_line() -> None:
    earnings = heard(StatusHub(), {"accepted": 12, "unsure": 1, "credit": 1020})
    gained = "2 groups accepted, credit +20; in all 12 groups, credit 1020"
    assert earnings.summary(submitted=5) == f"{gained}; 2 groups not judged yet, which may still earn"
    assert earnings.summary(submitted=3) == gained
