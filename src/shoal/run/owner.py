"""Keys of people and machines, and the signed orders of a run's owner.

owner.key (kept at home) ── vouch ──► node.key of machine 1, 2, 3 …    credit adds up under the owner
keys/admin.key + admin.json ──sign──► pause, drain, resume, sanctions, relays, revoke (of a validator)
keys/root.key ────────────────sign──► certificates (add-*, rotate), revoke (of anybody), limits (calibrate)
"""

import secrets
import string
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal import protocol
from shoal.client import HubClient
from shoal.errors import ConfigError, KeyFileError, ProtocolError, UserError
from shoal.hub.service.stories import Stories
from shoal.run.folder import ADMIN, RunFolder, hub_address
from shoal.runtime import SystemClock, duration, shoal_command

NODE_HEX, PUBLIC_KEY_HEX = 32, 64
MAX_FILE_BYTES = 64 * 1024
WAIT_S = 10.0
NO_POLICY = protocol.PolicyRef(incarnation=0, version=0, digest="0" * 64)  # before any policy
LEAST_PREFIX = 4
CERTIFIED_S, MOST_CERTIFIED_S = 30 * 86_400, 10**8  # how long a trusted worker's certificate holds
ABOUT_NODES = (protocol.AdminVerb.SUSPEND, protocol.AdminVerb.BAN, protocol.AdminVerb.PARDON)


def key_path(where: Path) -> Path:
    return where / "node.key" if where.is_dir() else where


def new_key(where: Path) -> list[str]:
    if (path := key_path(where)).exists():
        return [f"there is a key at {path} already", *describe(protocol.load_key(path))]
    key = protocol.SigningKey.generate()
    protocol.store_key(path, key)
    return [f"made {path}", *describe(key)]


def describe(key: protocol.SigningKey) -> list[str]:
    return [f"node        {key.node}", f"public key  {key.public_key}"]


def node_of(text: str) -> str:
    if set(text) <= set(string.hexdigits.lower()) and len(text) in (NODE_HEX, PUBLIC_KEY_HEX):
        return text if len(text) == NODE_HEX else protocol.node_id(text)
    if Path(text).exists():
        return protocol.load_key(key_path(Path(text))).node
    known = f"a node id ({NODE_HEX} hex digits), nor a public key ({PUBLIC_KEY_HEX}), nor a key file"
    raise UserError(f"{text[:80]!r} is neither {known}: on the machine in question, see: shoal key new FOLDER")


def vouch_for(node: str, owner: protocol.SigningKey) -> protocol.SignedDocument:
    vouch = protocol.Vouch(owner=owner.public_key, node=node, issued_at_ms=SystemClock().now_ms())
    return protocol.sign_document(vouch, owner)


def vouch_of(key: protocol.SigningKey, owner: Path | None, vouch: Path | None) -> protocol.SignedDocument | None:
    if owner is not None and vouch is not None:
        raise UserError("--owner and --vouch say the same thing: give one of them")
    if owner is not None:
        return vouch_for(key.node, protocol.load_key(key_path(owner)))
    if vouch is None:
        return None
    remedy = f"make one with: shoal key vouch {key.node} --owner FILE"
    try:
        signed = protocol.SignedDocument.model_validate_json(_text(vouch))
        node = protocol.open_document(signed, protocol.Vouch, signed.signed_by).node
    except (ValidationError, ProtocolError) as error:
        raise UserError(f"{vouch} is not a vouch: {remedy}") from error
    if node != key.node:
        raise UserError(f"{vouch} vouches for node {node}, but this one is {key.node}: {remedy}")
    return signed


def certificate_of(key: protocol.SigningKey, path: Path) -> protocol.SignedDocument:
    """The certificate in a file, if it is this trusted worker's; the hub checks that the run's root key signed it."""
    remedy = f"the run's owner makes one with: shoal admin add-worker RUN {key.public_key}"
    try:
        signed = protocol.SignedDocument.model_validate_json(_text(path))
        certificate = protocol.open_document(signed, protocol.RoleCertificate, signed.signed_by)
    except (ValidationError, ProtocolError) as error:
        raise UserError(f"{path} is not a certificate: {remedy}") from error
    if (certificate.role, certificate.public_key) != ("trusted", key.public_key):
        whose = f"a {protocol.node.titled(certificate.role)} with key {certificate.public_key[:16]}…"
        raise UserError(f"{path} is for {whose}, this folder's is {key.public_key[:16]}… (--folder): {remedy}")
    return signed


def _text(path: Path) -> str:
    try:
        with path.open() as file:
            return file.read(MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@dataclass(frozen=True)
class Order:
    """An order about `run` (a folder or a join URL), signed by the keys in `keys`, or by those of the run's folder."""

    run: str
    verb: str
    target: str = ""
    reason: str = ""
    for_s: float = 0.0
    certificates: tuple[protocol.SignedDocument, ...] = ()
    keys: Path | None = None

    def signer(self, needs_root: bool = False) -> tuple[protocol.SigningKey, protocol.SignedDocument | None]:
        """The admin's key with its certificate; the root key if it is needed, or if there is no other."""
        if self.keys is None and "://" in self.run:
            raise UserError("whose orders? give --keys FOLDER with admin.key and admin.json")
        keys = self.keys or RunFolder.open(Path(self.run)).path / "keys"
        root, admin, certificate = (keys / name for name in ("root.key", f"{ADMIN}.key", f"{ADMIN}.json"))
        if needs_root or not admin.exists():
            if not root.exists():
                raise ConfigError(f"{keys} has no root.key{'' if needs_root else ' and no admin.key'}: this needs it")
            return protocol.load_key(root), None
        try:
            return protocol.load_key(admin), protocol.SignedDocument.model_validate_json(certificate.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"cannot read {certificate}, the certificate of {admin}: put it back") from error

    def send(self, needs_root: bool = False) -> str:
        (key, certificate), verb = self.signer(needs_root), protocol.AdminVerb(self.verb)
        with closing(_client(self.run)) as client:
            action = protocol.AdminAction(
                run=client.trusted_run().run, id=secrets.token_hex(16), verb=verb,
                target=find_node(client, self.target, "node") if verb in ABOUT_NODES else self.target,
                reason=self.reason, for_s=self.for_s, certificates=self.certificates,
                issued_at_ms=SystemClock().now_ms(),
            )  # fmt: skip
            signed = protocol.sign_document(action, key)
            return client.admin(protocol.AdminRequest(action=signed, certificate=certificate)).message


def _client(run: str) -> HubClient:
    return HubClient.of_a_person(*hub_address(run, WAIT_S))


def find_node(client: HubClient | Stories, what: str, kinds: str = "unit and no node") -> str:
    """The id of a node from its id, the start of it, or its name. `kinds` is for the error message."""
    if len(what) == NODE_HEX and set(what) <= set("0123456789abcdef"):
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
    raise UserError(f"there is no {kinds} {what!r} in this run; a node is named by its id, its start, or its name")


def calibrate(order: Order) -> str:
    from shoal.validator.profiles import read_profile

    profile, (root, _) = read_profile(Path(order.target)), order.signer(needs_root=True)
    with closing(_client(order.run)) as client:
        measured = profile.measured
        kind = protocol.MeasuredKind(limits=profile.model_dump(mode="json"), tokens=measured.tokens if measured else 0)
        made = protocol.Calibration(
            run=client.trusted_run().run, policy=client.status().policy or NO_POLICY, kinds={profile.key: kind},
            machines=measured.validators if measured else (), made_at_ms=SystemClock().now_ms(),
        )  # fmt: skip
        signed = protocol.sign_document(made, root)
        client.publish_calibration(signed)
    return f"the run takes work of {profile.key} by calibration {protocol.document_hash(signed)}"


def add_validator(path: Path, public_key: str | None, out: Path | None, reason: str) -> Iterator[str]:
    folder = RunFolder.open(path)
    index = sum(name.startswith("validator-") for name in folder.trusted_roles)
    name = f"validator-{index}"
    own = public_key or protocol.load_or_create_key(path / "keys" / f"{name}.key").public_key
    _require_key(own)
    signed = folder.certify("validator", own)
    yield Order(str(path), "certify", reason=reason, certificates=(signed,)).send(needs_root=True)
    if public_key is None:
        folder.put_certificate(name, signed)
        yield f"start it with: {shoal_command()} validator {path} --index {index}"
        return
    target = out or Path(f"validator-{public_key[:8]}.json")
    target.write_text(signed.model_dump_json(indent=2) + "\n")
    yield f"its certificate: {target}. On the validator's machine, a folder VALIDATOR takes:"
    yield f"  {path / 'recipe.toml'} → VALIDATOR/recipe.toml (hub.database may hold a password: take it out)"
    yield f"  {path / 'endpoints.json'} → VALIDATOR/endpoints.json (with addresses that it reaches)"
    yield f"  {path / 'keys' / 'hub.json'} → VALIDATOR/keys/hub.json"
    yield f"  {target} → VALIDATOR/keys/validator-0.json"
    yield "  its own key, which stays there → VALIDATOR/keys/validator-0.key"
    yield f"start it there with: {shoal_command()} validator ./VALIDATOR --index 0"


def add_worker(path: Path, public_key: str, out: Path | None, for_s: float) -> Iterator[str]:
    """Certify the key of a machine that is checked by sample. The hub learns of it when that machine registers."""
    _require_key(public_key)
    if for_s > MOST_CERTIFIED_S:
        raise UserError(f"--for {for_s:,.0f}: a certificate holds for at most {MOST_CERTIFIED_S:,} seconds")
    folder, for_s = RunFolder.open(path), for_s or CERTIFIED_S
    signed, target = folder.certify("trusted", public_key, for_s), out or Path(f"trusted-{public_key[:8]}.json")
    target.write_text(signed.model_dump_json(indent=2) + "\n")
    yield f"its certificate, for {duration(for_s)}: {target}. On that machine, where FOLDER has its node.key:"
    yield f"  {shoal_command()} join {folder.endpoints.join} --folder FOLDER --trusted {target.name}"
    yield f"to end it earlier: {shoal_command()} admin revoke {path} {public_key}"


def rotate(path: Path, name: str, reason: str) -> Iterator[str]:
    """The hub trusts the new key before it replaces the old one (kept as keys/NAME.old.key), which is revoked later."""
    folder = RunFolder.open(path)
    roles: dict[str, protocol.Role] = {**folder.trusted_roles, ADMIN: "admin"}
    if name == "trainer":
        why = "it signs every published policy, and all nodes trust that one key"
        raise UserError(f"the trainer's key cannot be rotated: {why}; begin a new run from the exported model instead")
    if name not in roles:
        raise UserError(f"this run has no {name!r}; it has {', '.join(roles)}")
    before, keys = folder.certificate(name), path / "keys"
    following = protocol.load_or_create_key(keys / f"{name}.next.key")  # may be left from an interrupted rotation
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
    """Revoke a key, or that of `validator-N`; a validator's needs no root key."""
    key = order.target
    if key.startswith("validator-") and "://" not in order.run:
        key = str(RunFolder.open(Path(order.run)).certificate(key).document["public_key"])
    _require_key(key)
    with closing(_client(order.run)) as client:
        is_validators = key in client.trusted_run().validator_keys
    return Order(order.run, "revoke", key, order.reason, keys=order.keys).send(needs_root=not is_validators)


def _require_key(key: str) -> None:
    try:
        protocol.check_public_key(key)
    except ValueError as error:
        raise UserError(f"{error}; `shoal key new` prints public keys") from error
