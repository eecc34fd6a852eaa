"""What the trainer calls: announcements, batches and their rollouts, step reports."""

from __future__ import annotations

from shoal.errors import ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, node_label
from shoal.hub.state import batches, policies
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Moment, NodeRow
from shoal.hub.storage import Writer
from shoal.protocol import (
    Batch,
    BatchGroup,
    BatchReply,
    PolicyAnnouncement,
    SignedDocument,
    StepReport,
    Submission,
    TrainingBatch,
    TrainingGroup,
    TrainingRollout,
    open_document,
    pack,
    unpack,
)


class Training:
    def __init__(self, context: Context) -> None:
        self._context = context

    def announce(self, node: NodeRow, signed: SignedDocument) -> None:
        """A version is out: work is given out under it from now on."""
        context = self._context
        try:
            announcement = open_document(signed, PolicyAnnouncement, node.public_key)
        except ProtocolError as error:
            raise Refusal(422, "policy.signature", str(error)) from error
        if announcement.run != context.config.run_id:
            raise Refusal(422, "policy.run", f"the announcement is for run {announcement.run[:80]}")
        policy = announcement.policy
        with context.decision() as (transaction, moment):
            standing = policies.Standing(
                alive=transaction.alive_units(),
                leases=[holding.lease for holding in transaction.holdings()],
                batched=transaction.batched_units(),
            )
            known = transaction.policy(policy.incarnation, policy.version)
            transaction.apply(policies.announce(moment, known, standing, policy))
        context.changes.notify(*Topic)

    def batch(self, node: NodeRow, step: int) -> BatchReply:
        """The batch of a step: the one written down, or a new one written down now, or what it waits for."""
        context = self._context
        with context.decision(sweep=True) as (transaction, moment):
            batch = transaction.batch(step)
            waiting = "" if batch is not None else self._write_down(transaction, moment, step)
            batch = batch or transaction.batch(step)
        if batch is None:
            context.waits.waiting(node_label(node), f"a batch: {waiting}", moment.now_ms)
            return BatchReply(waiting=waiting)
        context.waits.done(node_label(node))
        context.changes.notify(Topic.LEASES)
        return BatchReply(batch=batch)

    def _write_down(self, transaction: Writer, moment: Moment, step: int) -> str:
        """Write the batch down if it is complete; otherwise what it waits for."""
        alive = transaction.alive_units()
        choice = batches.choose(moment, alive, step)
        if choice.units is None:
            return choice.waiting
        names = [unit.submission for unit in choice.units if unit.submission is not None]
        sampled = batches.Sampled(transaction.submissions_named(names), transaction.dropped_submissions(step))
        _batch, commands = batches.write_down(moment, alive, choice.units, sampled)
        transaction.apply(commands)
        return ""

    def rollouts(self, step: int) -> bytes:
        """The groups of a written batch with the validators' rewards, packed."""
        with self._context.storage.read() as reader:
            batch = reader.batch(step)
        if batch is None:
            raise Refusal(404, "batch.unknown", f"step {step} has no batch yet: ask for it with POST /batches/{step}")
        return pack(self._training_batch(batch))

    def report(self, report: StepReport) -> None:
        with self._context.storage.write() as transaction:
            transaction.put_report(report, self._context.clock.now_ms())

    def _training_batch(self, batch: Batch) -> TrainingBatch:
        return TrainingBatch(step=batch.step, groups=[self._training_group(group) for group in batch.groups])

    def _training_group(self, group: BatchGroup) -> TrainingGroup:
        body = self._context.blobs.get(group.submission)
        submission = unpack(body, Submission, self._context.config.submission_limits)
        with self._context.storage.read() as reader:
            unit = reader.unit(group.unit)
        assert unit is not None, "a batch holds units of this run only"
        rollouts = [
            TrainingRollout(tokens=rollout.tokens, logprobs=rollout.logprobs, finish=rollout.finish, reward=reward)
            for rollout, reward in zip(submission.rollouts, group.rewards, strict=True)
        ]
        return TrainingGroup(
            unit=group.unit,
            task=unit.task,
            version=group.policy.version,
            prompt=submission.prompt,
            rollouts=rollouts,
        )
