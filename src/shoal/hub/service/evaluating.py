"""What validators measure beside their audits, and who reads it: evaluations on held-out tasks.

tasks of a slice made (once for all versions) ─► claimed in a decision ─► task ids and prompt tokens, signed
audits ─► nothing to check, or one is overdue ─► a slice
report ─► signed by its validator, of this environment ─► the slice is done ─► /evaluations, /status, /metrics
"""

from __future__ import annotations

import threading

from shoal.environments import identity_of
from shoal.errors import EnvironmentSetupError, ModelError, ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, require_trusted
from shoal.hub.service.drawing import HELD_OUT, Drawing
from shoal.hub.state import evaluations
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import EvaluationRow, Moment, NodeRow
from shoal.hub.storage import Writer
from shoal.protocol.signing import SignedDocument, open_document, sign_document
from shoal.protocol.verdict import EvaluationPage, EvaluationReport, EvaluationSlice, EvaluationTask

MOST_VERSIONS = 1024


class Evaluating:
    """Slices out, reports in. What takes long is done by `prepare`: in no transaction, while no claim's time runs, by
    one at a time."""

    def __init__(self, context: Context, drawing: Drawing) -> None:
        self._context = context
        self._drawing = drawing
        self._made: dict[tuple[int, int], tuple[EvaluationTask, ...]] = {}  # the same for every version
        self._making = threading.Lock()

    def prepare(self, validator: NodeRow) -> bool:
        """Make the tasks of a slice that this validator could have; true if there is one to claim now that was not
        before. False also while another one is being made: those who wait are told when it is."""
        with self._context.storage.read() as reader:
            rows = evaluations.free(reader.evaluations_under_way(), validator.node, self._context.clock.now_ms())
        if not rows or any((row.first, row.tasks) in self._made for row in rows):
            return False
        if not self._making.acquire(blocking=False):
            return False
        try:
            split, found = self._context.config.environment.tasks("held_out"), []
            for index in range(rows[0].first, min(rows[0].first + rows[0].tasks, len(split))):
                try:
                    task = split[index]
                    prompt = self._drawing.prompt(task, HELD_OUT, index)
                    found.append(EvaluationTask(task=task.id, prompt_ids=prompt.ids))
                except (EnvironmentSetupError, ModelError) as error:  # left out: it is unscored
                    self._drawing.pass_over(HELD_OUT, index, error)
            self._made[rows[0].first, rows[0].tasks] = tuple(found)
        finally:
            self._making.release()
        self._context.changes.notify(Topic.AUDITS)
        return True

    def claim(self, transaction: Writer, moment: Moment, validator: NodeRow, wanted: bool) -> EvaluationRow | None:
        transaction.apply(evaluations.put_back(transaction.evaluations_under_way(), validator.node, moment.now_ms))
        if not wanted:
            return None
        rows = [row for row in transaction.evaluations_under_way() if (row.first, row.tasks) in self._made]
        chosen = evaluations.claim(moment, rows, validator.node)
        if chosen is None:
            return None
        transaction.apply([chosen])
        return chosen.row

    def pending(self) -> bool:
        with self._context.storage.read() as reader:
            return bool(reader.evaluations_under_way())

    def expire(self, now_ms: int) -> bool:
        with self._context.storage.read() as reader:
            late = evaluations.put_back(reader.evaluations_under_way(), "", now_ms)
        if late:
            with self._context.decision(exclusive=True) as (transaction, moment):
                rows = transaction.evaluations_under_way()
                transaction.apply(evaluations.put_back(rows, "", moment.now_ms))
        return bool(late)

    def document(self, row: EvaluationRow) -> SignedDocument:
        config = self._context.config
        made = EvaluationSlice(
            run=config.run_id, policy=row.policy, first=row.first, tasks=self._made[row.first, row.tasks],
            sampling=config.sampling, environment_digest=config.environment.digest,
            deadline_ms=row.claimed_until_ms or 0,
        )  # fmt: skip
        return sign_document(made, config.key)

    def report(self, node: NodeRow, signed: SignedDocument) -> None:
        context = self._context
        try:
            said = open_document(signed, EvaluationReport, node.public_key)
        except ProtocolError as error:
            raise Refusal(422, "evaluation.signature", str(error)) from error
        if said.run != context.config.run_id:
            raise Refusal(422, "evaluation.run", f"the report is for run {said.run[:80]}")
        require_environment(context, said.environment_digest, "evaluation.environment", "report")
        with context.decision() as (transaction, moment):
            require_trusted(transaction, node.public_key)
            row = transaction.evaluation(said.policy.incarnation, said.policy.version, said.first)
            transaction.apply(evaluations.report(row, said, node.node, signed.model_dump_json(), moment.now_ms))

    def page(self, since: int) -> EvaluationPage:
        with self._context.storage.read() as reader:
            found = evaluations.results(reader.evaluations_since(since, MOST_VERSIONS))
        return EvaluationPage(evaluations=tuple(found))


def require_environment(context: Context, digest: str, code: str, what: str) -> None:
    """Refuse what was scored with other tasks, or by other rules, than the run's."""
    own = identity_of(context.config.environment)
    if digest and digest != own.digest:
        what = f"the {what} is of environment {digest[:16]}…, the run's is {own.name} ({own.digest[:16]}…)"
        sentence = f"{what}: start the validator with the recipe and the data of this run"
        raise Refusal(422, code, sentence)
