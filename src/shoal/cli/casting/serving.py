"""What publisher and relay have in common: they serve until they are stopped, and say how they are reached."""

from __future__ import annotations

import shlex
import socket

from rich.console import Console

from shoal.runtime import logs
from shoal.runtime.stop import StopToken, stop_on_signals

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def begin(role: str, verbose: bool) -> StopToken:
    """Listen to signals, and log to stderr."""
    stop = stop_on_signals()
    logs.setup(role, None, verbose)
    return stop


def plain_console() -> Console:
    """For results: lines as they are, however long, so that a command can be copied out of them."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def say_commands(out: Console, url: str, host: str, key: str, output: str) -> None:
    """The commands that get what is served at `url`, by a server that listens on `host`."""
    where = f"{public_url(url, host)}/#{key}"
    out.print(f"fetch it:  shoal cast fetch {where} -o {shlex.quote(output)}")
    out.print(f"relay it:  shoal cast relay --upstream {where}")
    out.file.flush()


def public_url(url: str, host: str) -> str:
    """`url` as others reach it: for a server that listens everywhere, by this machine's own address."""
    port = url.rpartition(":")[2]
    return f"http://{_bracketed(own_address() if host in EVERYWHERE else host)}:{port}"


def local_url(host: str, port: int) -> str:
    """How a server that listens there is reached from this machine."""
    return f"http://{_bracketed(EVERYWHERE.get(host, host))}:{port}"


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: this only asks which address would be used
            address: str = probe.getsockname()[0]
            return address
        except OSError:
            return "127.0.0.1"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
