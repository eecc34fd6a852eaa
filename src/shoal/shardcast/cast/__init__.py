"""`shoal cast`: broadcasts any file or folder, without a run, a hub or torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import UserError
from shoal.protocol.identity import PUBLIC_KEY_HEX, check_public_key
from shoal.shardcast.connection import Address


class Report(Protocol):
    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Terminal(Protocol):
    """What a command prints with: results, remarks beside them, and progress, of which `Report` is told."""

    # fmt: off
    def say(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def metered(self, what: str, unit: str = "MB") -> AbstractContextManager[Report]: ...
    # fmt: on


@dataclass(frozen=True)
class Sources:
    urls: tuple[str, ...]
    key: str

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Sources:
        """From `http://host:8471/#KEY`; of several URLs at least one has the key, and none has another."""
        urls: dict[str, None] = {}
        keys: set[str] = set()
        for text in texts:
            url, mark, key = text.partition("#")
            Address.parse(url.rstrip("/"))
            urls[url.rstrip("/")] = None
            if mark:
                try:
                    keys.add(check_public_key(key.strip().lower()))
                except ValueError as error:
                    wanted = f"after # come the {PUBLIC_KEY_HEX} digits that `shoal cast publish` prints ({error})"
                    raise UserError(f"{text!r} does not end in a key: {wanted}") from error
        if len(keys) != 1:
            wrong = "no URL names the publisher's key" if not keys else "the URLs name different keys"
            raise UserError(f"{wrong}: give the URL as `shoal cast publish` prints it, http://host:port/#KEY")
        return cls(tuple(urls), keys.pop())


def say_commands(terminal: Terminal, url: str, key: str, output: str) -> None:
    where = f"{url}/#{key}"
    terminal.say(f"fetch it:  shoal cast fetch {where} --out {shlex.quote(output)}")
    terminal.say(f"relay it:  shoal cast relay --upstream {where}")
