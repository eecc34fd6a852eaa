"""What the hub thinks of this node, logged for its owner: credit earned, groups refused and why, a suspension.

A heartbeat's reply has the totals. If a group was refused, the reason is read from the run's status.
"""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.client import HubClient
from shoal.errors import DeadlineExceeded, HubError, ProtocolError, ResourceError, ShutOut
from shoal.protocol import HeartbeatReply, NodeState, NodeView
from shoal.runtime import count_of, write_atomically

log = logging.getLogger(__name__)

STANDING = "standing.json"
FORBIDDEN = 403
ASK_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Standing:
    """What one start of a worker has done, and the node's totals before and now. Written to its folder after each
    heartbeat, for the process that supervises several workers."""

    start: str
    tokens: int
    accepted: int
    accepted_before: int
    credit: int
    credit_before: int
    pending: int
    rejected: int = 0  # of this start
    unsure: int = 0
    doing: str = ""
    reason: str = ""  # why something was not accepted, the newest

    def leave(self, folder: Path) -> None:
        try:
            write_atomically(folder / STANDING, json.dumps(asdict(self)).encode())
        except ResourceError as error:
            log.debug("%s", error)  # writers of important files raise their own error

    @classmethod
    def read(cls, folder: Path) -> Standing | None:
        try:
            return cls(**json.loads((folder / STANDING).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def forget(folder: Path) -> None:
        (folder / STANDING).unlink(missing_ok=True)


class Earnings:
    """Used by one thread at a time. `folder`: where the `Standing` is written, if anywhere."""

    def __init__(self, client: HubClient, folder: Path | None = None) -> None:
        self._client, self._folder, self._start = client.patient(ASK_PATIENCE_S), folder, uuid.uuid4().hex
        self._first: NodeView | None = None
        self._last: NodeView | None = None
        self._reason = ""
        self.shut_out: ShutOut | None = None

    def hear(self, reply: HeartbeatReply, tokens: int = 0, doing: str = "") -> None:
        """`tokens` were generated since this start."""
        now, before = reply.node, self._last or reply.node
        is_first, first, self._last = self._first is None, self._first or now, now
        self._first = first
        self.shut_out = shut_out(now)
        if now.unsure > before.unsure:
            self._reason = f"{count_of(now.unsure - before.unsure, 'group')} could not be judged; that costs nothing"
            log.info("%s", self._reason)
        if now.rejected > before.rejected:
            self._reason = f"{count_of(now.rejected - before.rejected, 'group')} rejected: {self._why(now)}"
            log.warning("%s", self._reason)
        if self._folder is not None:
            totals = (now.accepted, first.accepted, now.credit, first.credit, now.pending)
            refused = (now.rejected - first.rejected, now.unsure - first.unsure)
            Standing(self._start, tokens, *totals, *refused, doing, self._reason).leave(self._folder)
        if now.accepted > before.accepted:
            log.info("%s", _gain(before, now))
        was, state = before.state, now.state  # a suspension is logged once, and again if its end changes
        if state is NodeState.SUSPENDED and (is_first or was is not state or now.until_ms != before.until_ms):
            reason = now.reason or "the hub gave no reason"
            how_long = "until the run's owner pardons it"
            if now.until_ms is not None:
                how_long = f"for {max(0, now.until_ms - now.last_seen_ms) / 1000:.0f} s more"
            log.warning("this node is suspended %s: %s; it waits, and resumes by itself", how_long, reason)
        elif state is NodeState.ACTIVE and was is NodeState.SUSPENDED:
            log.info("the suspension is over: this node gets work again")

    def summary(self, submitted: int = 0) -> str:
        """What this start earned; some of the `submitted` groups may not be judged yet."""
        first, last = self._first, self._last
        if first is None or last is None:
            return "the hub was not heard from"
        first_decided, decided = (view.accepted + view.rejected + view.unsure for view in (first, last))
        waiting = submitted - decided + first_decided
        verdicts = f"; {count_of(waiting, 'group')} not judged yet, which may still earn" if waiting > 0 else ""
        return _gain(first, last) + verdicts

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
    """The error that the worker ends with if the hub has banned its node."""
    if view.state is not NodeState.BANNED:
        return None
    sentence = f"the hub has {view.state.value} this node: {view.reason or 'it gave no reason'}"
    return ShutOut(FORBIDDEN, f"node.{view.state.value}", sentence)


def _gain(before: NodeView, now: NodeView) -> str:
    return (
        f"{count_of(now.accepted - before.accepted, 'group')} accepted, credit +{now.credit - before.credit}; "
        f"in all {count_of(now.accepted, 'group')}, credit {now.credit}"
        + (f" and {now.pending} pending" if now.pending else "")
    )
