"""A private key sealed with a passphrase, as one line of text, to move it to another machine.

    passphrase ─ scrypt (128 MiB) ─► AES-256-GCM ─► {"shoal_key": 1, "public_key": …, "salt": …, "sealed": …}

The owner of the key stays readable; the seal covers it and the costs, so neither can be changed.
"""

import hashlib
import os
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import Field, ValidationError

from shoal.errors import KeyFileError
from shoal.protocol.identity import SigningKey
from shoal.protocol.signing import Message, PublicKey, canonical_json

LEAST_PASSPHRASE = 8
COST = 2**17
MAX_COST = 2**20  # 1 GiB: a file from elsewhere cannot ask for more
BLOCK = 8
MAX_TEXT = 16 * 1024


class SealedKey(Message):
    """`salt`, `nonce` and `sealed` are hex."""

    shoal_key: Literal[1] = 1
    node: str
    public_key: PublicKey
    cost: int = Field(ge=2**10, le=MAX_COST)
    salt: str = Field(pattern="^[0-9a-f]{32}$")
    nonce: str = Field(pattern="^[0-9a-f]{24}$")
    sealed: str = Field(default="", pattern="^[0-9a-f]*$", max_length=4096)

    @property
    def covered(self) -> bytes:
        return b"shoal/key/v1\n" + canonical_json(self.model_dump(exclude={"sealed"}))


def seal(key: SigningKey, passphrase: str, cost: int = COST) -> str:
    if len(passphrase) < LEAST_PASSPHRASE:
        raise KeyFileError(f"the passphrase is too short: take at least {LEAST_PASSPHRASE} characters")
    frame = SealedKey(
        node=key.node, public_key=key.public_key, cost=cost, salt=os.urandom(16).hex(), nonce=os.urandom(12).hex()
    )
    sealed = _cipher(frame, passphrase).encrypt(bytes.fromhex(frame.nonce), key.to_pem(), frame.covered)
    return frame.model_copy(update={"sealed": sealed.hex()}).model_dump_json()


def unseal(text: str, passphrase: str) -> SigningKey:
    """The key, or `KeyFileError`: not a sealed key, another passphrase, or changed."""
    frame = read_sealed(text)
    try:
        nonce, sealed = bytes.fromhex(frame.nonce), bytes.fromhex(frame.sealed)
        key = SigningKey.from_pem(_cipher(frame, passphrase).decrypt(nonce, sealed, frame.covered))
    except (InvalidTag, ValueError, TypeError) as error:
        raise KeyFileError("this passphrase does not open the key, or the key was damaged on the way") from error
    if key.public_key != frame.public_key:
        raise KeyFileError("the sealed key is not the one that it says it is; do not use it")
    return key


def read_sealed(text: str) -> SealedKey:
    """Whose key it is can be read without the passphrase."""
    try:
        return SealedKey.model_validate_json(text[:MAX_TEXT])
    except ValidationError as error:
        raise KeyFileError("this is not a key that was exported with: shoal key export") from error


def _cipher(frame: SealedKey, passphrase: str) -> AESGCM:
    if frame.cost & (frame.cost - 1):
        raise KeyFileError("this key was sealed with a cost that is no power of two: it is damaged")
    salt, memory = bytes.fromhex(frame.salt), 128 * BLOCK * frame.cost + 2**20
    return AESGCM(hashlib.scrypt(passphrase.encode(), salt=salt, n=frame.cost, r=BLOCK, p=1, maxmem=memory, dklen=32))
