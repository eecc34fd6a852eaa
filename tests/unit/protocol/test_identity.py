"""Keys: files, signatures, weak points."""

from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from hypothesis import given
from hypothesis import strategies as st

from kit import at_once
from shoal.errors import KeyFileError, SignatureError
from shoal.protocol import SigningKey, fingerprint, load_key, load_or_create_key, node_id, store_key, verify

SEED = bytes(range(32))


def test_a_key_is_made_on_first_use_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    first = load_or_create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (load_or_create_key(path).public_key, load_key(path).sign(b"x")) == (first.public_key, first.sign(b"x"))
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_can_reach_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    load_or_create_key(path)
    path.chmod(mode)
    for load in (load_key, load_or_create_key):
        with pytest.raises(KeyFileError, match=rf"mode {mode:o}.*chmod 600 .*node\.key") as caught:
            load(path)
        assert caught.value.exit_code == 2


PEM = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
FOREIGN = x25519.X25519PrivateKey.generate().private_bytes(*PEM, serialization.NoEncryption())
LOCKED = ed25519.Ed25519PrivateKey.generate().private_bytes(*PEM, serialization.BestAvailableEncryption(b"x"))


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"hello", SigningKey.from_seed(SEED).to_pem()[:-40], FOREIGN, LOCKED]
)
def test_a_damaged_or_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="is not an Ed25519 key in PEM form"):
        load_or_create_key(path)
    assert path.read_bytes() == content


def test_a_missing_file_and_an_impossible_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read the key file"):
        load_key(tmp_path / "none.key")
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="cannot write the key file"):
        load_or_create_key(tmp_path / "file" / "node.key")


def test_threads_that_race_end_with_the_same_key(tmp_path: Path) -> None:
    for turn in range(20):
        path = tmp_path / f"{turn}.key"
        keys = at_once(*[partial(load_or_create_key, path)] * 4)
        assert [key.public_key for key in keys] == [load_key(path).public_key] * 4


def test_names_are_derived_from_the_public_key_and_a_key_never_shows_itself() -> None:
    key = SigningKey.from_seed(SEED)
    assert str(key) == repr(key) == f"SigningKey(node={key.node})"
    assert SEED.hex() not in repr(vars(key))
    assert key.public_key == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert key.node == node_id(key.public_key)
    assert (len(key.node), len(fingerprint(key.public_key))) == (32, 40)
    assert not fingerprint(key.public_key).startswith(key.node)
    assert SigningKey.from_pem(key.to_pem()).public_key == key.public_key


@given(st.binary(max_size=64), st.integers(0, 511))
def test_a_signature_holds_for_its_message_and_breaks_with_any_bit(message: bytes, bit: int) -> None:
    key = SigningKey.from_seed(SEED)
    signature = key.sign(message)
    verify(key.public_key, signature, message)
    flipped = bytearray.fromhex(signature)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SignatureError):
        verify(key.public_key, flipped.hex(), message)
    with pytest.raises(SignatureError):
        verify(key.public_key, signature, message + b"\0")
    with pytest.raises(SignatureError):
        verify(SigningKey.generate().public_key, signature, message)


@given(st.text(max_size=64), st.text(max_size=128))
def test_nonsense_as_key_or_signature_is_a_signature_error(key: str, signature: str) -> None:
    for public_key, sign in ((key, signature), (key.ljust(64, "0")[:64], signature.ljust(128, "g")[:128])):
        with pytest.raises(SignatureError):
            verify(public_key, sign, b"message")


def test_a_key_and_a_signature_have_one_spelling() -> None:
    key = SigningKey.from_seed(SEED)
    signature = key.sign(b"x")
    verify(key.public_key, signature, b"x")
    for public_key, sign in ((key.public_key.upper(), signature), (key.public_key, signature.upper())):
        with pytest.raises(SignatureError, match="lower case"):
            verify(public_key, sign, b"x")


KEY = SigningKey.from_seed(b"k" * 32)


def test_key_is_stored_only_where_no_key_is(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    store_key(path, KEY)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyFileError, match="there is a key at"):
        store_key(path, SigningKey.generate())
    assert load_key(path).public_key == KEY.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]
