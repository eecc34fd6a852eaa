"""Who may sign for a run: everything is derived from its root key.

    join URL ─pins─► root key ─certifies─► hub key ─signs─► RunInfo, leases, receipts, ledger heads
                              ├──────────► trainer key ─signs─► policies
                              └──────────► validator keys ─sign─► verdicts

Without a pinned fingerprint the first answer is trusted ("trust on first use"), and its root key is remembered for the
address that the user gave:

    ~/.shoal/known_hubs.json     {"http://hub.example:8470": "3540507c6be2367e4e0cb29ab5dfd722f330bda3"}

A fingerprint in the join URL wins over the remembered one, and replaces it once the hub has proven it. A revoked key is
not trusted.
"""

import json
import logging
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from shoal.errors import ConfigError, ProtocolError, SignatureError
from shoal.protocol import Role, RoleCertificate, RunInfo, SignedDocument, check_public_key, fingerprint, open_document
from shoal.protocol.node import check_spoken
from shoal.runtime.files import ensure_folder, home, write_atomically
from shoal.runtime.targets import DEFAULT_PORTS, PUBLIC_ONLY, Reach, is_address

log = logging.getLogger(__name__)

FINGERPRINT_HEX = 40
RUN_SUFFIX_HEX = 12


@dataclass(frozen=True)
class TrustedRun:
    """A run whose description is signed by a hub that its root key certified."""

    info: RunInfo
    root_fingerprint: str
    keys: dict[str, frozenset[str]]
    revoked: frozenset[str] = frozenset()
    reach: Reach = PUBLIC_ONLY  # where its hub may send this machine

    @property
    def run(self) -> str:
        return self.info.run

    @property
    def hub_keys(self) -> set[str]:
        return set(self.keys["hub"])

    @property
    def validator_keys(self) -> set[str]:
        return set(self.keys["validator"])

    @property
    def trainer_key(self) -> str:
        keys = self.keys["trainer"]
        if len(keys) != 1:
            raise ProtocolError(f"run {self.run} has {len(keys)} trainer keys; its owner has to certify exactly one")
        return next(iter(keys))


def run_id(name: str, root_fingerprint: str) -> str:
    """The id of a run contains the start of its root key's fingerprint, so no other key can claim it."""
    return f"{name}-{root_fingerprint[:RUN_SUFFIX_HEX]}"


def split_join_url(url: str) -> tuple[str, str | None]:
    """The hub's address, and the root fingerprint if the URL pins one (`http://host:8470/#fingerprint`)."""
    if not is_address(url):
        raise ConfigError(f"{url!r} is not a hub address; it should look like http://host:8470/#fingerprint")
    parts = urlsplit(url)
    base, pinned = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", parts.fragment
    if not pinned:
        return base, None
    if len(pinned) != FINGERPRINT_HEX or not set(pinned) <= set(string.hexdigits.lower()):
        what = f"the part after # in {url!r} is not a root fingerprint ({FINGERPRINT_HEX} hex digits)"
        raise ConfigError(f"{what}; copy the whole join URL again")
    return base, pinned


def parse_join_urls(urls: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Several join URLs of one run: their addresses, and the fingerprint that they pin, if any."""
    parts = [split_join_url(url) for url in urls]
    pins = list(dict.fromkeys(pin for _, pin in parts if pin is not None))
    if len(pins) > 1:
        raise ConfigError(f"these URLs are of different runs (root keys {', '.join(pins)}): give those of one run only")
    return tuple(dict.fromkeys(base for base, _ in parts)), pins[0] if pins else None


def open_run_info(signed: SignedDocument, pinned: str | None, revoked: frozenset[str] = frozenset()) -> TrustedRun:
    """Verify the chain from the root key to the hub's signature. Keys in `revoked` are already known to be revoked."""
    try:
        claimed_root = check_public_key(str(signed.document.get("root_key")))
    except ValueError as error:
        raise SignatureError(f"the hub's description of the run names no root key: {error}") from error
    root_fingerprint = fingerprint(claimed_root)
    if pinned not in (None, root_fingerprint):
        who = f"another run or an impostor answers at this address: its root key is {root_fingerprint}, not {pinned}"
        raise SignatureError(f"{who}; ask the run's owner for the whole join URL and use that")
    info = open_document(signed, RunInfo, signed.signed_by)  # well-formed; its signer is checked below
    check_spoken("hub", info.protocol_version)
    expected = run_id(info.name, root_fingerprint)
    if info.run != expected:
        raise SignatureError(f"the run calls itself {info.run!r}, but its name and root key give {expected!r}")
    revoked = revoked | frozenset(info.revoked)
    found: dict[str, set[str]] = {role: set() for role in get_args(Role)}
    for each in info.certificates:
        if each.document.get("role") in found:  # roles of later versions are ignored
            certificate = open_document(each, RoleCertificate, claimed_root)
            if certificate.run != info.run:
                raise SignatureError(f"a certificate is for run {certificate.run!r}, not for {info.run!r}")
            found[certificate.role].add(certificate.public_key)
    keys = {role: frozenset(holders - revoked) for role, holders in found.items()}
    if signed.signed_by not in keys["hub"]:
        why = "was revoked" if signed.signed_by in revoked else "is not certified by the run's root key"
        raise SignatureError(f"the hub's key {signed.signed_by[:16]}… {why}; ask the run's owner for the join URL")
    return TrustedRun(info=info, root_fingerprint=root_fingerprint, keys=keys, revoked=revoked)


def pinned_root(urls: Sequence[str], given: str | None) -> str | None:
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
    ensure_folder(home(), private=True)
    write_atomically(_path(), json.dumps({**known, address: root_fingerprint}, indent=2).encode() + b"\n", mode=0o600)


def _address(url: str) -> str:
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
        what = "is not a table of hub addresses and fingerprints; remove it to trust hubs again"
        raise ConfigError(f"{_path()} {what}") from error
