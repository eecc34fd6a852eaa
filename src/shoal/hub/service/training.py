"""What the trainer calls: announcements, batches and their rollouts, step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.errors import ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, node_label
from shoal.hub.service.owner import orders_of, require_trusted
from shoal.hub.state import batches, evaluations, policies
from shoal.hub.state.commands import Command, RaiseAlarm
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Moment, NodeRow, UnitRow
from shoal.hub.storage import Reader, Writer
from shoal.protocol import (
    Batch,
    BatchGroup,
    BatchReply,
    PolicyAnnouncement,
    PolicyRef,
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
from shoal.runtime.crash import point


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
        with context.decision(exclusive=True) as (transaction, moment):
            require_trusted(transaction, node.public_key)
            standing = policies.Standing(
                alive=transaction.alive_units(),
                leases=[holding.lease for holding in transaction.holdings()],
                batched=transaction.batched_units(),
            )
            known = transaction.policy(policy.incarnation, policy.version)
            announced = policies.announce(moment, known, standing, policy)
            transaction.apply(announced)
            if announced:
                transaction.apply(self._evaluation(transaction, moment, policy))
            point("hub.policy.before_commit")
        point("hub.policy.after_commit")
        context.changes.notify(*Topic)

    def _evaluation(self, reader: Reader, moment: Moment, policy: PolicyRef) -> list[Command]:
        """What validators are to measure of a version that is new."""
        if moment.rules.evaluation is None:
            return []
        tasks = len(self._context.config.environment.tasks("held_out"))
        return evaluations.offer(moment, policy, tasks, reader.evaluations_under_way())

    def batch(self, node: NodeRow, step: int) -> BatchReply:
        """The batch of a step: the one written down, or a new one written down now, or what it waits for."""
        context = self._context
        if context.storage.is_shared and (waiting := self._glance(step)):
            context.waits.waiting(node_label(node), f"a batch: {waiting}", context.clock.now_ms())
            return BatchReply(waiting=waiting)
        with context.decision(sweep=True, exclusive=True) as (transaction, moment):
            require_trusted(transaction, node.public_key)
            batch = transaction.batch(step)
            waiting = "" if batch is not None else self._write_down(transaction, moment, step)
            batch = batch or transaction.batch(step)
        if batch is None:
            context.waits.waiting(node_label(node), f"a batch: {waiting}", moment.now_ms)
            return BatchReply(waiting=waiting)
        point("hub.batch.after_commit")
        context.waits.done(node_label(node))
        context.changes.notify(Topic.LEASES)
        return BatchReply(batch=batch)

    def _glance(self, step: int) -> str:
        """What the batch waits for, without making anybody wait: an exclusive decision stops all hubs for a moment."""
        context = self._context
        with context.storage.read() as reader:
            if reader.batch(step) is not None:
                return ""
            moment = Moment(context.rules, reader.progress(counted=False), context.clock.now_ms())
            return self._choose(reader, moment, step)[0].waiting

    def _choose(self, reader: Reader, moment: Moment, step: int) -> tuple[batches.Choice, Sequence[UnitRow]]:
        """The units of the batch, or what it waits for; and those it was chosen among. None while the run is paused."""
        orders = orders_of(reader)
        halted = orders.halted(moment.now_ms)
        if orders.conduct == "paused":
            return batches.Choice(waiting=halted), ()
        few = batches.too_few(moment, reader.alive_counts(), step)
        alive = () if few else reader.alive_units()
        choice = batches.Choice(waiting=few) if few else batches.choose(moment, alive, step)
        if choice.units is None and halted:
            return batches.Choice(waiting=f"{choice.waiting.removesuffix(batches.NOBODY_ASKS)}; {halted}"), alive
        return choice, alive

    def _write_down(self, transaction: Writer, moment: Moment, step: int) -> str:
        """Write the batch down if it is complete; otherwise what it waits for."""
        choice, alive = self._choose(transaction, moment, step)
        if choice.units is None:
            return choice.waiting
        sampled = self._sampled(transaction, moment, choice.units, step)
        leases = [holding.lease for holding in transaction.holdings()] if moment.rules.max_staleness else []
        _batch, commands = batches.write_down(moment, alive, choice.units, sampled, leases)
        transaction.apply(commands)
        point("hub.batch.before_commit")
        return ""

    def _sampled(self, transaction: Writer, moment: Moment, chosen: Sequence[UnitRow], step: int) -> batches.Sampled:
        names = [unit.submission for unit in chosen if unit.submission is not None]
        sampled = batches.Sampled(transaction.submissions_named(names), transaction.dropped_submissions(step))
        if moment.rules.pools is None:
            return sampled
        lost = transaction.units_named([row.unit for row in sampled.dropped])
        tasks = {unit.unit: unit.task for unit in (*chosen, *lost.values())}
        return replace(sampled, tasks=tasks, known=transaction.task_rows(sorted(set(tasks.values()))))

    def rollouts(self, step: int) -> bytes:
        """The groups of a written batch with the validators' rewards, packed."""
        with self._context.storage.read() as reader:
            batch = reader.batch(step)
        if batch is None:
            raise Refusal(404, "batch.unknown", f"step {step} has no batch yet: ask for it with POST /batches/{step}")
        return pack(self._training_batch(batch))

    def report(self, report: StepReport) -> None:
        now_ms = self._context.clock.now_ms()
        with self._context.storage.write() as transaction:
            transaction.put_report(report.model_copy(update={"alarms": {}}), now_ms)
            transaction.apply([RaiseAlarm(report.step, code, text, now_ms) for code, text in report.alarms.items()])

    def _training_batch(self, batch: Batch) -> TrainingBatch:
        return TrainingBatch(step=batch.step, groups=[self._training_group(group) for group in batch.groups])

    def _training_group(self, group: BatchGroup) -> TrainingGroup:
        body = self._context.blobs.get(group.submission)
        submission = unpack(body, Submission, self._context.config.submission_limits)
        with self._context.storage.read() as reader:
            unit = reader.unit(group.unit)
        assert unit is not None, "a batch holds units of this run only"
        rollouts = [
            TrainingRollout(
                tokens=rollout.tokens,
                logprobs=rollout.logprobs,
                finish=rollout.finish,
                reward=reward,
                given=rollout.given,
            )
            for rollout, reward in zip(submission.rollouts, group.rewards, strict=True)
        ]
        return TrainingGroup(
            unit=group.unit, task=unit.task, version=group.policy.version, prompt=submission.prompt, rollouts=rollouts
        )
