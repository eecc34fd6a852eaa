"""What publisher, relay and fetch have in common: how a server is reached, and whom they tell what they do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from shoal.runtime.targets import own_address

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


class Terminal(Protocol):
    """Where results are said, remarks are noted beside them, and progress is shown."""

    def say(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def metered(self, what: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """A function to be told how many bytes are done, of how many."""
        ...


def say_commands(terminal: Terminal, url: str, host: str, key: str, output: str) -> None:
    """The commands that get what is served at `url`, by a server that listens on `host`."""
    where = f"{public_url(url, host)}/#{key}"
    terminal.say(f"fetch it:  shoal cast fetch {where} -o {shlex.quote(output)}")
    terminal.say(f"relay it:  shoal cast relay --upstream {where}")


def public_url(url: str, host: str) -> str:
    """`url` as others reach it: for a server that listens everywhere, by this machine's own address."""
    port = url.rpartition(":")[2]
    return f"http://{_bracketed(own_address() if host in EVERYWHERE else host)}:{port}"


def local_url(host: str, port: int) -> str:
    """How a server that listens there is reached from this machine."""
    return f"http://{_bracketed(EVERYWHERE.get(host, host))}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes} bytes" if size_bytes < 10_000 else f"{size_bytes / 1e6:,.2f} MB"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "100 %"
