"""What validators call: audits, the bytes of submissions, verdicts."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, node_label, require_trusted
from shoal.hub.service.measuring import Evaluating, in_force_of, require_environment, wanted_of
from shoal.hub.service.showing import Showing, unknown_submission
from shoal.hub.service.work import Work
from shoal.hub.state import Refusal, alarm, audits, newcomers, pacing, reputation
from shoal.hub.state.audits import Ruling, VerdictCase
from shoal.hub.state.rows import Moment, NodeRow, SubmissionRow, SubmissionState, TraceRow
from shoal.hub.storage import Reader, Writer
from shoal.protocol import verdict as messages
from shoal.protocol.codec import pack
from shoal.protocol.signing import SignedDocument
from shoal.protocol.verdict import AuditReply, AuditRequest, Outcome, RefusedVerdict, Severity, Verdict
from shoal.runtime.crash import point

AT_ONCE = 8  # verdicts of one transaction over a shared database
MAX_BODIES_BYTES = 64 * 1024 * 1024


class Checking:
    def __init__(self, context: Context, work: Work, evaluating: Evaluating, showing: Showing) -> None:
        self._context, self._work, self._evaluating, self._showing = context, work, evaluating, showing
        self._saved = 0.0  # tokens of audits that newcomers have a claim to

    def audits(self, node: NodeRow, request: AuditRequest) -> AuditReply:
        """Submissions to check; units to generate that nobody could judge; and a slice of an evaluation, if wanted now
        or if there is nothing to check."""
        evaluates = request.evaluate != "no" and self._context.rules.evaluation is not None
        if evaluates and request.evaluate != "idle":
            self._evaluating.prepare(node)
        reply = self._claim(node, request, evaluates)
        idle = evaluates and not (reply.audits or reply.evaluation or reply.finished)
        if idle and self._evaluating.prepare(node):
            reply = self._claim(node, request, evaluates)
        generates = request.generates and request.evaluate != "only" and not reply.finished
        leases = self._work.lease_to_validator(node, request) if generates else ()
        if leases:
            self._context.waits.done(node_label(node))
        return reply.model_copy(update={"generate": leases}) if leases else reply

    def _claim(self, node: NodeRow, request: AuditRequest, evaluates: bool) -> AuditReply:
        context, slice_ = self._context, None
        with context.decision() as (transaction, moment):
            orders = require_trusted(transaction, node.public_key)
            transaction.apply(audits.put_back(transaction.overdue_audits(moment.now_ms)))
            free = []
            if request.evaluate != "only":
                lost = [row for row in transaction.claimed_by(node.node) if row.submission not in request.left]
                transaction.apply(audits.put_back(lost))
                free = self._next(transaction, moment, request.max_audits)
            claims = audits.claim(moment, free, node.node)
            transaction.apply(claims)
            if evaluates:
                slice_ = self._evaluating.claim(transaction, moment, node, request.evaluate != "idle" or not claims)
            if claims:
                point("hub.audit.before_commit")
        with context.storage.read() as reader:  # not above: a claim must lock no node
            found = tuple(self._audit(reader, each.row) for each in claims)
            pending = bool(claims) or bool(reader.submissions_in([SubmissionState.AUDITING], 1))
            if request.evaluate != "only":
                idle = not claims and slice_ is None
                shown = self._showing.audit(reader, moment, (audit.size_bytes for audit in found), idle)
                found = found if shown is None else (*found, shown)
            calibration = {"calibration": in_force_of(reader).digest, "wanted": wanted_of(reader)}
        if found:
            point("hub.audit.after_commit")
        if found or slice_ is not None:
            context.waits.done(node_label(node))
            evaluation = None if slice_ is None else self._evaluating.document(slice_)
            return AuditReply(audits=found, evaluation=evaluation, **calibration)
        finished = pacing.is_finished(moment.rules, moment.progress) and not pending
        if finished and not (evaluates and self._evaluating.pending()):
            context.waits.done(node_label(node))
            return AuditReply(waiting="the run is finished", finished=True, **calibration)
        halted = orders.halted(moment.now_ms)
        waiting = "submissions: none is waiting to be checked" + (f"; {halted}" if halted else "")
        context.waits.waiting(node_label(node), waiting, moment.now_ms)
        return AuditReply(waiting=waiting, **calibration)

    def _next(self, transaction: Writer, moment: Moment, count: int) -> list[SubmissionRow]:
        share = moment.rules.newcomer_share
        if share >= 1 or not transaction.is_established_here(moment.now_ms - newcomers.HERE_MS):
            return transaction.submissions_in([SubmissionState.RECEIVED], count)
        established = transaction.waiting_audits(on_probation=False, limit=count)
        waiting = transaction.waiting_audits(on_probation=True, limit=count)
        chosen, self._saved = newcomers.choose(established, waiting, self._saved, count, share)
        return chosen

    def verdicts(self, node: NodeRow, report: messages.VerdictReport) -> messages.VerdictReply:
        """Apply verdicts; those that do not fit are named. Where hubs share a database, a few nodes' in a transaction:
        none is locked for long for others' sake."""
        rulings, refused, traces = list[Ruling](), list[RefusedVerdict](), dict[str, TraceRow]()
        for signed in report.verdicts:
            try:
                verdict = self._context.opened(signed, Verdict, node.public_key, "verdict")
                if not (digest := verdict.environment_digest):
                    sentence = "the verdict does not say which environment it was scored with"
                    raise Refusal(422, "verdict.environment", sentence)
                require_environment(self._context, digest, "verdict.environment", "verdict")
                rulings.append(Ruling(verdict, node.node, signed.model_dump_json()))
                if self._context.config.records:
                    traces |= _trace(verdict.submission, report.traces.get(verdict.submission))
            except Refusal as refusal:
                refused.append(_refused(str(signed.document.get("submission", ""))[:64], refusal))
        self._showing.keep(ruling.verdict for ruling in rulings)
        most = max(1, len(rulings))
        if self._context.storage.is_shared:
            rulings.sort(key=lambda ruling: ruling.verdict.node)
            most = AT_ONCE
        for first in range(0, max(1, len(rulings)), most):
            refused += self._rule(node, rulings[first : first + most], traces)
        failed = any(ruling.verdict.outcome != Outcome.ACCEPTED for ruling in rulings)
        # what waited for a light audit may wait for a full one now, and a unit for a validator
        self._context.changes.notify(Topic.LEASES, Topic.BATCHES, *((Topic.AUDITS,) if failed else ()))
        return messages.VerdictReply(refused=tuple(refused))

    def _rule(
        self, validator: NodeRow, rulings: Sequence[Ruling], traces: Mapping[str, TraceRow]
    ) -> list[RefusedVerdict]:
        refused, counted = list[RefusedVerdict](), list[tuple[NodeRow, Verdict]]()
        with self._context.decision(counted=False) as (transaction, moment):
            require_trusted(transaction, validator.public_key)
            transaction.lock_nodes(ruling.verdict.node for ruling in rulings)
            for ruling in rulings:
                verdict = ruling.verdict
                try:
                    case = self._case(transaction, moment, verdict)
                    moment = self._context.moment(transaction)
                    commands = audits.judge(moment, case, ruling)
                    transaction.apply(commands)
                    if commands and verdict.submission in traces:
                        transaction.apply([traces[verdict.submission]])
                    steered = verdict.branches.differences or verdict.reason == reputation.STEERED
                    if commands and steered:  # no commands: the same verdict again
                        counted.append((case.node, verdict))
                    if verdict.outcome == Outcome.ACCEPTED and case.node.on_probation:
                        self._context.turns.earned(case.node.network, case.node.node, moment.now_ms)
                except Refusal as refusal:
                    refused.append(_refused(verdict.submission, refusal))
                    if refusal.code == audits.DECIDED:
                        transaction.apply(audits.disagreement(moment, case.submission, ruling))
            if counted:
                transaction.frontier()  # one at a time: the evidence of many nodes is in one row
            for each, verdict in counted:
                _suspect(transaction, moment, each, verdict)
            point("hub.verdict.before_commit")
        point("hub.verdict.after_commit")
        return refused

    def bodies(self, names: Sequence[str]) -> bytes:
        shown = {name: body for name in names if (body := self._showing.body(name)) is not None}
        with self._context.storage.read() as reader:
            known = reader.submissions_named(names)
        for name in names:
            if name not in known and name not in shown:
                raise unknown_submission(name)
        if sum(row.size_bytes for row in known.values()) + sum(map(len, shown.values())) > MAX_BODIES_BYTES:
            raise Refusal(413, "submission.too_many", f"together they exceed {MAX_BODIES_BYTES} bytes: ask for fewer")
        bodies = [shown[name] if name in shown else self._context.blobs.get(name) for name in names]
        return pack(messages.SubmissionBodies(bodies), level=1)

    def _case(self, transaction: Writer, moment: Moment, verdict: Verdict) -> VerdictCase:
        submission = transaction.submission(verdict.submission) or self._showing.receive(transaction, moment, verdict)
        unit, node = transaction.unit(submission.unit), transaction.node(submission.node)
        assert unit is not None, "a foreign key ties a submission to its unit"
        assert node is not None, "a foreign key ties a submission to its node"
        case = VerdictCase(submission, unit, node)
        if verdict.outcome != Outcome.REJECTED and not node.failed_at_ms:
            return case
        held = transaction.holding(submission.lease)
        assert held is not None, "a foreign key ties a submission to its lease"
        case = replace(case, leased_at_ms=held.lease.issued_at_ms)
        if verdict.outcome != Outcome.REJECTED:
            return case
        if verdict.severity is Severity.STATISTICAL:
            profile = SignedDocument.model_validate_json(held.lease.document).document["profile"]
            node = replace(node, kind=str(profile))  # it may have asked for another kind of lease since
            same_kind = transaction.same_kind(node.kind, verdict.reason, moment.now_ms - reputation.WITHIN_MS)
            case = replace(case, node=node, same_kind=same_kind)
        return replace(
            case, holdings=transaction.holdings(node.node), untrained=transaction.untrained(node.node),
            light=transaction.light_audits(node.node), pending=transaction.pending_credit(node.node),
        )  # fmt: skip

    def _audit(self, reader: Reader, row: SubmissionRow) -> messages.Audit:
        holding, node = reader.holding(row.lease), reader.node(row.node)
        assert holding is not None, "a foreign key ties a submission to its lease"
        assert node is not None, "a foreign key ties a submission to its node"
        groups = reputation.evidence_groups(node)
        pooled = [_suspicion(reader, key).evidence.value for key in groups]
        evidence = max(node.gains.value, node.gains.recent, *pooled)
        # the pooled evidence of newer nodes is held only against nodes on probation
        distrusted: Literal["", "its owner", "newcomers"] = ""
        if node.owner and _suspicion(reader, f"gains/{node.owner}").distrusted:
            distrusted = "its owner"
        elif node.on_probation and _suspicion(reader, reputation.NEWER).distrusted:
            distrusted = "newcomers"
        return messages.Audit(
            submission=row.submission, size_bytes=row.size_bytes,
            lease=self._context.signed_before(holding.lease.document), received_at_ms=row.received_at_ms,
            deadline_ms=row.claimed_until_ms or 0, depth=row.depth, record=node.record,
            shown=self._showing.prefixes(reader, row.lease), newcomer=node.on_probation, trusted=node.is_ours,
            gains=node.gains, look_share=messages.look_share(node.passed, evidence), distrusted=distrusted,
        )  # fmt: skip


def _trace(submission: str, text: str | None) -> dict[str, TraceRow]:
    """What a validator saw at each token; none if that is no base64."""
    if not text:
        return {}
    try:
        return {submission: TraceRow(submission, base64.b64decode(text, validate=True))}
    except ValueError:
        return {}


def _suspicion(reader: Reader, key: str) -> reputation.Suspicion:
    stored = reader.setting(key)
    return reputation.Suspicion() if stored is None else reputation.Suspicion.model_validate_json(stored)


def _suspect(transaction: Writer, moment: Moment, node: NodeRow, verdict: Verdict) -> None:
    for key, whose in reputation.evidence_groups(node).items():
        before = _suspicion(transaction, key)
        after = before.after(verdict)
        if after != before:
            transaction.put_setting(key, after.model_dump_json())
        if after.distrusted and not before.distrusted:
            whom = "one owner" if whose == "its owner" else "newcomers"
            message = f"tokens that pass only by the tolerance are chosen for their reward, by nodes of {whom}"
            transaction.apply([alarm(moment, reputation.STEERED, message)])


def _refused(submission: str, refusal: Refusal) -> RefusedVerdict:
    return RefusedVerdict(submission=submission, status=refusal.status, code=refusal.code, message=refusal.sentence)
