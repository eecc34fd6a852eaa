"""Public keys for which anybody can sign: points of small order, and second spellings of points. Refused everywhere.

There are eight points whose order divides 8. That each of these is one, the library itself shows.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from kit import TempPaths
from kit.served_hub import Hub, refusal, running_hub
from shoal.client.trust import open_run_info
from shoal.errors import SignatureError, UserError
from shoal.hub.storage.sqlite import SqliteStorage
from shoal.protocol import Registration, RoleCertificate, SignedDocument, SigningKey, Vouch, node_id, verify
from shoal.protocol.identity import check_public_key
from shoal.protocol.signing import RequestSignature, body_hash, request_bytes
from shoal.runtime.clock import SystemClock
from shoal.shardcast.cast import Sources

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493


def encoded(y: int, sign: int) -> str:
    return (y | sign << 255).to_bytes(32, "little").hex()


ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022  # the y of two such points
SMALL = [encoded(y, 0) for y in (1, P - 1)] + [encoded(y, x) for y in (0, ORDER_8, P - ORDER_8) for x in (0, 1)]
SPELLINGS = sorted({encoded(y, sign) for y in range(P, 2**255) for sign in (0, 1)} | {encoded(1, 1), encoded(P - 1, 1)})


def forged(public_key: str, tries: range = range(64)) -> tuple[bytes, str]:
    """A message, and a signature that holds for it by a bare check, made without any private key.

    R is the identity, S is 0. It holds whenever the hash is a multiple of the point's order: for one message in eight.
    """
    signature = encoded(1, 0) + "00" * 32
    for number in tries:
        message = b"message %d" % number
        digest = hashlib.sha512(bytes.fromhex(signature[:64]) + bytes.fromhex(public_key) + message).digest()
        if int.from_bytes(digest, "little") % L % 8 == 0:
            return message, signature
    raise AssertionError("no message was found")


@pytest.mark.parametrize("public_key", SMALL)
def test_signature_without_a_key_is_refused(public_key: str) -> None:
    message, signature = forged(public_key)
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), message)
    with pytest.raises(SignatureError, match="small order"):
        verify(public_key, signature, message)


@pytest.mark.parametrize("public_key", [*SMALL, *SPELLINGS])
def test_weak_key_is_accepted_nowhere(public_key: str) -> None:
    with pytest.raises(ValueError, match="public key"):
        check_public_key(public_key)
    places: list[tuple[Any, dict[str, Any]]] = [
        (Registration, {"public_key": public_key}),
        (RoleCertificate, {"run": "r", "role": "hub", "public_key": public_key, "issued_at_ms": 1}),
        (Vouch, {"owner": public_key, "node": "0" * 32, "issued_at_ms": 1}),
        (SignedDocument, {"kind": "k", "document": {}, "signed_by": public_key, "signature": "0" * 128}),
    ]
    for message, fields in places:
        with pytest.raises(ValidationError, match="public key"):
            message(**fields)
    with pytest.raises(UserError, match="does not end in a key"):
        Sources.parse([f"http://host:1/#{public_key}"])
    signed = SignedDocument.model_construct(
        kind="run-info", document={"root_key": public_key}, signed_by="", signature=""
    )
    with pytest.raises(SignatureError, match="names no root key"):
        open_run_info(signed, None)


@pytest.mark.parametrize("number", range(20))
def test_ordinary_keys_are_accepted(number: int) -> None:
    public_key = SigningKey.from_seed(bytes([number]) * 32).public_key
    assert check_public_key(public_key) == public_key


@pytest.fixture(scope="module")
def hub(tmp_path_factory: TempPaths) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("weak") / "run") as hub:
        yield hub


def test_weak_key_cannot_register(hub: Hub) -> None:
    """A request signed without a private key, to a real hub: it holds for the bare check, and is refused."""
    public_key = encoded(1, 0)
    body = b'{"public_key": "%s", "name": "everybody"}' % public_key.encode()
    signature = encoded(1, 0) + "00" * 32
    unsigned = RequestSignature(node_id(public_key), SystemClock().now_ms(), "n" * 24, body_hash(body), signature)
    covered = request_bytes("POST", hub.run, "/nodes", unsigned)
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), covered)
    answer = hub.http.post("/nodes", content=body, headers=unsigned.headers())
    assert refusal(answer)[0] == 422
    assert "small order" in answer.json()["message"]


def test_files_with_secrets_are_private_and_a_readable_database_becomes_private(hub: Hub, tmp_path: Path) -> None:
    folder = hub.folder.path
    modes = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    private = ["hub", "keys", "hub/hub.db", "hub/hub.db-wal", "hub/hub.db-shm", "hub/secret", "recipe.toml"]
    private += [name for name in modes if name.endswith(".key")]
    assert len(private) > 10
    wide = {name: oct(modes[name]) for name in private if modes[name] & 0o077}
    assert wide == {}
    SqliteStorage(tmp_path / "hub.db").close()
    (tmp_path / "hub.db").chmod(0o644)
    SqliteStorage(tmp_path / "hub.db").close()
    assert (tmp_path / "hub.db").stat().st_mode & 0o777 == 0o600
