"""Orders of a run's owner: made, signed, sent to the hub (`shoal admin`).

    keys/admin.key + admin.json ──sign──► pause, drain, resume, sanctions, relays, revoke (of a validator)
    keys/root.key ────────────────sign──► certificates (add-validator, rotate), revoke (of anybody), limits (calibrate)

Rotating a key:  a new key beside the old ─► the root certifies it ─► the hub trusts both ─► the new one takes the
place of the old (keys/NAME.old.key) ─► the process is restarted ─► the old key is revoked
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.client import HubClient, split_join_url
from shoal.client.known_hubs import known_root
from shoal.errors import ConfigError, UserError
from shoal.protocol import (
    AdminAction,
    AdminRequest,
    AdminVerb,
    Calibration,
    MeasuredKind,
    PolicyRef,
    Role,
    SignedDocument,
    SigningKey,
    document_hash,
    fingerprint,
    load_key,
    load_or_create_key,
    sign_document,
)
from shoal.protocol.identity import check_public_key
from shoal.run.folder import ADMIN, RunFolder
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.text import shoal_command

WAIT_S = 10.0
NO_POLICY = PolicyRef(incarnation=0, version=0, digest="0" * 64)  # an owner may open a kind before there is one
LEAST_PREFIX = 4
ABOUT_NODES = (AdminVerb.SUSPEND, AdminVerb.BAN, AdminVerb.PARDON)


@dataclass(frozen=True)
class Order:
    verb: str
    target: str = ""
    reason: str = ""
    for_s: float = 0.0
    certificates: tuple[SignedDocument, ...] = ()


@dataclass(frozen=True)
class Signer:
    """Who gives an order: the root key, or an admin key with its certificate."""

    key: SigningKey
    certificate: SignedDocument | None


@dataclass(frozen=True)
class Office:
    """Where orders go, and what signs them: a hub's address, the root that it must answer for, a folder of keys."""

    url: str
    pinned: str | None
    keys: Path

    @classmethod
    def of(cls, run: str, keys: Path | None) -> Office:
        if "://" in run:
            if keys is None:
                raise UserError("whose orders? give --keys FOLDER with admin.key and admin.json")
            url, pinned = split_join_url(run)
            return cls(url, known_root([url], pinned), keys)
        folder = RunFolder.open(Path(run))
        return cls(folder.endpoints.hub, fingerprint(folder.root_key), keys or folder.path / "keys")

    def signer(self, needs_root: bool = False) -> Signer:
        """The admin's key; the root's if it is needed, or if there is no other."""
        root, admin, certificate = (self.keys / name for name in ("root.key", f"{ADMIN}.key", f"{ADMIN}.json"))
        if needs_root or not admin.exists():
            if not root.exists():
                which = "the root key" if needs_root else "neither an admin key nor the root key"
                raise ConfigError(f"{self.keys} has {'no root.key: this needs ' if needs_root else ''}{which}")
            return Signer(load_key(root), None)
        try:
            signed = SignedDocument.model_validate_json(certificate.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"cannot read {certificate}, the certificate of {admin}: put it back") from error
        return Signer(load_key(admin), signed)

    def client(self) -> HubClient:
        return HubClient.of_a_person(self.url, WAIT_S, self.pinned)


def open_kind(run: str, file: Path, keys: Path | None = None, clock: Clock = SystemClock()) -> str:
    """Sign the limits in a file as the owner, and put them in force for their kind of worker; returns what to say."""
    from shoal.validator.profiles import read_profile

    profile, office = read_profile(file), Office.of(run, keys)
    root = office.signer(needs_root=True).key
    with closing(office.client()) as client:
        tokens = profile.measured.tokens if profile.measured is not None else 0
        made = Calibration(
            run=client.trusted_run().run,
            policy=client.status().policy or NO_POLICY,
            kinds={profile.key: MeasuredKind(limits=profile.model_dump(mode="json"), tokens=tokens)},
            machines=profile.measured.validators if profile.measured is not None else (),
            made_at_ms=clock.now_ms(),
        )
        signed = sign_document(made, root)
        client.publish_calibration(signed)
    return f"the run takes work of {profile.key} by calibration {document_hash(signed)}"


def send(office: Office, order: Order, needs_root: bool = False, clock: Clock = SystemClock()) -> str:
    """Give an order as the owner of a run; returns what the hub says."""
    signer, verb = office.signer(needs_root), AdminVerb(order.verb)
    with closing(office.client()) as client:
        target = find_node(client, order.target, "node") if verb in ABOUT_NODES else order.target
        action = AdminAction(
            run=client.trusted_run().run,
            id=secrets.token_hex(16),
            verb=verb,
            target=target,
            reason=order.reason,
            for_s=order.for_s,
            certificates=order.certificates,
            issued_at_ms=clock.now_ms(),
        )
        request = AdminRequest(action=sign_document(action, signer.key), certificate=signer.certificate)
        return client.admin(request).message


def find_node(client: HubClient, what: str, kinds: str = "unit and no node") -> str:
    """The id of a node: given whole, by its start, or by its name. `kinds` is what there is none of, for errors."""
    if len(what) == 32 and set(what) <= set("0123456789abcdef"):
        return what
    found, after = [], ""
    while (page := client.nodes(after, 1000).nodes) and page[-1].node > after:
        found += [
            view for view in page if view.name == what or (len(what) >= LEAST_PREFIX and view.node.startswith(what))
        ]
        after = page[-1].node
    if len(found) == 1:
        return found[0].node
    if found:
        several = ", ".join(view.node[:12] for view in found[:4])
        raise UserError(f"{len(found)} nodes are called {what!r} ({several}, …): give the start of an id")
    raise UserError(
        f"there is no {kinds} {what!r} in this run; a node is named by its id, the start of it, or its name"
    )


# ── whom the run trusts ──────────────────────────────────────────────────────────────────────────────────────────


def add_validator(path: Path, public_key: str | None, out: Path | None, reason: str) -> Iterator[str]:
    """Certify a validator's key, one that is given or a new one in the folder, and have the hub trust it."""
    folder = RunFolder.open(path)
    if public_key is None:
        index = len([name for name in folder.trusted_roles if name.startswith("validator-")])
        name = f"validator-{index}"
        signed = folder.certify("validator", load_or_create_key(path / "keys" / f"{name}.key").public_key)
        yield _certified(folder, (signed,), reason)
        folder.put_certificate(name, signed)
        yield f"start it with: {shoal_command()} validator --dir {path} --index {index}"
        return
    _require_key(public_key)
    signed = folder.certify("validator", public_key)
    yield _certified(folder, (signed,), reason)
    target = out or Path(f"validator-{public_key[:8]}.json")
    target.write_text(signed.model_dump_json(indent=2) + "\n")
    yield f"its certificate: {target}. On the validator's machine, a folder VALIDATOR takes:"
    yield f"  {path / 'recipe.toml'} → VALIDATOR/recipe.toml (hub.database may hold a password: take it out)"
    yield f"  {path / 'endpoints.json'} → VALIDATOR/endpoints.json (with addresses that it reaches)"
    yield f"  {path / 'keys' / 'hub.json'} → VALIDATOR/keys/hub.json"
    yield f"  {target} → VALIDATOR/keys/validator-0.json"
    yield "  its own key, which stays there → VALIDATOR/keys/validator-0.key"
    yield f"start it there with: {shoal_command()} validator --dir VALIDATOR --index 0"


def rotate(path: Path, name: str, reason: str) -> Iterator[str]:
    """Another key for a process: trusted by the hub before anything is replaced."""
    folder = RunFolder.open(path)
    if name == "trainer":
        raise UserError(
            "the trainer's key cannot be rotated: it signs every published policy, and whoever follows the run "
            "believes that one key; begin a new run from the exported model instead"
        )
    if name != ADMIN and name not in folder.trusted_roles:
        raise UserError(f"this run has no {name!r}; it has {', '.join([*folder.trusted_roles, ADMIN])}")
    role: Role = "admin" if name == ADMIN else folder.trusted_roles[name]
    before, keys = folder.certificate(name), path / "keys"
    following = load_or_create_key(keys / f"{name}.next.key")  # one that an interrupted rotation left is gone on with
    signed = folder.certify(role, following.public_key)
    yield _certified(folder, (before, signed), reason)
    (keys / f"{name}.key").replace(keys / f"{name}.old.key")
    (keys / f"{name}.next.key").replace(keys / f"{name}.key")
    folder.put_certificate(name, signed)
    yield f"keys/{name}.key is the new key; the old one is keys/{name}.old.key"
    if name != ADMIN:
        yield f"restart the {role}, so that it signs with it"
    old = before.document["public_key"]
    yield f"when nothing needs the old one any more: {shoal_command()} admin revoke {path} {old}"


def revoke(run: str, key: str, reason: str, keys: Path | None) -> str:
    """Have a key trusted for nothing; a validator's needs no root key."""
    office, needs_root = Office.of(run, keys), True
    if key.startswith("validator-") and "://" not in run:
        key, needs_root = str(RunFolder.open(Path(run)).certificate(key).document["public_key"]), False
    _require_key(key)
    with closing(office.client()) as client:
        needs_root = needs_root and key not in client.trusted_run().validator_keys
    return send(office, Order("revoke", key, reason), needs_root)


def _certified(folder: RunFolder, certificates: tuple[SignedDocument, ...], reason: str) -> str:
    office = Office.of(str(folder.path), None)
    return send(office, Order("certify", reason=reason, certificates=certificates), needs_root=True)


def _require_key(key: str) -> None:
    try:
        check_public_key(key)
    except ValueError as error:
        raise UserError(f"{error}; `shoal key new` prints public keys") from error
