"""What validators call: audits, the bytes of submissions, verdicts."""

from __future__ import annotations

from shoal.errors import ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, node_label
from shoal.hub.state import pacing
from shoal.hub.state.audits import Case, Ruling, claim, expire, judge
from shoal.hub.state.machines import SubmissionState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import NodeRow, SubmissionRow
from shoal.hub.storage import Reader, Writer
from shoal.protocol import Audit, AuditReply, AuditRequest, Outcome, SignedDocument, Verdict, open_document


class Checking:
    def __init__(self, context: Context) -> None:
        self._context = context

    def audits(self, node: NodeRow, request: AuditRequest) -> AuditReply:
        """Submissions to check, claimed for this validator until their deadline."""
        context = self._context
        with context.decision() as (transaction, moment):
            transaction.apply(expire(transaction.overdue_audits(moment.now_ms), moment.now_ms))
            free = transaction.submissions_in([SubmissionState.RECEIVED], request.max_audits)
            claims = claim(moment, free, node.node, request.max_audits)
            transaction.apply(claims)
            found = tuple(self._audit(transaction, claimed.row) for claimed in claims)
            pending = bool(claims) or bool(transaction.submissions_in([SubmissionState.AUDITING], 1))
        if found:
            context.waits.done(node_label(node))
            return AuditReply(audits=found)
        finished = pacing.is_finished(moment.rules, moment.progress) and not pending
        waiting = "the run is finished" if finished else "submissions: none is waiting to be checked"
        if finished:
            context.waits.done(node_label(node))
        else:
            context.waits.waiting(node_label(node), waiting, moment.now_ms)
        return AuditReply(waiting=waiting, finished=finished)

    def verdict(self, node: NodeRow, signed: SignedDocument) -> None:
        """Apply a verdict that this very validator signed."""
        context = self._context
        try:
            verdict = open_document(signed, Verdict, node.public_key)
        except ProtocolError as error:
            raise Refusal(422, "verdict.signature", str(error)) from error
        if verdict.run != context.config.run_id:
            raise Refusal(422, "verdict.run", f"the verdict is for run {verdict.run[:80]}")
        ruling = Ruling(verdict, node.node, signed.model_dump_json())
        with context.decision() as (transaction, moment):
            case = self._case(transaction, verdict)
            transaction.apply(judge(moment, case, ruling))
        context.changes.notify(Topic.LEASES, Topic.BATCHES)

    def submission_body(self, submission: str) -> bytes:
        with self._context.storage.read() as reader:
            if reader.submission(submission) is None:
                raise _unknown(submission)
        return self._context.blobs.get(submission)

    def _case(self, transaction: Writer, verdict: Verdict) -> Case:
        submission = transaction.submission(verdict.submission)
        if submission is None:
            raise _unknown(verdict.submission)
        unit, node = transaction.unit(submission.unit), transaction.node(submission.node)
        assert unit is not None, "a foreign key ties a submission to its unit"
        assert node is not None, "a foreign key ties a submission to its node"
        # Only a ban touches the node's other leases.
        holdings = transaction.holdings(submission.node) if verdict.outcome == Outcome.REJECTED else []
        return Case(submission, unit, node, tuple(holdings))

    def _audit(self, reader: Reader, row: SubmissionRow) -> Audit:
        holding = reader.holding(row.lease)
        assert holding is not None, "a foreign key ties a submission to its lease"
        return Audit(
            submission=row.submission,
            size_bytes=row.size_bytes,
            lease=SignedDocument.model_validate_json(holding.lease.document),
            received_at_ms=row.received_at_ms,
            deadline_ms=row.claimed_until_ms or 0,
        )


def _unknown(submission: str) -> Refusal:
    return Refusal(404, "submission.unknown", f"there is no submission {submission[:64]} in this run")
