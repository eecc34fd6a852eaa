"""How the hub says no: an HTTP status, a stable code for programs, a sentence for people."""

from __future__ import annotations

from shoal.errors import HubRefused


class Refusal(HubRefused):
    """Raised by decisions and services; the routes turn it into a `Problem`.

    >>> str(Refusal(410, "lease.late", "lease u7a0 ran out"))
    'lease u7a0 ran out [lease.late, HTTP 410]'
    """

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(status, code, sentence)
        self.sentence = sentence
