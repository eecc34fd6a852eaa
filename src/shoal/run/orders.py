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

from shoal.client import HubClient
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
    load_key,
    load_or_create_key,
    sign_document,
)
from shoal.protocol.identity import check_public_key
from shoal.run.folder import ADMIN, RunFolder, hub_of
from shoal.runtime.clock import SystemClock
from shoal.runtime.text import shoal_command

WAIT_S = 10.0
NO_POLICY = PolicyRef(incarnation=0, version=0, digest="0" * 64)  # an owner may open a kind before there is one
LEAST_PREFIX = 4
ABOUT_NODES = (AdminVerb.SUSPEND, AdminVerb.BAN, AdminVerb.PARDON)


@dataclass(frozen=True)
class Order:
    """What is ordered of `run`, a folder or a join URL; signed by the keys in `keys`, or else in the run's folder."""

    run: str
    verb: str
    target: str = ""
    reason: str = ""
    for_s: float = 0.0
    certificates: tuple[SignedDocument, ...] = ()
    keys: Path | None = None

    def signer(self, needs_root: bool = False) -> tuple[SigningKey, SignedDocument | None]:
        """The admin's key with its certificate; the root's if it is needed, or if there is no other."""
        if self.keys is None and "://" in self.run:
            raise UserError("whose orders? give --keys FOLDER with admin.key and admin.json")
        keys = self.keys or Path(self.run) / "keys"
        root, admin, certificate = (keys / name for name in ("root.key", f"{ADMIN}.key", f"{ADMIN}.json"))
        if needs_root or not admin.exists():
            if not root.exists():
                raise ConfigError(f"{keys} has no root.key{'' if needs_root else ' and no admin.key'}: this needs it")
            return load_key(root), None
        try:
            return load_key(admin), SignedDocument.model_validate_json(certificate.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"cannot read {certificate}, the certificate of {admin}: put it back") from error

    def send(self, needs_root: bool = False) -> str:
        """Give the order; returns what the hub says."""
        (key, certificate), verb = self.signer(needs_root), AdminVerb(self.verb)
        with closing(_client(self.run)) as client:
            action = AdminAction(
                run=client.trusted_run().run,
                id=secrets.token_hex(16),
                verb=verb,
                target=find_node(client, self.target, "node") if verb in ABOUT_NODES else self.target,
                reason=self.reason,
                for_s=self.for_s,
                certificates=self.certificates,
                issued_at_ms=SystemClock().now_ms(),
            )
            return client.admin(AdminRequest(action=sign_document(action, key), certificate=certificate)).message


def _client(run: str) -> HubClient:
    return HubClient.of_a_person(*hub_of(run, WAIT_S))


def find_node(client: HubClient, what: str, kinds: str = "unit and no node") -> str:
    """The id of a node: given whole, by its start, or by its name. `kinds` is what there is none of, for errors."""
    if len(what) == 32 and set(what) <= set("0123456789abcdef"):
        return what
    found, after = [], ""
    while (page := client.nodes(after, 1000).nodes) and page[-1].node > after:
        by_id = len(what) >= LEAST_PREFIX
        found += [view for view in page if view.name == what or (by_id and view.node.startswith(what))]
        after = page[-1].node
    if len(found) == 1:
        return found[0].node
    if found:
        several = ", ".join(view.node[:12] for view in found[:4])
        raise UserError(f"{len(found)} nodes are called {what!r} ({several}, …): give the start of an id")
    raise UserError(
        f"there is no {kinds} {what!r} in this run; a node is named by its id, the start of it, or its name"
    )


def calibrate(order: Order) -> str:
    """Sign the limits in a file as the owner, and put them in force for their kind of worker; returns what to say."""
    from shoal.validator.profiles import read_profile

    profile, (root, _) = read_profile(Path(order.target)), order.signer(needs_root=True)
    with closing(_client(order.run)) as client:
        measured = profile.measured
        kind = MeasuredKind(limits=profile.model_dump(mode="json"), tokens=measured.tokens if measured else 0)
        made = Calibration(
            run=client.trusted_run().run,
            policy=client.status().policy or NO_POLICY,
            kinds={profile.key: kind},
            machines=measured.validators if measured else (),
            made_at_ms=SystemClock().now_ms(),
        )
        signed = sign_document(made, root)
        client.publish_calibration(signed)
    return f"the run takes work of {profile.key} by calibration {document_hash(signed)}"


# ── whom the run trusts ──────────────────────────────────────────────────────────────────────────────────────────


def add_validator(path: Path, public_key: str | None, out: Path | None, reason: str) -> Iterator[str]:
    """Certify a validator's key, one that is given or a new one in the folder, and have the hub trust it."""
    folder = RunFolder.open(path)
    index = sum(name.startswith("validator-") for name in folder.trusted_roles)
    name = f"validator-{index}"
    own = public_key or load_or_create_key(path / "keys" / f"{name}.key").public_key
    _require_key(own)
    signed = folder.certify("validator", own)
    yield Order(str(path), "certify", reason=reason, certificates=(signed,)).send(needs_root=True)
    if public_key is None:
        folder.put_certificate(name, signed)
        yield f"start it with: {shoal_command()} validator --dir {path} --index {index}"
        return
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
    roles: dict[str, Role] = {**folder.trusted_roles, ADMIN: "admin"}
    if name == "trainer":
        raise UserError(
            "the trainer's key cannot be rotated: it signs every published policy, and whoever follows the run "
            "believes that one key; begin a new run from the exported model instead"
        )
    if name not in roles:
        raise UserError(f"this run has no {name!r}; it has {', '.join(roles)}")
    before, keys = folder.certificate(name), path / "keys"
    following = load_or_create_key(keys / f"{name}.next.key")  # one that an interrupted rotation left is used
    signed = folder.certify(roles[name], following.public_key)
    yield Order(str(path), "certify", reason=reason, certificates=(before, signed)).send(needs_root=True)
    (keys / f"{name}.key").replace(keys / f"{name}.old.key")
    (keys / f"{name}.next.key").replace(keys / f"{name}.key")
    folder.put_certificate(name, signed)
    yield f"keys/{name}.key is the new key; the old one is keys/{name}.old.key"
    if name != ADMIN:
        yield f"restart the {roles[name]}, so that it signs with it"
    old = before.document["public_key"]
    yield f"when nothing needs the old one any more: {shoal_command()} admin revoke {path} {old}"


def revoke(order: Order) -> str:
    """Have a key, or that of `validator-N`, trusted for nothing; a validator's needs no root key."""
    key = order.target
    if key.startswith("validator-") and "://" not in order.run:
        key = str(RunFolder.open(Path(order.run)).certificate(key).document["public_key"])
    _require_key(key)
    with closing(_client(order.run)) as client:
        is_validators = key in client.trusted_run().validator_keys
    return Order(order.run, "revoke", key, order.reason, keys=order.keys).send(needs_root=not is_validators)


def _require_key(key: str) -> None:
    try:
        check_public_key(key)
    except ValueError as error:
        raise UserError(f"{error}; `shoal key new` prints public keys") from error
