"""Whether two prompts are the same question, and which questions are set aside in a mixture."""

from __future__ import annotations

import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from hashlib import sha256

from shoal.environments.protocol import DigestedEnvironment, Environment, GeneratingEnvironment, Split, Task
from shoal.errors import UnusableTask

DIGEST_BYTES = 16
LOWER = bytes(range(256)).lower()
SPACES = bytes([*range(9, 14), *range(28, 33)])
"""What `str.isspace` says of ASCII."""


def prompt_digest(text: str) -> bytes:
    """Sixteen bytes that name a question, however it is spaced and capitalised."""
    if text.isascii():  # in one pass: a hundred thousand prompts take a tenth of a second
        plain = text.encode().translate(LOWER, SPACES)
    else:
        words = "".join(unicodedata.normalize("NFKC", text).casefold().split())
        plain = words.encode(errors="surrogatepass")
    return sha256(plain).digest()[:DIGEST_BYTES]


def question_digest(prompt: str, history: Iterable[tuple[str, str]] = ()) -> bytes:
    """The digest of a prompt with what was said before it: the same last words ask for something else after others.

    What the system said does not count: it tells how to answer, not what is asked.
    """
    before = [role.encode() + prompt_digest(text) for role, text in history if role != "system"]
    asked = prompt_digest(prompt)
    return sha256(b"\n".join([*before, asked])).digest()[:DIGEST_BYTES] if before else asked


UNUSABLE = b""
"""Stands for a task that cannot be asked: no question has this digest."""


def task_digest(task: Task) -> bytes:
    return question_digest(task.prompt, task.history)


def task_digests(environment: Environment, split: Split) -> Iterator[bytes]:
    """The digest of every task of a split, in order; `UNUSABLE` for those that cannot be used."""
    if isinstance(environment, DigestedEnvironment):
        yield from environment.prompt_digests(split)
        return
    tasks = environment.tasks(split)
    for index in range(len(tasks)):
        try:
            yield task_digest(tasks[index])
        except UnusableTask:
            yield UNUSABLE


class Aside:
    """What the parts of a mixture, by label, set aside for each other."""

    def __init__(self, parts: Mapping[str, Environment]) -> None:
        self._listing = {name: part for name, part in parts.items() if not isinstance(part, GeneratingEnvironment)}
        self.skipped = lru_cache(maxsize=None)(self._skipped)

    @cached_property
    def held_out(self) -> frozenset[bytes]:
        """The questions that parts hold out and that others may come to."""
        found = (task_digests(environment, "held_out") for environment in self._listing.values())
        return frozenset(digest for digests in found for digest in digests) - {UNUSABLE}

    def generates(self, label: str) -> bool:
        return label not in self._listing

    def _skipped(self, label: str) -> tuple[int, ...]:
        """Positions in the train split of a part that nobody trains on, ascending; none of one that generates."""
        if self.generates(label) or not self.held_out:
            return ()
        digests = enumerate(task_digests(self._listing[label], "train"))
        return tuple(index for index, digest in digests if digest in self.held_out)

    def is_trained(self, task: Task) -> bool:
        """Whether a part that lists its tasks trains on this question."""
        place = bisect_left(self._trained, _key(task_digest(task)))
        return place < len(self._trained) and self._trained[place] == _key(task_digest(task))

    @cached_property
    def _trained(self) -> array[int]:
        """The first 64 bits of each digest, sorted: eight megabytes for a million questions."""
        found = (task_digests(environment, "train") for environment in self._listing.values())
        return array(
            "Q", sorted(_key(digest) for digests in found for digest in digests if digest not in self.held_out)
        )


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
