"""What the trainer calls: announcements, batches and their rollouts, step reports."""

import json
from dataclasses import replace

from shoal.environments import columns_of
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, node_label, orders_of, require_trusted
from shoal.hub.state import Moment, NodeRow, RaiseAlarm, Refusal, UnitRow, UnitState, batches, evaluations
from shoal.hub.storage import Reader, Writer
from shoal.protocol import PolicyAnnouncement, SignedDocument, Submission, pack, unpack
from shoal.protocol.batch import BatchReply, StepReport, TrainingBatch, TrainingGroup, TrainingRollout
from shoal.runtime.crash import point


class Training:
    def __init__(self, context: Context) -> None:
        self._context = context

    def announce(self, node: NodeRow, signed: SignedDocument) -> None:
        context = self._context
        policy = context.opened(signed, PolicyAnnouncement, node.public_key, "policy").policy
        with context.decision(exclusive=True) as (transaction, moment):
            require_trusted(transaction, node.public_key)
            announced = batches.announce(
                moment, policy, known=transaction.policy(policy.incarnation, policy.version),
                alive=transaction.alive_units(), leases=[holding.lease for holding in transaction.holdings()],
                batched=transaction.batched_units(),
            )  # fmt: skip
            transaction.apply(announced)
            if announced and moment.rules.evaluation is not None:
                tasks = len(context.config.environment.tasks("held_out"))
                transaction.apply(evaluations.offer(moment, policy, tasks, transaction.evaluations_under_way()))
            point("hub.policy.before_commit")
        point("hub.policy.after_commit")
        context.look()
        context.changes.notify(*Topic)

    def batch(self, node: NodeRow, step: int) -> BatchReply:
        context, batch, waiting = self._context, None, ""
        if context.storage.is_shared:  # look first: an exclusive decision stops all hubs for a moment
            with context.storage.read() as reader:
                if reader.batch(step) is None:
                    waiting = self._choose(reader, context.moment(reader, counted=False), step)[1]
        if not waiting:
            with context.decision(sweep=True, exclusive=True) as (transaction, moment):
                require_trusted(transaction, node.public_key)
                batch = transaction.batch(step)
                if batch is None:
                    waiting = self._write_down(transaction, moment, step)
                    batch = transaction.batch(step)
        if batch is None:
            context.waits.waiting(node_label(node), f"a batch: {waiting}", context.clock.now_ms())
            with context.storage.read() as reader:
                return BatchReply(waiting=waiting, accepted=reader.alive_counts().get(UnitState.ACCEPTED, 0))
        point("hub.batch.after_commit")
        context.waits.done(node_label(node))
        context.changes.notify(Topic.LEASES)
        return BatchReply(batch=batch)

    def _choose(self, reader: Reader, moment: Moment, step: int) -> tuple[list[UnitRow] | None, str]:
        halted = (orders := orders_of(reader)).halted(moment.now_ms)
        if orders.conduct == "paused":
            return None, halted
        waiting = batches.too_few(moment, reader.alive_counts(), step)
        chosen, waiting = (None, waiting) if waiting else batches.choose(moment, reader.alive_units(), step)
        if chosen is None and halted:
            waiting = f"{waiting.removesuffix(batches.NOBODY_ASKS)}; {halted}"
        return chosen, waiting

    def _write_down(self, transaction: Writer, moment: Moment, step: int) -> str:
        chosen, waiting = self._choose(transaction, moment, step)
        if chosen is None:
            return waiting
        names = [unit.submission for unit in chosen if unit.submission is not None]
        sampled = batches.Sampled(transaction.submissions_named(names), transaction.dropped_submissions(step))
        if moment.rules.pools is not None:
            lost = transaction.units_named([row.unit for row in sampled.dropped])
            tasks = {unit.unit: unit.task for unit in (*chosen, *lost.values())}
            sampled = replace(sampled, tasks=tasks, known=transaction.task_rows(sorted(set(tasks.values()))))
        leases = [holding.lease for holding in transaction.holdings()] if moment.rules.max_staleness else []
        transaction.apply(batches.write_down(moment, transaction.alive_units(), chosen, sampled, leases)[1])
        point("hub.batch.before_commit")
        return ""

    def rollouts(self, step: int) -> bytes:
        context = self._context
        with context.storage.read() as reader:
            batch = reader.batch(step)
            units = reader.units_named([group.unit for group in batch.groups] if batch else [])
            verdicts = reader.verdicts_of([group.submission for group in batch.groups] if batch else [])
        if batch is None:
            raise Refusal(404, "batch.unknown", f"step {step} has no batch yet: ask for it with POST /batches/{step}")
        groups = []
        for group in batch.groups:
            submission = unpack(context.blobs.get(group.submission), Submission, context.config.submission_limits)
            scored = json.loads(verdicts[group.submission])["document"]["rewards"]
            rollouts = [
                TrainingRollout(each.tokens, each.logprobs, each.finish, reward, each.given, parts.get("parts", {}))
                for each, reward, parts in zip(submission.rollouts, group.rewards, scored, strict=True)
            ]
            task, version = units[group.unit].task, group.policy.version
            columns = columns_of(context.config.environment, task)
            groups.append(TrainingGroup(group.unit, task, version, submission.prompt, rollouts, columns))
        return pack(TrainingBatch(batch.step, groups))

    def report(self, report: StepReport) -> None:
        now_ms = self._context.clock.now_ms()
        with self._context.storage.write() as transaction:
            transaction.put_report(report.model_copy(update={"alarms": {}}), now_ms)
            transaction.apply([RaiseAlarm(report.step, code, text, now_ms) for code, text in report.alarms.items()])
