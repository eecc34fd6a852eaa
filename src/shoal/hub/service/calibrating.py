"""Calibrations as services see them: published by validators or the owner, named in leases, told to anyone.

Each is kept for ever, as it was signed, under its digest (`meta`): verdicts name it, and may be judged again by it.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.errors import ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, orders_of
from shoal.hub.state import calibrations
from shoal.hub.state.calibrations import CalibrationTerms, InForce
from shoal.hub.state.commands import RaiseAlarm, Refusal
from shoal.hub.storage import Reader, Writer
from shoal.protocol import Calibration, SignedDocument, document_hash, open_document
from shoal.protocol.lease import format_of

SETTING = "calibration"
WANTED = "calibrations.wanted"


class Calibrating:
    def __init__(self, context: Context) -> None:
        self._context = context

    def terms(self, transaction: Writer, kind: str) -> CalibrationTerms:
        """What a worker of this kind is judged by; its limits are wanted from now on."""
        config = self._context.config
        in_force = in_force_of(transaction)
        if kind not in calibrations.taken(InForce(owners=in_force.owners), config.profiles, config.measurable):
            known = calibrations.taken(in_force, config.profiles, config.measurable)
            sentence = (
                f"no validator of this run can judge work of {kind}; the run takes {', '.join(known)}: choose by "
                "--device and --dtype (worker.device and worker.dtype of a recipe) one of these, or measure yours with "
                "`shoal doctor --calibrate` and ask the run's owner to open it (`shoal admin calibrate`)"
            )
            raise Refusal(403, "profile.unknown", sentence)
        wanted = wanted_of(transaction)
        if kind not in wanted:
            transaction.put_setting(WANTED, " ".join([*wanted, kind]))
        return calibrations.terms(in_force, kind, config.profiles)

    def publish(self, signed: SignedDocument) -> None:
        """Put a calibration in force: a validator's for all leases from now on, the owner's for the kinds in it."""
        context, digest = self._context, document_hash(signed)
        with context.decision(exclusive=True) as (transaction, moment):
            made, by_owner = self._open(transaction, signed)
            before = in_force_of(transaction)
            if by_owner:
                after = calibrations.open_kinds(before, digest, made)
            else:
                after = calibrations.put_in_force(before, digest, made, moment.progress.policy)
            transaction.put_setting(f"{SETTING}/{digest}", signed.model_dump_json())
            transaction.put_setting(SETTING, after.model_dump_json())
            step = moment.progress.next_step
            transaction.apply(
                [
                    RaiseAlarm(step, f"calibration.refused.{format_of(kind)}", _closed(kind, why), moment.now_ms)
                    for kind, why in made.refused.items()
                    if kind not in before.refused
                ]
            )
        context.changes.notify(Topic.LEASES, Topic.AUDITS)

    def _open(self, transaction: Writer, signed: SignedDocument) -> tuple[Calibration, bool]:
        """The calibration, and whether the owner signed it; raises unless one who may has signed it for this run."""
        config = self._context.config
        certified = {
            str(each.document.get("public_key"))
            for each in orders_of(transaction).trusted(config.certificates)
            if each.document.get("role") == "validator"
        }
        try:
            made = open_document(signed, Calibration, {config.root_key, *certified})
        except ProtocolError as error:
            raise Refusal(403, "calibration.signature", f"the calibration does not hold: {error}") from error
        if made.run != config.run_id:
            raise Refusal(422, "calibration.run", f"the calibration is for run {made.run[:80]}")
        return made, signed.signed_by == config.root_key

    def document(self, digest: str) -> SignedDocument:
        with self._context.storage.read() as reader:
            text = reader.setting(f"{SETTING}/{digest}")
        if text is None:
            raise Refusal(404, "calibration.unknown", f"there is no calibration {digest} in this run")
        return SignedDocument.model_validate_json(text)


def _closed(kind: str, why: str) -> str:
    return (
        f"the limits that were measured for {kind} are not used: {why}. Let workers compute in another format "
        "(worker.dtype), or validators in a finer one (validator.dtype)"
    )


def in_force_of(reader: Reader) -> InForce:
    """What is in force; asked for with every lease, so that the last few are kept parsed."""
    return _parsed(reader.setting(SETTING) or "{}")


def wanted_of(reader: Reader) -> tuple[str, ...]:
    """The kinds that workers have asked for leases with, at whichever hub."""
    return tuple((reader.setting(WANTED) or "").split())


@lru_cache(maxsize=8)
def _parsed(text: str) -> InForce:
    return InForce.model_validate_json(text)
