"""A worker's folder: its identity, its outbox, its cache of weights, and which hub it trusts. One process at a time.

node.key           who this node is; credit belongs to it, so keep it
outbox/            finished work not yet promised by a hub
cache/             weights
known_hubs.json    hub address → root fingerprint, believed at the first contact
.lock              held while a worker runs here: two with one key and one outbox would answer for each other
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError
from shoal.protocol import SigningKey, load_or_create_key
from shoal.runtime.files import write_atomically


def identity(folder: Path) -> SigningKey:
    return load_or_create_key(folder / "node.key")


def pinned_root(folder: Path, hub_urls: Sequence[str], given: str | None) -> str | None:
    """The root fingerprint to insist on: the one given, else the one remembered for these addresses, else none."""
    if given is not None:
        return given
    known = _known(folder)
    roots = list(dict.fromkeys(known[url] for url in hub_urls if url in known))
    if len(roots) > 1:
        raise ConfigError(
            f"{', '.join(hub_urls)} were hubs of different runs ({', '.join(roots)}): give the addresses of one run, "
            f"or its whole join URL; {_path(folder)} is what is remembered"
        )
    return roots[0] if roots else None


def remember_root(folder: Path, hub_url: str, root_fingerprint: str) -> None:
    known = _known(folder)
    if known.get(hub_url) != root_fingerprint:
        write_atomically(_path(folder), json.dumps({**known, hub_url: root_fingerprint}, indent=2).encode())


def _path(folder: Path) -> Path:
    return folder / "known_hubs.json"


def _known(folder: Path) -> dict[str, str]:
    path = _path(folder)
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; remove it to trust hubs anew") from error
    if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
        raise ConfigError(f"{path} is not a table of hub addresses and fingerprints; remove it to trust hubs anew")
    return known
