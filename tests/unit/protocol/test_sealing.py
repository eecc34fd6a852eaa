"""A sealed key: only its passphrase opens it, and nothing in its frame can be exchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import KeyFileError
from shoal.protocol import SigningKey, load_key
from shoal.protocol.identity import store_key
from shoal.protocol.sealing import read_sealed, seal, unseal

KEY = SigningKey.from_seed(b"k" * 32)
WORDS = "correct horse battery"
CHEAP = 2**10  # scrypt's cost; a real one takes 128 MiB
SEALED = seal(KEY, WORDS, CHEAP)


def test_it_comes_back_with_its_passphrase_and_shows_whose_it_is_without() -> None:
    assert unseal(SEALED, WORDS).public_key == KEY.public_key
    assert read_sealed(SEALED).node == KEY.node
    assert KEY.to_pem().decode().splitlines()[1] not in SEALED
    assert "\n" not in SEALED


def test_the_usual_cost_is_not_a_small_one_and_works() -> None:
    text = seal(KEY, WORDS)
    assert read_sealed(text).cost == 2**17
    assert unseal(text, WORDS).public_key == KEY.public_key


@pytest.mark.parametrize("passphrase", ["", "correct horse batterz", WORDS + " "])
def test_another_passphrase_does_not_open_it(passphrase: str) -> None:
    with pytest.raises(KeyFileError, match="does not open"):
        unseal(SEALED, passphrase)


@pytest.mark.parametrize(
    ("field", "value"),
    [("node", "0" * 32), ("public_key", "0" * 64), ("cost", 2**11), ("salt", "0" * 32), ("nonce", "0" * 24),
     ("sealed", "00"), ("sealed", "")],
)  # fmt: skip
def test_nothing_of_it_can_be_exchanged(field: str, value: object) -> None:
    changed = json.dumps({**json.loads(SEALED), field: value})
    with pytest.raises(KeyFileError):
        unseal(changed, WORDS)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", SEALED[:-9], SEALED + " x", "{" * 100_000])
def test_what_is_no_sealed_key_is_said_to_be_none(text: str) -> None:
    with pytest.raises(KeyFileError, match="shoal key export"):
        unseal(text, WORDS)


@pytest.mark.parametrize("cost", [2**21, 2**60, 0, -1, 1500])
def test_a_file_cannot_ask_for_all_the_memory(cost: int) -> None:
    with pytest.raises(KeyFileError):
        unseal(json.dumps({**json.loads(SEALED), "cost": cost}), WORDS)


def test_a_sealed_key_that_gives_itself_out_as_another_is_refused() -> None:
    impostor = SigningKey.from_seed(b"i" * 32)
    impostor.public_key = KEY.public_key
    with pytest.raises(KeyFileError, match="not the one that it says it is"):
        unseal(seal(impostor, WORDS, CHEAP), WORDS)


def test_a_short_passphrase_is_refused() -> None:
    with pytest.raises(KeyFileError, match="too short"):
        seal(KEY, "1234567")


def test_a_key_is_written_where_there_is_none_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    store_key(path, KEY)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyFileError, match="is not overwritten"):
        store_key(path, SigningKey.generate())
    assert load_key(path).public_key == KEY.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]
