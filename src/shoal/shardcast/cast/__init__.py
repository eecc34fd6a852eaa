"""What `shoal cast` does: broadcast any file or folder, without a run, a hub or torch.

trust      which key and which broadcast a URL stands for, and what was believed before
publish    write the next version into a folder and serve it
fetch      bring a version here, resumable, and put it where it belongs
relay      mirror a broadcast
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from shoal.runtime.targets import own_address
from shoal.shardcast.server import EVERYWHERE, local_url


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
    return local_url(own_address() if host in EVERYWHERE else host, int(url.rpartition(":")[2]))


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes} bytes" if size_bytes < 10_000 else f"{size_bytes / 1e6:,.2f} MB"
