"""Whether two prompts are the same question: a digest that white space, case and width do not change.

Held-out prompts are kept out of training by it, and leaks are found by it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from hashlib import sha256

DIGEST_BYTES = 16
LOWER = bytes(range(256)).lower()
SPACES = bytes([*range(9, 14), *range(28, 33)])
"""What `str.isspace` says of ASCII."""


def prompt_digest(text: str) -> bytes:
    """Sixteen bytes that name a question, however it is spaced and capitalised.

    >>> prompt_digest("What is  2 + 2?\\n") == prompt_digest("what is 2+2?")
    True
    """
    if text.isascii():
        return ascii_digest(text.encode())
    plain = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return sha256(plain.encode(errors="surrogatepass")).digest()[:DIGEST_BYTES]


def question_digest(prompt: str, history: Iterable[tuple[str, str]] = ()) -> bytes:
    """The digest of a prompt with what was said before it: the same last words ask for something else after others.

    What the system said does not count: it tells how to answer, not what is asked.

    >>> question_digest("And doubled?", [("user", "2+2?"), ("assistant", "4")]) == question_digest("And doubled?")
    False
    """
    before = [role.encode() + prompt_digest(text) for role, text in history if role != "system"]
    asked = prompt_digest(prompt)
    return sha256(b"\n".join([*before, asked])).digest()[:DIGEST_BYTES] if before else asked


def ascii_digest(text: bytes) -> bytes:
    """The same of ASCII text, in one pass: a hundred thousand prompts take a tenth of a second."""
    return sha256(text.translate(LOWER, SPACES)).digest()[:DIGEST_BYTES]


BLANK = ascii_digest(b"")
