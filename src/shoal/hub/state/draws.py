"""What a unit consists of follows from its number: its seeds (secret) and its task (public). Audits are drawn here too.

Seeds are HMAC-SHA256 under the run's secret, so nobody can tell the seeds of a unit that it has not been given, and
a unit that is issued again has the same ones. Tasks follow a keyed permutation of the train split, another one in
each epoch, so that every task occurs exactly once per epoch. The permutation is computed for one position at a time
(a Feistel network over the next power of four, walked until it lands inside): no list of a million tasks is shuffled.

Which task a unit gets, so that anyone can check it: the first of `candidates(n, seed, unit)` that can be used. Its row
may be unusable (`UnusableTask`), or difficulty may speak against it (`pools`, whose dice are `share`); both are public,
and so is the seed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

from shoal.errors import EnvironmentSetupError

SEED_HEX = 16
FRACTION_BYTES = 8
FEISTEL_ROUNDS = 6
MOST_DRAWN = 64
"""Tasks that are drawn for a unit before it takes what there is."""


def unit_seeds(secret: bytes, run: str, unit: int, count: int) -> tuple[str, ...]:
    """One 64-bit seed per rollout, as 16 hex digits.

    >>> unit_seeds(b"k", "demo", 7, 2) == unit_seeds(b"k", "demo", 7, 2)
    True
    """
    return tuple(_seed(secret, run, unit, index) for index in range(count))


def _seed(secret: bytes, run: str, unit: int, index: int) -> str:
    message = f"shoal/seed/v1\n{run}\n{unit}\n{index}".encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()[:SEED_HEX]


def audit_fraction(secret: bytes, submission: str) -> float:
    """A number in [0, 1) that a submission's bytes fix and nobody without the secret can tell.

    Whoever hands in bytes cannot know whether they will be audited fully, and cannot try others: the first stand.
    """
    digest = hmac.new(secret, b"shoal/audit/v1" + submission.encode(), hashlib.sha256).digest()
    return _fraction(digest)


def _fraction(digest: bytes) -> float:
    return (int.from_bytes(digest[:FRACTION_BYTES], "big") >> 11) / 2**53  # as many bits as a float holds exactly


def task_index(task_count: int, seed: int, unit: int) -> int:
    """Which task of the train split a unit is: position `unit mod n` of the permutation of epoch `unit div n`.

    >>> sorted(task_index(3, seed=0, unit=unit) for unit in (3, 4, 5))
    [0, 1, 2]
    """
    if task_count < 1:
        raise EnvironmentSetupError("the environment has no tasks in its train split: nothing can be generated")
    epoch, position = divmod(unit, task_count)
    return permute(position, task_count, f"{seed}/{epoch}")


def candidates(task_count: int, seed: int, unit: int) -> Iterator[int]:
    """The tasks that a unit may be, in order: its own of this epoch, then those of `MOST_DRAWN` - 1 other permutations.

    >>> first, *others = candidates(1000, seed=0, unit=7)
    >>> first == task_index(1000, seed=0, unit=7), len(others)
    (True, 63)
    """
    yield task_index(task_count, seed, unit)
    epoch, position = divmod(unit, task_count)
    for attempt in range(1, MOST_DRAWN):
        yield permute(position, task_count, f"{seed}/{epoch}/again/{attempt}")


def share(seed: int, unit: int, attempt: int) -> float:
    """A public number in [0, 1): whether the candidate of this attempt is among the share of its pool that is taken."""
    digest = hashlib.sha256(f"shoal/share/v1\n{seed}\n{unit}\n{attempt}".encode()).digest()
    return _fraction(digest)


def permute(position: int, size: int, key: str) -> int:
    """Where `position` of `range(size)` goes under the permutation named `key`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(position, half_bits, key)
    while value >= size:  # leaves the range at most 3 times out of 4 on average: ends, because it is one cycle
        value = _feistel(value, half_bits, key)
    return value


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(FEISTEL_ROUNDS):
        digest = hashlib.sha256(f"shoal/tasks/v1\n{key}\n{turn}\n{right}".encode()).digest()
        left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
    return (left << half_bits) | right
