"""The state machines of the hub: every state and every legal move, as tables.

    unit        open ─► leased ─► submitted ─► accepted ─► trained
                  ▲  ◄────┘  ◄───────┘  └────► dropped          (any of the alive ones ─► void)
                  │  ◄───────────────────────┘ pulled: its node failed an audit before the group was in a batch
                  └──────────────────► submitted                 a late submission whose unit is still free

    lease       active ─► submitted | expired | released | void        expired ─► submitted (late, unit still free)
    submission  received ⇄ auditing ─► accepted | rejected | unsure        accepted ─► pulled
    node        active ⇄ suspended ─► banned        banned ─► active: a pardon by the run's owner
    evaluation  open ⇄ claimed ─► done | void        open ─► void: overtaken by a newer version

A row changes state only through `check_move`, so an illegal move is an exception, never a row in the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from shoal.errors import ShoalError
from shoal.protocol import NodeState


class UnitState(StrEnum):
    OPEN = "open"
    LEASED = "leased"
    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    DROPPED = "dropped"  # equal rewards: nothing to learn from
    TRAINED = "trained"
    VOID = "void"


class LeaseState(StrEnum):
    ACTIVE = "active"
    SUBMITTED = "submitted"
    EXPIRED = "expired"
    RELEASED = "released"
    VOID = "void"


class SubmissionState(StrEnum):
    RECEIVED = "received"
    AUDITING = "auditing"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNSURE = "unsure"
    PULLED = "pulled"  # was accepted; then its node failed an audit, and it is not trained on


class EvaluationState(StrEnum):
    OPEN = "open"
    CLAIMED = "claimed"
    DONE = "done"
    VOID = "void"  # nobody measures it any more: tried too often, or overtaken by a newer version


UNDECIDED_UNITS = frozenset({UnitState.OPEN, UnitState.LEASED, UnitState.SUBMITTED})
OUTCOMES = frozenset({SubmissionState.ACCEPTED, SubmissionState.REJECTED, SubmissionState.UNSURE})
UNDECIDED_SUBMISSIONS = frozenset({SubmissionState.RECEIVED, SubmissionState.AUDITING})

UNIT_MOVES: Mapping[UnitState, frozenset[UnitState]] = {
    UnitState.OPEN: frozenset({UnitState.LEASED, UnitState.SUBMITTED, UnitState.VOID}),
    UnitState.LEASED: frozenset({UnitState.SUBMITTED, UnitState.OPEN, UnitState.VOID}),
    UnitState.SUBMITTED: frozenset({UnitState.ACCEPTED, UnitState.DROPPED, UnitState.OPEN, UnitState.VOID}),
    UnitState.ACCEPTED: frozenset({UnitState.TRAINED, UnitState.OPEN, UnitState.VOID}),
    **dict.fromkeys((UnitState.DROPPED, UnitState.TRAINED, UnitState.VOID), frozenset[UnitState]()),
}
LEASE_MOVES: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.ACTIVE: frozenset(LeaseState) - {LeaseState.ACTIVE},
    LeaseState.EXPIRED: frozenset({LeaseState.SUBMITTED}),
    **dict.fromkeys((LeaseState.SUBMITTED, LeaseState.RELEASED, LeaseState.VOID), frozenset[LeaseState]()),
}
SUBMISSION_MOVES: Mapping[SubmissionState, frozenset[SubmissionState]] = {
    SubmissionState.RECEIVED: frozenset({SubmissionState.AUDITING, *OUTCOMES}),
    SubmissionState.AUDITING: frozenset({SubmissionState.RECEIVED, *OUTCOMES}),
    SubmissionState.ACCEPTED: frozenset({SubmissionState.PULLED}),
    **dict.fromkeys(
        (SubmissionState.REJECTED, SubmissionState.UNSURE, SubmissionState.PULLED), frozenset[SubmissionState]()
    ),
}
NODE_MOVES: Mapping[NodeState, frozenset[NodeState]] = {
    NodeState.ACTIVE: frozenset({NodeState.SUSPENDED, NodeState.BANNED}),
    NodeState.SUSPENDED: frozenset({NodeState.ACTIVE, NodeState.BANNED}),
    NodeState.BANNED: frozenset({NodeState.ACTIVE}),  # only by the owner's pardon
}
EVALUATION_MOVES: Mapping[EvaluationState, frozenset[EvaluationState]] = {
    EvaluationState.OPEN: frozenset({EvaluationState.CLAIMED, EvaluationState.DONE, EvaluationState.VOID}),
    EvaluationState.CLAIMED: frozenset({EvaluationState.OPEN, EvaluationState.DONE, EvaluationState.VOID}),
    **dict.fromkeys((EvaluationState.DONE, EvaluationState.VOID), frozenset[EvaluationState]()),
}

S = TypeVar("S", bound=StrEnum)


class IllegalMove(ShoalError):
    """A defect of the hub itself: it tried a move that its tables forbid. Nothing was written."""


def check_move(moves: Mapping[S, frozenset[S]], source: S, target: S, who: str) -> None:
    if target not in moves[source]:
        raise IllegalMove(f"{who} cannot go from {source.value} to {target.value}")
