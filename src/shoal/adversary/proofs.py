"""Cheats with forged proofs: tokens and log-probabilities are honest, so that nothing but the proofs can tell.

Each would do without committing to activations, and so without having computed any.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from shoal.adversary.base import Cheat
from shoal.protocol import Lease, Submission

FIELD = 65_497
MODAL = 0x4040  # 3.0 as bfloat16: the size that the largest activations after a norm often have

MALFORMED = frozenset({"proofs.malformed"})
OTHERS = frozenset({"duplicate.proof", "proofs.malformed", "proofs.mismatch"})  # another size, or another's content


class ForgedProofs(Cheat):
    """Replaces the proofs of every rollout, or only some chunks of them."""

    reasons = MALFORMED
    chunk: ClassVar[Callable[[bytes], bytes]]
    """One proof, given what the honest one would be."""

    def submission(self, submission: Submission, lease: Lease, /) -> Submission:
        proofs = self.forge([rollout.proofs for rollout in submission.rollouts], lease)
        pairs = zip(submission.rollouts, proofs, strict=True)
        return replace(submission, rollouts=[replace(rollout, proofs=forged) for rollout, forged in pairs])

    def forge(self, honest: Sequence[bytes], lease: Lease, /) -> list[bytes]:
        """One string of proofs per rollout, given what honest ones would be."""
        full, chunk = 2 + 2 * lease.proof.topk, type(self).chunk
        return [b"".join(map(chunk, chunks_of(proofs, full))) for proofs in honest]


def chunks_of(proofs: bytes, full_bytes: int) -> list[bytes]:
    """The proofs of one rollout; only the last can be shorter than a full one."""
    return [proofs[start : start + full_bytes] for start in range(0, len(proofs), full_bytes)]


def constant_polynomial(modulus: int, value: int, size_bytes: int) -> bytes:
    """A proof of `size_bytes` that says `value` at every index."""
    return struct.pack(">HH", modulus, value).ljust(size_bytes, b"\0")


def _random(honest: bytes) -> bytes:
    noise = hashlib.shake_128(honest).digest(len(honest))
    numbers = struct.unpack(f">{len(honest) // 2}H", noise)
    return struct.pack(f">{len(numbers)}H", FIELD, *(number % FIELD for number in numbers[1:]))


def _forging(
    name: str, what: str, chunk: Callable[[bytes], bytes], reasons: frozenset[str] = MALFORMED
) -> type[ForgedProofs]:
    return type(name, (ForgedProofs,), {"name": name, "what": what, "chunk": staticmethod(chunk), "reasons": reasons})


BY_CHUNK = (
    _forging("no-proofs", "hands in its work without any proofs", lambda _honest: b""),
    _forging("null-proofs", "hands in proofs that are nothing but zeros", lambda honest: bytes(len(honest))),
    _forging(
        "constant-proofs",
        "hands in polynomials that have one plausible value everywhere, which takes no computation at all",
        lambda honest: constant_polynomial(FIELD, MODAL, len(honest)),
        frozenset({"proofs.forged"}),
    ),
    _forging(
        "modulus-one",
        "chooses 1 as the modulus of its proofs, so that every index falls on the same value",
        lambda honest: struct.pack(">HH", 1, MODAL) + honest[4:],
    ),
    _forging("random-proofs", "hands in well-formed proofs of random numbers", _random, frozenset({"proofs.mismatch"})),
    _forging("half-proofs", "hands in the first half of every proof", lambda honest: honest[: len(honest) // 2]),
    _forging("long-proofs", "hands in more proofs than there are chunks", lambda honest: honest * 2),
)


class SwappedProofs(ForgedProofs):
    name = "swapped-proofs"
    what = "hands in the proofs of another rollout of the same group"
    reasons = OTHERS

    def forge(self, honest: Sequence[bytes], _lease: Lease, /) -> list[bytes]:
        return [*honest[1:], honest[0]]


class ReplayedProofs(ForgedProofs):
    name = "replayed-proofs"
    what = "computes the first proof of each size, and hands that one in for ever"
    reasons = OTHERS

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}

    def forge(self, honest: Sequence[bytes], lease: Lease, /) -> list[bytes]:
        """Of each size the first proof that it ever made."""
        full = 2 + 2 * lease.proof.topk
        parts = ([self._kept.setdefault(len(each), each) for each in chunks_of(proofs, full)] for proofs in honest)
        return [b"".join(part) for part in parts]
