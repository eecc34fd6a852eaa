"""Shown progress: which chunks of a lease are taken, and which lease is looked at next. Nothing in them is believed.

    node on probation ─ chunks ─► form checked ─► appended as a part ─► the lease is renewed (`leases.renew`)
    validator asks ─► a lease that showed twice as much as when it was last looked at ─► one of its rollouts, prefilled
    submission ─► its audit carries what was shown of each rollout: it must be how the rollout begins

A part that does not begin where the hub's copy ends is left out, and the reply says where to begin: so messages may be
lost, come twice or out of order. A lease is looked at when it shows its first chunk and then after each doubling, one
rollout each time, drawn by a secret in proportion to what was shown of it: about `2 / group_size` of the cost of an
audit of the group, and whoever made up a part of the tokens is found with that probability or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Rules, ShownRow
from shoal.protocol import ProofParameters
from shoal.protocol.submission import ShownChunks, ShownPrefix, shown_digest

GROWTH = 2
"""A lease that was looked at is looked at again when it has shown so many times as many tokens."""
LEAST_PROOF_BYTES = 4


def take(
    rules: Rules, proof: ProofParameters, lease: str, last: ShownRow | None, chunks: Sequence[ShownChunks]
) -> tuple[tuple[int, ...], ShownRow | None, list[ShownChunks]]:
    """How many tokens of each rollout are there now, the next part without its body (None if nothing is new), and what
    belongs into it."""
    have = list(last.tokens if last is not None else [0] * rules.group_size)
    new: list[ShownChunks] = []
    for each in chunks:
        _require_form(rules, proof, each)
        if each.start == have[each.rollout]:
            if each.start % proof.rows:
                raise _malformed(each.rollout, f"it ended with a short chunk, at token {each.start}")
            have[each.rollout] += len(each.tokens) // 4
            new.append(each)
    if not new:
        return tuple(have), None, []
    return tuple(have), ShownRow(lease, 0 if last is None else last.part + 1, tuple(have)), new


def _require_form(rules: Rules, proof: ProofParameters, each: ShownChunks) -> None:
    """Refuse what cannot be meant. How large a proof is depends on the model, so that is only bounded here."""
    if each.rollout >= rules.group_size:
        raise _malformed(each.rollout, f"groups have {rules.group_size} rollouts")
    count, chunks = len(each.tokens) // 4, -(-len(each.tokens) // 4 // proof.rows)
    if len(each.tokens) % 4 or count == 0:
        raise _malformed(each.rollout, f"{len(each.tokens)} bytes of tokens are no list of 32-bit numbers")
    if each.start + count > rules.max_new_tokens:
        raise _malformed(each.rollout, f"{each.start + count} tokens; at most {rules.max_new_tokens} are generated")
    if not LEAST_PROOF_BYTES * chunks <= len(each.proofs) <= (2 + 2 * proof.topk) * chunks:
        raise _malformed(each.rollout, f"{len(each.proofs)} bytes of proofs do not fit {chunks} chunks")


def _malformed(rollout: int, why: str) -> Refusal:
    return Refusal(422, "progress.malformed", f"the chunks of rollout {rollout} cannot be taken: {why}")


def is_due(tokens: int, looked_at: int) -> bool:
    """Whether a lease that has shown so many tokens is to be looked at, when it had shown `looked_at` the last time."""
    return tokens >= max(1, GROWTH * looked_at)


def next_rollout(tokens: Sequence[int], fraction: float) -> int:
    """The rollout that a draw in [0, 1) picks, each in proportion to its shown tokens.

    >>> [next_rollout((32, 0, 96), fraction) for fraction in (0.0, 0.24, 0.25, 0.99)]
    [0, 0, 2, 2]
    """
    left = fraction * sum(tokens)
    for rollout, count in enumerate(tokens):
        if left < count:
            return rollout
        left -= count
    return max(range(len(tokens)), key=tokens.__getitem__)


def joined(parts: Sequence[Sequence[ShownChunks]]) -> dict[int, tuple[bytes, bytes]]:
    """The tokens and proofs of every rollout of which something was shown, from all parts in order."""
    tokens: dict[int, list[bytes]] = defaultdict(list)
    proofs: dict[int, list[bytes]] = defaultdict(list)
    for each in (chunk for part in parts for chunk in part):
        tokens[each.rollout].append(each.tokens)
        proofs[each.rollout].append(each.proofs)
    return {rollout: (b"".join(tokens[rollout]), b"".join(proofs[rollout])) for rollout in sorted(tokens)}


def prefixes(shown: Mapping[int, tuple[bytes, bytes]]) -> tuple[ShownPrefix, ...]:
    """What a submission has to begin with."""
    return tuple(
        ShownPrefix(
            rollout=rollout, tokens=len(tokens) // 4, proof_bytes=len(proofs), digest=shown_digest(tokens, proofs)
        )
        for rollout, (tokens, proofs) in shown.items()
    )
