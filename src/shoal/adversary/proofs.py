"""Cheats with forged proofs: tokens and log-probabilities are honest, so that nothing but the proofs can tell.

Each would do without committing to activations, and so without having computed any.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

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

    def submission(self, submission: Submission, lease: Lease, /) -> Submission:
        proofs = self.forge([rollout.proofs for rollout in submission.rollouts], lease)
        pairs = zip(submission.rollouts, proofs, strict=True)
        return replace(submission, rollouts=[replace(rollout, proofs=forged) for rollout, forged in pairs])

    def forge(self, honest: Sequence[bytes], lease: Lease, /) -> list[bytes]:
        """One string of proofs per rollout, given what honest ones would be."""
        full = 2 + 2 * lease.proof.topk
        return [b"".join(map(self.chunk, chunks_of(proofs, full))) for proofs in honest]

    def chunk(self, honest: bytes, /) -> bytes:
        """One proof, given what the honest one would be."""
        return honest


def chunks_of(proofs: bytes, full_bytes: int) -> list[bytes]:
    """The proofs of one rollout; only the last can be shorter than a full one."""
    return [proofs[start : start + full_bytes] for start in range(0, len(proofs), full_bytes)]


def constant_polynomial(modulus: int, value: int, size_bytes: int) -> bytes:
    """A proof of `size_bytes` that says `value` at every index."""
    return struct.pack(">HH", modulus, value).ljust(size_bytes, b"\0")


class NoProofs(ForgedProofs):
    name = "no-proofs"
    what = "hands in its work without any proofs"

    def chunk(self, _honest: bytes, /) -> bytes:
        return b""


class NullProofs(ForgedProofs):
    name = "null-proofs"
    what = "hands in proofs that are nothing but zeros"

    def chunk(self, honest: bytes, /) -> bytes:
        return bytes(len(honest))


class ConstantProofs(ForgedProofs):
    name = "constant-proofs"
    what = "hands in polynomials that have one plausible value everywhere, which takes no computation at all"
    reasons = frozenset({"proofs.forged"})

    def chunk(self, honest: bytes, /) -> bytes:
        return constant_polynomial(FIELD, MODAL, len(honest))


class ModulusOne(ForgedProofs):
    name = "modulus-one"
    what = "chooses 1 as the modulus of its proofs, so that every index falls on the same value"

    def chunk(self, honest: bytes, /) -> bytes:
        return struct.pack(">HH", 1, MODAL) + honest[4:]


class RandomProofs(ForgedProofs):
    name = "random-proofs"
    what = "hands in well-formed proofs of random numbers"
    reasons = frozenset({"proofs.mismatch"})

    def chunk(self, honest: bytes, /) -> bytes:
        noise = hashlib.shake_128(honest).digest(len(honest))
        numbers = struct.unpack(f">{len(honest) // 2}H", noise)
        return struct.pack(f">{len(numbers)}H", FIELD, *(number % FIELD for number in numbers[1:]))


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

    def chunk(self, honest: bytes, /) -> bytes:
        """The first proof of that size that it ever made."""
        return self._kept.setdefault(len(honest), honest)


class HalfProofs(ForgedProofs):
    name = "half-proofs"
    what = "hands in the first half of every proof"

    def chunk(self, honest: bytes, /) -> bytes:
        return honest[: len(honest) // 2]


class LongProofs(ForgedProofs):
    name = "long-proofs"
    what = "hands in more proofs than there are chunks"

    def chunk(self, honest: bytes, /) -> bytes:
        return honest * 2
