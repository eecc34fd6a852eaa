"""Whether two prompts are the same question."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import sha256

from shoal.environments.protocol import DigestedEnvironment, Environment, Split, Task
from shoal.errors import UnusableTask

DIGEST_BYTES = 16
LOWER = bytes(range(256)).lower()
SPACES = bytes([*range(9, 14), *range(28, 33)])
"""What `str.isspace` says of ASCII."""
UNUSABLE = b""
"""Stands for a task that cannot be asked: no question has this digest."""


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
    What the system said does not count: it tells how to answer, not what is asked."""
    before = [role.encode() + prompt_digest(text) for role, text in history if role != "system"]
    asked = prompt_digest(prompt)
    return sha256(b"\n".join([*before, asked])).digest()[:DIGEST_BYTES] if before else asked


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
