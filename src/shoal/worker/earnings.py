"""What the hub thinks of this node, said to its owner: credit earned, groups refused and why, a suspension and its end.

The heartbeat's answer carries the totals; when a refusal is among them, the reason is read from the run's status.
Good news is gathered and told every so often, bad news at once.
"""

from __future__ import annotations

import logging

from shoal.client import HubClient
from shoal.errors import DeadlineExceeded, HubError, ProtocolError, ShutOut
from shoal.protocol import HeartbeatReply, NodeState, NodeView
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.text import count_of

log = logging.getLogger(__name__)

FORBIDDEN = 403
TELL_EVERY_S = 15.0
ASK_PATIENCE_S = 5.0


class Earnings:
    """Compares what the hub says with what it said before. Called by one thread at a time."""

    def __init__(self, client: HubClient, clock: Clock = SystemClock()) -> None:
        self._client = client.patient(ASK_PATIENCE_S)
        self._clock = clock
        self._first: NodeView | None = None
        self._last: NodeView | None = None
        self._told: NodeView | None = None
        self._tell_at_s = 0.0
        self.shut_out: ShutOut | None = None

    def hear(self, reply: HeartbeatReply) -> None:
        now, before = reply.node, self._last or reply.node
        self._first, self._last = self._first or now, now
        self._told = self._told or now
        if now.rejected > before.rejected:
            log.warning("%s rejected: %s", count_of(now.rejected - before.rejected, "group"), self._why(now))
        if now.unsure > before.unsure:
            log.info("%s could not be judged; that costs nothing", count_of(now.unsure - before.unsure, "group"))
        if now.accepted > self._told.accepted and self._clock.monotonic_s() >= self._tell_at_s:
            log.info("%s", _gain(self._told, now))
            self._told, self._tell_at_s = now, self._clock.monotonic_s() + TELL_EVERY_S
        self._tell_suspension(before, now)
        self.shut_out = shut_out(now)

    def _tell_suspension(self, before: NodeView, now: NodeView) -> None:
        """Said once, and again if it got longer: the worker goes on asking, and goes on working when it is over."""
        is_new = before.state is not NodeState.SUSPENDED or now.until_ms != before.until_ms or self._first is now
        if now.state is NodeState.SUSPENDED and is_new:
            log.warning("%s", suspension(now))
        elif now.state is NodeState.ACTIVE and before.state is NodeState.SUSPENDED:
            log.info("the suspension is over: this node gets work again")

    def summary(self, submitted: int = 0) -> str:
        """What this start of the worker earned, for its last line; `submitted` groups were sent, of which some may not
        be judged yet."""
        if self._first is None or self._last is None:
            return "the hub was not heard from"
        waiting = submitted - _decided(self._last) + _decided(self._first)
        verdicts = f"; {count_of(waiting, 'group')} not judged yet, which may still earn" if waiting > 0 else ""
        return _gain(self._first, self._last) + verdicts

    def _why(self, view: NodeView) -> str:
        try:
            verdicts = self._client.status().verdicts
        except (HubError, ProtocolError, DeadlineExceeded) as error:
            return f"the reason could not be asked for ({error})"
        mine = [verdict for verdict in verdicts if verdict.node == view.node and verdict.reason]
        if not mine:
            return view.reason or "the hub no longer knows why"
        newest = max(mine, key=lambda verdict: verdict.decided_at_ms)
        return f"unit {newest.unit}, {newest.reason}: {newest.message}"


def shut_out(view: NodeView) -> ShutOut | None:
    """What a node that the hub sees like this has to end with, if anything."""
    if view.state is not NodeState.BANNED:
        return None
    sentence = f"the hub has {view.state.value} this node: {view.reason or 'it gave no reason'}"
    return ShutOut(FORBIDDEN, f"node.{view.state.value}", sentence)


def suspension(view: NodeView) -> str:
    """What a suspended node's owner should know: how long, why, and that nothing has to be done."""
    reason = view.reason or "the hub gave no reason"
    if view.until_ms is None:
        return f"this node is suspended until the run's owner pardons it: {reason}; it waits"
    left_s = max(0, view.until_ms - view.last_seen_ms) / 1000
    return f"this node is suspended for {left_s:.0f} s more: {reason}; it waits, and goes on by itself"


def _decided(view: NodeView) -> int:
    return view.accepted + view.rejected + view.unsure


def _gain(before: NodeView, now: NodeView) -> str:
    return (
        f"{count_of(now.accepted - before.accepted, 'group')} accepted, credit +{now.credit - before.credit}; "
        f"in all {count_of(now.accepted, 'group')}, credit {now.credit}"
        + (f" and {now.pending} pending" if now.pending else "")
    )
