"""Showing progress: on probation a lease gets more time for finished chunks (token ids with proofs) only.

    engine ── chunks finished ──► due? ── snapshot ──► `ProgressSender` ── what the hub lacks, in parts ──► hub
              (engine's thread)   a few times a lease  (a thread) ▲                                          │
                                                                  └── what it has of each rollout, deadline ─┘

All chunks are sent, because a worker that sends only some could make up the rest: 12 bytes a token, only for groups
that take longer than a part of `lease_s`. Parts are small, so that one arrives in time on a slow line, and begin where
the hub's copy ends, so that a lost one does no harm. A submission must begin with what was shown. If tokens were
generated again and differ (an engine that discards tokens when memory runs out), the lease is given back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal.adversary import Cheat
from shoal.client import HubClient
from shoal.engines import Chunks, Completion, OnChunks
from shoal.errors import DeadlineExceeded, HubRefused, HubUnreachable, ProtocolError
from shoal.protocol import HeartbeatReply, Lease, ShownChunks, ShownProgress, pack_tokens
from shoal.runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

SHOWINGS_PER_LEASE = 4  # in `lease_s`: one may be late, another lost
PART_BYTES = 64 * 1024
PATIENCE_S = 30.0
JOIN_S = 5.0


@dataclass
class _SentProgress:
    """One lease: its newest snapshot, what may have reached the hub, and what the hub says it has of each rollout."""

    lease: Lease
    due_s: float
    latest: dict[int, Chunks] = field(default_factory=dict)
    sent: dict[int, Chunks] = field(default_factory=dict)
    have: Sequence[int] = ()
    fresh: bool = False  # the snapshot has something that was not sent yet
    ended: bool = False

    def __post_init__(self) -> None:
        self.have = [0] * len(self.lease.seeds)

    def part(self) -> ShownProgress | None:
        """What the hub lacks, up to the size of a part; it counts as sent from now on. None if the hub lacks
        nothing."""
        chunks, size, rows = list[ShownChunks](), 0, self.lease.proof.rows
        for rollout, there in self.latest.items():
            start = self.have[rollout]
            end, first = start, start // rows
            while end < len(there.token_ids) and size < PART_BYTES and end % rows == 0:
                size += 4 * rows + len(there.proofs[end // rows])
                end = min(end + rows, len(there.token_ids))
            if end > start:
                proofs = there.proofs[: -(-end // rows)]
                tokens = pack_tokens(there.token_ids[start:end])
                chunks.append(ShownChunks(rollout, start, tokens, b"".join(proofs[first:])))
                known = self.sent.get(rollout)
                if known is None or end > len(known.token_ids):
                    self.sent[rollout] = Chunks(there.token_ids[:end], proofs)
        return ShownProgress(chunks) if chunks else None

    def is_continued_by(self, rollout: int, found: Chunks) -> bool:
        """Whether what was sent of a rollout agrees with a later snapshot. The last proof may be of a short chunk."""
        sent = self.sent.get(rollout, found)
        both, length = min(len(sent.proofs), len(found.proofs)) - 1, min(len(sent.token_ids), len(found.token_ids))
        same = bool((sent.token_ids[:length] == found.token_ids[:length]).all())
        return same and sent.proofs[:both] == found.proofs[:both]

    def is_beginning_of(self, group: Sequence[Completion]) -> bool:
        """Whether the finished group begins with everything that may have been sent."""
        return all(
            group[rollout].token_ids[: len(sent.token_ids)].tolist() == sent.token_ids.tolist()
            and group[rollout].proofs.startswith(b"".join(sent.proofs))
            for rollout, sent in self.sent.items()
        )


class ProgressSender:
    """A context manager. `on_deadline` gets new deadlines of leases, in the sender's thread."""

    def __init__(
        self, client: HubClient, on_deadline: Callable[[str, int], None], conduct: Cheat = Cheat(),
        clock: Clock = SystemClock(),
    ) -> None:  # fmt: skip
        self._client, self._on_deadline, self._conduct, self._clock = client, on_deadline, conduct, clock
        self._leases: dict[str, _SentProgress] = {}
        self._changed, self._closing = threading.Condition(), False
        self._on_probation = True  # until the hub says otherwise: unneeded progress does no harm
        self._thread = threading.Thread(target=self._run, name="showing", daemon=True)

    def __enter__(self) -> ProgressSender:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def hear(self, reply: HeartbeatReply) -> None:
        self._on_probation = reply.node.on_probation

    def of(self, lease: Lease) -> OnChunks | None:
        """The function that an engine calls with finished chunks of a lease; None if the node is past probation."""
        if not self._on_probation:
            return None
        fresh = _SentProgress(lease, self._clock.monotonic_s() + _every_s(lease))
        with self._changed:
            return partial(self._see, self._leases.setdefault(lease.lease, fresh))

    def _see(self, shown: _SentProgress, take: Callable[[], dict[int, Chunks]]) -> None:
        """Runs in the engine's thread: keep a snapshot for the sender, if one is due."""
        now_s = self._clock.monotonic_s()
        if shown.ended or now_s < shown.due_s or not self._on_probation:
            return
        by_seed = take()
        latest = {row: by_seed[seed] for row, seed in enumerate(shown.lease.seed_numbers) if seed in by_seed}
        with self._changed:
            shown.due_s = now_s + _every_s(shown.lease)
            shown.ended = not all(shown.is_continued_by(rollout, found) for rollout, found in latest.items())
            shown.latest, shown.fresh = latest, True
            self._changed.notify()

    def keeps_word(self, lease: str, group: Sequence[Completion]) -> bool:
        with self._changed:
            if (shown := self._leases.pop(lease, None)) is None:
                return True
            shown.ended = True
            return shown.is_beginning_of(group)

    def forget(self, lease: str) -> None:
        with self._changed:
            if (shown := self._leases.pop(lease, None)) is not None:
                shown.ended = True

    def _run(self) -> None:
        def found() -> _SentProgress | None:
            return next((shown for shown in self._leases.values() if shown.fresh and not shown.ended), None)

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or found() is not None)
                if self._closing or (shown := found()) is None:
                    return
                part, shown.fresh = shown.part(), False
            if part is not None:
                self._send(shown, part)

    def _send(self, shown: _SentProgress, part: ShownProgress) -> None:
        name, before = shown.lease.lease, list(shown.have)
        try:
            reply = self._client.patient(PATIENCE_S).show(name, self._conduct.shown(part, shown.lease))
        except HubRefused as refusal:
            log.info("progress on unit %d is not shown any more: %s", shown.lease.unit, refusal)
            shown.ended = True
        except (HubUnreachable, DeadlineExceeded, ProtocolError) as error:
            log.debug("progress on unit %d was not shown, the next snapshot is: %s", shown.lease.unit, error)
        else:
            self._on_deadline(name, reply.deadline_ms)
            if len(reply.tokens) == len(before):
                shown.have = reply.tokens
                shown.fresh |= list(reply.tokens) != before  # there may be more than one part


def _every_s(lease: Lease) -> float:
    return (lease.deadline_ms - lease.issued_at_ms) / 1000 / SHOWINGS_PER_LEASE
