"""Keys. A node is an Ed25519 key; its id is derived from the public half.

    root ──signs──► certificates (hub, trainer, validator, trusted)  one root per run, pinned in the join URL
    node ──signs──► its own requests                                  no certificate: anyone may join
    owner ─signs──► vouches for nodes                                 so credit of several machines adds up

A key file is PEM (PKCS 8), mode 0600, made on first use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.errors import KeyFileError, SignatureError

PUBLIC_KEY_HEX, SIGNATURE_HEX = 64, 128
_FIELD = 2**255 - 19
_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})
"""The y of the eight points whose order divides 8: one signature by such a key holds for many messages."""


def check_public_key(public_key: str) -> str:
    """The key (hex); `ValueError` if it is no key, not in its canonical form, or of small order."""
    if len(public_key) != PUBLIC_KEY_HEX or set(public_key) - set("0123456789abcdef"):
        raise ValueError(f"{public_key[:80]!r} is no public key: it has {PUBLIC_KEY_HEX} hex digits in lower case")
    y = int.from_bytes(bytes.fromhex(public_key), "little") & (2**255 - 1)
    if y >= _FIELD:
        raise ValueError(f"{public_key[:16]}… is a public key in an encoding that is not its only one")
    if y in _SMALL_ORDER:
        raise ValueError(f"{public_key[:16]}… is a public key of small order: anybody can sign for it")
    return public_key


def node_id(public_key: str) -> str:
    """The node's name on the wire."""
    return hashlib.sha256(b"shoal/node/v1\n" + bytes.fromhex(public_key)).hexdigest()[:32]


def fingerprint(public_key: str) -> str:
    """The short form of a root key that a join URL pins."""
    return hashlib.sha256(b"shoal/root/v1\n" + bytes.fromhex(public_key)).hexdigest()[:40]


class SigningKey:
    """A private key. `str()` and `repr()` never show it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: str = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKey:
        """From 32 bytes, for tests that need the same key twice."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def node(self) -> str:
        return node_id(self.public_key)

    def sign(self, message: bytes) -> str:
        return self._key.sign(message).hex()

    def __repr__(self) -> str:
        return f"SigningKey(node={self.node})"

    def to_pem(self) -> bytes:
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return self._key.private_bytes(pem, pkcs8, serialization.NoEncryption())

    @classmethod
    def from_pem(cls, data: bytes) -> SigningKey:
        key = serialization.load_pem_private_key(data, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("not an Ed25519 key")
        return cls(key)


def verify(public_key: str, signature: str, message: bytes) -> None:
    """Raise `SignatureError` unless `signature` over `message` was made by `public_key` (both hex)."""
    if len(signature) != SIGNATURE_HEX or signature != signature.lower():
        raise SignatureError(f"a signature has {SIGNATURE_HEX} hex digits in lower case")
    try:
        _parsed_key(public_key).verify(bytes.fromhex(signature), message)
    except ValueError as error:
        raise SignatureError(str(error)) from error
    except InvalidSignature as error:
        raise SignatureError("the signature does not match the key") from error


@lru_cache(8192)  # a server sees the same keys again and again
def _parsed_key(public_key: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_public_key(public_key)))


def load_key(path: Path) -> SigningKey:
    """Refuse a key file that others can read."""
    try:
        mode, data = path.stat().st_mode & 0o777, path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise KeyFileError(f"the key file {path} is readable by others (mode {mode:o}); run: chmod 600 {path}")
    try:
        return SigningKey.from_pem(data)
    except (ValueError, TypeError) as error:
        advice = "restore it from a backup, or move it away to get a new identity"
        raise KeyFileError(f"{path} is not an Ed25519 key in PEM form; {advice}") from error


def load_or_create_key(path: Path) -> SigningKey:
    """The key at `path`, made on first use. Two processes that race end with the same key."""
    if path.exists():
        return load_key(path)
    key = SigningKey.generate()
    return key if _write_key(path, key) else load_key(path)


def store_key(path: Path, key: SigningKey) -> None:
    """Write a key if there is no key yet: an overwritten key would be lost with its credit."""
    if path.exists() or not _write_key(path, key):
        raise KeyFileError(f"there is a key at {path} already: move it away, or choose another file")


def _write_key(path: Path, key: SigningKey) -> bool:
    """Atomically; False if another process was first."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")  # a pid repeats: threads, containers
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.to_pem())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails if somebody else was first, unlike a rename
        except FileExistsError:
            return False
    except OSError as error:
        raise KeyFileError(f"cannot write the key file {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # its folder may be what could not be made
            temporary.unlink(missing_ok=True)
    return True
