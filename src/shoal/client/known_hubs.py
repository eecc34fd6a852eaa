"""The root key of each hub that this user has met, by the hub's address: the memory of "trust on first use".

    ~/.shoal/known_hubs.json     {"http://hub.example:8470": "3540507c6be2367e4e0cb29ab5dfd722f330bda3"}

A fingerprint in the join URL is the user's own word: it wins over the memory, and replaces it once the hub has proven
it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from shoal.errors import ConfigError
from shoal.runtime.files import home, make_home, write_atomically

log = logging.getLogger(__name__)

DEFAULT_PORTS = {"http": 80, "https": 443}


def known_root(urls: Sequence[str], given: str | None) -> str | None:
    """The root fingerprint to insist on: the one given, else the one remembered for these addresses, else none."""
    if given is not None:
        return given
    known = _load()
    roots = list(dict.fromkeys(known[address] for url in urls if (address := _address(url)) in known))
    if len(roots) > 1:
        what = f"{', '.join(urls)} were hubs of different runs ({', '.join(roots)})"
        advice = f"give the addresses of one run, or its whole join URL; {_path()} is what is remembered"
        raise ConfigError(f"{what}: {advice}")
    return roots[0] if roots else None


def remember_root(url: str, root_fingerprint: str) -> None:
    known, address = _load(), _address(url)
    if (before := known.get(address, root_fingerprint)) != root_fingerprint:
        log.warning("%s had the root key %s until now; by your join URL it is %s", url, before, root_fingerprint)
    make_home()
    write_atomically(_path(), json.dumps({**known, address: root_fingerprint}, indent=2).encode() + b"\n", mode=0o600)


def _address(url: str) -> str:
    """One spelling for one address: `HTTP://Hub.Example:80/` as `http://hub.example:80`."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host.rstrip(".")
    return f"{parts.scheme}://{host}:{parts.port or DEFAULT_PORTS.get(parts.scheme, 0)}{parts.path.rstrip('/')}"


def _path() -> Path:
    return home() / "known_hubs.json"


def _load() -> dict[str, str]:
    try:
        return TypeAdapter(dict[str, str]).validate_json(_path().read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        what = "is not a table of hub addresses and fingerprints; remove it to trust hubs anew"
        raise ConfigError(f"{_path()} {what}") from error
