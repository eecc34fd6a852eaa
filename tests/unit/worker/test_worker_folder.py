"""What a worker's folder remembers: its key, and the root key of each hub it has met."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.worker.folder import identity, pinned_root, remember_root


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    first = identity(tmp_path / "w")
    assert identity(tmp_path / "w").public_key == first.public_key
    assert (tmp_path / "w" / "node.key").stat().st_mode & 0o777 == 0o600


def test_a_hub_is_believed_once_and_then_held_to_it(tmp_path: Path) -> None:
    assert pinned_root(tmp_path, ["http://a"], None) is None
    remember_root(tmp_path, "http://a", "1" * 40)
    remember_root(tmp_path, "http://b", "2" * 40)
    assert pinned_root(tmp_path, ["http://a"], None) == "1" * 40
    assert pinned_root(tmp_path, ["http://b"], None) == "2" * 40


def test_a_fingerprint_from_the_join_url_goes_before_the_memory(tmp_path: Path) -> None:
    remember_root(tmp_path, "http://a", "1" * 40)
    assert pinned_root(tmp_path, ["http://a"], "3" * 40) == "3" * 40
    remember_root(tmp_path, "http://a", "3" * 40)
    assert pinned_root(tmp_path, ["http://a"], None) == "3" * 40


@pytest.mark.parametrize("text", ["{", "[]", '{"http://a": 1}'])
def test_a_damaged_memory_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "known_hubs.json").write_text(text)
    with pytest.raises(ConfigError, match="remove it"):
        pinned_root(tmp_path, ["http://a"], None)
