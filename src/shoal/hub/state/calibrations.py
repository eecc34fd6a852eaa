"""Which calibration is in force, and what a worker of some kind gets by it.

    kind measured, or opened by the owner ─► leases that name its calibration
    kind with built-in limits             ─► leases at once; they name the calibration in force, if there is one
    another kind of a measured format     ─► leases, as for newcomers: judged by all limits of its number format
    kind that the run takes, not measured ─► waits until a validator has measured its number format

All of it is one row (`meta.calibration`).
"""

from collections.abc import Collection
from dataclasses import dataclass

from pydantic import Field

from shoal.hub.state.commands import Refusal
from shoal.protocol import MAX_KINDS, Calibration, Message, PolicyRef, format_of


class InForce(Message):
    """The validators' calibration in force, and by kind those that the owner signed, the last at `owners_at_ms`."""

    digest: str = ""
    kinds: tuple[str, ...] = ()
    refused: dict[str, str] = Field(default={})
    owners: dict[str, str] = Field(default={})
    owners_at_ms: int = 0


@dataclass(frozen=True)
class CalibrationTerms:
    """A calibration (empty: built-in limits), measured for this very kind or only for its number format. `waiting` says
    why it gets no leases yet."""

    calibration: str = ""
    measured: bool = True
    waiting: str = ""


def terms(in_force: InForce, kind: str, built_in: Collection[str]) -> CalibrationTerms:
    if kind in in_force.owners:
        return CalibrationTerms(in_force.owners[kind])
    if kind in in_force.kinds or kind in built_in:
        return CalibrationTerms(in_force.digest)
    number_format = format_of(kind)
    if kind not in in_force.refused and number_format in map(format_of, in_force.kinds):
        return CalibrationTerms(in_force.digest, measured=False)
    for refused, why in in_force.refused.items():
        if format_of(refused) == number_format:
            return CalibrationTerms(waiting=f"no work is taken in {number_format} for now: as {refused}, {why}")
    return CalibrationTerms(waiting=f"the run's validators have not measured work in {number_format} yet")


def taken(in_force: InForce, built_in: Collection[str], measurable: Collection[str]) -> tuple[str, ...]:
    closed = set(map(format_of, in_force.refused)) - set(map(format_of, (*in_force.kinds, *in_force.owners)))
    open_kinds = (kind for kind in measurable if format_of(kind) not in closed and kind not in in_force.refused)
    return tuple(dict.fromkeys([*built_in, *open_kinds, *in_force.owners]))


def put_in_force(in_force: InForce, digest: str, made: Calibration, policy: PolicyRef | None) -> InForce:
    if made.replaces != in_force.digest:
        sentence = "another came into force meanwhile: fetch it, join what was measured with it, and try again"
        raise Refusal(409, "calibration.outdated", sentence)
    if policy is None or made.policy.incarnation != policy.incarnation or made.policy.version > policy.version:
        raise Refusal(409, "calibration.policy", f"this run does not have policy {made.policy.label} now")
    measured = {"kinds": tuple(sorted(made.kinds)), "refused": dict(made.refused)}
    return in_force.model_copy(update={"digest": digest, **measured})


def open_kinds(in_force: InForce, digest: str, made: Calibration) -> InForce:
    """The kinds of the owner's calibration are judged by it, whatever is measured. Anyone can send an old one again: it
    must not replace what the owner signed since."""
    owners = {**in_force.owners, **dict.fromkeys(made.kinds, digest)}
    if owners == in_force.owners:
        return in_force
    if made.made_at_ms <= in_force.owners_at_ms:
        raise Refusal(409, "calibration.outdated", "the owner has signed a later one: sign this again to return to it")
    if len(owners) > MAX_KINDS:
        raise Refusal(422, "calibration.kinds", f"no more than {MAX_KINDS} kinds can be opened")
    return in_force.model_copy(update={"owners": owners, "owners_at_ms": made.made_at_ms})
