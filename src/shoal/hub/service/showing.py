"""Progress that nodes on probation show: taken in from them, given to validators, held against what they submit.

    POST /leases/{lease}/progress ─► caps, form ─► a part in the database ─► the lease is renewed
    POST /audits ─► one rollout of one lease, now and then ─► prefilled ─ wrong ─► verdict ─► as if it were submitted
                                                                       └ right, or unsure ─► nothing is said
    PUT /submissions ─► audit with what was shown

Due leases, and what validators were given, are kept in this process. Another hub finds such leases in the database;
after a restart a lease is looked at again.
"""

import threading
from collections.abc import Iterable
from dataclasses import replace

from shoal import protocol
from shoal.errors import CodecError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context
from shoal.hub.state import Refusal, Save, draws, leases, submissions
from shoal.hub.state.rows import LeaseRow, LeaseState, Moment, NodeRow, SubmissionRow
from shoal.hub.storage import Reader, Writer
from shoal.protocol import SHOWN_BYTES, BodyLimits, ProgressReply, ShownPrefix, ShownProgress, pack, unpack
from shoal.protocol.verdict import Audit, Outcome, Severity, Verdict

SHOWN_LIMITS = BodyLimits(compressed_bytes=SHOWN_BYTES, inflated_bytes=SHOWN_BYTES)
AUDIT_SHARE = 1 / 16  # of shown progress, of the bytes that validators are given while submissions wait
MOST_GIVEN = 64
SEARCH_EVERY_MS, SEARCH_SHARED_MS = 60_000, 1_000
"""How often the database is searched for shown leases: by the only hub, which hears of them, and by one of several."""


class Showing:
    def __init__(self, context: Context) -> None:
        self._context, self._lock = context, threading.Lock()
        self._looked_at: dict[str, int] = {}  # lease: its shown tokens when it was last given to a validator
        self._due: dict[str, tuple[int, int]] = {}  # lease: its deadline and shown tokens when they were last seen
        self._searched_ms = -SEARCH_EVERY_MS
        self._given: dict[str, tuple[str, bytes]] = {}  # lease and bytes by digest, the newest last
        self._saved_bytes = 0.0

    def show(self, node: NodeRow, lease: str, body: bytes) -> ProgressReply:
        try:
            said = unpack(body, ShownProgress, SHOWN_LIMITS)
        except CodecError as error:
            raise Refusal(422, "progress.malformed", str(error)) from error
        context = self._context
        with context.storage.write(durable=False) as transaction:
            transaction.lock_nodes([node.node])
            fresh = transaction.node(node.node) or node
            held = submissions.check_owner(transaction.holding(lease), node.node, lease)
            if held.lease.state is not LeaseState.ACTIVE:
                raise Refusal(410, submissions.LATE, f"lease {lease} has ended: it is {held.lease.state.value}")
            last = transaction.last_shown(lease)
            tokens, part, new = submissions.take_shown(context.rules, context.config.proof, lease, last, said.chunks)
            if part is None or not fresh.on_probation:  # what established nodes show is not checked, so it is not kept
                return ProgressReply(tokens=tokens, deadline_ms=held.lease.deadline_ms)
            moment = context.moment(transaction, counted=False)
            renewed = leases.renew(moment, [held.lease], {lease: sum(tokens)})
            transaction.apply([replace(part, body=pack(ShownProgress(new))), *renewed])
        with self._lock:
            self._note([each.row for each in renewed])
        context.changes.notify(Topic.AUDITS)
        deadline_ms = renewed[0].row.deadline_ms if renewed else held.lease.deadline_ms
        return ProgressReply(tokens=tokens, deadline_ms=deadline_ms)

    def prefixes(self, reader: Reader, lease: str) -> tuple[ShownPrefix, ...]:
        return submissions.prefixes(self._shown(reader, lease))

    def _shown(self, reader: Reader, lease: str) -> dict[int, tuple[bytes, bytes]]:
        limits, parts = BodyLimits(inflated_bytes=2 * SHOWN_BYTES), reader.shown(lease)
        return submissions.joined_parts([unpack(part.body, ShownProgress, limits).chunks for part in parts])

    def audit(self, reader: Reader, moment: Moment, claimed: Iterable[int], idle: bool) -> Audit | None:
        """One rollout of the due lease that ends first, for a validator that `claimed` submissions of so many bytes."""
        with self._lock:
            self._saved_bytes += AUDIT_SHARE * sum(claimed)
            row = self._next(reader, moment.now_ms)
            if row is None:
                self._saved_bytes = 0.0
                return None
            signed = self._context.signed_before(row.document)
            body = self._sampled(reader, row, signed)
            if len(body) > self._saved_bytes and not idle:
                return None
            self._saved_bytes = max(0.0, self._saved_bytes - len(body))
            self._looked_at[row.lease] = row.progress
            name = protocol.submission_digest(body)
            self._given[name] = (row.lease, body)
            while len(self._given) > MOST_GIVEN:
                del self._given[next(iter(self._given))]
        return Audit(
            submission=name, size_bytes=len(body), lease=signed, received_at_ms=moment.now_ms,
            deadline_ms=moment.now_ms + moment.rules.audit_ms, depth="progress",
        )  # fmt: skip

    def _is_due(self, row: LeaseRow) -> bool:
        return row.progress >= max(1, submissions.GROWTH * self._looked_at.get(row.lease, 0))

    def _note(self, rows: Iterable[LeaseRow]) -> None:
        self._due.update({row.lease: (row.deadline_ms, row.progress) for row in rows if self._is_due(row)})

    def _next(self, reader: Reader, now_ms: int) -> LeaseRow | None:
        every_ms = SEARCH_SHARED_MS if self._context.storage.is_shared else SEARCH_EVERY_MS
        if now_ms - self._searched_ms >= every_ms:
            self._searched_ms, showing = now_ms, reader.showing()
            self._looked_at = {row.lease: n for row in showing if (n := self._looked_at.get(row.lease)) is not None}
            self._note(showing)
        while self._due:
            lease = min(self._due, key=self._due.__getitem__)
            held = reader.holding(lease)
            row = held.lease if held is not None and held.lease.state is LeaseState.ACTIVE else None
            if row is not None and row.progress < self._due[lease][1]:
                return None  # this view is older than what was shown: the next request sees it
            if row is not None and self._is_due(row):
                return row
            del self._due[lease]
        return None

    def _sampled(self, reader: Reader, row: LeaseRow, signed: protocol.SignedDocument) -> bytes:
        """A submission with only what was shown of one rollout; nobody knows in advance of which."""
        shown, lease = self._shown(reader, row.lease), protocol.Lease.model_validate(signed.document)
        tokens = [len(shown.get(rollout, (b"", b""))[0]) for rollout in range(self._context.rules.group_size)]
        fraction = draws.audit_fraction(self._context.secret, f"progress/{row.lease}/{sum(tokens)}")
        picked = submissions.next_shown_rollout(tokens, fraction)
        rollouts = [protocol.Rollout(tokens=b"", logprobs=b"", finish="length")] * len(tokens)
        ids, proofs = shown[picked]
        rollouts[picked] = protocol.Rollout(tokens=ids, logprobs=b"", finish="length", proofs=proofs)
        made = protocol.Submission(
            format=protocol.SUBMISSION_FORMAT, run=lease.run, node=row.node, lease=row.lease, unit=row.unit,
            incarnation=row.incarnation, version=row.version, policy_digest=row.digest,
            prompt=protocol.pack_tokens(lease.prompt_ids), rollouts=rollouts,
        )  # fmt: skip
        return pack(made)

    def body(self, name: str) -> bytes | None:
        return self._given[name][1] if name in self._given else None

    def keep(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            body = self.body(verdict.submission)
            if body is not None and _is_failure(verdict):
                self._context.blobs.put(body)

    def receive(self, transaction: Writer, moment: Moment, verdict: Verdict) -> SubmissionRow:
        """Store the shown progress that failed as the submission of its lease. The lease may have ended: giving it back
        does not undo what was shown. The unit stays as it is; the ban reopens it if the node still holds it."""
        if verdict.submission not in self._given:
            raise unknown_submission(verdict.submission)
        lease, body = self._given[verdict.submission]
        if not _is_failure(verdict):
            raise Refusal(422, "verdict.progress", "of shown progress nothing is reported but a certain failure")
        held = transaction.holding(lease)
        assert held is not None, "leases are never deleted"
        if (verdict.unit, verdict.node) != (held.lease.unit, held.lease.node):
            raise Refusal(422, "verdict.mismatch", "the verdict names another unit or node than the shown lease")
        if transaction.submission_of_lease(lease) is not None:
            raise Refusal(409, "verdict.late", f"lease {lease} has a submission, which is judged by itself")
        arrival = submissions.Arrival(verdict.node, lease, verdict.submission, len(body), depth="progress")
        row = submissions.new_row(held.lease, arrival, moment.now_ms)
        transaction.apply([Save(row, None)])
        return row


def _is_failure(verdict: Verdict) -> bool:
    certain = verdict.outcome is Outcome.REJECTED and verdict.severity is Severity.CERTAIN
    return certain and verdict.reason.startswith("progress.")


def unknown_submission(name: str) -> Refusal:
    return Refusal(404, "submission.unknown", f"there is no submission {name[:64]} in this run")
