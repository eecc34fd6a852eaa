"""Calibrations: how far honest work of each kind may be off, as trusted machines measured it for one policy.

    validator ── measures ──► Calibration, signed ──► hub: the newest is in force ──► Lease ──► Verdict: name it
    owner     ── signs ─────► a calibration of kinds that no validator's machine has

What limits mean is a matter between validators: for all others they are values.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from shoal.protocol.lease import PRINTABLE, PROFILE
from shoal.protocol.policy import HEX_256, PolicyRef
from shoal.protocol.signing import Document, Message, Milliseconds

Kind = Annotated[str, Field(pattern=PROFILE)]
Words = Annotated[str, Field(max_length=500, pattern=PRINTABLE)]
MAX_KINDS = 64
DIGEST_OR_NONE = rf"^$|{HEX_256}"


class MeasuredKind(Message):
    """The limits of one kind of worker. `caught` says, by cheat, which share of blocks they catch; `tokens` how many
    honest tokens were measured."""

    limits: dict[str, Any] = Field(max_length=64)
    caught: dict[Words, float] = Field(default={}, max_length=64)
    tokens: int = Field(default=0, ge=0)


class Calibration(Document):
    """What was measured with `policy`, signed by a validator or by the run's owner; named by `document_hash`.

    `replaces` is the one that was in force when it was made: another one meanwhile, and it is refused. `machines` are
    what the validators computed with (device/format). `refused` are kinds whose limits would let cheats pass, with the
    reason: nobody may work so.
    """

    kind: ClassVar[str] = "calibration"
    run: str
    policy: PolicyRef
    replaces: str = Field(default="", pattern=DIGEST_OR_NONE)
    kinds: dict[Kind, MeasuredKind] = Field(default={}, max_length=MAX_KINDS)
    refused: dict[Kind, Words] = Field(default={}, max_length=MAX_KINDS)
    machines: tuple[Annotated[str, Field(max_length=64)], ...] = Field(default=(), max_length=MAX_KINDS)
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    made_at_ms: Milliseconds = Field(ge=0)


def format_of(kind: str) -> str:
    """The number format of a kind of worker.

    >>> format_of("torch/cuda/bfloat16")
    'bfloat16'
    """
    return kind.rpartition("/")[2]
