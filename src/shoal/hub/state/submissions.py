"""Submissions arriving, and the progress that nodes on probation show before.

    submission   new (201), the same again (200), another body (409), late or void (410), not yours (403)

A late submission is taken while its unit is free and not too stale to train on.

A part of shown progress that does not begin where the hub's copy ends is left out, and the reply says where to begin:
messages may be lost, come twice or out of order. A lease is looked at when it shows its first chunk and after each
doubling, one rollout each time, drawn by a secret in proportion to what was shown of it: about `2 / group_size` of the
cost of an audit of the group, and a made-up part of the tokens is found with its own share as probability, or more.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.hub.state import Command, Refusal, Save, nodes, pacing, rows, units
from shoal.hub.state.rows import Holding, LeaseState, Moment, NodeRow, Rules, ShownRow, SubmissionRow, UnitState
from shoal.protocol import Depth, ProofParameters, ShownChunks, ShownPrefix, shown_digest

CREATED, SAME_AGAIN = 201, 200
LATE = "lease.late"
GROWTH = 2  # a lease that was looked at is looked at again when it has shown so many times as many tokens
LEAST_PROOF_BYTES = 4


@dataclass(frozen=True)
class Arrival:
    """Bytes for a lease. `depth` is drawn from what is committed here and written with it: never drawn again."""

    node: str
    lease: str
    submission: str
    size_bytes: int
    depth: Depth = "full"
    tokens: int = 0


def check_owner(holding: Holding | None, node: str, lease: str) -> Holding:
    if holding is None:
        raise Refusal(404, "lease.unknown", f"there is no lease {lease[:64]} in this run")
    if holding.lease.node != node:
        raise Refusal(403, "lease.not_yours", f"lease {lease} belongs to another node")
    return holding


def receive(
    moment: Moment, node: NodeRow, holding: Holding, existing: SubmissionRow | None, arrival: Arrival
) -> tuple[int, SubmissionRow]:
    """A new submission, which has no receipt yet, or the `existing` one again."""
    if existing is not None:
        if existing.submission != arrival.submission:
            raise Refusal(409, "submission.other_body", f"lease {arrival.lease} was already answered with another body")
        return SAME_AGAIN, existing
    lease, unit = holding.lease, holding.unit
    if lease.state == LeaseState.VOID:
        raise Refusal(410, "lease.void", f"lease {lease.lease} is void: its node was banned or its policy withdrawn")
    if lease.state == LeaseState.RELEASED:
        raise Refusal(410, "lease.released", f"lease {lease.lease} was given back")
    if lease.state != LeaseState.ACTIVE:
        late = f"lease {lease.lease} ran out"
        if unit.state != UnitState.OPEN:
            raise Refusal(410, LATE, f"{late} and unit {unit.unit} is {unit.state.value} meanwhile")
        if units.is_for_validators(unit) and not node.is_ours:
            raise Refusal(410, LATE, f"{late}, and a validator generates unit {unit.unit} now")
        if pacing.is_stale(moment.rules, moment.progress.next_step, lease.version):
            raise Refusal(410, LATE, f"{late}, and policy {lease.policy.label} is too old to train on now")
    return CREATED, new_row(lease, arrival, moment.now_ms)


def received(node: NodeRow, holding: Holding, row: SubmissionRow, now_ms: int) -> list[Command]:
    lease, unit = holding.lease, holding.unit
    commands: list[Command] = [
        Save(nodes.delivered(node, lease, now_ms), node.state),
        Save(row, None),
        Save(lease.to(LeaseState.SUBMITTED, ended_at_ms=now_ms), lease.state),
    ]
    if unit.state is not UnitState.VOID:  # void: too old to train on, but it is judged and paid
        filled = {"incarnation": lease.incarnation, "version": lease.version, "submission": row.submission}
        commands.append(Save(unit.to(UnitState.SUBMITTED, **filled), unit.state))
    return commands


def new_row(lease: rows.LeaseRow, arrival: Arrival, now_ms: int) -> SubmissionRow:
    return SubmissionRow(
        arrival.submission, lease.lease, lease.unit, lease.node, lease.incarnation, lease.version, lease.digest,
        arrival.size_bytes, now_ms, depth=arrival.depth, tokens=arrival.tokens,
    )  # fmt: skip


def take_shown(
    rules: Rules, proof: ProofParameters, lease: str, last: ShownRow | None, chunks: Sequence[ShownChunks]
) -> tuple[tuple[int, ...], ShownRow | None, list[ShownChunks]]:
    """How many tokens of each rollout are there now, the next part without its body (None: nothing new), and what
    belongs into it."""
    have = list(last.tokens if last is not None else [0] * rules.group_size)
    new: list[ShownChunks] = []
    for each in chunks:
        if wrong := _form_problem(rules, proof, each):
            raise _malformed(each, wrong)
        if each.start == have[each.rollout]:
            if each.start % proof.rows:
                raise _malformed(each, f"it ended with a short chunk, at token {each.start}")
            have[each.rollout] += len(each.tokens) // 4
            new.append(each)
    part = ShownRow(lease, 0 if last is None else last.part + 1, tuple(have)) if new else None
    return tuple(have), part, new


def _form_problem(rules: Rules, proof: ProofParameters, each: ShownChunks) -> str:
    """The size of a proof depends on the model, so that is only bounded here."""
    count = len(each.tokens) // 4
    chunks = -(-count // proof.rows)
    if each.rollout >= rules.group_size:
        return f"groups have {rules.group_size} rollouts"
    if len(each.tokens) % 4 or count == 0:
        return f"{len(each.tokens)} bytes of tokens are no list of 32-bit numbers"
    if each.start + count > rules.max_new_tokens:
        return f"{each.start + count} tokens; at most {rules.max_new_tokens} are generated"
    if not LEAST_PROOF_BYTES * chunks <= len(each.proofs) <= (2 + 2 * proof.topk) * chunks:
        return f"{len(each.proofs)} bytes of proofs do not fit {chunks} chunks"
    return ""


def _malformed(each: ShownChunks, why: str) -> Refusal:
    return Refusal(422, "progress.malformed", f"the chunks of rollout {each.rollout} cannot be taken: {why}")


def next_shown_rollout(tokens: Sequence[int], fraction: float) -> int:
    """The rollout that a draw in [0, 1) picks, in proportion to shown tokens.

    >>> [next_shown_rollout((32, 0, 96), fraction) for fraction in (0.0, 0.24, 0.25, 0.99)]
    [0, 0, 2, 2]
    """
    left = fraction * sum(tokens)
    for rollout, count in enumerate(tokens):
        if left < count:
            return rollout
        left -= count
    return max(range(len(tokens)), key=tokens.__getitem__)


def joined_parts(parts: Sequence[Sequence[ShownChunks]]) -> dict[int, tuple[bytes, bytes]]:
    shown: dict[int, tuple[bytes, bytes]] = defaultdict(lambda: (b"", b""))
    for each in (chunk for part in parts for chunk in part):
        tokens, proofs = shown[each.rollout]
        shown[each.rollout] = tokens + each.tokens, proofs + each.proofs
    return dict(sorted(shown.items()))


def prefixes(shown: Mapping[int, tuple[bytes, bytes]]) -> tuple[ShownPrefix, ...]:
    return tuple(
        ShownPrefix(rollout=rollout, tokens=len(ids) // 4, proof_bytes=len(proofs), digest=shown_digest(ids, proofs))
        for rollout, (ids, proofs) in shown.items()
    )
