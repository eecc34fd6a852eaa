"""What the run's owner has ordered, and what an order changes.

              resume
    running ◄──────── paused     no leases, no batches; what is out may come in
            ────────► draining   no leases; what is out is judged, and trained on in every batch that it fills; a step
             pause, drain        that cannot be filled waits

    relays        added to, and removed from, those that the hub was started with
    certificates  signed by the root key after the hub was started
    revoked       keys that are trusted for nothing

All of it is one row (`meta.orders`), for every hub of the run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.hub.state.commands import Refusal
from shoal.protocol import MAX_RELAYS, AdminAction, AdminVerb, Conduct, OwnerOrders, RoleCertificate
from shoal.protocol.node import titled
from shoal.protocol.signing import MAX_SKEW_MS, Message, SignedDocument, open_document

REMEMBERED_MS = 3 * MAX_SKEW_MS
CONDUCTS: Mapping[AdminVerb, Conduct] = {
    AdminVerb.PAUSE: "paused", AdminVerb.DRAIN: "draining", AdminVerb.RESUME: "running"
}  # fmt: skip
PARTICIPLES = {AdminVerb.SUSPEND: "suspended", AdminVerb.BAN: "banned", AdminVerb.PARDON: "under no sanction"}
SANCTIONS = frozenset(PARTICIPLES)
REVOKED = "its key was revoked by the run's owner"  # why a node is banned whose key is trusted for nothing any more


class Orders(Message):
    """`seen` are the ids of the last minutes' orders with their dates."""

    conduct: Conduct = "running"
    since_ms: int = 0
    reason: str = ""
    relays: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    certificates: tuple[SignedDocument, ...] = ()
    revoked: tuple[str, ...] = ()
    seen: tuple[tuple[str, int], ...] = ()

    @property
    def standing(self) -> OwnerOrders:
        return OwnerOrders(conduct=self.conduct, since_ms=self.since_ms, reason=self.reason)

    def halted(self, now_ms: int) -> str:
        if self.conduct == "running":
            return ""
        why = f": {self.reason}" if self.reason else ""
        since = f"{max(0, now_ms - self.since_ms) // 1000} s ago"
        what = "paused the run" if self.conduct == "paused" else "lets the run drain: no new work is given out"
        return f"the run's owner {what} ({since}){why}"

    def sources(self, configured: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(url for url in configured if url not in self.removed), *self.relays]))

    def trusted(self, configured: Iterable[SignedDocument]) -> tuple[SignedDocument, ...]:
        """The certificates in force, without admins': these come with each order."""
        known = [each for each in (*configured, *self.certificates) if each.document.get("role") != "admin"]
        found = {str(each.document.get("public_key")): each for each in known}
        return tuple(signed for key, signed in found.items() if key not in self.revoked)


@dataclass(frozen=True)
class Estate:
    run: str
    root_key: str
    hub_key: str
    sources: tuple[str, ...]
    last_resort: tuple[str, ...]
    certificates: tuple[SignedDocument, ...]


def require_fresh(action: AdminAction, now_ms: int) -> None:
    off_ms = action.issued_at_ms - now_ms
    if abs(off_ms) > MAX_SKEW_MS:
        off = f"{abs(off_ms) / 1000:.0f} s {'ahead of' if off_ms > 0 else 'behind'} the hub's clock"
        sentence = f"the order is dated {off} (at most {MAX_SKEW_MS // 1000} s): set this machine's clock"
        raise Refusal(401, "admin.skew", sentence)


def require_allowed(orders: Orders, verb: AdminVerb, role: str, public_key: str) -> None:
    """A revocation is final, because some may be ordered by the root key only. A trusted node cannot be banned or
    suspended, since the run would wait for it without saying so: its key is revoked instead."""
    if verb is AdminVerb.PARDON and public_key in orders.revoked:
        raise Refusal(409, "admin.revoked", f"key {public_key[:16]}… was revoked, which is final: make a new one")
    if verb is AdminVerb.PARDON and role == "trusted":
        sentence = "a trusted worker is not pardoned: make a new key there, and certify it (shoal admin add-worker)"
        raise Refusal(409, "admin.role", sentence)
    if verb is not AdminVerb.PARDON and role == "trainer":
        raise Refusal(409, "admin.role", "a trainer cannot be banned or suspended: pause the run, or end it")
    if verb is not AdminVerb.PARDON and role != "worker":
        remedy = f"shoal admin revoke RUN {public_key}"
        raise Refusal(409, "admin.role", f"a {titled(role)} cannot be banned or suspended: {remedy}")


def apply_order(
    orders: Orders, action: AdminAction, estate: Estate, by_root: bool, now_ms: int
) -> tuple[Orders, bool, str]:
    """The orders in force after this one, whether that is a change, and in words. Sanctions are the caller's."""
    kept = tuple((known, at_ms) for known, at_ms in orders.seen if now_ms - at_ms <= REMEMBERED_MS)
    noted = orders.model_copy(update={"seen": (*kept, (action.id, now_ms))})
    verb, changes = action.verb, dict[str, Any]()
    if verb in CONDUCTS:
        message = f"the run is {CONDUCTS[verb]}"
        if noted.conduct != CONDUCTS[verb]:
            changes = {"conduct": CONDUCTS[verb], "since_ms": now_ms, "reason": action.reason}
    elif verb in (AdminVerb.ADD_RELAY, AdminVerb.REMOVE_RELAY):
        changes, message = _relay(noted, action, estate)
    elif verb is AdminVerb.CERTIFY:
        changes, message = _certify(noted, action, estate)
    elif verb is AdminVerb.REVOKE:
        changes, message = _revoke(noted, action, estate, by_root)
    else:
        message = f"node {action.target} is {PARTICIPLES[verb]}"
    changed = any(getattr(noted, name) != value for name, value in changes.items()) or verb in SANCTIONS
    return noted.model_copy(update=changes), changed, message


def _relay(orders: Orders, action: AdminAction, estate: Estate) -> tuple[dict[str, Any], str]:
    url, sources = action.target.rstrip("/"), orders.sources(estate.sources)
    if not url.startswith(("http://", "https://")):
        raise Refusal(422, "admin.relay", f"{action.target[:80]!r} is no address of a relay: http://host:port")
    removed = tuple(known for known in orders.removed if known != url)
    relays = tuple(known for known in orders.relays if known != url)
    if action.verb is AdminVerb.ADD_RELAY:
        if url in sources:
            return {}, f"{url} is a relay of this run"
        if len(relays) >= MAX_RELAYS:
            raise Refusal(409, "admin.relays", f"the run has {MAX_RELAYS} added relays: remove one first")
        return {"removed": removed, "relays": relays if url in estate.sources else (*relays, url)}, f"{url} was added"
    if not set(sources) - {url} and not estate.last_resort:
        raise Refusal(409, "admin.last_source", f"{url} is the only place that weights come from: add another first")
    if url not in sources:
        return {}, f"{url} is no relay of this run"
    return {"relays": relays, "removed": (*removed, url) if url in estate.sources else removed}, f"{url} was removed"


def _certify(orders: Orders, action: AdminAction, estate: Estate) -> tuple[dict[str, Any], str]:
    if not action.certificates:
        raise Refusal(422, "admin.certificate", "the order carries no certificate")
    known, names = list(orders.certificates), []
    for signed in action.certificates:
        certificate = open_document(signed, RoleCertificate, estate.root_key)
        key = certificate.public_key
        if certificate.run != estate.run:
            raise Refusal(422, "admin.certificate", f"a certificate is for run {certificate.run[:80]}")
        if certificate.role == "trainer":
            one = "a run has one trainer key, which signs every policy: it cannot be added to"
            raise Refusal(409, "admin.trainer", one)
        if key in orders.revoked:
            raise Refusal(409, "admin.revoked", f"key {key[:16]}… was revoked: make a new one")
        if not any(each.document.get("public_key") == key for each in known):
            known.append(signed)
        names.append(f"{certificate.role} {key[:16]}…")
    return {"certificates": tuple(known)}, f"trusted from now on: {', '.join(names)}"


def _revoke(orders: Orders, action: AdminAction, estate: Estate, by_root: bool) -> tuple[dict[str, Any], str]:
    key = action.target
    certified = (*estate.certificates, *orders.certificates)
    roles = [str(signed.document.get("role", "")) for signed in certified if signed.document.get("public_key") == key]
    role = roles[0] if roles else ""
    if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
        raise Refusal(422, "admin.key", "a key is named by its public half, 64 hex digits")
    if key == estate.root_key:
        raise Refusal(409, "admin.root", "the root key is the run itself and cannot be revoked")
    if key == estate.hub_key:
        raise Refusal(409, "admin.in_use", "this hub signs with that very key: give it another first (rotate)")
    if role == "trainer":
        raise Refusal(409, "admin.trainer", "without the trainer's key no policy can be believed: end the run instead")
    if role != "validator" and not by_root:
        whose = role or "somebody who is no validator"
        raise Refusal(403, "admin.root_needed", f"only the root key revokes the key of {whose}")
    return {"revoked": tuple(dict.fromkeys([*orders.revoked, key]))}, f"key {key[:16]}… is trusted for nothing now"
