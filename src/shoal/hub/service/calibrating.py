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
from shoal.protocol import Calibration, SignedDocument, document_hash, format_of, open_document

SETTING = "calibration"
WANTED = "calibrations.wanted"


class Calibrating:
    def __init__(self, context: Context) -> None:
        self._context = context

    def terms(self, transaction: Writer, kind: str) -> CalibrationTerms:
        """What a worker of this kind is judged by; its limits are wanted from now on."""
        config, in_force = self._context.config, in_force_of(transaction)
        if kind not in calibrations.taken(InForce(owners=in_force.owners), config.profiles, config.measurable):
            known = calibrations.taken(in_force, config.profiles, config.measurable)
            takes = f"no validator of this run can judge work of {kind}; the run takes {', '.join(known)}"
            advice = "choose one (worker.device, worker.dtype), or measure yours (`shoal doctor --calibrate`)"
            raise Refusal(403, "profile.unknown", f"{takes}: {advice}")
        wanted = wanted_of(transaction)
        if kind not in wanted:
            transaction.put_setting(WANTED, " ".join([*wanted, kind]))
        return calibrations.terms(in_force, kind, config.profiles)

    def publish(self, signed: SignedDocument) -> None:
        """Put a calibration in force: a validator's for all leases from now on, the owner's for the kinds in it."""
        context, config, digest = self._context, self._context.config, document_hash(signed)
        with context.decision(exclusive=True) as (transaction, moment):
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
            before = in_force_of(transaction)
            if signed.signed_by == config.root_key:
                after = calibrations.open_kinds(before, digest, made)
            else:
                after = calibrations.put_in_force(before, digest, made, moment.progress.policy)
            transaction.put_setting(f"{SETTING}/{digest}", signed.model_dump_json())
            transaction.put_setting(SETTING, after.model_dump_json())
            for kind, why in made.refused.items():
                if kind not in before.refused:
                    message = (
                        f"the limits measured for {kind} are not used: {why}. Change worker.dtype or validator.dtype"
                    )
                    code = f"calibration.refused.{format_of(kind)}"
                    transaction.apply([RaiseAlarm(moment.progress.next_step, code, message, moment.now_ms)])
        context.changes.notify(Topic.LEASES, Topic.AUDITS)

    def document(self, digest: str) -> SignedDocument:
        with self._context.storage.read() as reader:
            text = reader.setting(f"{SETTING}/{digest}")
        if text is None:
            raise Refusal(404, "calibration.unknown", f"there is no calibration {digest} in this run")
        return SignedDocument.model_validate_json(text)


def in_force_of(reader: Reader) -> InForce:
    return _parsed(reader.setting(SETTING) or "{}")


_parsed = lru_cache(maxsize=8)(InForce.model_validate_json)


def wanted_of(reader: Reader) -> tuple[str, ...]:
    return tuple((reader.setting(WANTED) or "").split())
