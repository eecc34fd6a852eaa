"""What validators measure beside their audits: calibrations, and evaluations on held-out tasks.

calibration ─► signed by a validator or the owner ─► in force: named in leases, told to anyone
tasks of a slice made (once for all versions) ─► claimed in a decision ─► task ids and prompt tokens, signed
report ─► signed by its validator, of this environment ─► the slice is done ─► /evaluations, /status, /metrics

Each signed calibration is kept for ever under its digest (`meta`): verdicts name it, and may be judged again by it.
"""

import threading
from functools import lru_cache

from shoal.environments import identity_of
from shoal.errors import EnvironmentSetupError, ModelError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, orders_of, require_trusted
from shoal.hub.service.drawing import HELD_OUT, Drawing
from shoal.hub.state import EvaluationRow, Moment, NodeRow, RaiseAlarm, Refusal, calibrations, evaluations
from shoal.hub.storage import Reader, Writer
from shoal.protocol import Calibration, SignedDocument, document_hash, format_of, sign_document
from shoal.protocol.verdict import EvaluationPage, EvaluationReport, EvaluationSlice, EvaluationTask

CALIBRATION, WANTED, MOST_VERSIONS = "calibration", "calibrations.wanted", 1024


class Calibrating:
    def __init__(self, context: Context) -> None:
        self._context = context

    def terms(self, transaction: Writer, kind: str) -> calibrations.CalibrationTerms:
        config, in_force = self._context.config, in_force_of(transaction)
        opened, bounds = calibrations.InForce(owners=in_force.owners), (config.profiles, config.measurable)
        if kind not in calibrations.taken(opened, *bounds):
            known = calibrations.taken(in_force, *bounds)
            takes = f"no validator of this run can judge work of {kind}; the run takes {', '.join(known)}"
            advice = "choose one (worker.device, worker.dtype), or measure yours (`shoal doctor --calibrate`)"
            raise Refusal(403, "profile.unknown", f"{takes}: {advice}")
        wanted = wanted_of(transaction)
        if kind not in wanted:
            transaction.put_setting(WANTED, " ".join([*wanted, kind]))
        return calibrations.terms(in_force, kind, config.profiles)

    def publish(self, signed: SignedDocument) -> None:
        """A validator's is in force for all leases from now on, the owner's for the kinds in it."""
        context, config, digest = self._context, self._context.config, document_hash(signed)
        with context.decision(exclusive=True) as (transaction, moment):
            trusted = [each.document for each in orders_of(transaction).trusted(config.certificates)]
            keys = {str(each.get("public_key")) for each in trusted if each.get("role") == "validator"}
            made = context.opened(signed, Calibration, {config.root_key, *keys}, "calibration", 403)
            before = in_force_of(transaction)
            if signed.signed_by == config.root_key:
                after = calibrations.open_kinds(before, digest, made)
            else:
                after = calibrations.put_in_force(before, digest, made, moment.progress.policy)
            transaction.put_setting(f"{CALIBRATION}/{digest}", signed.model_dump_json())
            transaction.put_setting(CALIBRATION, after.model_dump_json())
            for kind, why in made.refused.items():
                if kind not in before.refused:
                    unused, code = f"the limits measured for {kind} are not used: {why}", format_of(kind)
                    alarm = f"calibration.refused.{code}", f"{unused}. Change worker.dtype or validator.dtype"
                    transaction.apply([RaiseAlarm(moment.progress.next_step, *alarm, moment.now_ms)])
        context.changes.notify(Topic.LEASES, Topic.AUDITS)

    def document(self, digest: str) -> SignedDocument:
        with self._context.storage.read() as reader:
            text = reader.setting(f"{CALIBRATION}/{digest}")
        if text is None:
            raise Refusal(404, "calibration.unknown", f"there is no calibration {digest} in this run")
        return SignedDocument.model_validate_json(text)


def in_force_of(reader: Reader) -> calibrations.InForce:
    return _parsed(reader.setting(CALIBRATION) or "{}")


_parsed = lru_cache(maxsize=8)(calibrations.InForce.model_validate_json)


def wanted_of(reader: Reader) -> tuple[str, ...]:
    return tuple((reader.setting(WANTED) or "").split())


class Evaluating:
    """`prepare` makes tasks, which takes long: in no transaction, before a claim's deadline is set, one at a time."""

    def __init__(self, context: Context, drawing: Drawing) -> None:
        self._context, self._drawing = context, drawing
        self._made: dict[tuple[int, int], tuple[EvaluationTask, ...]] = {}  # the same for every version
        self._making = threading.Lock()

    def prepare(self, validator: NodeRow) -> bool:
        """Make the tasks of the slice that this validator gets next; whether there is a new one to claim. False while
        another one is being made: polls are woken when it is ready."""
        with self._context.storage.read() as reader:
            now_ms = self._context.clock.now_ms()
            row = evaluations.next_free(reader.evaluations_under_way(), validator.node, now_ms)
        if row is None or (row.first, row.tasks) in self._made or not self._making.acquire(blocking=False):
            return False
        try:
            split, found = self._context.config.environment.tasks("held_out"), []
            for index in range(row.first, min(row.first + row.tasks, len(split))):
                try:
                    prompt = self._drawing.prompt(task := split[index], HELD_OUT, index)
                    found.append(EvaluationTask(task=task.id, prompt_ids=prompt.ids))
                except (EnvironmentSetupError, ModelError) as error:  # left out: it is unscored
                    self._drawing.pass_over(HELD_OUT, index, error)
            self._made[row.first, row.tasks] = tuple(found)
        finally:
            self._making.release()
        self._context.changes.notify(Topic.AUDITS)
        return True

    def claim(self, transaction: Writer, moment: Moment, validator: NodeRow, wanted: bool) -> EvaluationRow | None:
        transaction.apply(evaluations.put_back(transaction.evaluations_under_way(), validator.node, moment.now_ms))
        if not wanted:
            return None
        row = evaluations.next_free(transaction.evaluations_under_way(), validator.node, moment.now_ms)
        if row is None or (row.first, row.tasks) not in self._made:
            return None
        claimed = evaluations.claim(moment, row, validator.node)
        transaction.apply([claimed])
        return claimed.row

    def pending(self) -> bool:
        with self._context.storage.read() as reader:
            return bool(reader.evaluations_under_way())

    def expire(self, now_ms: int) -> bool:
        with self._context.storage.read() as reader:
            late = evaluations.put_back(reader.evaluations_under_way(), "", now_ms)
        if late:
            with self._context.decision(exclusive=True) as (transaction, moment):
                transaction.apply(evaluations.put_back(transaction.evaluations_under_way(), "", moment.now_ms))
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
        said = context.opened(signed, EvaluationReport, node.public_key, "evaluation")
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
    own = identity_of(context.config.environment)
    if digest and digest != own.digest:
        what = f"the {what} is of environment {digest[:16]}…, the run's is {own.name} ({own.digest[:16]}…)"
        raise Refusal(422, code, f"{what}: start the validator with the recipe and the data of this run")
