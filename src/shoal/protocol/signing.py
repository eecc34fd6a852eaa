"""Signatures over documents and over requests.

    {"kind": "lease", "document": {...}, "signed_by": "<public key>", "signature": "<hex>"}

The signature covers `shoal/<kind>/v1` and the canonical JSON of `document` *as it arrived*, so readers with an older or
newer message type can verify it. The kind is included, so no document can replace one of another kind.

A signed request has five headers. The signature covers the method, the run, the path with its query, the node, the
time, the nonce and the hash of the body, so nothing can be changed, replayed or sent to another run. The hash is a
header, so a server knows who is asking before it reads the body.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from shoal.errors import ProtocolError, SignatureError
from shoal.protocol.identity import SigningKey, check_public_key, verify

MAX_SKEW_MS = 120_000
MAX_TIME_DIGITS = 15


def canonical_json(value: Any) -> bytes:
    """One byte string per value: sorted keys, no spaces, UTF-8, shortest floats, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


PublicKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$"), AfterValidator(check_public_key)]
"""An Ed25519 key in hex, in its only encoding and not of small order."""

Milliseconds = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""Of a time since 1970, or of a duration. Bounded, so that no time that a message names overflows anywhere."""


class Message(BaseModel, frozen=True, extra="forbid"):
    """Base of every message that crosses a process: frozen, and unknown fields are refused."""


class Document(Message):
    """A message that is signed; `kind` separates signatures of different kinds."""

    kind: ClassVar[str]


class SignedDocument(Message):
    kind: str = Field(max_length=64)
    document: dict[str, Any]
    signed_by: PublicKey
    signature: str = Field(pattern="^[0-9a-f]{128}$")


D = TypeVar("D", bound=Document)


def _document_bytes(kind: str, document: Mapping[str, Any]) -> bytes:
    try:
        return f"shoal/{kind}/v1\n".encode() + canonical_json(document)
    except (ValueError, UnicodeError) as error:
        raise ProtocolError(f"a {kind} holds a value that JSON cannot carry: {error}") from error


def sign_document(document: Document, key: SigningKey) -> SignedDocument:
    return sign_values(document.kind, document.model_dump(mode="json"), key)


def sign_values(kind: str, values: dict[str, Any], key: SigningKey) -> SignedDocument:
    signature = key.sign(_document_bytes(kind, values))
    return SignedDocument(kind=kind, document=values, signed_by=key.public_key, signature=signature)


def open_document(signed: SignedDocument, kind: type[D], trusted: str | set[str]) -> D:
    keys = {trusted} if isinstance(trusted, str) else trusted
    if signed.kind != kind.kind:
        raise SignatureError(f"expected a signed {kind.kind}, got a {signed.kind[:40]}")
    if signed.signed_by not in keys:
        raise SignatureError(f"this {kind.kind} is signed by {signed.signed_by[:16]}…, which is not trusted for it")
    verify(signed.signed_by, signed.signature, _document_bytes(signed.kind, signed.document))
    try:
        return kind.model_validate(signed.document, extra="ignore")
    except ValidationError as error:
        raise ProtocolError(f"this {kind.kind} is signed but malformed: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """`field: what is wrong`."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"]) or "body"
    return f"{where}: {problem['msg']}"


def document_hash(signed: SignedDocument | str) -> str:
    """Names a signed document with its signature; ledger rows refer to it. `str`: the document as JSON."""
    values = json.loads(signed) if isinstance(signed, str) else signed.model_dump(mode="json")
    return hashlib.sha256(b"shoal/evidence/v1\n" + canonical_json(values)).hexdigest()


HEADERS = ("shoal-node", "shoal-time", "shoal-nonce", "shoal-body", "shoal-signature")
HEADER_NODE, HEADER_TIME, HEADER_NONCE, HEADER_BODY, HEADER_SIGNATURE = HEADERS


@dataclass(frozen=True)
class RequestSignature:
    """The signed part of a request's headers, parsed but not yet verified."""

    node: str
    at_ms: int
    nonce: str
    body_hash: str
    signature: str

    def headers(self) -> dict[str, str]:
        values = (self.node, str(self.at_ms), self.nonce, self.body_hash, self.signature)
        return dict(zip(HEADERS, values, strict=True))

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> RequestSignature:
        try:
            node, at, nonce, body, signature = (headers[name] for name in HEADERS)
        except KeyError as error:
            raise SignatureError(f"the request is not signed: header {error.args[0]} is missing") from error
        if not (at.isascii() and at.isdigit() and len(at) <= MAX_TIME_DIGITS):
            raise SignatureError(f"header {HEADER_TIME} is not a whole number of milliseconds")
        parsed = cls(node, int(at), nonce, body, signature)
        if not (8 <= len(parsed.nonce) <= 64 and parsed.nonce.isascii() and len(parsed.node) == 32):
            raise SignatureError("the request's node id or nonce has the wrong length")
        return parsed


def body_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def request_bytes(method: str, run: str, target: str, signature: RequestSignature) -> bytes:
    """What a request's signature covers. `target` is the path with its query, as sent."""
    who = (signature.node, str(signature.at_ms), signature.nonce)
    return "\n".join(["shoal/request/v1", method.upper(), run, target, *who, signature.body_hash]).encode()


def sign_request(key: SigningKey, run: str, method: str, target: str, body: bytes, at_ms: int) -> dict[str, str]:
    unsigned = RequestSignature(key.node, at_ms, secrets.token_hex(12), body_hash(body), signature="")
    signature = key.sign(request_bytes(method, run, target, unsigned))
    return replace(unsigned, signature=signature).headers()


def verify_request(
    public_key: str, run: str, method: str, target: str, signature: RequestSignature, now_ms: int
) -> None:
    """Raise unless `public_key` signed it within the allowed skew; the caller checks nonce and `verify_body`."""
    check_date(signature, now_ms)
    verify(public_key, signature.signature, request_bytes(method, run, target, signature))


def check_date(signature: RequestSignature, now_ms: int) -> None:
    skew = signature.at_ms - now_ms
    if abs(skew) > MAX_SKEW_MS:
        raise SignatureError(
            f"the request's clock is {abs(skew) / 1000:.0f} s {'ahead' if skew > 0 else 'behind'}; "
            f"at most {MAX_SKEW_MS // 1000} s are allowed: set this machine's clock (for instance with NTP)"
        )


def verify_body(signature: RequestSignature, body: bytes) -> None:
    if body_hash(body) != signature.body_hash:
        raise SignatureError("the body is not the one that the request was signed for")
